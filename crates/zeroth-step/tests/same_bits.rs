//! Passes move work and do not change arithmetic: every program of a model trains to the same bits, in list order and in
//! any order that its waits allow.

#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

mod job;

use job::{BF16, F32, Golden, Outcome, ROOMY, Setup};
use zeroth_step::program::{Settings, Types};

const STEPS: usize = 3;

/// Programs of one model on `ranks` ranks that must agree: every stage, and every key that moves work.
fn programs(ranks: u64, accumulation: u64, micro_batch: u64, stages: &[u8], types: Types) -> Vec<Setup> {
    let huge = u64::MAX / 4;
    let mut all = Vec::new();
    for stage in stages {
        let base = Settings { stage: *stage, accumulation, types, ..ROOMY };
        // (reduce bucket, max_live, max_reuse, prefetch, overlap, persistence, threads)
        for (reduce_bucket, max_live, max_reuse, prefetch, overlap, persistence, threads) in [
            (huge, huge, 0, 0, false, 0, 1),
            (0, huge, 0, 0, false, 0, 2),
            (5000, huge, 0, 0, true, 0, 1),
            (huge, huge, 0, huge, true, 0, 3),
            (6000, 0, 0, 1, true, 30, 1),
            (0, 4000, 3000, huge, true, 100, 2),
            (20_000, 8000, huge, 5000, true, 700, 1),
            (huge, huge, huge, huge, true, 1_000_000, 1),
        ] {
            let settings =
                Settings { persistence, reduce_bucket, max_live, max_reuse, prefetch, overlap, ..base };
            let setup = Setup { steps: STEPS, ranks, micro_batch, threads, settings, ..Setup::default() };
            all.push(setup);
        }
    }
    all
}

fn assert_same(expected: &Outcome, found: &Outcome, what: &str) {
    let bits = |weights: &[Vec<f32>]| weights.iter().flatten().map(|w| w.to_bits()).collect::<Vec<_>>();
    for (a, b) in expected.records.iter().zip(&found.records) {
        assert_eq!(a.loss.to_bits(), b.loss.to_bits(), "{what}: loss {} {}", a.loss, b.loss);
        assert_eq!(a.norm.to_bits(), b.norm.to_bits(), "{what}: norm {} {}", a.norm, b.norm);
    }
    assert!(found.records.iter().all(|record| record.apply == 1), "{what}");
    assert!(bits(&expected.gradients) == bits(&found.gradients), "{what}: gradients differ");
    assert!(bits(&expected.weights) == bits(&found.weights), "{what}: weights differ");
}

fn assert_all_same(golden: &Golden, setups: &[Setup]) {
    let expected = golden.train(&setups[0]);
    for (at, setup) in setups.iter().enumerate() {
        assert_same(&expected, &golden.train(setup), &format!("{} {setup:?}", golden.name));
        let chaos = Setup { chaos: Some(1000 + at as u64), ..*setup };
        assert_same(&expected, &golden.train(&chaos), &format!("{} {chaos:?}", golden.name));
    }
}

#[test]
fn no_key_that_moves_work_changes_a_bit_without_accumulation() {
    for (name, types) in [("qwen3-tied", BF16), ("llama-biases-tied", F32)] {
        let setups = programs(3, 1, 4, &[0, 1, 2, 3], types);
        assert!(setups.len() >= 30);
        assert_all_same(&Golden::named(name), &setups);
    }
}

#[test]
fn alone_every_stage_is_the_same_program_in_bits() {
    for (name, types) in [("mistral-window", BF16), ("qwen3-biases-yarn", F32)] {
        assert_all_same(&Golden::named(name), &programs(1, 1, 4, &[0, 3], types));
    }
}

#[test]
fn with_accumulation_stages_0_and_1_agree_and_so_do_2_and_3() {
    for types in [BF16, F32] {
        let golden = Golden::named("llama-one-kv-head");
        for stages in [[0, 1], [2, 3]] {
            assert_all_same(&golden, &programs(2, 4, 2, &stages, types));
        }
    }
}

#[test]
fn bf16_follows_fp32_and_is_not_it() {
    // Weights of 8 bits' precision and moments in f32: losses stay near PyTorch's fp32 ones, and are not equal.
    let golden = Golden::named("qwen2-yarn-tied");
    let setup = |types| Setup { micro_batch: 4, settings: Settings { types, ..ROOMY }, ..Setup::default() };
    let (wide, narrow) = (golden.train(&setup(F32)), golden.train(&setup(BF16)));
    for (wide, narrow) in wide.records.iter().zip(&narrow.records) {
        assert!((wide.loss - narrow.loss).abs() < 0.02 * wide.loss, "{} {}", wide.loss, narrow.loss);
        assert!((wide.norm - narrow.norm).abs() < 0.05 * wide.norm, "{} {}", wide.norm, narrow.norm);
        assert_ne!(wide.loss, narrow.loss);
    }
}
