//! How near the collectives of a program come to a plain copy of the same bytes, as an engine carries them out.
//!
//!     cargo run --release -p zeroth-step --example program_collectives [-- <steps>]
//!
//! Two ranks, a thread each, train a model that is nearly all vocabulary on a few tokens, at stage 3 (gathers and
//! reductions) and at stage 2 (reductions, and gathers in place after the update). After each step both copy as much between
//! private memory at the same time. A line: the bytes of a rank's part, and GB/s, best and median, in percent of the copy.
//! What counts is what a rank ends up with that it did not have in place, in the type that is sent: both parts for `gather`
//! and for `reduce` (which writes their sum in f32, as many bytes), the other's for `gather weights`. The time is that of
//! the rank that came last: the other's has its waiting in it.
#![allow(clippy::print_stdout, reason = "the report of a program that is run by hand")]
#![allow(clippy::unwrap_used, reason = "a program that is run by hand stops where something fails")]

use std::collections::BTreeMap;
use std::sync::Barrier;
use std::time::Instant;

use serde_json::json;
use zeroth_base::DType;
use zeroth_comm::Comm;
use zeroth_comm::local::{Job, Options};
use zeroth_device::cpu::{Arena, CpuDevice, Pool, copy};
use zeroth_device::{Optimizer, Recipe, Span, Target, Tier};
use zeroth_model::{Batch, ModelConfig, forward, table};
use zeroth_step::program::{Action, Offload, Recompute, Settings, Types};
use zeroth_step::run::{Compiled, Engine, MicroBatch, Rank};

const RANKS: usize = 2;
const HIDDEN: u64 = 512;
const TOKENS: usize = 16;
const SETTINGS: Settings = Settings {
    stage: 3,
    accumulation: 1,
    types: Types { run: DType::Bf16, communication: DType::Bf16 },
    persistence: 0,
    reduce_bucket: u64::MAX / 4,
    max_live: u64::MAX / 4,
    max_reuse: 0,
    prefetch: 0,
    overlap: false,
    optimizer: Optimizer::AdamW,
    moments: DType::F32,
    rounds_by_chance: false,
    recompute: Recompute::Nothing,
    offload: Offload::NOTHING,
    reduce_scatter: true,
    allgather_bucket: u64::MAX / 4,
    allgather_partitions: true,
    memory_efficient_linear: true,
};

/// Two matrices of a part of `part` bytes a rank, and next to nothing else.
fn compiled(part: u64, stage: u8) -> Compiled {
    let vocabulary = part * RANKS as u64 / DType::Bf16.bytes() / HIDDEN;
    let config = json!({
        "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 64, "vocab_size": vocabulary,
    });
    let config = ModelConfig::from_json(&config.to_string(), "example").unwrap();
    let graph = forward(&config, &table(&config), Batch { tokens: TOKENS as u64 }).unwrap();
    let (target, settings) = (Target::Cpu { threads: 1 }, Settings { stage, ..SETTINGS });
    Compiled::new(graph, RANKS as u64, &settings, target, vec![TOKENS as u64]).unwrap()
}

/// Seconds of each collective of a large flat by its name, and of the copies, one entry a time it ran.
type Times = BTreeMap<&'static str, Vec<f64>>;

fn rank(compiled: &Compiled, comm: Box<dyn Comm>, part: usize, steps: usize, together: &Barrier) -> Times {
    let number = comm.rank();
    let [bytes, host] = [Tier::Device, Tier::Host].map(|tier| compiled.memory.arena(tier));
    let device = Box::new(CpuDevice::new(1, bytes, host).unwrap());
    let rank = Rank { comm: Some(comm), device, recipe: Recipe::default(), decayed: &|_| true, seed: 1 };
    let mut engine = Engine::new(compiled, rank).unwrap();
    let mut state = number as u64 + 1;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    engine
        .load(&mut |_, _, elements| {
            elements.fill_with(|| 0.05 * random());
            Ok(())
        })
        .unwrap();
    engine.record_trace();
    let all = (2 * RANKS * part) as u64;
    let (mut arena, pool) = (Arena::new("copies", all).unwrap(), Pool::new(1));
    let (from, to) = arena.bytes_mut(Span::device(0, all)).unwrap().split_at_mut(RANKS * part);
    from.chunks_exact_mut(4).for_each(|bytes| bytes.copy_from_slice(&random().to_le_bytes()));
    let ids: Vec<i32> = (0..TOKENS as i32).map(|place| 31 * place + number as i32).collect();
    let positions: Vec<i32> = (0..TOKENS as i32).collect();
    let batch =
        MicroBatch { ids: &ids, labels: &ids, positions: &positions, starts: &[0, TOKENS as u32], keys: &[] };
    let mut times = Times::new();
    for step in 0..=steps {
        engine.step(&[batch], (RANKS * TOKENS) as u64, step as u64, &[1e-4]).unwrap();
        engine.record().unwrap();
        for timed in engine.take_times(false).unwrap() {
            let action = &compiled.program.sections[timed.section].instructions[timed.instruction].action;
            let large = action.flat().is_some_and(|flat| {
                compiled.program.layout.flats[flat].elements() * 2 >= (RANKS * part) as u64
            });
            let counts = matches!(action, Action::Gather(_) | Action::Reduce(..) | Action::GatherWeights(_));
            if counts && large && step > 0 {
                times.entry(action.name()).or_default().push(timed.seconds);
            }
        }
        for _ in 0..2 {
            together.wait();
            let begin = Instant::now();
            copy(&pool, from, to);
            let seconds = begin.elapsed().as_secs_f64();
            if step > 0 {
                times.entry("copy").or_default().push(seconds);
            }
        }
    }
    times
}

fn main() {
    let steps = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(9);
    println!(
        "{:<8} {:<16} {:>5} {:>10} {:>8} {:>7} {:>7}",
        "", "", "MiB", "best GB/s", "median", "best %", "med. %"
    );
    for (stage, part) in [(3, 16 << 20), (2, 16 << 20), (3, 64 << 20), (2, 64 << 20)] {
        let (compiled, job) = (compiled(part as u64, stage), Job::create(RANKS, 8 << 20).unwrap());
        let together = Barrier::new(RANKS);
        let start = |number: usize| {
            let comm = Box::new(job.join(number, &Options::default()).unwrap());
            rank(&compiled, comm, part, steps, &together)
        };
        let [first, second] = std::thread::scope(|scope| {
            [0, 1]
                .map(|number| {
                    scope.spawn({
                        let start = &start;
                        move || start(number)
                    })
                })
                .map(|thread| thread.join().unwrap())
        });
        let mut limits = [0.0; 2];
        let names = ["copy"].into_iter().chain(first.keys().copied().filter(|name| *name != "copy"));
        for name in names {
            // Of a copy the slower rank counts, of a meeting the one that came last.
            let of = |(a, b): (&f64, &f64)| if name == "copy" { a.max(*b) } else { a.min(*b) };
            let mut seconds: Vec<f64> = first[name].iter().zip(&second[name]).map(of).collect();
            seconds.sort_by(f64::total_cmp);
            let counted = if name == "gather weights" { (RANKS - 1) * part } else { RANKS * part };
            let rates = [seconds[0], seconds[seconds.len() / 2]].map(|time| counted as f64 / time / 1e9);
            if name == "copy" {
                limits = rates;
            }
            let [best, median] = [0, 1].map(|at: usize| 100.0 * rates[at] / limits[at]);
            println!(
                "stage {stage}  {name:<16} {:>5} {:>10.1} {:>8.1} {best:>7.0} {median:>7.0}",
                part >> 20,
                rates[0],
                rates[1]
            );
        }
    }
}
