//! What a program needs: the figures follow ZeRO's formulas, and no two live buffers overlap.

#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

use serde_json::json;
use zeroth_base::DType;
use zeroth_device::Target;
use zeroth_graph::{Backward, Graph};
use zeroth_model::{Batch, ModelConfig, forward, table};
use zeroth_step::program::{Category, Memory, Settings, Types, bytes, compile};

const BF16: Types = Types { run: DType::Bf16, communication: DType::Bf16 };
const SETTINGS: Settings = Settings {
    stage: 3,
    accumulation: 1,
    types: BF16,
    persistence: 0,
    reduce_bucket: 200_000_000,
    max_live: 1_000_000_000,
    max_reuse: 0,
    prefetch: 0,
    overlap: false,
};

/// A llama of these sizes: (hidden, feed-forward, heads, kv heads, head_dim, blocks, vocabulary).
fn model(sizes: [u64; 7], tokens: u64) -> (Graph, Backward) {
    let [hidden, ffn, heads, kv_heads, head_dim, blocks, vocab] = sizes;
    let config = json!({
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": blocks, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": ffn, "vocab_size": vocab,
    });
    let config = ModelConfig::from_json(&config.to_string(), "test").unwrap();
    let graph = forward(&config, &table(&config), Batch { tokens }).unwrap();
    let backward = graph.backward().unwrap();
    (graph, backward)
}

fn memory(graph: &Graph, backward: &Backward, ranks: u64, settings: Settings) -> Memory {
    let program = compile(graph, backward, ranks, &settings).unwrap();
    let rows = graph.info(graph.inputs[0]).rows;
    bytes(&program, graph, backward, Target::Cpu { threads: 2 }, &[rows])
}

fn elements(graph: &Graph) -> u64 {
    graph.params.iter().map(zeroth_graph::Param::elements).sum()
}

/// About 160M parameters, all of whose matrices are whole blocks.
const MIDDLE: [u64; 7] = [1024, 2816, 16, 4, 64, 8, 32_000];

#[test]
fn states_take_16_bytes_a_parameter_alone_and_18_in_company() {
    let (graph, backward) = model(MIDDLE, 512);
    // Norms of 1,024 elements take a block each, and shards are whole blocks: padding is below a percent.
    let parameters = elements(&graph);
    let per_parameter = |ranks: u64, settings: Settings| {
        let memory = memory(&graph, &backward, ranks, settings);
        memory.states() as f64 / parameters as f64
    };
    let stage = |stage, accumulation| Settings { stage, accumulation, ..SETTINGS };
    for (ranks, settings, expected) in [
        (1, stage(0, 1), 16.0),
        (1, stage(3, 1), 16.0),
        (1, stage(0, 4), 18.0),
        (2, stage(0, 1), 18.0),
        (2, stage(3, 1), 9.0),
        (5, stage(3, 1), 3.6),
        (8, stage(3, 4), 2.25),
        (64, stage(3, 1), 18.0 / 64.0),
    ] {
        let found = per_parameter(ranks, settings);
        assert!((found / expected - 1.0).abs() < 0.01, "{ranks} ranks, {settings:?}: {found} {expected}");
    }
}

#[test]
fn fp32_keeps_no_master_copy() {
    let (graph, backward) = model(MIDDLE, 512);
    let types = Types { run: DType::F32, communication: DType::F32 };
    let memory = memory(&graph, &backward, 1, Settings { stage: 0, types, ..SETTINGS });
    let found = memory.states() as f64 / elements(&graph) as f64;
    assert!((found / 16.0 - 1.0).abs() < 0.005, "4 + 4 + 8 bytes: {found}");
}

#[test]
fn activations_are_what_the_closed_form_counts() {
    // trainers' closed form for a llama block: 2h · 4 + q and o 2qw · 2 + kv 4kvw + gate, up 4f + silu·up 2f + lse 4a.
    // The program keeps besides: q and k before rope and gradients on their way; rstd, 4 bytes a norm.
    let tokens = 512;
    let (graph, backward) = model(MIDDLE, tokens);
    let found = memory(&graph, &backward, 2, SETTINGS).peak(Category::Activations);
    let [hidden, ffn, heads, kv_heads, head_dim, blocks, _] = MIDDLE;
    let (q, kv) = (heads * head_dim, kv_heads * head_dim);
    let block = 8 * hidden + 4 * q + 4 * kv + 6 * ffn + 4 * heads + 8;
    let closed = tokens * block * blocks;
    assert!(found >= closed, "{found} {closed}");
    assert!((found as f64) < 1.1 * closed as f64, "{found} {closed}");
}

#[test]
fn seventy_billion_on_1024_ranks_are_counted_without_a_byte_of_them() {
    let (graph, backward) = model([8192, 28_672, 64, 8, 128, 80, 128_256], 4096);
    let parameters = elements(&graph);
    assert_eq!(parameters, 70_553_706_496);
    let memory = memory(&graph, &backward, 1024, SETTINGS);
    let states = memory.states() as f64 / parameters as f64;
    assert!((states / (18.0 / 1024.0) - 1.0).abs() < 0.01, "{states}");
    // Two gathered blocks are never there at once without prefetch: the largest flat is the embedding.
    assert!(memory.peak(Category::Buffers) < 2 * 4 * 128_256 * 8192);
}
