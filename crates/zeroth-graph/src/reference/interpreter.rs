//! The state of the interpreter, which the files of the ops read.

use crate::{Graph, ParamId, Rows, Value};

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
pub struct Interpreter<'a> {
    pub(super) graph: &'a Graph,
    /// By stream.
    data: &'a [Data],
    params: Vec<Vec<f64>>,
    pub(super) values: Vec<Vec<f64>>,
    /// Of all values.
    pub(super) widths: Vec<usize>,
    pub(super) gradients: Vec<Vec<f64>>,
}

impl<'a> Interpreter<'a> {
    /// An interpreter with the data of each stream and these parameters, in the order of the graph's.
    pub fn new(graph: &'a Graph, data: &'a [Data], params: Vec<Vec<f64>>) -> Self {
        let gradients = params.iter().map(|param| vec![0.0; param.len()]).collect();
        let values = vec![Vec::new(); graph.values.len()];
        let widths = graph.values.iter().map(|info| info.width as usize).collect();
        let mut interpreter = Self { graph, data, params, values, widths, gradients };
        interpreter.feed(data);
        interpreter
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

    /// A value that was computed.
    pub fn value(&self, value: Value) -> &[f64] {
        &self.values[value.index()]
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
