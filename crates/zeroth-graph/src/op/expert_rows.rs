//! Copies between the rows of tokens and the rows of their experts. Each is the other's gradient.

use super::route::Routing;
use crate::gradient::Deriver;
use crate::reference::{Gradients, Interpreter};
use crate::{Builder, GradNode, GradOp, GradWrite, GraphError, Node, Op, Value, ValueInfo};

impl Builder {
    /// The row of its token for every slot [T · k, H], in sorted order.
    pub fn gather_rows(&mut self, x: Value, routing: &Routing) -> Result<Value, GraphError> {
        let op = Op::GatherRows;
        self.expect_rows(op, x, routing.weights)?;
        let width = self.info(x).width;
        self.expect_width(op, x, width)?;
        let y = ValueInfo { rows: self.info(routing.order).rows, ..self.info(x) };
        let inputs = [x, routing.order, routing.places, routing.offsets];
        self.push(op, &inputs, &[], &[y]).map(|outputs| outputs[0])
    }

    /// The sum of the rows of its slots for every token [T, H].
    pub fn combine_rows(&mut self, x: Value, routing: &Routing) -> Result<Value, GraphError> {
        let op = Op::CombineRows;
        self.expect_slots(op, x, routing)?;
        let y = ValueInfo { rows: self.info(routing.weights).rows, ..self.info(x) };
        let inputs = [x, routing.order, routing.places, routing.offsets];
        self.push(op, &inputs, &[], &[y]).map(|outputs| outputs[0])
    }
}

pub(super) fn derive(deriver: &mut Deriver<'_>, index: usize, node: &Node) {
    let Some(dy) = deriver.gradient(node.outputs[0]) else { return };
    let [x, order, places, offsets] = [0, 1, 2, 3].map(|place| node.inputs[place]);
    if !deriver.needs(x) {
        return;
    }
    let (op, indices) = match node.op {
        Op::GatherRows => (GradOp::CombineRows, places),
        _ => (GradOp::GatherRows, order),
    };
    let dx = deriver.fresh(x);
    let outputs = vec![(dx, GradWrite::Write)];
    deriver.push(index, op, vec![dy, indices, offsets], Vec::new(), outputs, false);
    deriver.contribute(index, x, dx);
}

/// `x[order[p] / k]` for the routed places p; zeros for the others.
pub fn gather_rows(x: &[f64], width: usize, order: &[usize], k: usize, routed: usize) -> Vec<f64> {
    let mut y = vec![0.0; order.len() * width];
    for (y, slot) in y.chunks_exact_mut(width).zip(order).take(routed) {
        y.copy_from_slice(&x[slot / k * width..][..width]);
    }
    y
}

/// For every token the sum of the rows at its places; those that are not routed count as zeros.
pub fn combine_rows(x: &[f64], width: usize, places: &[usize], k: usize, routed: usize) -> Vec<f64> {
    let mut y = vec![0.0; places.len() / k * width];
    for (y, places) in y.chunks_exact_mut(width).zip(places.chunks_exact(k)) {
        for place in places.iter().filter(|place| **place < routed) {
            y.iter_mut().zip(&x[place * width..][..width]).for_each(|(y, x)| *y += x);
        }
    }
    y
}

/// The value, its width and an operand's indices, as both directions read them.
fn operands<'a>(
    interpreter: &'a Interpreter<'_>,
    x: Value,
    indices: Value,
) -> (&'a [f64], usize, Vec<usize>) {
    let indices = interpreter.indices(indices).into_iter().map(|index| index as usize);
    (interpreter.value(x), interpreter.width(x), indices.collect())
}

fn copied(
    interpreter: &Interpreter<'_>,
    is_gather: bool,
    [x, indices, offsets]: [Value; 3],
    k: usize,
) -> Vec<f64> {
    let (x, width, indices) = operands(interpreter, x, indices);
    let routed = interpreter.indices(offsets).last().map_or(0, |routed| *routed as usize);
    let copy = if is_gather { gather_rows } else { combine_rows };
    copy(x, width, &indices, k, routed)
}

pub(super) fn forward(interpreter: &Interpreter<'_>, node: &Node) -> Vec<Vec<f64>> {
    let [x, order, places, offsets] = [0, 1, 2, 3].map(|place| node.inputs[place]);
    let is_gather = node.op == Op::GatherRows;
    let k = interpreter.width(places);
    vec![copied(interpreter, is_gather, [x, if is_gather { order } else { places }, offsets], k)]
}

pub(super) fn backward(interpreter: &Interpreter<'_>, node: &GradNode, of: &Node) -> Gradients {
    let is_gather = node.op == GradOp::GatherRows;
    let operands = [0, 1, 2].map(|place| node.inputs[place]);
    Gradients::of_values(vec![copied(interpreter, is_gather, operands, interpreter.width(of.inputs[2]))])
}
