//! Host memory of a rank outside its arenas: the process itself, and buffers for loading, reading and sending.
//!
//! Arenas are exact; this is an upper estimate based on measurements. It depends only on the job, so all ranks and
//! all launches compute the same number.

use serde::{Deserialize, Serialize};
use zeroth_kernel::Tier;
use zeroth_program::Compiled;

/// Resident pages of the executable, shared by all processes of a machine.
const IMAGE: u64 = 15_000_000;
/// Memory of the launcher while ranks run.
const LAUNCHER: u64 = 4_000_000;
/// Stack pages and allocator caches per thread.
const THREAD: u64 = 64 << 10;
/// Bytes per instruction, and per instruction lowered for one row count.
const INSTRUCTION: u64 = 1024;
const LOWERED: u64 = 544;
/// Weights are read and written in pieces of at most this many f32 elements. Checkpoints pass through a buffer, and
/// hold at most 12 bytes per parameter.
const PIECE: u64 = 1 << 20;
const CHECKPOINT_BUFFER: u64 = 8 << 20;
const CHECKPOINT: u64 = 12;
/// Bytes per token of an assembled and fed micro-batch, and per pair of rotary angles.
const TOKEN: u64 = 56;
const ANGLES: u64 = 8;
/// Bytes of a token's numbers in a further input, each: what a cache has of a teacher.
const FURTHER: u64 = 8;
/// Heap fragmentation left by tokenisation: bytes per token, and its maximum.
const TOKENISED: u64 = 32;
const MOST_TOKENISED: u64 = 12_000_000;
/// Each 4096-byte page takes 8 bytes of page tables in every process that maps it.
const PAGE_TABLES: u64 = 4096 / 8;

/// Process parameters of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Processes {
    /// Size of the shared-memory region through which each of several ranks sends.
    pub region: u64,
    /// Threads of a rank besides its compute threads.
    pub threads: u64,
}

/// The size of the data in a rank's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DataSize {
    /// Bytes of the sample index.
    pub index: u64,
    /// Tokens, which the process that starts the run encodes.
    pub tokens: u64,
}

/// Host memory of a rank outside its arenas, in bytes by purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Overhead {
    /// The process: its share of the executable, allocator, stacks.
    pub process: u64,
    /// The program, lowered for every row count.
    pub program: u64,
    /// Buffers for weights, and the micro-batch being fed.
    pub staging: u64,
    /// The sample index, and heap left over from tokenisation.
    pub data: u64,
    /// Shared memory for sending; 0 with one rank.
    pub exchange: u64,
    /// Page tables of the arenas.
    pub page_tables: u64,
    /// Its share of the launcher process; 0 with one rank.
    pub launcher: u64,
    /// The sum.
    pub total: u64,
}

impl Overhead {
    /// Estimates the overhead of each rank of a job.
    pub fn of(data: DataSize, compiled: &Compiled, processes: Processes) -> Self {
        let ranks = compiled.program.layout.ranks().max(1);
        let elements = compiled.graph.params.iter().map(zeroth_graph::Param::elements).sum::<u64>();
        let checkpoint = (CHECKPOINT * elements.div_ceil(ranks)).min(CHECKPOINT_BUFFER);
        Self::with(data, compiled, processes, checkpoint)
    }

    /// Estimates the overhead of a process that only runs a model forward, in addition to its data and tokenizer.
    pub fn of_inference(compiled: &Compiled) -> Self {
        Self::with(DataSize::default(), compiled, Processes::default(), 0)
    }

    fn with(data: DataSize, compiled: &Compiled, processes: Processes, checkpoint: u64) -> Self {
        let ranks = compiled.program.layout.ranks().max(1);
        let is_alone = ranks == 1;
        let threads = processes.threads + compiled.target.threads() as u64;
        let process = compiled.target.process_bytes() + THREAD * threads + IMAGE.div_ceil(ranks);

        let instructions = compiled.program.sections.iter().map(|section| section.instructions.len() as u64);
        let instructions: u64 = instructions.sum();
        let program = instructions * (INSTRUCTION + LOWERED * compiled.row_sizes.len() as u64);

        let largest = compiled.graph.params.iter().map(zeroth_graph::Param::elements).max().unwrap_or(0);
        let rows = compiled.row_sizes.iter().last().map_or(0, |rows| rows.iter().sum());
        let pairs = compiled.graph.rotaries.iter().map(|rotary| rotary.frequencies.len() as u64);
        let angles = ANGLES * pairs.sum::<u64>();
        let inputs = compiled.graph.inputs.iter().skip(3 * compiled.graph.streams.len());
        let further = FURTHER * inputs.map(|input| compiled.graph.info(*input).width).sum::<u64>();
        let fed = rows * (TOKEN + angles + further);
        let staging = 4 * largest.min(PIECE) + checkpoint + fed;

        // A message may be the gradient of a whole flat buffer, and each half of a region holds a part of one.
        let flats = compiled.program.layout.flats.iter().map(|flat| 4 * flat.padded());
        let exchange = if is_alone { 0 } else { processes.region.min(2 * flats.max().unwrap_or(0)) };

        let device = compiled.memory.arena(Tier::Device);
        let mapped = if compiled.target.is_host() { device } else { 0 };
        let page_tables = (mapped + compiled.memory.arena(Tier::Host)) / PAGE_TABLES;

        let DataSize { index, tokens } = data;
        // The process that starts the run tokenises the data: the launcher, or a single rank.
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
