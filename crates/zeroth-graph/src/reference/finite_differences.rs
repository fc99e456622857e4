//! Derived gradients against finite differences of the loss.

use super::{Data, Interpreter};
use crate::{Graph, Value};

/// The step of a difference, to both sides.
const STEP: f64 = 1e-5;

/// Numbers that are neither round nor equal, the same on every run.
fn numbers(count: u64, salt: usize) -> Vec<f64> {
    (0..count as usize).map(|i| ((i * 37 + salt * 101 + 13) as f64 * 0.734_1).sin() * 0.6 + 0.1).collect()
}

/// The first difference between the derived gradients of a graph and those by finite differences of its loss, in words.
/// Streams have this data, further inputs these numbers, and parameters numbers without a pattern.
pub fn mismatch(graph: &Graph, data: &[Data], inputs: &[(Value, Vec<i64>)]) -> Option<String> {
    mismatch_with(graph, data, |interpreter| {
        for (input, indices) in inputs {
            interpreter.set_input(*input, indices);
        }
    })
}

/// As [`mismatch`], with further inputs that `feed` sets.
pub fn mismatch_with(graph: &Graph, data: &[Data], feed: impl Fn(&mut Interpreter<'_>)) -> Option<String> {
    let params = || {
        let numbers = |(salt, param): (usize, &crate::Param)| numbers(param.elements(), salt);
        graph.params.iter().enumerate().map(numbers).collect::<Vec<_>>()
    };
    let interpreter = |params| {
        let mut interpreter = Interpreter::new(graph, data, params);
        feed(&mut interpreter);
        interpreter
    };
    let backward = match graph.backward() {
        Ok(backward) => backward,
        Err(error) => return Some(error.to_string()),
    };
    let mut trained = interpreter(params());
    let (loss, forward) = (trained.train(&backward), interpreter(params()).loss());
    if (loss - forward).abs() >= 1e-12 * loss.abs().max(1.0) {
        return Some(format!("the loss is {loss} with gradients and {forward} without"));
    }
    for id in graph.units.iter().flat_map(|unit| &unit.params) {
        let (param, found) = (graph.param(*id), trained.gradient(*id));
        for (element, found) in found.iter().enumerate() {
            let nudged = |by: f64| {
                let mut params = params();
                params[id.index()][element] += by;
                interpreter(params).loss()
            };
            let expected =
                if param.spec.trainable { (nudged(STEP) - nudged(-STEP)) / (2.0 * STEP) } else { 0.0 };
            if (found - expected).abs() >= 1e-7 * expected.abs().max(1.0) {
                return Some(format!("{}[{element}]: {found}, by differences {expected}", param.spec.name));
            }
        }
    }
    None
}

#[cfg(test)]
pub(crate) use small::{DATA_ROWS, VOCAB, data, specs};

/// A small batch and its parameters, for the tests of ops.
#[cfg(test)]
mod small {
    use super::Data;
    use crate::ParamSpec;

    pub(crate) const VOCAB: u64 = 7;
    pub(crate) const DATA_ROWS: u64 = 7;

    /// Two sequences of uneven length, two labels masked.
    pub(crate) fn data() -> Data {
        Data {
            ids: vec![1, 4, 2, 6, 0, 4, 4],
            labels: vec![4, 2, -100, -100, 4, 4, 3],
            positions: vec![0, 1, 2, 3, 0, 1, 2],
            starts: vec![0, 4],
        }
    }

    pub(crate) fn specs(params: &[(&str, &[u64])]) -> Vec<ParamSpec> {
        let spec = |(name, shape): &(&str, &[u64])| ParamSpec {
            name: (*name).to_owned(),
            shape: shape.to_vec(),
            trainable: true,
            quantized: false,
        };
        params.iter().map(spec).collect()
    }
}
