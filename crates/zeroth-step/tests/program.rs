//! Programs of stages 0 and 3 compute the same training: on any number of ranks, with any limits, with accumulation.

#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

mod ranks;

use proptest::prelude::*;
use ranks::Ranks;
use serde_json::json;
use zeroth_graph::reference::Data;
use zeroth_graph::{Backward, Graph};
use zeroth_model::{Batch, ModelConfig, forward, table};
use zeroth_step::Layout;
use zeroth_step::program::{Action, ProgramError, Settings, compile};

const STEPS: usize = 3;
const TOKENS: usize = 5;

/// Sizes of a small qwen3: (hidden, heads, kv heads, blocks, vocabulary, tied).
type Sizes = (u64, u64, u64, u64, u64, bool);

fn model(sizes: Sizes) -> (Graph, Backward) {
    let (hidden, heads, kv_heads, blocks, vocab, tied) = sizes;
    let config = json!({
        "model_type": "qwen3", "hidden_size": hidden, "num_hidden_layers": blocks, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 4, "intermediate_size": 2 * hidden, "vocab_size": vocab,
        "tie_word_embeddings": tied, "max_position_embeddings": 64,
    });
    let config = ModelConfig::from_json(&config.to_string(), "test").unwrap();
    let tokens = TOKENS as u64;
    let graph = forward(&config, &table(&config), Batch { tokens, longest: tokens }).unwrap();
    let backward = graph.backward().unwrap();
    (graph, backward)
}

fn numbers(count: usize, salt: usize) -> Vec<f64> {
    (0..count).map(|i| ((i * 29 + salt * 71 + 5) as f64 * 0.811).sin() * 0.5).collect()
}

/// Micro-batches of two sequences each, different everywhere.
fn micro_batches(count: usize, vocab: u64) -> Vec<Data> {
    let token = |at: usize| (at * 7 + 3) % vocab as usize;
    let data = |index: usize| Data {
        ids: (0..TOKENS).map(|i| token(index * TOKENS + i)).collect(),
        labels: (0..TOKENS).map(|i| if i == 1 { -100 } else { token(index + 2 * i) as i64 }).collect(),
        positions: vec![0, 1, 0, 1, 2],
        starts: vec![0, 2],
    };
    (0..count).map(data).collect()
}

const ROOMY: Settings =
    Settings { stage: 3, accumulation: 1, reduce_bucket: u64::MAX / 4, max_live: u64::MAX / 4, max_reuse: 0 };

/// Some steps of training: the loss and norm of each, and the weights after them.
fn train(sizes: Sizes, ranks: u64, persistence: u64, settings: Settings) -> (Vec<[f64; 2]>, Vec<Vec<f64>>) {
    let (graph, backward) = model(sizes);
    let params: Vec<Vec<f64>> = graph
        .params
        .iter()
        .enumerate()
        .map(|(salt, param)| numbers(param.elements() as usize, salt))
        .collect();
    let program = compile(&graph, &backward, Layout::new(&graph, ranks, persistence), settings).unwrap();
    program.check(settings.max_live).unwrap();
    let batch = ranks as usize * settings.accumulation as usize;
    let data = micro_batches(batch * STEPS, sizes.4);
    let trained =
        |data: &[Data]| data.iter().flat_map(|data| &data.labels).filter(|label| **label >= 0).count();
    let mut running = Ranks::new(&graph, &backward, &program, &data[0], &params);
    let mut said = Vec::new();
    for step in 0..STEPS {
        let of_step = &data[step * batch..(step + 1) * batch];
        // Step, then micro-batch, then rank.
        running.step(|micro, rank| &of_step[micro * ranks as usize + rank], trained(of_step) as f64);
        said.push([running.loss, running.norm]);
    }
    (said, running.params())
}

fn assert_near(a: &(Vec<[f64; 2]>, Vec<Vec<f64>>), b: &(Vec<[f64; 2]>, Vec<Vec<f64>>), what: &str) {
    let pairs =
        a.0.iter().flatten().zip(b.0.iter().flatten()).chain(a.1.iter().flatten().zip(b.1.iter().flatten()));
    for (a, b) in pairs {
        // NaN is never near: what was read after its release shows.
        assert!((a - b).abs() <= 1e-9, "{what}: {a} {b}");
    }
}

const SIZES: Sizes = (8, 2, 1, 2, 11, false);

#[test]
fn any_split_of_a_batch_trains_the_same() {
    let expected = train(SIZES, 1, 0, Settings { stage: 0, accumulation: 30, ..ROOMY });
    for stage in [0, 3] {
        for (ranks, accumulation) in [(1, 30), (2, 15), (3, 10), (5, 6), (30, 1), (15, 2)] {
            let settings = Settings { stage, accumulation, ..ROOMY };
            let what = format!("stage {stage}, {ranks} ranks, accumulation {accumulation}");
            assert_near(&train(SIZES, ranks, 0, settings), &expected, &what);
        }
    }
}

#[test]
fn limits_and_buckets_do_not_change_a_bit() {
    for (sizes, ranks) in [(SIZES, 3), ((4, 1, 1, 3, 700, true), 2)] {
        let expected = train(sizes, ranks, 0, ROOMY);
        for persistence in [0, 8, 100, 100_000] {
            for (max_live, max_reuse) in
                [(0, 0), (500, 0), (500, 10_000), (u64::MAX / 4, 100), (u64::MAX / 4, u64::MAX)]
            {
                for reduce_bucket in [0, 5000, u64::MAX / 4] {
                    let settings = Settings { max_live, max_reuse, reduce_bucket, ..ROOMY };
                    let found = train(sizes, ranks, persistence, settings);
                    assert!(
                        found.0[0][0] == expected.0[0][0],
                        "{settings:?}: {:?} {:?}",
                        found.0,
                        expected.0
                    );
                    assert_near(&found, &expected, &format!("{settings:?}"));
                }
            }
        }
    }
}

#[test]
fn a_large_reuse_distance_keeps_what_a_small_one_lets_go() {
    let (graph, backward) = model(SIZES);
    let gathers = |max_reuse| {
        let settings = Settings { max_reuse, ..ROOMY };
        compile(&graph, &backward, Layout::new(&graph, 2, 0), settings)
            .unwrap()
            .check(u64::MAX)
            .unwrap()
            .gathers
    };
    // Four units: the embedding is gathered once (its gradient needs no weights), the head once, blocks twice.
    assert_eq!(gathers(0), 1 + 2 * 2 + 1);
    assert_eq!(gathers(u64::MAX), 4);
}

#[test]
fn stages_without_passes_are_refused() {
    let (graph, backward) = model(SIZES);
    let settings = Settings { stage: 2, ..ROOMY };
    let refused = compile(&graph, &backward, Layout::new(&graph, 2, 0), settings);
    assert_eq!(refused.unwrap_err(), ProgramError::Stage { stage: 2 });
}

#[test]
fn the_check_finds_a_missing_gather_and_a_lost_reduction() {
    let (graph, backward) = model(SIZES);
    let program = compile(&graph, &backward, Layout::new(&graph, 2, 0), ROOMY).unwrap();
    let without = |drop: fn(&Action) -> bool| {
        let mut broken = program.clone();
        let instructions = &mut broken.sections[0].instructions;
        let index = instructions.iter().position(|instruction| drop(&instruction.action)).unwrap();
        instructions.remove(index);
        broken.check(u64::MAX).unwrap_err()
    };
    assert!(matches!(
        without(|action| matches!(action, Action::Gather(_))),
        ProgramError::NotResident { .. }
    ));
    assert!(matches!(
        without(|action| matches!(action, Action::Reduce { .. })),
        ProgramError::Reduced { times: 0, .. }
    ));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_program_keeps_the_rules(
        (hidden, heads, kv_heads, blocks, vocab, tied) in
            (1u64..6, 1u64..4, 1u64..3, 1u64..5, 2u64..40, any::<bool>()),
        ranks in 1u64..9,
        persistence in 0u64..200,
        accumulation in 1u64..5,
        stage in prop::sample::select(vec![0u8, 3]),
        max_live in 0u64..3000,
        max_reuse in 0u64..3000,
        reduce_bucket in 0u64..20_000,
    ) {
        let (graph, backward) = model((2 * hidden, heads * kv_heads, kv_heads, blocks, vocab, tied));
        let settings = Settings { stage, accumulation, reduce_bucket, max_live, max_reuse };
        let program = compile(&graph, &backward, Layout::new(&graph, ranks, persistence), settings).unwrap();
        let residency = program.check(max_live).unwrap();
        if stage == 0 {
            prop_assert_eq!(residency.gathers, 0);
        }
        // Every rank compiles the same collectives in the same order: the program does not know its rank.
        let again = compile(&graph, &backward, Layout::new(&graph, ranks, persistence), settings).unwrap();
        prop_assert_eq!(program.in_order().count() as u64, accumulation + 1);
        prop_assert!(again == program);
    }
}
