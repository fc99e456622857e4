//! Attention within each sequence of a stream, or to the sequences of another.

use std::fmt;
use std::ops::Range;

use super::dropout;
use crate::gradient::{Deriver, Gradient};
use crate::reference::{Gradients, Interpreter};
use crate::{
    AttentionSpec, Builder, DropoutSpec, GradNode, GradOp, GradWrite, GraphError, Kind, Node, Op, Rows, Value,
};

/// What a model says of an attention; its operands say the rest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionOptions {
    /// Heads of q.
    pub heads: u64,
    /// Heads of k and v; each serves heads / kv_heads heads of q.
    pub kv_heads: u64,
    /// See [`AttentionSpec::window`].
    pub window: Option<u64>,
    /// Factor of the scores.
    pub scale: f64,
    /// See [`AttentionSpec::causal`].
    pub causal: bool,
    /// The probability that a softmax weight is zeroed; 0 for no dropout.
    pub dropout: f64,
}

impl Builder {
    /// Causal attention within each sequence.
    pub fn attention(
        &mut self,
        qkv: [Value; 3],
        heads: u64,
        kv_heads: u64,
        window: Option<u64>,
        scale: f64,
    ) -> Result<Value, GraphError> {
        let options = AttentionOptions { heads, kv_heads, window, scale, causal: true, dropout: 0.0 };
        self.attention_with(qkv, None, options)
    }

    /// Attention to the sequences of k and v: those of q, or in cross attention those of another stream with the same index. `bias`
    /// [heads, distances] is added to the scaled scores.
    pub fn attention_with(
        &mut self,
        [q, k, v]: [Value; 3],
        bias: Option<Value>,
        options: AttentionOptions,
    ) -> Result<Value, GraphError> {
        let AttentionOptions { heads, kv_heads, window, scale, causal, dropout: probability } = options;
        let max_distance = bias.map(|bias| self.info(bias).width / 2);
        let dropout = (probability != 0.0).then_some(DropoutSpec { probability, salt: self.dropouts });
        let op =
            Op::Attention(AttentionSpec { heads, kv_heads, window, scale, causal, max_distance, dropout });
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            let expected = format!("a multiple of the {kv_heads} heads of k and v");
            return Err(self.shape_error(op, "the number of heads", &expected, heads.to_string()));
        }
        self.expect_probability(op, probability)?;
        let head_dim = self.head_dim(op, q, heads)?;
        self.stream_of(op, q)?;
        self.stream_of(op, k)?;
        for other in [k, v] {
            self.expect_width(op, other, kv_heads * head_dim)?;
        }
        if causal {
            self.expect_rows(op, k, q)?;
        } else if window.is_some() {
            let found = "attention to all keys".to_owned();
            return Err(self.shape_error(op, "what a sliding window is of", "causal attention", found));
        }
        self.expect_rows(op, v, k)?;
        if let Some(bias) = bias {
            self.expect_kind(op, bias, Kind::Statistic)?;
            let info = self.info(bias);
            if info.rows != Rows::Fixed(heads) || info.width.is_multiple_of(2) {
                let expected = format!("[{heads} heads, an odd number of distances]");
                let found = format!("{:?}, {} wide", info.rows, info.width);
                return Err(self.shape_error(op, "the biases", &expected, found));
            }
        }
        self.dropouts += u32::from(dropout.is_some());
        let inputs: Vec<Value> = [q, k, v].into_iter().chain(bias).collect();
        let outputs = [self.activation_like(q, heads * head_dim), self.statistic_like(q, heads)];
        self.push(op, &inputs, &[], &outputs).map(|outputs| outputs[0])
    }
}

pub(super) fn derive(deriver: &mut Deriver<'_>, index: usize, node: &Node) {
    let Some(dy) = deriver.gradient(node.outputs[0]) else { return };
    if !node.inputs.iter().any(|input| deriver.needs(*input)) {
        return;
    }
    let mut inputs = node.inputs.clone();
    inputs.extend([node.outputs[0], node.outputs[1], dy]);
    let gradients: Vec<Value> = node.inputs[..3].iter().map(|input| deriver.fresh(*input)).collect();
    let mut outputs: Vec<_> = gradients.iter().map(|gradient| (*gradient, GradWrite::Write)).collect();
    if let Some(bias) = node.inputs.get(3).copied().filter(|bias| deriver.needs(*bias)) {
        // Attentions that share biases add to one f32 value.
        outputs.push(match deriver.gradient(bias) {
            Some(sum) => (sum, GradWrite::Add),
            None => (deriver.fresh_statistic(bias), GradWrite::Write),
        });
        deriver.gradients[bias.index()] = Some(Gradient { value: outputs[3].0, shared: false });
    }
    deriver.push(index, GradOp::Attention(node.op), inputs, Vec::new(), outputs, false);
    for (input, gradient) in node.inputs.iter().zip(gradients) {
        deriver.contribute(index, *input, gradient);
    }
}

/// The shape of an attention, its sequences, and what is done to its scores and weights.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// Heads of q.
    pub heads: usize,
    /// Heads of k and v.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Whether a query attends to the keys up to its own only.
    pub causal: bool,
    /// Keys per query, its own included.
    pub window: Option<usize>,
    /// Factor of the scores.
    pub scale: f64,
    /// The start of each sequence of q, then the end of the last. Rows after it attend to nothing.
    pub starts: &'a [usize],
    /// Those of k and v; `starts` again except in cross attention.
    pub kv_starts: &'a [usize],
    /// Biases [heads, 2 · max_distance + 1] by the key's position less the query's, limited to ±max_distance.
    pub bias: Option<&'a [f64]>,
    /// The factor of a softmax weight by dropout, given the row of q, the head, and the key's position in its sequence.
    pub dropout: Option<&'a dyn Fn(usize, usize, usize) -> f64>,
}

impl fmt::Debug for Attention<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { heads, kv_heads, head_dim, causal, window, scale, starts, kv_starts, .. } = self;
        write!(
            f,
            "attention of {heads} and {kv_heads} heads of {head_dim}, scale {scale}, causal {causal}, "
        )?;
        write!(f, "window {window:?}, sequences {starts:?} to {kv_starts:?}, ")?;
        write!(f, "biases {}, dropout {}", self.bias.is_some(), self.dropout.is_some())
    }
}

/// A key of a query's head, with its softmax weight.
struct Key {
    row: usize,
    weight: f64,
    /// Of the weight, by dropout.
    factor: f64,
    /// The index of its bias.
    bias: usize,
}

/// A head's query: its keys, and the log of the softmax's sum.
struct Query {
    row: usize,
    head: usize,
    keys: Vec<Key>,
    lse: f64,
}

impl<'a> Attention<'a> {
    /// Causal attention without biases and dropout.
    pub const fn causal(
        [heads, kv_heads, head_dim]: [usize; 3],
        window: Option<usize>,
        scale: f64,
        starts: &'a [usize],
    ) -> Self {
        Self {
            heads,
            kv_heads,
            head_dim,
            causal: true,
            window,
            scale,
            starts,
            kv_starts: starts,
            bias: None,
            dropout: None,
        }
    }

    /// A query's position in its sequence, the first row of the keys' sequence, and the positions it may attend to there.
    fn keys(&self, row: usize) -> Option<(usize, usize, Range<usize>)> {
        let sequence = self.starts.windows(2).position(|ends| (ends[0]..ends[1]).contains(&row))?;
        let position = row - self.starts[sequence];
        let (first, end) = (self.kv_starts[sequence], self.kv_starts[sequence + 1]);
        let end = if self.causal { (end - first).min(position + 1) } else { end - first };
        let least = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        Some((position, first, least..end))
    }

    /// The offsets of a query's head, and of a key's head that serves it.
    fn offsets(&self, row: usize, head: usize, key: usize) -> [usize; 2] {
        let kv_head = head * self.kv_heads / self.heads;
        [(row * self.heads + head) * self.head_dim, (key * self.kv_heads + kv_head) * self.head_dim]
    }

    /// The index of the bias of a key at `key` for a query at `query`; 0 without biases.
    fn bias_at(&self, head: usize, query: usize, key: usize) -> usize {
        let Some(bias) = self.bias else { return 0 };
        let distances = bias.len() / self.heads;
        let most = distances / 2;
        head * distances + (key + most).saturating_sub(query).min(distances - 1)
    }

    /// A head's query; `None` without a key.
    fn query(&self, q: &[f64], k: &[f64], row: usize, head: usize) -> Option<Query> {
        let (position, first, keys) = self.keys(row)?;
        let scored = |at: usize| {
            let [from, to] = self.offsets(row, head, first + at);
            let product: f64 = (0..self.head_dim).map(|d| q[from + d] * k[to + d]).sum();
            let bias = self.bias_at(head, position, at);
            let score = product * self.scale + self.bias.map_or(0.0, |biases| biases[bias]);
            let factor = self.dropout.map_or(1.0, |factor| factor(row, head, at));
            Key { row: first + at, weight: score, factor, bias }
        };
        let mut keys: Vec<Key> = keys.map(scored).collect();
        let greatest = keys.iter().map(|key| key.weight).reduce(f64::max)?;
        let total: f64 = keys.iter().map(|key| (key.weight - greatest).exp()).sum();
        let lse = greatest + total.ln();
        for key in &mut keys {
            key.weight = (key.weight - lse).exp();
        }
        Some(Query { row, head, keys, lse })
    }

    /// Every query of every head with a key.
    fn queries<'s>(&'s self, q: &'s [f64], k: &'s [f64]) -> impl Iterator<Item = Query> + 's {
        let rows = q.len() / (self.heads * self.head_dim);
        let heads = move |row| (0..self.heads).filter_map(move |head| self.query(q, k, row, head));
        (0..rows).flat_map(heads)
    }
}

/// o [Tq, heads · D] and lse [Tq, heads]. A query without a key gives zeros.
pub fn attention(dims: Attention<'_>, q: &[f64], k: &[f64], v: &[f64]) -> [Vec<f64>; 2] {
    let (mut o, mut lses) = (vec![0.0; q.len()], vec![0.0; q.len() / dims.head_dim]);
    for Query { row, head, keys, lse } in dims.queries(q, k) {
        lses[row * dims.heads + head] = lse;
        for key in keys {
            let [at, there] = dims.offsets(row, head, key.row);
            (0..dims.head_dim).for_each(|d| o[at + d] += key.weight * key.factor * v[there + d]);
        }
    }
    [o, lses]
}

/// dq, dk and dv of [`attention`], and the gradient of the biases; the last is empty without biases.
pub fn attention_backward(dims: Attention<'_>, q: &[f64], k: &[f64], v: &[f64], dy: &[f64]) -> [Vec<f64>; 4] {
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    let mut dbias = vec![0.0; dims.bias.map_or(0, <[f64]>::len)];
    for Query { row, head, keys, .. } in dims.queries(q, k) {
        // The gradient of a weight before dropout.
        let dp = |key: &Key| {
            let [at, there] = dims.offsets(row, head, key.row);
            key.factor * (0..dims.head_dim).map(|d| dy[at + d] * v[there + d]).sum::<f64>()
        };
        let delta: f64 = keys.iter().map(|key| key.weight * dp(key)).sum();
        for key in keys {
            let [at, there] = dims.offsets(row, head, key.row);
            let ds = key.weight * (dp(&key) - delta);
            for d in 0..dims.head_dim {
                dq[at + d] += ds * dims.scale * k[there + d];
                dk[there + d] += ds * dims.scale * q[at + d];
                dv[there + d] += key.weight * key.factor * dy[at + d];
            }
            if dims.bias.is_some() {
                dbias[key.bias] += ds;
            }
        }
    }
    [dq, dk, dv, dbias]
}

/// Calls `compute` with the shape of a forward node, and its operands.
fn with_dims<R>(
    interpreter: &Interpreter<'_>,
    node: &Node,
    spec: AttentionSpec,
    compute: impl FnOnce(Attention<'_>, [&[f64]; 3]) -> R,
) -> R {
    let [starts, kv_starts] = [0, 1].map(|place| interpreter.data_of(node.inputs[place]).ends());
    let heads = spec.heads as usize;
    let longest = kv_starts.last().copied().unwrap_or(0);
    let DropoutSpec { probability, salt } = spec.dropout.unwrap_or(DropoutSpec { probability: 0.0, salt: 0 });
    let factor = |row: usize, head: usize, key: usize| {
        dropout::factor((row * heads + head) * longest + key, probability, salt)
    };
    let dims = Attention {
        heads,
        kv_heads: spec.kv_heads as usize,
        head_dim: interpreter.width(node.inputs[0]) / heads,
        causal: spec.causal,
        window: spec.window.map(|window| window as usize),
        scale: spec.scale,
        starts: &starts,
        kv_starts: &kv_starts,
        bias: node.inputs.get(3).map(|bias| interpreter.value(*bias)),
        dropout: Some(&factor),
    };
    compute(dims, [0, 1, 2].map(|place| interpreter.value(node.inputs[place])))
}

pub(super) fn forward(interpreter: &Interpreter<'_>, node: &Node, spec: AttentionSpec) -> Vec<Vec<f64>> {
    with_dims(interpreter, node, spec, |dims, [q, k, v]| attention(dims, q, k, v)).into()
}

pub(super) fn backward(
    interpreter: &Interpreter<'_>,
    node: &GradNode,
    of: &Node,
    spec: AttentionSpec,
) -> Gradients {
    let dy = interpreter.value(node.inputs[of.inputs.len() + 2]);
    let gradients = with_dims(interpreter, of, spec, |dims, [q, k, v]| attention_backward(dims, q, k, v, dy));
    Gradients::of_values(gradients.into())
}

#[cfg(test)]
mod tests;
