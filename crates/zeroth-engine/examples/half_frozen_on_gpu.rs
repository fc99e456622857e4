//! Trains the half-frozen golden models and those with LoRA adapters on a GPU, on one rank: stages 0 to 3, with and without
//! offload and recomputation. Losses and final norms must be those of PyTorch and PEFT, and frozen parameters keep their bits.
//!
//!     cargo run --release -p zeroth-engine --example half_frozen_on_gpu
//!
//! Needs an NVIDIA GPU. Exits with 1 if a result is wrong.
#![allow(clippy::print_stdout, reason = "the report of a program that is run by hand")]
#![allow(clippy::unwrap_used, reason = "a panic is its report, as in the tests that it shares code with")]

#[path = "../tests/it/job/mod.rs"]
mod job;

use std::process::ExitCode;

use job::lora::{lora_goldens, name_in_steps};
use job::{Golden, Outcome, ROOMY, Setup};
use zeroth_program::{Offload, Recompute, Settings};

/// Largest error of a loss, and of the norm of a parameter's final weights relative to it.
const BOUND: f64 = 1e-5;

fn main() -> ExitCode {
    let optimizer = Offload { optimizer: Some(1.0), sub_group_size: 4096, ..Offload::NOTHING };
    let both = Offload { parameters: Some(u64::MAX), ..optimizer };
    let block = Recompute::Block { blocks: None, checkpoints: None, offloaded: true };
    let (mut runs, mut wrong, mut worst) = (0, 0, 0.0f64);
    let adapted = lora_goldens();
    let adapted = adapted.iter().map(|name| Golden::lora(name, 0.0));
    for golden in
        ["qwen3-half-frozen", "llama-biases-half-frozen"].map(Golden::named).into_iter().chain(adapted)
    {
        let name = &golden.name;
        for stage in 0..=3 {
            for (offload, recompute) in [Offload::NOTHING, optimizer, both]
                .into_iter()
                .flat_map(|o| [Recompute::Nothing, block].map(|r| (o, r)))
            {
                let settings = Settings { stage, offload, recompute, overlap: true, ..ROOMY };
                let setup = Setup { micro_batch: 4, settings, cuda: true, ..Setup::default() };
                let error = largest_error(&golden, &golden.train(&setup));
                worst = worst.max(error);
                runs += 1;
                if error >= BOUND {
                    wrong += 1;
                    println!("FAILED: {name}, stage {stage}, {offload:?}, {recompute:?}: error {error:.1e}");
                }
            }
        }
    }
    println!("{runs} runs of half-frozen and adapted models, {wrong} failed, largest error {worst:.1e}");
    if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The largest error of a loss or of a final norm; infinite where one is NaN or a frozen parameter has changed.
fn largest_error(golden: &Golden, outcome: &Outcome) -> f64 {
    let run = golden.run(4);
    let mut errors: Vec<f64> = outcome
        .records
        .iter()
        .zip(run["loss"].as_array().unwrap())
        .map(|(record, loss)| (record.loss - loss.as_f64().unwrap()).abs())
        .collect();
    for ((parameter, before), after) in golden.table.iter().zip(&golden.weights).zip(&outcome.weights) {
        if golden.is_frozen(&parameter.name) && before != after {
            return f64::INFINITY;
        }
        let Some(expected) = run["final"][name_in_steps(&parameter.name)]["norm"].as_f64() else {
            assert!(golden.is_frozen(&parameter.name), "{} has no final norm", parameter.name);
            continue;
        };
        let norm = after.iter().map(|weight| f64::from(*weight).powi(2)).sum::<f64>().sqrt();
        errors.push((norm / expected - 1.0).abs());
    }
    if errors.iter().any(|error| error.is_nan()) {
        f64::INFINITY
    } else {
        errors.into_iter().fold(0.0, f64::max)
    }
}
