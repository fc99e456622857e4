//! Gradients against finite differences.

use super::*;
use crate::reference::Data;
use crate::reference::finite_differences::{DATA_ROWS, VOCAB, data, mismatch, specs};
use crate::{PositionBuckets, Role};

#[test]
fn gradients_with_shared_key_heads_and_a_window() {
    for (kv_heads, window) in [(1, None), (2, Some(2)), (1, Some(3))] {
        let mut b = Builder::new(&[DATA_ROWS]);
        let params = specs(&[
            ("table", &[VOCAB, 4]),
            ("q", &[6, 4]),
            ("k", &[3 * kv_heads, 4]),
            ("v", &[3 * kv_heads, 4]),
            ("head", &[VOCAB, 6]),
        ]);
        b.unit("all", Role::Other, params).unwrap();
        let [table, q, k, v, head] = ["table", "q", "k", "v", "head"].map(|name| b.param(name).unwrap());
        let x = b.embedding(b.ids(), table).unwrap();
        let qkv = [q, k, v].map(|weight| b.linear(x, weight, None).unwrap());
        let o = b.attention(qkv, 2, kv_heads, window, 0.5).unwrap();
        b.head_loss(o, head).unwrap();
        assert_eq!(mismatch(&b.finish().unwrap(), &[data()], &[]), None, "{kv_heads} {window:?}");
    }
}

const BUCKETS: PositionBuckets = PositionBuckets { buckets: 6, max_distance: 4, bidirectional: false };

fn options(causal: bool, dropout: f64) -> AttentionOptions {
    AttentionOptions { heads: 2, kv_heads: 1, window: None, scale: 0.7, causal, dropout }
}

/// Two attentions, the second of the first's result, with the same biases.
fn biased(causal: bool, dropout: f64, trained: bool) -> crate::Graph {
    let mut b = Builder::new(&[DATA_ROWS]);
    let mut params = specs(&[
        ("table", &[VOCAB, 4]),
        ("q", &[4, 4]),
        ("k", &[2, 4]),
        ("bias", &[6, 2]),
        ("head", &[VOCAB, 4]),
    ]);
    params[3].trainable = trained;
    b.unit("all", Role::Other, params).unwrap();
    let [table, q, k, bias, head] = ["table", "q", "k", "bias", "head"].map(|name| b.param(name).unwrap());
    let bias = b.position_bias(bias, PositionBuckets { bidirectional: !causal, ..BUCKETS }).unwrap();
    let mut x = b.embedding(b.ids(), table).unwrap();
    for _ in 0..2 {
        let [q, k] = [q, k].map(|weight| b.linear(x, weight, None).unwrap());
        x = b.attention_with([q, k, k], Some(bias), options(causal, dropout)).unwrap();
    }
    b.head_loss(x, head).unwrap();
    b.finish().unwrap()
}

#[test]
fn biases_of_two_layers_add_their_gradients() {
    for (causal, dropout) in [(true, 0.0), (false, 0.0), (true, 0.3), (false, 0.3)] {
        let graph = biased(causal, dropout, true);
        assert_eq!(mismatch(&graph, &[data()], &[]), None, "{causal} {dropout}");
    }
    let backward = biased(false, 0.0, true).backward().unwrap();
    let attentions = backward.nodes.iter().filter(|node| matches!(node.op, GradOp::Attention(_)));
    let written: Vec<_> = attentions.map(|node| node.outputs[3]).collect();
    let [(first, GradWrite::Write), (second, GradWrite::Add)] = written[..] else {
        panic!("{written:?}");
    };
    assert_eq!(first, second, "one gradient, written and then added to");
    assert_eq!(backward.values[first.index()].kind, Kind::Statistic);
}

#[test]
fn frozen_biases_get_no_gradient() {
    let graph = biased(true, 0.0, false);
    assert_eq!(mismatch(&graph, &[data()], &[]), None);
    let backward = graph.backward().unwrap();
    let is_attention = |op| matches!(op, GradOp::Attention(_));
    assert!(backward.nodes.iter().filter(|node| is_attention(node.op)).all(|node| node.outputs.len() == 3));
    assert!(!backward.nodes.iter().any(|node| matches!(node.op, GradOp::PositionBias(_))));
}

/// Three sequences of the second stream attend to those of the first, of other lengths; `lengths` are of both.
fn cross(lengths: [[usize; 3]; 2], dropout: f64, biases: bool) -> Option<String> {
    let data: Vec<Data> = lengths
        .iter()
        .map(|lengths| {
            let rows: usize = lengths.iter().sum();
            Data {
                ids: (0..rows).map(|row| row * 3 % VOCAB as usize).collect(),
                labels: (0..rows).map(|row| (row * 5 % VOCAB as usize) as i64).collect(),
                positions: lengths.iter().flat_map(|length| 0..*length).collect(),
                starts: vec![0, lengths[0], lengths[0] + lengths[1]],
            }
        })
        .collect();
    let rows: Vec<u64> = data.iter().map(|data| data.ids.len() as u64).collect();
    let mut b = Builder::new(&rows);
    let params = specs(&[
        ("table", &[VOCAB, 4]),
        ("q", &[4, 4]),
        ("k", &[2, 4]),
        ("v", &[2, 4]),
        ("bias", &[6, 2]),
        ("head", &[VOCAB, 4]),
    ]);
    b.unit("all", Role::Other, params).unwrap();
    let names = ["table", "q", "k", "v", "bias", "head"];
    let [table, q, k, v, bias, head] = names.map(|name| b.param(name).unwrap());
    let [source, target] = [0, 1].map(|stream| b.embedding(b.stream(stream).ids, table).unwrap());
    let q = b.linear(target, q, None).unwrap();
    let [k, v] = [k, v].map(|weight| b.linear(source, weight, None).unwrap());
    let buckets = PositionBuckets { bidirectional: true, ..BUCKETS };
    let bias = biases.then(|| b.position_bias(bias, buckets).unwrap());
    let o = b.attention_with([q, k, v], bias, options(false, dropout)).unwrap();
    assert_eq!(b.info(o).rows, Rows::Stream(1));
    b.head_loss_of(o, b.stream(1).labels, head).unwrap();
    mismatch(&b.finish().unwrap(), &data, &[])
}

#[test]
fn gradients_of_cross_attention() {
    for (lengths, dropout, biases) in [
        ([[5, 1, 2], [2, 4, 3]], 0.0, false),
        ([[3, 2, 4], [1, 3, 1]], 0.4, true),
        ([[3, 0, 2], [2, 2, 1]], 0.0, true),
        ([[3, 1, 2], [2, 0, 1]], 0.0, false),
    ] {
        assert_eq!(cross(lengths, dropout, biases), None, "{lengths:?} {dropout} {biases}");
    }
}

#[test]
fn a_query_without_a_key_gives_zeros() {
    let dims = Attention {
        causal: false,
        kv_starts: &[0, 0, 2],
        ..Attention::causal([1, 1, 1], None, 1.0, &[0, 1, 2])
    };
    let [o, lse] = attention(dims, &[3.0, 0.0], &[5.0, 5.0], &[2.0, 4.0]);
    assert_eq!((o, lse), (vec![0.0, 3.0], vec![0.0, 2f64.ln()]));
}
