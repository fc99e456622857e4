//! A whole training step of a Qwen3-shaped model: tokens a second, arithmetic beside the processor's limit, and where the
//! time goes.
//!
//! Ranks are threads of this process that meet over shared memory as processes do. Between two steps every rank runs the
//! limit's loop for a moment, all at the same time, so that both see the same machine.

use std::num::NonZeroU64;
use std::time::Instant;

use zeroth_base::{DType, format_bytes, philox4x32};
use zeroth_cpu::{Isa, Pool};
use zeroth_engine::Timed;
use zeroth_graph::Op;
use zeroth_kernel::DeviceError;
use zeroth_machine::bench::{BenchResult, Rate, Unit, matmul_limit, run_peak_loop};
use zeroth_machine::probe;
use zeroth_model::{Batch, Family, ForwardError, ModelConfig, ModelError, ModelSizes, forward, table};
use zeroth_program::Action;
use zeroth_program::Compiled;
use zeroth_train::report::breakdown::Part;
use zeroth_train::report::figures::Work;
use zeroth_train::{MicroBatch, Place};

use crate::{Session, SessionError};

/// The models of the peers' figures, in Qwen3's shape with tied embeddings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelSize {
    /// 41.6M parameters; 2 × 512 tokens a rank.
    M50,
    /// 102M parameters; 2 × 512 tokens a rank.
    M125,
    /// Qwen3-0.6B; 1 × 512 tokens a rank.
    Qwen3,
}

impl ModelSize {
    /// As it is typed.
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

    /// The model.
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
        })
    }

    /// Sequences of a rank.
    pub const fn sequences(self) -> usize {
        match self {
            Self::M50 | Self::M125 => 2,
            Self::Qwen3 => 1,
        }
    }
}

/// Tokens of a sequence.
const LENGTH: usize = 512;

/// What to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepAsk {
    /// The model.
    pub size: ModelSize,
    /// The ZeRO stage.
    pub stage: u8,
    /// bf16 or f32.
    pub dtype: DType,
    /// Ranks.
    pub ranks: usize,
    /// Threads of a rank.
    pub threads: usize,
    /// Steps that count, after one that does not.
    pub steps: usize,
    /// Tokens of a sequence; 512 where not given.
    pub length: Option<usize>,
}

/// What stops it.
#[derive(Debug, thiserror::Error)]
pub enum StepBenchError {
    /// The sizes make no model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Its forward cannot be written.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// It cannot be run.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The instructions asked for are not there.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// It needs more memory than there is.
    #[error(
        "{ranks} ranks need {} and {} are free: take a smaller --size, fewer --ranks, or --stage 3",
        format_bytes(*needed), format_bytes(*available)
    )]
    Memory {
        /// Ranks asked for.
        ranks: usize,
        /// Bytes of all of them.
        needed: u64,
        /// Bytes free.
        available: u64,
    },
}

/// Where the time of a step goes, in percent of it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepShares {
    /// Products of linear maps and of the head with its loss, forward and backward.
    pub products: f64,
    /// Attention.
    pub attention: f64,
    /// All other ops of forward and backward.
    pub around: f64,
    /// Gathering parameters.
    pub gather: f64,
    /// Rounding, exchanging and adding gradients.
    pub reduce: f64,
    /// Norm, optimizer, and spreading weights.
    pub update: f64,
    /// Between instructions.
    pub rest: f64,
}

impl StepShares {
    /// Products and attention.
    pub fn matrix(self) -> f64 {
        self.products + self.attention
    }
}

/// What a step came to.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// Arithmetic of all ranks beside the processor's limit, and tokens a second.
    pub lines: [BenchResult; 2],
    /// Tokens of a step, all ranks together.
    pub tokens: usize,
    /// Parameters of the model.
    pub params: u64,
    /// Bytes that a rank was planned to have.
    pub planned_bytes: u64,
    /// The loss of the last step.
    pub loss: f64,
    /// Where rank 0's time goes.
    pub shares: StepShares,
}

/// What a rank found: seconds of steps, GFLOP/s of the limit beside each, the loss, and the times of one step.
struct Found {
    seconds: Vec<f64>,
    limit: Vec<f64>,
    loss: f64,
    timed: (f64, Vec<Timed>),
}

/// Trains a new model on random tokens for some steps. `told` hears of every step.
#[allow(clippy::missing_panics_doc, reason = "all models here are decoders, whose work can be counted")]
pub fn whole_step(ask: &StepAsk, told: &(dyn Fn(usize) + Sync)) -> Result<StepReport, StepBenchError> {
    let config = ask.size.config()?;
    let parameters = table(&config);
    let (sequences, length) = (ask.size.sequences(), ask.length.unwrap_or(LENGTH));
    let rows = sequences * length;
    let graph = forward(&config, &parameters, Batch { tokens: rows as u64 })?;
    let json = format!(
        r#"{{"train_micro_batch_size_per_gpu": {sequences}, "gradient_clipping": 1.0, "bf16": {{"enabled": {}}},
            "zero_optimization": {{"stage": {}, "overlap_comm": true}},
            "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-4, "weight_decay": 0.1}}}}}}"#,
        ask.dtype == DType::Bf16,
        ask.stage
    );
    // One that touches the memory, those that count, one that is timed instruction by instruction.
    let steps = NonZeroU64::MIN.saturating_add(ask.steps as u64 + 1);
    let session = Session::with_threads(graph, &json, ask.ranks as u64, ask.threads, steps)?;
    let needed = ask.ranks as u64 * session.bytes();
    if let Some(available) = probe().host_memory_available().filter(|available| needed > *available) {
        return Err(StepBenchError::Memory { ranks: ask.ranks, needed, available });
    }
    let path = Isa::chosen().map_err(DeviceError::from)?;
    let limit = matmul_limit(path, ask.dtype);
    let vocab = config.vocab;
    let found = session.run(|rank| {
        let pool = Pool::new(ask.threads);
        let trained = (ask.ranks * sequences * (length - 1)) as u64;
        let mut found = Found { seconds: Vec::new(), limit: Vec::new(), loss: 0.0, timed: (0.0, Vec::new()) };
        let mut batch = MicroBatch::with_capacity(rows, sequences);
        for step in 0..steps.get() {
            if rank.rank() == 0 {
                told(step as usize);
            }
            batch.clear();
            for sequence in 0..sequences as u64 {
                let sample = (step * ask.ranks as u64 + rank.rank()) * sequences as u64 + sequence;
                let row = random_row(sample, length, vocab);
                batch.push(&row, &row, Place { epoch: 0, sample });
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
    let tokens = ask.ranks * rows;
    // Ranks meet in every step, so the slowest one's time is the step's; what they could do adds up.
    let slowest = |step: usize| found.iter().map(|rank| rank.seconds[step]).fold(0.0, f64::max);
    let times: Vec<f64> = (0..ask.steps).map(slowest).collect();
    let limits = (0..ask.steps).map(|step| found.iter().map(|rank| rank.limit[step]).sum()).collect();
    let work = Work::of(&config, &parameters).expect("a decoder has one length");
    let flop = work.step(std::iter::repeat_n(length as u64, ask.ranks * sequences));
    let rate = |amount: f64| Rate::of(times.iter().map(|seconds| amount / seconds).collect());
    let name = format!(
        "{} {} ZeRO-{}, {} ranks x {} threads, {sequences} x {length} tokens a rank",
        ask.size.name(),
        ask.dtype,
        ask.stage,
        ask.ranks,
        ask.threads
    );
    let limit = (limit, Rate::of(limits));
    let threads = ask.ranks * ask.threads;
    let lines = [
        BenchResult::new(name.clone(), threads, Unit::Gflops, rate(flop / 1e9), Some(limit)),
        BenchResult::new(name, threads, Unit::Tokens, rate(tokens as f64), None),
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

/// The limit's loop on all threads of a rank; gives GFLOP/s.
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

/// Tokens by chance, the same for the same sample.
fn random_row(sample: u64, length: usize, vocab: u64) -> Vec<i32> {
    let token = |place: usize| {
        let [word, ..] = philox4x32([place as u32, 0, 0, 0], [sample as u32, (sample >> 32) as u32]);
        (u64::from(word) % vocab) as i32
    };
    (0..length).map(token).collect()
}

/// What the times of one step's instructions say.
fn shares(compiled: &Compiled, seconds: f64, times: &[Timed]) -> StepShares {
    let graph = &compiled.graph;
    let mut shares = StepShares::default();
    let mut told = 0.0;
    for timed in times {
        let section = &compiled.program.sections[timed.section];
        let action = &section.instructions[timed.instruction].action;
        let node = match action {
            Action::Forward(node) | Action::Recompute { node, .. } => Some(*node),
            Action::Backward(node) => Some(compiled.backward.nodes[*node].of),
            _ => None,
        };
        let share = match (node.map(|node| &graph.nodes[node].op), Part::of(section.kind, action)) {
            (Some(Op::Linear | Op::HeadLoss), _) => &mut shares.products,
            (Some(Op::Attention { .. }), _) => &mut shares.attention,
            (_, Part::Gather) => &mut shares.gather,
            (_, Part::Reduce) => &mut shares.reduce,
            (_, Part::Update) => &mut shares.update,
            _ => &mut shares.around,
        };
        *share += 100.0 * timed.seconds / seconds;
        told += timed.seconds;
    }
    shares.rest = 100.0 * (seconds - told) / seconds;
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_measured_and_its_shares_are_the_whole() {
        let ask = StepAsk {
            size: ModelSize::M50,
            stage: 2,
            dtype: DType::F32,
            ranks: 2,
            threads: 1,
            steps: 1,
            length: Some(8),
        };
        let report = whole_step(&ask, &|_| {}).unwrap();
        assert_eq!((report.tokens, report.params), (2 * 2 * 8, 41_559_552));
        let StepShares { products, attention, around, gather, reduce, update, rest } = report.shares;
        let whole = products + attention + around + gather + reduce + update + rest;
        assert!((whole - 100.0).abs() < 1e-6 && rest >= 0.0, "{report:?}");
        assert!(report.shares.matrix() > 0.0 && update > 0.0 && reduce > 0.0, "{report:?}");
        assert!(report.loss.is_finite() && report.lines.iter().all(|line| line.best > 0.0), "{report:?}");
    }

    #[test]
    fn models_have_the_parameters_of_the_peers() {
        let params = [ModelSize::M50, ModelSize::M125, ModelSize::Qwen3]
            .map(|size| table(&size.config().unwrap()).total());
        // Of transformers' Qwen3ForCausalLM with the same sizes.
        assert_eq!(params[2], 596_049_920);
        assert!(params[0] < params[1] && params[1] < params[2], "{params:?}");
    }
}
