//! A reference interpreter: every op and its gradient in f64, element by element.
//!
//! It is slow and simple. Tests check it against finite differences and PyTorch, and kernels and executors against it. The
//! functions are those of the ops' files.

pub mod finite_differences;

use crate::op;
pub use crate::op::{
    Attention, Routed, TeacherRows, activation, activation_backward, attention, attention_backward,
    balance_loss, combine_rows, distill_loss, embedding, embedding_backward, gated_activation,
    gated_activation_backward, gated_rows, gated_rows_backward, gather_rows, grouped_linear,
    grouped_linear_backward, head_loss, linear, linear_backward, position_bias, position_bias_backward,
    rms_norm, rms_norm_backward, rope, route, route_backward,
};
use crate::{Backward, GradWrite, Graph, ParamId, Rows, Value};

/// The data of a stream of a micro-batch: packed sequences.
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

impl Data {
    /// The start of each sequence, then the end of the last.
    pub(crate) fn ends(&self) -> Vec<usize> {
        self.starts.iter().copied().chain([self.ids.len()]).collect()
    }

    /// The length of the sequence that a row belongs to.
    pub(crate) fn length_at(&self, row: usize) -> u64 {
        let ends = self.ends();
        let sequence = ends.windows(2).find(|ends| (ends[0]..ends[1]).contains(&row));
        sequence.map_or(0, |ends| (ends[1] - ends[0]) as u64)
    }
}

/// What a backward node computes.
pub(crate) struct Gradients {
    /// Its results.
    pub(crate) values: Vec<Vec<f64>>,
    /// Gradients of parameters, to accumulate.
    pub(crate) params: Vec<(ParamId, Vec<f64>)>,
}

impl Gradients {
    pub(crate) fn of_values(values: Vec<Vec<f64>>) -> Self {
        Self { values, params: Vec::new() }
    }
}

/// Interprets a graph and its backward.
#[derive(Debug)]
pub struct Machine<'a> {
    graph: &'a Graph,
    /// By stream.
    data: &'a [Data],
    params: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
    /// Of all values.
    widths: Vec<usize>,
    gradients: Vec<Vec<f64>>,
}

impl<'a> Machine<'a> {
    /// An interpreter with the data of each stream and these parameters, in the order of the graph's.
    pub fn new(graph: &'a Graph, data: &'a [Data], params: Vec<Vec<f64>>) -> Self {
        let gradients = params.iter().map(|param| vec![0.0; param.len()]).collect();
        let values = vec![Vec::new(); graph.values.len()];
        let widths = graph.values.iter().map(|info| info.width as usize).collect();
        let mut machine = Self { graph, data, params, values, widths, gradients };
        machine.feed(data);
        machine
    }

    /// The loss, by forward alone.
    pub fn loss(&mut self) -> f64 {
        for index in 0..self.graph.nodes.len() {
            self.run_forward(index);
        }
        self.weighted_loss()
    }

    /// The sum of the parts of the loss that was computed last, each times its weight.
    fn weighted_loss(&self) -> f64 {
        let parts = self.graph.loss_parts.iter().zip(self.loss_parts());
        parts.map(|(part, loss)| part.weight * loss).sum()
    }

    /// The parts of the loss that was computed last.
    pub fn loss_parts(&self) -> Vec<f64> {
        let mut parts = vec![0.0; self.graph.loss_parts.len()];
        for node in &self.graph.nodes {
            for (part, loss) in node.op.loss_parts().zip(&node.outputs) {
                parts[part] += self.value(*loss)[0];
            }
        }
        parts
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
        self.weighted_loss()
    }

    /// Sets the next micro-batch; keeps parameters and gradients.
    pub fn feed(&mut self, data: &'a [Data]) {
        self.data = data;
        for (stream, data) in self.graph.streams.iter().zip(data) {
            self.values[stream.ids.index()] = data.ids.iter().map(|id| *id as f64).collect();
            self.values[stream.labels.index()] = data.labels.iter().map(|label| *label as f64).collect();
            self.values[stream.positions.index()] = data.positions.iter().map(|at| *at as f64).collect();
        }
    }

    /// Sets a further input.
    pub fn set_input(&mut self, input: Value, indices: &[i64]) {
        self.values[input.index()] = indices.iter().map(|index| *index as f64).collect();
    }

    /// Sets a further input of f32.
    pub fn set_statistic_input(&mut self, input: Value, numbers: &[f64]) {
        self.values[input.index()] = numbers.to_vec();
    }

    /// Runs one node of forward.
    pub fn run_forward(&mut self, node: usize) {
        let node = &self.graph.nodes[node];
        for (value, output) in node.outputs.iter().zip(op::forward(self, node)) {
            self.values[value.index()] = output;
        }
    }

    /// Runs one node of backward.
    pub fn run_backward(&mut self, backward: &Backward, node: usize) {
        self.values.resize(backward.values.len(), Vec::new());
        let gradients = &backward.values[self.widths.len()..];
        self.widths.extend(gradients.iter().map(|info| info.width as usize));
        let node = &backward.nodes[node];
        let Gradients { values, params } = op::backward(self, node, &self.graph.nodes[node.of]);
        for (param, gradient) in params.into_iter().filter(|(param, _)| node.accumulates_into.contains(param))
        {
            self.gradients[param.index()].iter_mut().zip(gradient).for_each(|(sum, add)| *sum += add);
        }
        for ((value, write), output) in node.outputs.iter().zip(values) {
            let there = &mut self.values[value.index()];
            match write {
                GradWrite::Write => *there = output,
                GradWrite::Add => there.iter_mut().zip(output).for_each(|(sum, add)| *sum += add),
            }
        }
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

    pub(crate) fn graph(&self) -> &Graph {
        self.graph
    }

    pub(crate) fn param(&self, param: ParamId) -> &[f64] {
        &self.params[param.index()]
    }

    /// An input's numbers.
    pub(crate) fn indices(&self, value: Value) -> Vec<i64> {
        self.value(value).iter().map(|index| *index as i64).collect()
    }

    /// The data of the stream that gives a value its rows.
    pub(crate) fn data_of(&self, value: Value) -> &Data {
        match self.graph.info(value).rows {
            Rows::Stream(stream) | Rows::Times(stream, _) => &self.data[stream],
            Rows::Fixed(_) => unreachable!("ops that read sequences have the rows of a stream"),
        }
    }

    /// Elements of a value's row.
    pub(crate) fn width(&self, value: Value) -> usize {
        self.widths[value.index()]
    }
}
