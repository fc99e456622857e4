//! The gated activation of the rows of experts, times the weight of each.

use zeroth_base::ActivationFn;

use super::route::Routing;
use crate::gradient::Deriver;
use crate::reference::{Gradients, Interpreter};
use crate::{Builder, GradNode, GradOp, GradWrite, GraphError, Node, Op, Value};

impl Builder {
    /// `f(gate) · up · weight`, f the activation: `gate_up` [T · k, 2F] has the gate in the first half of a row.
    pub fn gated_rows(
        &mut self,
        activation: ActivationFn,
        gate_up: Value,
        routing: &Routing,
    ) -> Result<Value, GraphError> {
        let op = Op::GatedRows(activation);
        self.expect_slots(op, gate_up, routing)?;
        let width = self.head_dim(op, gate_up, 2)?;
        let inputs = [gate_up, routing.weights, routing.order, routing.offsets];
        self.push(op, &inputs, &[], &[self.activation_like(gate_up, width)]).map(|outputs| outputs[0])
    }
}

pub(super) fn derive(deriver: &mut Deriver<'_>, index: usize, node: &Node, activation: ActivationFn) {
    let Some(dy) = deriver.gradient(node.outputs[0]) else { return };
    let [gate_up, weights, order, offsets] = [0, 1, 2, 3].map(|place| node.inputs[place]);
    let dgate_up = deriver.fresh(gate_up);
    let dweights = deriver.needs(weights).then(|| deriver.fresh_statistic(weights));
    let outputs = [Some(dgate_up), dweights].into_iter().flatten();
    let outputs = outputs.map(|gradient| (gradient, GradWrite::Write)).collect();
    let inputs = vec![gate_up, dy, weights, order, offsets];
    deriver.push(index, GradOp::GatedRows(activation), inputs, Vec::new(), outputs, false);
    deriver.contribute(index, gate_up, dgate_up);
    if let Some(dweights) = dweights {
        deriver.contribute(index, weights, dweights);
    }
}

/// `f(gate) · up · weights[order]` of the routed rows; zeros for the others.
pub fn gated_rows(
    activation: ActivationFn,
    gate_up: &[f64],
    weights: &[f64],
    order: &[usize],
    routed: usize,
) -> Vec<f64> {
    let width = gate_up.len() / order.len() / 2;
    let mut y = vec![0.0; order.len() * width];
    for ((y, gate_up), slot) in
        y.chunks_exact_mut(width).zip(gate_up.chunks_exact(2 * width)).zip(order).take(routed)
    {
        let (gate, up) = gate_up.split_at(width);
        for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
            *y = activation.value(*gate) * up * weights[*slot];
        }
    }
    y
}

/// dgate_up and dweights of [`gated_rows`].
pub fn gated_rows_backward(
    activation: ActivationFn,
    gate_up: &[f64],
    dy: &[f64],
    weights: &[f64],
    order: &[usize],
    routed: usize,
) -> [Vec<f64>; 2] {
    let width = gate_up.len() / order.len() / 2;
    let (mut dgate_up, mut dweights) = (vec![0.0; gate_up.len()], vec![0.0; weights.len()]);
    for (place, slot) in order.iter().enumerate().take(routed) {
        let (gate, up) = gate_up[place * 2 * width..][..2 * width].split_at(width);
        let (dgate, dup) = dgate_up[place * 2 * width..][..2 * width].split_at_mut(width);
        for (f, dy) in dy[place * width..][..width].iter().enumerate() {
            let value = activation.value(gate[f]);
            dgate[f] = dy * weights[*slot] * up[f] * activation.slope(gate[f]);
            dup[f] = dy * weights[*slot] * value;
            dweights[*slot] += dy * value * up[f];
        }
    }
    [dgate_up, dweights]
}

fn order(interpreter: &Interpreter<'_>, order: Value, offsets: Value) -> (Vec<usize>, usize) {
    let order = interpreter.indices(order).into_iter().map(|slot| slot as usize).collect();
    (order, interpreter.indices(offsets).last().map_or(0, |routed| *routed as usize))
}

pub(super) fn forward(interpreter: &Interpreter<'_>, node: &Node, activation: ActivationFn) -> Vec<Vec<f64>> {
    let [gate_up, weights] = [0, 1].map(|place| interpreter.value(node.inputs[place]));
    let (order, routed) = order(interpreter, node.inputs[2], node.inputs[3]);
    vec![gated_rows(activation, gate_up, weights, &order, routed)]
}

pub(super) fn backward(
    interpreter: &Interpreter<'_>,
    node: &GradNode,
    activation: ActivationFn,
) -> Gradients {
    let [gate_up, dy, weights] = [0, 1, 2].map(|place| interpreter.value(node.inputs[place]));
    let (order, routed) = order(interpreter, node.inputs[3], node.inputs[4]);
    Gradients::of_values(gated_rows_backward(activation, gate_up, dy, weights, &order, routed).into())
}
