//! Host memory that a rank takes beside its arenas: the process itself, and what it needs to load, read and send.
//!
//! Arenas are counted to the byte; this is an estimate from above, of what was measured. Its parts are a function of the
//! job, so that all ranks and every start come to the same number.

use serde::{Deserialize, Serialize};
use zeroth_kernel::Tier;
use zeroth_program::Compiled;
use zeroth_program::Target;

use crate::Job;
use zeroth_data::Samples;

/// Pages of the program's file that are in use. They are there once for all processes of a machine.
const IMAGE: u64 = 12_000_000;
/// What a rank allocates whatever it trains, and what the system keeps for a process.
const PROCESS: u64 = 7_000_000;
/// The same of a rank whose device is a GPU: the driver and its libraries.
const CUDA_PROCESS: u64 = 400_000_000;
/// What the launcher of several ranks holds while they run.
const LAUNCHER: u64 = 4_000_000;
/// Of a thread's stack, and of what the allocator keeps for it.
const THREAD: u64 = 64 << 10;
/// An instruction, and an instruction lowered for one number of rows.
const INSTRUCTION: u64 = 1024;
const LOWERED: u64 = 544;
/// Weights are read and written in pieces of at most so many elements, as f32, and pass through a buffer on their way to a
/// checkpoint of at most 12 bytes a parameter.
const PIECE: u64 = 1 << 20;
const CHECKPOINT_BUFFER: u64 = 8 << 20;
const CHECKPOINT: u64 = 12;
/// A token of a micro-batch as it is put together and as it is fed, and a pair of its rotary angles.
const TOKEN: u64 = 56;
const ANGLES: u64 = 8;
/// A sample in the index of the data, and where it is packed; a pack.
const SAMPLE: u64 = 12;
const PACKED: u64 = 8;
/// What tokenising leaves behind in pieces too small to give back: so many bytes a token, up to so many.
const TOKENISED: u64 = 32;
const MOST_TOKENISED: u64 = 12_000_000;
/// A page of 4096 bytes takes 8 in the page tables of whoever maps it.
const PAGE_TABLES: u64 = 4096 / 8;

/// How the processes of a job are started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Processes {
    /// Bytes of shared memory through which each of several ranks sends.
    pub region: u64,
    /// Threads of a rank besides those that compute.
    pub threads: u64,
}

/// Bytes of host memory that a rank takes beside its arenas, by what takes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Overhead {
    /// The process: its share of the program's image, allocator, stacks.
    pub process: u64,
    /// The step, lowered for every number of rows.
    pub program: u64,
    /// Pieces of weights on their way, and the micro-batch that is being fed.
    pub staging: u64,
    /// The index of the samples, and what is left of reading them.
    pub data: u64,
    /// Shared memory through which it sends; 0 where there is one rank.
    pub exchange: u64,
    /// Page tables of the arenas.
    pub page_tables: u64,
    /// Its share of the process that started the ranks; 0 where there is one rank.
    pub launcher: u64,
    /// All of it.
    pub total: u64,
}

impl Overhead {
    /// That of a rank of a job.
    pub fn of(job: &Job, compiled: &Compiled, processes: Processes) -> Self {
        let ranks = job.shape.ranks.max(1);
        let is_alone = ranks == 1;
        let (own, computing) = match compiled.target {
            Target::Cpu { threads } => (PROCESS, threads as u64),
            Target::Cuda => (CUDA_PROCESS, 1),
        };
        let process = own + THREAD * (processes.threads + computing) + IMAGE.div_ceil(ranks);

        let instructions = compiled.program.sections.iter().map(|section| section.instructions.len() as u64);
        let instructions: u64 = instructions.sum();
        let program = instructions * (INSTRUCTION + LOWERED * compiled.row_sizes.len() as u64);

        let elements = || compiled.graph.params.iter().map(zeroth_graph::Param::elements);
        let largest = elements().max().unwrap_or(0);
        let checkpoint = CHECKPOINT * elements().sum::<u64>().div_ceil(ranks);
        let rows = compiled.row_sizes.last().copied().unwrap_or(0);
        let angles = ANGLES * compiled.graph.rotary.frequencies.len() as u64;
        let staging = 4 * largest.min(PIECE) + checkpoint.min(CHECKPOINT_BUFFER) + rows * (TOKEN + angles);

        // One message may be the gradient of a whole flat, and each half of a region holds a part of one.
        let flats = compiled.program.layout.flats.iter().map(|flat| 4 * flat.padded());
        let exchange = if is_alone { 0 } else { processes.region.min(2 * flats.max().unwrap_or(0)) };

        let device = compiled.memory.arena(Tier::Device);
        let mapped = if compiled.target == Target::Cuda { 0 } else { device };
        let page_tables = (mapped + compiled.memory.arena(Tier::Host)) / PAGE_TABLES;

        let all_samples =
            || [Some(&job.samples), job.evaluation.as_ref().map(|evaluation| &evaluation.samples)];
        let index: u64 = all_samples().into_iter().flatten().map(index).sum();
        let tokens: u64 = all_samples().into_iter().flatten().map(|samples| samples.totals().tokens).sum();
        // Whoever starts the run has read the data: the launcher, or a rank alone.
        let tokenised = (TOKENISED * tokens).min(MOST_TOKENISED);
        let (data, launcher) = if is_alone {
            (index + tokenised, 0)
        } else {
            let launcher = LAUNCHER + INSTRUCTION * instructions + index + tokenised;
            (index, launcher.div_ceil(ranks))
        };

        let total = process + program + staging + data + exchange + page_tables + launcher;
        Self { process, program, staging, data, exchange, page_tables, launcher, total }
    }
}

/// Bytes of the index of samples.
fn index(samples: &Samples) -> u64 {
    let totals = samples.totals();
    let packed = if totals.packs > 0 { PACKED * (totals.samples + totals.packs) } else { 0 };
    SAMPLE * totals.samples + packed
}
