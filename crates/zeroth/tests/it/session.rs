//! A custom model with dropout: masks depend only on sample and position, so stage, offload, recomputation and batch
//! decomposition do not change training.

#![allow(clippy::many_single_char_names, reason = "q, k and v")]

use std::num::NonZeroU64;

use serde_json::{Value, json};
use zeroth::Session;
use zeroth::engine::StreamBatch;
use zeroth::graph::{AttentionOptions, Builder, Graph, ParamSpec, Role};
use zeroth::train::{EpochSample, TokenBatch};

const LENGTH: usize = 12;

fn model(rows: u64, probability: f64) -> Graph {
    let param = |name: &str, shape: &[u64]| ParamSpec {
        name: name.to_owned(),
        shape: shape.to_vec(),
        trainable: true,
        quantized: false,
    };
    let mut b = Builder::new(&[rows]);
    b.unit("embedding", Role::Embedding, vec![param("table", &[40, 16])]).unwrap();
    let (ids, table) = (b.ids(), b.param("table").unwrap());
    let mut x = b.embedding(ids, table).unwrap();
    for block in 0..2 {
        let name = |part: &str| format!("{part}{block}");
        let params = ["q", "k", "v", "up"].map(|part| param(&name(part), &[16, 16]));
        b.unit(name("block"), Role::Block(block), params.into()).unwrap();
        let linear = |b: &mut Builder, x, part: &str| {
            let weight = b.param(&name(part)).unwrap();
            b.linear(x, weight, None).unwrap()
        };
        let [q, k, v] = ["q", "k", "v"].map(|part| linear(&mut b, x, part));
        let attended = b.attention([q, k, v], 2, 2, None, 0.35).unwrap();
        let dropped = b.dropout(attended, probability).unwrap();
        let up = linear(&mut b, dropped, "up");
        x = b.dropout(up, probability).unwrap();
    }
    b.unit("head", Role::Head, vec![param("head", &[40, 16])]).unwrap();
    let head = b.param("head").unwrap();
    b.head_loss(x, head).unwrap();
    b.finish().unwrap()
}

/// An encoder-decoder: targets attend to their sources, with dropout of the weights.
fn translator(pairs: u64, probability: f64) -> Graph {
    let param = |name: &str, rows: u64| ParamSpec {
        name: name.to_owned(),
        shape: vec![rows, 16],
        trainable: true,
        quantized: false,
    };
    let mut b = Builder::new(&[pairs * LENGTH as u64, pairs * (LENGTH as u64 - 4)]);
    b.unit("embedding", Role::Embedding, vec![param("table", 40)]).unwrap();
    let table = b.param("table").unwrap();
    let [source, target] = [0, 1].map(|stream| b.embedding(b.stream(stream).ids, table).unwrap());
    b.unit("block", Role::Block(0), ["q", "k", "v"].map(|name| param(name, 16)).into()).unwrap();
    let qkv = [(target, "q"), (source, "k"), (source, "v")].map(|(x, name)| {
        let weight = b.param(name).unwrap();
        b.linear(x, weight, None).unwrap()
    });
    let options = AttentionOptions {
        heads: 2,
        kv_heads: 2,
        window: None,
        scale: 0.35,
        causal: false,
        dropout: probability,
    };
    let attended = b.attention_with(qkv, None, options).unwrap();
    b.unit("head", Role::Head, vec![param("head", 40)]).unwrap();
    let (labels, head) = (b.stream(1).labels, b.param("head").unwrap());
    b.head_loss_of(attended, labels, head).unwrap();
    b.finish().unwrap()
}

/// Losses of five steps of four pairs, and of an evaluation after them.
fn translated(probability: f64, ranks: u64, mut config: Value) -> Vec<f64> {
    let pairs = 4 / ranks;
    // New weights hardly attend; after a few of these steps they do.
    config["optimizer"]["params"]["lr"] = json!(0.1);
    let graph = translator(pairs, probability);
    let session = Session::new(graph, &config.to_string(), ranks, NonZeroU64::new(5).unwrap()).unwrap();
    let mut all = session
        .run(|rank| {
            let mut found = Vec::new();
            for step in 0..6 {
                let first = (step * ranks + rank.rank()) * pairs;
                let [source, target] = [LENGTH, LENGTH - 4].map(|length| {
                    let mut batch = TokenBatch::default();
                    for sample in first..first + pairs {
                        let row: Vec<i32> =
                            (0..length).map(|at| (sample as usize * 7 + at * at) as i32 % 40).collect();
                        batch.push(&row, &row, EpochSample { epoch: 0, sample });
                    }
                    batch
                });
                let streams = [source.view(), target.view()];
                let batch = StreamBatch { streams: &streams, inputs: &[] };
                if step < 5 {
                    found.push(rank.step_streams(&[batch], 4 * (LENGTH as u64 - 5))?.loss);
                } else {
                    found.push(rank.evaluate_streams(&batch)?);
                }
            }
            Ok(found)
        })
        .unwrap();
    // Each rank evaluates its own pairs.
    let evaluated: f64 = all.iter_mut().map(|losses| losses.pop().unwrap()).sum();
    all.swap_remove(0).into_iter().chain([evaluated]).collect()
}

#[test]
fn masks_of_attention_weights_are_those_of_their_pairs_on_any_rank() {
    let alone = translated(0.3, 1, config(1, &json!({"stage": 0}), "none"));
    for (ranks, stage, recompute) in [(1, 3, "block"), (2, 2, "attention"), (4, 3, "block")] {
        let found = translated(0.3, ranks, config(ranks, &json!({"stage": stage}), recompute));
        for (found, expected) in found.iter().zip(&alone) {
            assert!((found - expected).abs() < 1e-5 * expected, "{ranks} ranks: {found} {expected}");
        }
    }
    let without = translated(0.0, 1, config(1, &json!({"stage": 0}), "none"));
    assert!((without[3] - alone[3]).abs() > 1e-3 * alone[3], "{without:?} {alone:?}");
}

/// Losses and gradient norms of five steps of four samples.
fn trained(probability: f64, ranks: u64, config: &Value) -> Vec<(f64, f64)> {
    let micro_batch = 4 / ranks;
    let graph = model(micro_batch * LENGTH as u64, probability);
    let session = Session::new(graph, &config.to_string(), ranks, NonZeroU64::new(5).unwrap()).unwrap();
    let all = session.run(|rank| {
        let mut found = Vec::new();
        for step in 0..5 {
            let mut batch = TokenBatch::default();
            for place in 0..micro_batch {
                let sample = (step * ranks + rank.rank()) * micro_batch + place;
                let row: Vec<i32> =
                    (0..LENGTH).map(|at| (sample as usize * 7 + at * at) as i32 % 40).collect();
                batch.push(&row, &row, EpochSample { epoch: 0, sample });
            }
            let record = rank.step(&[batch.view()], 4 * (LENGTH as u64 - 1))?;
            found.push((record.loss, record.norm));
        }
        Ok(found)
    });
    let mut all = all.unwrap();
    assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "all ranks agree");
    all.swap_remove(0)
}

fn config(ranks: u64, zero: &Value, recompute: &str) -> Value {
    json!({
        "train_micro_batch_size_per_gpu": 4 / ranks, "fp16": {"enabled": false}, "bf16": {"enabled": false},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "zero_optimization": zero,
        "zeroth": {"recompute": recompute},
    })
}

#[test]
fn dropout_does_not_depend_on_stage_offload_or_recomputation() {
    let host = json!({"device": "cpu"});
    let plain = trained(0.3, 2, &config(2, &json!({"stage": 0}), "none"));
    for (zero, recompute) in [
        (json!({"stage": 3, "stage3_param_persistence_threshold": 0}), "none"),
        (json!({"stage": 3, "offload_param": host, "offload_optimizer": host}), "block"),
        (json!({"stage": 2}), "attention"),
    ] {
        assert_eq!(trained(0.3, 2, &config(2, &zero, recompute)), plain, "{zero} {recompute}");
    }
    // Another batch decomposition sums in another order, but draws the same masks.
    for ranks in [1, 4] {
        let other = trained(0.3, ranks, &config(ranks, &json!({"stage": 3}), "none"));
        for (a, b) in other.iter().zip(&plain) {
            assert!((a.0 - b.0).abs() < 1e-5 && (a.1 - b.1).abs() < 1e-4 * b.1, "{ranks} ranks: {a:?} {b:?}");
        }
    }
    assert_ne!(trained(0.0, 2, &config(2, &json!({"stage": 0}), "none")), plain, "dropout has an effect");
}

#[test]
fn invalid_and_unsupported_configs_are_refused() {
    let refused = |config: &Value| {
        let session = Session::new(model(48, 0.0), &config.to_string(), 1, NonZeroU64::MIN);
        session.err().expect("refused").to_string()
    };
    assert!(refused(&json!({"zero_optimization": {"stage": 7}})).contains("stage"));
    let disk =
        json!({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "x"}}});
    assert!(refused(&disk).contains("offload_param.device"));
}
