//! Several token streams, and several rows for each token.

use zeroth_graph::reference::Data;
use zeroth_graph::reference::finite_differences::mismatch;
use zeroth_graph::{Builder, Graph, ParamSpec, Role, Rotary, Rows};

const VOCAB: u64 = 7;

fn specs(params: &[(&str, &[u64])]) -> Vec<ParamSpec> {
    let spec = |(name, shape): &(&str, &[u64])| ParamSpec {
        name: (*name).to_owned(),
        shape: shape.to_vec(),
        trainable: true,
        quantized: false,
    };
    params.iter().map(spec).collect()
}

fn data() -> [Data; 2] {
    let first = Data {
        ids: vec![1, 4, 2, 6, 0, 4, 4],
        labels: vec![4, 2, -100, -100, 4, 4, 3],
        positions: vec![0, 1, 2, 3, 0, 1, 2],
        starts: vec![0, 4],
    };
    let second = Data {
        ids: vec![3, 3, 5, 0],
        labels: vec![-100, 5, 0, 6],
        positions: vec![0, 0, 1, 2],
        starts: vec![0, 1],
    };
    [first, second]
}

/// Two streams that share the weights of an attention; each has its own sequences, positions and loss.
fn two_streams() -> Graph {
    let mut b = Builder::new(&[7, 4]);
    b.rotary(Rotary { frequencies: vec![1.0, 0.1], scale: 1.1, dynamic: None });
    b.unit("all", Role::Other, specs(&[("table", &[VOCAB, 4]), ("q", &[4, 4]), ("head", &[VOCAB, 4])]))
        .unwrap();
    let [table, weight, head] = ["table", "q", "head"].map(|name| b.param(name).unwrap());
    for stream in 0..2 {
        let x = b.embedding(b.stream(stream).ids, table).unwrap();
        let q = b.linear(x, weight, None).unwrap();
        let q = b.rope(q, 1).unwrap();
        let o = b.attention([q, q, x], 1, 1, None, 0.5).unwrap();
        assert_eq!(b.info(o).rows, Rows::Stream(stream));
        b.head_loss(o, head).unwrap();
    }
    b.finish().unwrap()
}

#[test]
fn streams_have_their_own_sequences_and_share_parameters() {
    assert_eq!(mismatch(&two_streams(), &data(), &[]), None);
}

#[test]
fn rows_of_different_streams_do_not_mix() {
    let mut b = Builder::new(&[7, 4]);
    b.unit("all", Role::Other, specs(&[("table", &[VOCAB, 4]), ("norm", &[4]), ("head", &[VOCAB, 4])]))
        .unwrap();
    let [table, norm, head] = ["table", "norm", "head"].map(|name| b.param(name).unwrap());
    let [x, y] = [0, 1].map(|stream| b.embedding(b.stream(stream).ids, table).unwrap());
    let wide = b.input(1, 2);
    let z = b.embedding(wide, table).unwrap();
    assert_eq!(b.info(z).rows, Rows::Times(1, 2));
    for (error, words) in [
        (b.swiglu(x, y).unwrap_err(), "an operand's rows should be Stream(0), and is Stream(1)"),
        (b.add_rms_norm(y, z, norm, 1e-6).unwrap_err(), "should be Stream(1), and is Times(1, 2)"),
        (b.attention([x, y, x], 1, 1, None, 1.0).unwrap_err(), "should be Stream(0), and is Stream(1)"),
        (b.dropout(z, 0.5).unwrap_err(), "should be one row for each token of a stream, and is Times(1, 2)"),
        (
            b.head_loss_of(x, b.stream(1).labels, head).unwrap_err(),
            "should be Stream(0), and is Stream(1), 1 wide",
        ),
    ] {
        assert!(error.to_string().contains(words), "{error}");
    }
}
