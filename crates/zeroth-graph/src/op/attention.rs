//! Causal attention within each sequence of a stream.

use std::ops::RangeInclusive;

use crate::gradient::Deriver;
use crate::reference::{Gradients, Machine};
use crate::{Builder, GradNode, GradOp, GraphError, Node, Op, Value};

impl Builder {
    /// Causal attention within each sequence.
    pub fn attention(
        &mut self,
        [q, k, v]: [Value; 3],
        heads: u64,
        kv_heads: u64,
        window: Option<u64>,
        scale: f64,
    ) -> Result<Value, GraphError> {
        let op = Op::Attention { heads, kv_heads, window, scale };
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            let expected = format!("a multiple of the {kv_heads} heads of k and v");
            return Err(self.shape_error(op, "the number of heads", &expected, heads.to_string()));
        }
        let head_dim = self.head_dim(op, q, heads)?;
        self.stream_of(op, q)?;
        for other in [k, v] {
            self.expect_width(op, other, kv_heads * head_dim)?;
            self.expect_rows(op, other, q)?;
        }
        let outputs = [self.activation(q, heads * head_dim), self.statistic(q, heads)];
        self.push(op, &[q, k, v], &[], &outputs).map(|outputs| outputs[0])
    }
}

pub(super) fn derive(deriver: &mut Deriver<'_>, index: usize, node: &Node) {
    let Some(dy) = deriver.gradient(node.outputs[0]) else { return };
    let mut inputs = node.inputs.clone();
    inputs.extend([node.outputs[0], node.outputs[1], dy]);
    deriver.many(index, node, GradOp::Attention(node.op), inputs);
}

/// The shape of an attention, and its sequences.
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a> {
    /// Heads of q.
    pub heads: usize,
    /// Heads of k and v.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Keys per query, its own included.
    pub window: Option<usize>,
    /// Factor of the scores.
    pub scale: f64,
    /// The start of each sequence, then the end of the last. Rows after it attend to nothing.
    pub starts: &'a [usize],
}

/// A head's query: its keys with their softmax weights, and the log of the softmax's sum.
struct Query {
    row: usize,
    head: usize,
    weights: Vec<(usize, f64)>,
    lse: f64,
}

impl Attention<'_> {
    /// Keys that a query may attend to: its own sequence, itself and earlier, within the window.
    fn keys(&self, query: usize) -> Option<RangeInclusive<usize>> {
        let sequence = self.starts.windows(2).find(|ends| (ends[0]..ends[1]).contains(&query))?;
        let least = self.window.map_or(0, |window| (query + 1).saturating_sub(window));
        Some(sequence[0].max(least)..=query)
    }

    /// The offsets of a query's head, and of a key's head that serves it.
    fn offsets(&self, row: usize, head: usize, key: usize) -> [usize; 2] {
        let kv_head = head * self.kv_heads / self.heads;
        [(row * self.heads + head) * self.head_dim, (key * self.kv_heads + kv_head) * self.head_dim]
    }

    /// Every query of every head.
    fn weights(&self, q: &[f64], k: &[f64]) -> Vec<Query> {
        let rows = q.len() / (self.heads * self.head_dim);
        let queries = (0..rows).flat_map(|row| (0..self.heads).map(move |head| (row, head)));
        let of = |(row, head): (usize, usize)| {
            let score = |key: usize| {
                let [at, there] = self.offsets(row, head, key);
                (0..self.head_dim).map(|d| q[at + d] * k[there + d]).sum::<f64>() * self.scale
            };
            let scores: Vec<(usize, f64)> = self.keys(row)?.map(|key| (key, score(key))).collect();
            let greatest = scores.iter().fold(f64::MIN, |most, (_, score)| most.max(*score));
            let total: f64 = scores.iter().map(|(_, score)| (score - greatest).exp()).sum();
            let lse = greatest + total.ln();
            let weights = scores.into_iter().map(|(key, score)| (key, (score - lse).exp())).collect();
            Some(Query { row, head, weights, lse })
        };
        queries.filter_map(of).collect()
    }
}

/// o [T, heads · D] and lse [T, heads].
pub fn attention(dims: Attention<'_>, q: &[f64], k: &[f64], v: &[f64]) -> [Vec<f64>; 2] {
    let (mut o, mut lses) = (vec![0.0; q.len()], vec![0.0; q.len() / dims.head_dim]);
    for Query { row, head, weights, lse } in dims.weights(q, k) {
        lses[row * dims.heads + head] = lse;
        for (key, p) in weights {
            let [at, there] = dims.offsets(row, head, key);
            (0..dims.head_dim).for_each(|d| o[at + d] += p * v[there + d]);
        }
    }
    [o, lses]
}

/// dq, dk and dv of [`attention`].
pub fn attention_backward(dims: Attention<'_>, q: &[f64], k: &[f64], v: &[f64], dy: &[f64]) -> [Vec<f64>; 3] {
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    for Query { row, head, weights, .. } in dims.weights(q, k) {
        let dp = |key: usize| {
            let [at, there] = dims.offsets(row, head, key);
            (0..dims.head_dim).map(|d| dy[at + d] * v[there + d]).sum::<f64>()
        };
        let delta: f64 = weights.iter().map(|(key, p)| p * dp(*key)).sum();
        for (key, p) in weights {
            let [at, there] = dims.offsets(row, head, key);
            let ds = p * (dp(key) - delta) * dims.scale;
            for d in 0..dims.head_dim {
                dq[at + d] += ds * k[there + d];
                dk[there + d] += ds * q[at + d];
                dv[there + d] += p * dy[at + d];
            }
        }
    }
    [dq, dk, dv]
}

fn dims<'a>(
    machine: &Machine<'_>,
    q: Value,
    starts: &'a [usize],
    (heads, kv_heads, window, scale): (u64, u64, Option<u64>, f64),
) -> Attention<'a> {
    Attention {
        heads: heads as usize,
        kv_heads: kv_heads as usize,
        head_dim: machine.width(q) / heads as usize,
        window: window.map(|window| window as usize),
        scale,
        starts,
    }
}

pub(super) fn forward(
    machine: &Machine<'_>,
    node: &Node,
    heads: u64,
    kv_heads: u64,
    window: Option<u64>,
    scale: f64,
) -> Vec<Vec<f64>> {
    let starts = machine.data_of(node.inputs[0]).ends();
    let dims = dims(machine, node.inputs[0], &starts, (heads, kv_heads, window, scale));
    let [q, k, v] = [0, 1, 2].map(|place| machine.value(node.inputs[place]));
    attention(dims, q, k, v).into()
}

pub(super) fn backward(
    machine: &Machine<'_>,
    node: &GradNode,
    of: &Node,
    heads: u64,
    kv_heads: u64,
    window: Option<u64>,
    scale: f64,
) -> Gradients {
    let starts = machine.data_of(of.inputs[0]).ends();
    let dims = dims(machine, of.inputs[0], &starts, (heads, kv_heads, window, scale));
    let [q, k, v, dy] = [0, 1, 2, 5].map(|place| machine.value(node.inputs[place]));
    Gradients::of_values(attention_backward(dims, q, k, v, dy).into())
}

#[cfg(test)]
mod tests {
    use crate::reference::finite_differences::{DATA_ROWS, VOCAB, data, mismatch, specs};
    use crate::{Builder, Role};

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
}
