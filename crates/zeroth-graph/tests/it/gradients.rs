//! Derived gradients against finite differences of the loss, over forwards with every op and every way of sharing.

#![allow(clippy::many_single_char_names, reason = "the letters of the formulas")]

use zeroth_graph::reference::Data;
use zeroth_graph::reference::finite_differences::mismatch;
use zeroth_graph::{ActivationFn, Builder, GradOp, Graph, ParamSpec, Role, Rotary, Value};

/// Sizes of a small decoder.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    ffn: u64,
    blocks: u64,
    window: Option<u64>,
    tied: bool,
    biases: bool,
    head_norms: bool,
    dropout: f64,
    activation: ActivationFn,
}

const SMALL: Sizes = Sizes {
    hidden: 6,
    heads: 2,
    kv_heads: 1,
    head_dim: 4,
    ffn: 5,
    blocks: 2,
    window: None,
    tied: false,
    biases: false,
    head_norms: false,
    dropout: 0.0,
    activation: ActivationFn::Silu,
};

const VOCAB: u64 = 7;
const EPS: f64 = 1e-5;

fn spec(name: String, shape: &[u64], frozen: fn(&str) -> bool) -> ParamSpec {
    ParamSpec { trainable: !frozen(&name), name, shape: shape.to_vec(), quantized: false }
}

/// A decoder of the llama family, as a model would write it.
fn decoder(sizes: Sizes, tokens: u64, frozen: fn(&str) -> bool) -> Graph {
    let Sizes { hidden, heads, kv_heads, head_dim, ffn, .. } = sizes;
    let mut b = Builder::new(&[tokens]);
    let half = head_dim as usize / 2;
    let frequencies = (0..half).map(|i| 10_000f64.powf(-(i as f64) / half as f64)).collect();
    b.rotary(Rotary { frequencies, scale: 1.1, dynamic: None });
    b.unit("embedding", Role::Embedding, vec![spec("embed".to_owned(), &[VOCAB, hidden], frozen)]).unwrap();
    let table = b.param("embed").unwrap();
    let ids = b.ids();
    let mut branch = b.embedding(ids, table).unwrap();
    let mut residual: Option<Value> = None;
    for block in 0..sizes.blocks {
        let name = |part: &str| format!("{block}.{part}");
        let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let mut params: Vec<(String, Vec<u64>)> = vec![
            (name("norm1"), vec![hidden]),
            (name("q"), vec![q_width, hidden]),
            (name("k"), vec![kv_width, hidden]),
            (name("v"), vec![kv_width, hidden]),
            (name("o"), vec![hidden, q_width]),
            (name("norm2"), vec![hidden]),
            (name("gate"), vec![ffn, hidden]),
            (name("up"), vec![ffn, hidden]),
            (name("down"), vec![hidden, ffn]),
        ];
        if sizes.biases {
            params.extend([(name("q_bias"), vec![q_width]), (name("down_bias"), vec![hidden])]);
        }
        if sizes.head_norms {
            params.extend([(name("q_norm"), vec![head_dim]), (name("k_norm"), vec![head_dim])]);
        }
        b.unit(
            format!("block {block}"),
            Role::Block(block),
            params.into_iter().map(|(n, s)| spec(n, &s, frozen)).collect(),
        )
        .unwrap();
        let p = |b: &Builder, part: &str| b.param(&name(part)).unwrap();

        let norm1 = p(&b, "norm1");
        let (sum, normed) = match residual {
            None => (branch, b.rms_norm(branch, norm1, EPS).unwrap()),
            Some(residual) => b.add_rms_norm(residual, branch, norm1, EPS).unwrap(),
        };
        let (wq, wk, wv, wo) = (p(&b, "q"), p(&b, "k"), p(&b, "v"), p(&b, "o"));
        let bias = |b: &Builder, part: &str| sizes.biases.then(|| b.param(&name(part)).unwrap());
        let q_bias = bias(&b, "q_bias");
        let (mut q, mut k) = (b.linear(normed, wq, q_bias).unwrap(), b.linear(normed, wk, None).unwrap());
        let v = b.linear(normed, wv, None).unwrap();
        if sizes.head_norms {
            let (q_norm, k_norm) = (p(&b, "q_norm"), p(&b, "k_norm"));
            q = b.head_norm_rope(q, q_norm, heads, EPS).unwrap();
            k = b.head_norm_rope(k, k_norm, kv_heads, EPS).unwrap();
        } else {
            (q, k) = (b.rope(q, heads).unwrap(), b.rope(k, kv_heads).unwrap());
        }
        let o = b.attention([q, k, v], heads, kv_heads, sizes.window, 0.5).unwrap();
        let o = b.linear(o, wo, None).unwrap();
        let o = b.dropout(o, sizes.dropout).unwrap();
        let norm2 = p(&b, "norm2");
        let (sum, normed) = b.add_rms_norm(sum, o, norm2, EPS).unwrap();
        let (wg, wu, wd, down_bias) = (p(&b, "gate"), p(&b, "up"), p(&b, "down"), bias(&b, "down_bias"));
        let (gate, up) = (b.linear(normed, wg, None).unwrap(), b.linear(normed, wu, None).unwrap());
        let y = b.gated_activation(sizes.activation, gate, up).unwrap();
        branch = b.linear(y, wd, down_bias).unwrap();
        residual = Some(sum);
    }
    let mut head = vec![spec("norm".to_owned(), &[hidden], frozen)];
    if !sizes.tied {
        head.push(spec("head".to_owned(), &[VOCAB, hidden], frozen));
    }
    b.unit("head", Role::Head, head).unwrap();
    let norm = b.param("norm").unwrap();
    let (_, normed) = b.add_rms_norm(residual.unwrap(), branch, norm, EPS).unwrap();
    let weight = if sizes.tied { table } else { b.param("head").unwrap() };
    b.head_loss(normed, weight).unwrap();
    b.finish().unwrap()
}

/// Two sequences of uneven length, one label masked.
fn data() -> Data {
    Data {
        ids: vec![1, 4, 2, 6, 0, 4, 4],
        labels: vec![4, 2, -100, -100, 4, 4, 3],
        positions: vec![0, 1, 2, 3, 0, 1, 2],
        starts: vec![0, 4],
    }
}

fn assert_gradients(graph: &Graph) {
    assert_eq!(mismatch(graph, &[data()], &[]), None);
}

fn nothing_frozen(_: &str) -> bool {
    false
}

#[test]
fn a_decoder_with_shared_key_heads() {
    assert_gradients(&decoder(SMALL, 7, nothing_frozen));
}

#[test]
fn every_gated_activation() {
    for activation in ActivationFn::ALL {
        assert_gradients(&decoder(Sizes { activation, blocks: 1, ..SMALL }, 7, nothing_frozen));
    }
}

#[test]
fn a_window_head_norms_and_biases() {
    let sizes = Sizes { kv_heads: 2, window: Some(2), biases: true, head_norms: true, blocks: 1, ..SMALL };
    assert_gradients(&decoder(sizes, 7, nothing_frozen));
}

#[test]
fn the_norm_of_q_trains_where_nothing_before_it_does() {
    let sizes = Sizes { head_norms: true, blocks: 1, ..SMALL };
    let graph = decoder(sizes, 7, |name| !["0.q_norm", "0.down"].contains(&name));
    assert_gradients(&graph);
    let backward = graph.backward().unwrap();
    let norms = backward.nodes.iter().filter(|node| matches!(node.op, GradOp::HeadNormRope(_)));
    let norms: Vec<_> = norms.map(|node| (node.outputs.len(), node.accumulates_into.len())).collect();
    assert_eq!(norms, [(0, 1)], "no gradient of x, and none of k's norm");
}

#[test]
fn a_tied_head_adds_to_the_embeddings_gradient() {
    assert_gradients(&decoder(Sizes { tied: true, blocks: 1, ..SMALL }, 7, nothing_frozen));
}

#[test]
fn dropout_meets_the_same_mask_in_backward() {
    assert_gradients(&decoder(Sizes { dropout: 0.4, blocks: 1, ..SMALL }, 7, nothing_frozen));
}

#[test]
fn frozen_parameters_add_no_backward_ops() {
    // Only the second block's down projection trains: nothing before it needs a gradient.
    let graph = decoder(SMALL, 7, |name| name != "1.down");
    assert_gradients(&graph);
    let backward = graph.backward().unwrap();
    let ops: Vec<GradOp> = backward.nodes.iter().map(|node| node.op).collect();
    assert!(
        matches!(ops.as_slice(), [GradOp::HeadLoss, GradOp::AddRmsNorm(_), GradOp::LinearParams]),
        "{ops:?}"
    );
}

#[test]
fn a_value_that_several_ops_read_gets_the_sum() {
    // The norm of the embedding is read as gate and as up, and the embedding by a residual as well.
    let mut b = Builder::new(&[7]);
    let declare = |names: &[(&str, &[u64])]| {
        names.iter().map(|(name, shape)| spec((*name).to_owned(), shape, nothing_frozen)).collect()
    };
    b.unit("all", Role::Other, declare(&[("embed", &[VOCAB, 6]), ("a", &[6]), ("b", &[6]), ("c", &[6])]))
        .unwrap();
    let p = |b: &Builder, name: &str| b.param(name).unwrap();
    let (ids, embed, a, second, third) = (b.ids(), p(&b, "embed"), p(&b, "a"), p(&b, "b"), p(&b, "c"));
    let x = b.embedding(ids, embed).unwrap();
    let n = b.rms_norm(x, a, EPS).unwrap();
    let y = b.swiglu(n, n).unwrap();
    let (sum, m) = b.add_rms_norm(x, y, second, EPS).unwrap();
    let z = b.swiglu(m, sum).unwrap();
    let (_, last) = b.add_rms_norm(x, z, third, EPS).unwrap();
    b.head_loss(last, embed).unwrap();
    assert_gradients(&b.finish().unwrap());
}

#[test]
fn q_k_and_v_add_into_one_gradient_without_a_sum() {
    let backward = decoder(Sizes { blocks: 1, ..SMALL }, 7, nothing_frozen).backward().unwrap();
    assert!(!backward.nodes.iter().any(|node| node.op == GradOp::Sum));
}
