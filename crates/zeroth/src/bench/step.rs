//! Benchmarks a training step of a Qwen3-shaped model: tokens per second, FLOP/s against the CPU's limit, and time by
//! phase.
//!
//! Ranks are threads of this process and communicate over shared memory as processes do. Between steps every rank
//! briefly runs the loop that measures the limit, all at once, so that both see the same machine state.

use std::num::NonZeroU64;
use std::time::Instant;

use zeroth_base::{DType, counted, format_bytes, philox4x32};
use zeroth_cpu::{Isa, Pool};
use zeroth_engine::InstructionTime;
use zeroth_graph::Op;
use zeroth_kernel::DeviceError;
use zeroth_machine::bench::{BenchResult, Rate, RateUnit, matmul_limit, run_peak_loop};
use zeroth_machine::probe;
use zeroth_model::{BatchTokens, Family, ForwardError, ModelConfig, ModelError, ModelSizes, forward, table};
use zeroth_program::Action;
use zeroth_program::Compiled;
use zeroth_train::report::breakdown::StepPhase;
use zeroth_train::report::flops::ModelFlops;
use zeroth_train::{EpochSample, TokenBatch};

use crate::{Session, SessionError};

/// Model sizes of published comparisons, in Qwen3's architecture with tied embeddings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelSize {
    /// 41.6M parameters; 2 × 512 tokens per rank.
    M50,
    /// 102M parameters; 2 × 512 tokens per rank.
    M125,
    /// Qwen3-0.6B; 1 × 512 tokens per rank.
    Qwen3,
}

impl ModelSize {
    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::M50 => "m50",
            Self::M125 => "m125",
            Self::Qwen3 => "0.6b",
        }
    }

    /// Hidden, feed-forward, blocks, heads, kv heads, head_dim, vocabulary.
    const fn sizes(self) -> [u64; 7] {
        match self {
            Self::M50 => [512, 1536, 8, 8, 4, 64, 32_000],
            Self::M125 => [768, 2304, 12, 12, 4, 64, 32_000],
            Self::Qwen3 => [1024, 3072, 28, 16, 8, 128, 151_936],
        }
    }

    /// The model's config.
    pub fn config(self) -> Result<ModelConfig, ModelError> {
        let [hidden, ffn, blocks, heads, kv_heads, head_dim, vocab] = self.sizes();
        ModelConfig::from_sizes(&ModelSizes {
            family: Family::Qwen3,
            hidden,
            blocks,
            heads,
            kv_heads: Some(kv_heads),
            head_dim: Some(head_dim),
            ffn,
            vocab,
            tied: true,
            max_positions: None,
            rope_theta: None,
            experts: None,
        })
    }

    /// Sequences per rank.
    pub const fn sequences(self) -> usize {
        match self {
            Self::M50 | Self::M125 => 2,
            Self::Qwen3 => 1,
        }
    }
}

/// Tokens per sequence.
const LENGTH: usize = 512;

/// Parameters of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct StepBenchOptions {
    pub size: ModelSize,
    pub stage: u8,
    /// bf16 or f32.
    pub dtype: DType,
    pub ranks: usize,
    /// Threads per rank.
    pub threads: usize,
    /// Measured steps, after one warm-up step.
    pub steps: usize,
    /// Tokens per sequence; 512 by default.
    pub length: Option<usize>,
}

/// An error of the benchmark.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum StepBenchError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Forward(#[from] ForwardError),
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(
        "{} are needed by {}, but {} are free: use a smaller --size, fewer --ranks, or --stage 3",
        format_bytes(*needed), counted(*ranks as u64, "rank"), format_bytes(*available)
    )]
    Memory { ranks: usize, needed: u64, available: u64 },
}

/// Time of a step by phase, in percent.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepShares {
    /// Matmuls of linear layers and of the head with its loss, forward and backward.
    pub matmuls: f64,
    /// Attention.
    pub attention: f64,
    /// Other ops of forward and backward.
    pub other_ops: f64,
    /// Parameter all-gathers.
    pub gather: f64,
    /// Rounding and reducing gradients.
    pub reduce: f64,
    /// Gradient norm, optimizer, and all-gathers of updated weights.
    pub update: f64,
    /// Time between instructions.
    pub other: f64,
}

impl StepShares {
    /// Matmuls and attention.
    pub fn matrix(self) -> f64 {
        self.matmuls + self.attention
    }
}

/// The result of the benchmark.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// FLOP/s of all ranks against the CPU's limit, and tokens per second.
    pub lines: [BenchResult; 2],
    /// Tokens per step, over all ranks.
    pub tokens: usize,
    /// Parameters of the model.
    pub params: u64,
    /// Planned bytes per rank.
    pub planned_bytes: u64,
    /// The loss of the last step.
    pub loss: f64,
    /// Time of rank 0 by phase.
    pub shares: StepShares,
}

/// Measurements of one rank: step times, GFLOP/s of the limit after each, the loss, and instruction times of one
/// step.
struct Found {
    seconds: Vec<f64>,
    limit: Vec<f64>,
    loss: f64,
    timed: (f64, Vec<InstructionTime>),
}

/// Trains a new model on random tokens for some steps. `progress` is called every step.
#[allow(clippy::missing_panics_doc, reason = "all models here are decoders, whose work can be counted")]
pub fn whole_step(
    options: &StepBenchOptions,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<StepReport, StepBenchError> {
    let config = options.size.config()?;
    let parameters = table(&config);
    let (sequences, length) = (options.size.sequences(), options.length.unwrap_or(LENGTH));
    let rows = sequences * length;
    let graph = forward(&config, &parameters, BatchTokens::of_tokens(rows as u64))?;
    let json = format!(
        r#"{{"train_micro_batch_size_per_gpu": {sequences}, "gradient_clipping": 1.0, "bf16": {{"enabled": {}}},
            "zero_optimization": {{"stage": {}, "overlap_comm": true}},
            "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-4, "weight_decay": 0.1}}}}}}"#,
        options.dtype == DType::Bf16,
        options.stage
    );
    // A warm-up step that faults memory in, the measured steps, and one with instruction timing.
    let steps = NonZeroU64::MIN.saturating_add(options.steps as u64 + 1);
    let session = Session::with_threads(graph, &json, options.ranks as u64, options.threads, steps)?;
    let needed = options.ranks as u64 * session.bytes();
    if let Some(available) = probe().host_memory_available().filter(|available| needed > *available) {
        return Err(StepBenchError::Memory { ranks: options.ranks, needed, available });
    }
    let path = Isa::chosen().map_err(DeviceError::from)?;
    let limit = matmul_limit(path, options.dtype);
    let vocab = config.vocab;
    let found = session.run(|rank| {
        let pool = Pool::new(options.threads);
        let trained = (options.ranks * sequences * (length - 1)) as u64;
        let mut found = Found { seconds: Vec::new(), limit: Vec::new(), loss: 0.0, timed: (0.0, Vec::new()) };
        let mut batch = TokenBatch::with_capacity(rows, sequences);
        for step in 0..steps.get() {
            if rank.rank() == 0 {
                progress(step as usize);
            }
            batch.clear();
            for sequence in 0..sequences as u64 {
                let sample = (step * options.ranks as u64 + rank.rank()) * sequences as u64 + sequence;
                let row = random_row(sample, length, vocab);
                batch.push(&row, &row, EpochSample { epoch: 0, sample });
            }
            let last = step + 1 == steps.get();
            if last {
                rank.record_times();
            }
            let begun = Instant::now();
            let record = rank.step(&[batch.view()], trained)?;
            let seconds = begun.elapsed().as_secs_f64();
            found.loss = record.loss;
            if last {
                found.timed = (seconds, rank.take_times()?);
            } else if step > 0 {
                found.seconds.push(seconds);
                found.limit.push(limit_burst(&pool, path, limit));
            }
        }
        Ok(found)
    })?;
    let tokens = options.ranks * rows;
    // Ranks synchronise in every step, so the slowest determines its time; their limits add up.
    let slowest = |step: usize| found.iter().map(|rank| rank.seconds[step]).fold(0.0, f64::max);
    let times: Vec<f64> = (0..options.steps).map(slowest).collect();
    let limits = (0..options.steps).map(|step| found.iter().map(|rank| rank.limit[step]).sum()).collect();
    let work = ModelFlops::of(&config, &parameters).expect("a decoder has one length");
    let flop = work.step(std::iter::repeat_n(length as u64, options.ranks * sequences));
    let rate = |amount: f64| Rate::of(times.iter().map(|seconds| amount / seconds).collect());
    let name = format!(
        "{} {} ZeRO-{}, {} x {}, {sequences} x {length} tokens a rank",
        options.size.name(),
        options.dtype,
        options.stage,
        counted(options.ranks as u64, "rank"),
        counted(options.threads as u64, "thread")
    );
    let limit = (limit, Rate::of(limits));
    let threads = options.ranks * options.threads;
    let lines = [
        BenchResult::new(name.clone(), threads, RateUnit::Gflops, rate(flop / 1e9), Some(limit)),
        BenchResult::new(name, threads, RateUnit::Tokens, rate(tokens as f64), None),
    ];
    Ok(StepReport {
        lines,
        tokens,
        params: parameters.total(),
        planned_bytes: session.bytes(),
        loss: found[0].loss,
        shares: shares(session.compiled(), found[0].timed.0, &found[0].timed.1),
    })
}

/// Runs the limit's loop on all threads of a rank; returns GFLOP/s.
fn limit_burst(pool: &Pool, path: Isa, limit: &str) -> f64 {
    let tasks = pool.threads();
    let flop = std::sync::Mutex::new(0.0);
    let start = Instant::now();
    pool.run(tasks, |_, _| {
        let done = run_peak_loop(path, limit);
        *flop.lock().unwrap_or_else(std::sync::PoisonError::into_inner) += done;
    });
    flop.into_inner().unwrap_or(0.0) / start.elapsed().as_secs_f64() / 1e9
}

/// Random tokens, determined by the sample.
fn random_row(sample: u64, length: usize, vocab: u64) -> Vec<i32> {
    let token = |place: usize| {
        let [word, ..] = philox4x32([place as u32, 0, 0, 0], [sample as u32, (sample >> 32) as u32]);
        (u64::from(word) % vocab) as i32
    };
    (0..length).map(token).collect()
}

/// Aggregates the instruction times of one step by phase.
fn shares(compiled: &Compiled, seconds: f64, times: &[InstructionTime]) -> StepShares {
    let graph = &compiled.graph;
    let mut shares = StepShares::default();
    let mut timed_seconds = 0.0;
    for timed in times {
        let section = &compiled.program.sections[timed.section];
        let action = &section.instructions[timed.instruction].action;
        let node = match action {
            Action::Forward(node) | Action::Recompute { node, .. } => Some(*node),
            Action::Backward(node) => Some(compiled.backward.nodes[*node].of),
            _ => None,
        };
        let share = match (node.map(|node| &graph.nodes[node].op), StepPhase::of(section.kind, action)) {
            (Some(Op::Linear | Op::LinearAdd { .. } | Op::HeadLoss { .. }), _) => &mut shares.matmuls,
            (Some(Op::Attention { .. }), _) => &mut shares.attention,
            (_, StepPhase::Gather) => &mut shares.gather,
            (_, StepPhase::Reduce) => &mut shares.reduce,
            (_, StepPhase::Update) => &mut shares.update,
            _ => &mut shares.other_ops,
        };
        *share += 100.0 * timed.seconds / seconds;
        timed_seconds += timed.seconds;
    }
    shares.other = 100.0 * (seconds - timed_seconds) / seconds;
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_a_step_sum_to_100_percent() {
        let options = StepBenchOptions {
            size: ModelSize::M50,
            stage: 2,
            dtype: DType::F32,
            ranks: 2,
            threads: 1,
            steps: 1,
            length: Some(8),
        };
        let report = whole_step(&options, &|_| {}).unwrap();
        assert_eq!((report.tokens, report.params), (2 * 2 * 8, 41_559_552));
        let StepShares { matmuls, attention, other_ops, gather, reduce, update, other } = report.shares;
        let whole = matmuls + attention + other_ops + gather + reduce + update + other;
        assert!((whole - 100.0).abs() < 1e-6 && other >= 0.0, "{report:?}");
        assert!(report.shares.matrix() > 0.0 && update > 0.0 && reduce > 0.0, "{report:?}");
        assert!(report.loss.is_finite() && report.lines.iter().all(|line| line.best > 0.0), "{report:?}");
    }

    #[test]
    fn model_sizes_match_transformers() {
        let params = [ModelSize::M50, ModelSize::M125, ModelSize::Qwen3]
            .map(|size| table(&size.config().unwrap()).total());
        // From transformers' Qwen3ForCausalLM with the same sizes.
        assert_eq!(params[2], 596_049_920);
        assert!(params[0] < params[1] && params[1] < params[2], "{params:?}");
    }
}
