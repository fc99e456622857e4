//! Models whose rows are long enough to be kept a line apart: the plan has room for that, and they train to what the
//! reference machine computes, in every program to the same bits.

use zeroth_base::DType;
use zeroth_cpu::{Pool, normal, row_stride};
use zeroth_cuda::CudaTarget;
use zeroth_graph::{Kind, ValueInfo};
use zeroth_program::Compiled;
use zeroth_program::{BufferId, Memory, Offload, PlacedBuffer, Recompute, Settings, Types, plan_memory};

use crate::job::{BF16, F32, Golden, ROOMY, Setup};

const ROWS: u64 = 3;

/// A model with the ops of a family, `hidden` wide; the rows of its feed-forward are 64 numbers longer.
fn model(family: &str, hidden: u64) -> Golden {
    let mut golden = Golden::synthetic(&serde_json::json!({
        "model_type": family, "hidden_size": hidden, "intermediate_size": hidden + 64, "num_hidden_layers": 2,
        "num_attention_heads": hidden / 64, "num_key_value_heads": hidden / 128, "head_dim": 64, "vocab_size": 50,
        "max_position_embeddings": 32, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true,
        "hidden_act": "silu",
    }));
    // Products about as large as their operands.
    for (number, (parameter, weights)) in golden.table.iter().zip(&mut golden.weights).enumerate() {
        let deviation = (hidden as f32).sqrt().recip();
        normal(&Pool::new(1), 1, number as u64, 0, deviation, &mut weights[..]);
        if parameter.shape.len() == 1 {
            for weight in weights.iter_mut() {
                *weight += 1.0;
            }
        }
    }
    golden
}

/// Models with long rows, as each type has them.
fn models() -> [(Golden, Types); 4] {
    [
        (model("qwen3", 256), F32),
        (model("llama", 256), F32),
        (model("qwen3", 512), BF16),
        (model("llama", 512), BF16),
    ]
}

fn setup(types: Types, ranks: u64) -> Setup {
    let settings = Settings { types, ..ROOMY };
    Setup { steps: 2, ranks, micro_batch: ROWS, settings, ..Setup::default() }
}

/// The shape of every activation of a step, and the bytes that a plan has for it.
fn activations(compiled: &Compiled, memory: &Memory) -> Vec<(ValueInfo, u64)> {
    let of = |placed: &PlacedBuffer| match placed.buffer.id {
        BufferId::Value(value) => Some((compiled.backward.values[value], placed.buffer.bytes)),
        _ => None,
    };
    let all = memory.sections[0].buffers.iter().filter_map(of);
    all.filter(|(info, _)| info.kind == Kind::Activation).collect()
}

#[test]
fn a_plan_has_a_line_more_for_every_long_row() {
    for (golden, types) in models() {
        let compiled = golden.compile(&setup(types, 1));
        let size = types.compute.bytes();
        let mut apart = 0;
        for (info, bytes) in activations(&compiled, &compiled.memory) {
            let stride = row_stride(info.width as usize, types.compute) as u64;
            // Buffers begin and end on 256 bytes.
            assert_eq!(
                bytes,
                (compiled.graph.most_rows(info.rows) * stride * size).next_multiple_of(256),
                "{info:?}"
            );
            apart += usize::from(stride * size == info.width * size + 64);
        }
        assert!(apart > 30, "{apart} values, {types:?}");
    }
}

#[test]
fn on_a_card_rows_follow_each_other() {
    for (golden, types) in models() {
        let compiled = golden.compile(&setup(types, 1));
        let Compiled { program, graph, backward, row_sizes, .. } = &compiled;
        let memory = plan_memory(program, graph, backward, &CudaTarget, row_sizes);
        let activations = activations(&compiled, &memory);
        assert!(activations.len() > 30);
        for (info, bytes) in activations {
            assert_eq!(
                bytes,
                (compiled.graph.most_rows(info.rows) * info.width * types.compute.bytes())
                    .next_multiple_of(256),
                "{info:?}"
            );
        }
    }
}

/// The length of the difference, as a part of the length of what is expected.
fn distance(found: &[f32], expected: &[f64]) -> f64 {
    let length =
        |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    let apart = length(&mut found.iter().zip(expected).map(|(found, expected)| f64::from(*found) - expected));
    apart / length(&mut expected.iter().copied())
}

#[test]
fn long_rows_train_to_what_the_reference_computes() {
    for (golden, types) in models() {
        let outcome = golden.train(&setup(types, 1));
        let (loss, gradients) = golden.reference(ROWS, types.compute);
        let near = if types.compute == DType::F32 { 2e-5 } else { 4e-2 };
        let found = outcome.records[0].loss;
        assert!((found - loss).abs() < near * loss, "{types:?}: loss {found}, {loss}");
        for ((parameter, found), expected) in golden.table.iter().zip(&outcome.gradients).zip(&gradients) {
            let distance = distance(found, expected);
            assert!(distance < near, "{types:?}: {} is {distance} off", parameter.name);
        }
    }
}

#[test]
fn long_rows_have_the_same_bits_in_every_program() {
    let away = Offload { optimizer: Some(1.0), parameters: Some(u64::MAX), ..Offload::NOTHING };
    let parked = Recompute::Block { blocks: None, checkpoints: None, offloaded: true };
    for (golden, types) in models() {
        let base = setup(types, 2);
        let expected = golden.train(&base);
        let others = [
            Settings { stage: 0, ..base.settings },
            Settings { recompute: parked, overlap: true, prefetch: 1, ..base.settings },
            Settings { recompute: Recompute::NormSwiGlu, offload: away, ..base.settings },
        ];
        for (at, settings) in others.into_iter().enumerate() {
            let other = Setup { settings, threads: 1 + at, chaos: Some(at as u64), ..base };
            let found = golden.train(&other);
            assert!(found == expected, "{types:?}, {settings:?}");
        }
    }
}
