//! A reference interpreter: every op and its gradient in f64, element by element.
//!
//! It is slow and simple. Tests check it against finite differences and PyTorch, and kernels and executors against it.

#![allow(clippy::many_single_char_names, reason = "the letters of the formulas")]

mod backward;
mod forward;

use std::ops::RangeInclusive;

use crate::{Backward, Graph, ParamId, Value};

/// The data of a micro-batch: packed sequences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Data {
    /// Tokens.
    pub ids: Vec<usize>,
    /// Labels; negative: ignored.
    pub labels: Vec<i64>,
    /// Positions in their sequences.
    pub positions: Vec<usize>,
    /// The first row of each sequence.
    pub starts: Vec<usize>,
}

/// Interprets a graph and its backward.
#[derive(Debug)]
pub struct Machine<'a> {
    graph: &'a Graph,
    data: &'a Data,
    params: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
    gradients: Vec<Vec<f64>>,
}

impl<'a> Machine<'a> {
    /// An interpreter with these parameters, in the order of the graph's.
    pub fn new(graph: &'a Graph, data: &'a Data, params: Vec<Vec<f64>>) -> Self {
        let gradients = params.iter().map(|param| vec![0.0; param.len()]).collect();
        Self { graph, data, params, values: vec![Vec::new(); graph.values.len()], gradients }
    }

    /// The loss, by forward alone.
    pub fn loss(&mut self) -> f64 {
        for index in 0..self.graph.nodes.len() {
            self.run_forward(index);
        }
        let losses = self.graph.losses().map(|node| self.graph.nodes[node].outputs[0]);
        losses.map(|loss| self.value(loss)[0]).sum()
    }

    /// The loss and all gradients, by forward without its losses and then backward.
    pub fn train(&mut self, backward: &Backward) -> f64 {
        for index in 0..self.graph.nodes.len() {
            if !self.graph.nodes[index].op.is_loss() {
                self.run_forward(index);
            }
        }
        for index in 0..backward.nodes.len() {
            self.run_backward(backward, index);
        }
        backward.losses.iter().map(|loss| self.value(*loss)[0]).sum()
    }

    /// Sets the next micro-batch; keeps parameters and gradients.
    pub fn feed(&mut self, data: &'a Data) {
        self.data = data;
    }

    /// Runs one node of forward.
    pub fn run_forward(&mut self, node: usize) {
        let graph = self.graph;
        self.forward(&graph.nodes[node]);
    }

    /// Runs one node of backward.
    pub fn run_backward(&mut self, backward: &Backward, node: usize) {
        self.values.resize(backward.values.len(), Vec::new());
        self.backward(&backward.nodes[node]);
    }

    /// A value that was computed.
    pub fn value(&self, value: Value) -> &[f64] {
        &self.values[value.index()]
    }

    /// A parameter, to read and to change.
    pub fn param_mut(&mut self, param: ParamId) -> &mut [f64] {
        &mut self.params[param.index()]
    }

    /// A parameter's gradient, to clear it.
    pub fn gradient_mut(&mut self, param: ParamId) -> &mut [f64] {
        &mut self.gradients[param.index()]
    }

    /// A parameter's accumulated gradient.
    pub fn gradient(&self, param: ParamId) -> &[f64] {
        &self.gradients[param.index()]
    }

    fn rows(&self) -> usize {
        self.data.ids.len()
    }

    fn width(&self, value: Value) -> usize {
        self.graph.info(value).width as usize
    }

    /// The length of the sequence that a row belongs to.
    fn length(&self, row: usize) -> u64 {
        let begin = self.data.starts.iter().rev().copied().find(|start| *start <= row).unwrap_or(0);
        let end = self.data.starts.iter().copied().find(|start| *start > row).unwrap_or(self.rows());
        (end - begin) as u64
    }

    /// Keys that a query may attend to: its own sequence, itself and earlier, within the window.
    fn keys(&self, query: usize, window: Option<u64>) -> RangeInclusive<usize> {
        let start = self.data.starts.iter().rev().copied().find(|start| *start <= query).unwrap_or(0);
        let least = window.map_or(start, |window| (query + 1).saturating_sub(window as usize).max(start));
        least..=query
    }

    fn logits(&self, x: &[f64], weight: ParamId, row: usize) -> Vec<f64> {
        let weight = &self.params[weight.index()];
        let hidden = x.len() / self.rows();
        let dot = |w: &[f64]| w.iter().zip(&x[row * hidden..]).map(|(w, x)| w * x).sum::<f64>();
        weight.chunks(hidden).map(dot).collect()
    }

    /// Scores of one query's keys; `at` are the offsets of the query's and the keys' heads.
    #[expect(clippy::too_many_arguments, reason = "a formula with this many letters")]
    fn scores(
        &self,
        q: &[f64],
        k: &[f64],
        at: (usize, usize),
        (dim, kv): (usize, usize),
        row: usize,
        window: Option<u64>,
        scale: f64,
    ) -> Vec<(usize, f64)> {
        let score = |key: usize| (0..dim).map(|d| q[at.0 + d] * k[key * kv + at.1 + d]).sum::<f64>() * scale;
        self.keys(row, window).map(|key| (key, score(key))).collect()
    }

    fn rotate(&self, rotary: usize, x: &[f64], heads: usize, direction: f64) -> Vec<f64> {
        let rotary = &self.graph.rotaries[rotary];
        let width = x.len() / self.rows();
        let half = width / heads / 2;
        let mut y = x.to_vec();
        for (row, position) in self.data.positions.iter().enumerate() {
            let frequencies: Vec<f64> = rotary.frequencies_at(self.length(row)).collect();
            for (head, i) in (0..heads).flat_map(|head| (0..half).map(move |i| (head, i))) {
                let angle = *position as f64 * frequencies[i] * direction;
                let (cos, sin) = (angle.cos() * rotary.scale, angle.sin() * rotary.scale);
                let a = row * width + head * 2 * half + i;
                (y[a], y[a + half]) = (x[a] * cos - x[a + half] * sin, x[a + half] * cos + x[a] * sin);
            }
        }
        y
    }
}

fn log_sum(logits: &[f64]) -> f64 {
    logits.iter().map(|logit| logit.exp()).sum::<f64>().ln()
}

/// Groups as wide as the weight: rows for a norm, heads for the norm of q or k.
fn norm(x: &[f64], weight: &[f64], eps: f64) -> Vec<Vec<f64>> {
    let width = weight.len();
    let rstd: Vec<f64> = x
        .chunks(width)
        .map(|x| 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / width as f64 + eps).sqrt())
        .collect();
    let y = x.iter().enumerate().map(|(at, x)| x * rstd[at / width] * weight[at % width]).collect();
    vec![y, rstd]
}

fn norm_backward(x: &[f64], rstd: &[f64], dy: &[f64], weight: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let width = weight.len();
    let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; width]);
    for (group, r) in rstd.iter().enumerate() {
        let at = |i: usize| group * width + i;
        let dot: f64 = (0..width).map(|i| dy[at(i)] * weight[i] * x[at(i)]).sum();
        for i in 0..width {
            dx[at(i)] = r * dy[at(i)] * weight[i] - r * r * r * x[at(i)] * dot / width as f64;
            dw[i] += dy[at(i)] * x[at(i)] * r;
        }
    }
    (dx, dw)
}

/// A mask that depends on salt and index alone, the same in forward and backward.
fn mask(x: &[f64], probability: f64, salt: u32) -> Vec<f64> {
    let keep = |at: usize| {
        let hash = (at as u64 ^ u64::from(salt) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (hash >> 40) as f64 / f64::from(1 << 24) >= probability
    };
    x.iter().enumerate().map(|(at, x)| if keep(at) { x / (1.0 - probability) } else { 0.0 }).collect()
}
