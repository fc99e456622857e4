//! What a benchmark run measures, and what it has found.

use zeroth::bench::StepReport;
use zeroth::machine::Machine;
use zeroth::machine::bench::{BenchPart, BenchResult, Identity};

use crate::bench_args::BenchArgs;

/// The resolved arguments.
pub(super) struct BenchRun<'a> {
    pub(super) arguments: &'a BenchArgs,
    pub(super) machine: Machine,
    pub(super) parts: Vec<BenchPart>,
    pub(super) threads: usize,
    pub(super) rounds: usize,
}

/// The results.
pub(super) struct BenchFindings {
    pub(super) machine: Identity,
    pub(super) quick: bool,
    pub(super) rounds: usize,
    pub(super) parts: Vec<(BenchPart, Vec<BenchResult>)>,
    pub(super) step: Option<StepReport>,
}
