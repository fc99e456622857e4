//! Matmuls with a weight for each expert: plain, and scaled and added to a value (the outer matrix of a LoRA adapter).

use super::linear::{linear, linear_backward};
use super::route::Routing;
use crate::gradient::{Deriver, Gradient};
use crate::reference::{Gradients, Interpreter};
use crate::{Builder, GradNode, GradOp, GradWrite, GraphError, Node, Op, ParamId, Value};

impl Builder {
    /// `x · w[e]ᵀ` for the rows of each expert e: `weight` is [E, O, I].
    pub fn grouped_linear(
        &mut self,
        x: Value,
        weight: ParamId,
        routing: &Routing,
    ) -> Result<Value, GraphError> {
        let op = Op::GroupedLinear;
        let [out, inner] = self.expert_sides(op, weight, routing)?;
        self.expect_slots(op, x, routing)?;
        self.expect_width(op, x, inner)?;
        self.push(op, &[x, routing.offsets], &[weight], &[self.activation_like(x, out)])
            .map(|outputs| outputs[0])
    }

    /// `base + scale · u · w[e]ᵀ` for the rows of each expert e: `weight` is [E, O, I].
    pub fn grouped_linear_add(
        &mut self,
        base: Value,
        u: Value,
        weight: ParamId,
        scale: f64,
        routing: &Routing,
    ) -> Result<Value, GraphError> {
        let op = Op::GroupedLinearAdd { scale };
        if !scale.is_finite() {
            return Err(self.shape_error(op, "the scale", "a finite number", scale.to_string()));
        }
        let [out, inner] = self.expert_sides(op, weight, routing)?;
        for (value, width) in [(base, out), (u, inner)] {
            self.expect_slots(op, value, routing)?;
            self.expect_width(op, value, width)?;
        }
        self.push(op, &[base, u, routing.offsets], &[weight], &[self.activation_like(base, out)])
            .map(|outputs| outputs[0])
    }
}

pub(super) fn derive(deriver: &mut Deriver<'_>, index: usize, node: &Node) {
    let Some(dy) = deriver.gradient(node.outputs[0]) else { return };
    let [x, offsets] = [node.inputs[0], node.inputs[1]];
    deriver.push(index, GradOp::GroupedLinearParams, vec![x, dy, offsets], Vec::new(), Vec::new(), true);
    if !deriver.needs(x) {
        return;
    }
    let (inputs, weight) = (vec![dy, offsets], node.params.clone());
    // The inner matrix of an adapter accumulates into the gradient that the base's weight left.
    if let Some(Gradient { value, shared: false }) = deriver.gradients[x.index()] {
        let outputs = vec![(value, GradWrite::Add)];
        deriver.push(index, GradOp::GroupedLinearInput, inputs, weight, outputs, false);
    } else {
        let dx = deriver.fresh(x);
        let outputs = vec![(dx, GradWrite::Write)];
        deriver.push(index, GradOp::GroupedLinearInput, inputs, weight, outputs, false);
        deriver.contribute(index, x, dx);
    }
}

/// The gradient of `base` is that of the result: one value serves both.
pub(super) fn derive_add(deriver: &mut Deriver<'_>, index: usize, node: &Node, scale: f64) {
    let Some(dy) = deriver.gradient(node.outputs[0]) else { return };
    let [base, u, offsets] = [0, 1, 2].map(|place| node.inputs[place]);
    let op = GradOp::GroupedLinearAddParams { scale };
    deriver.push(index, op, vec![u, dy, offsets], Vec::new(), Vec::new(), true);
    if deriver.needs(u) {
        let du = deriver.fresh(u);
        let op = GradOp::GroupedLinearAddInput { scale };
        let outputs = vec![(du, GradWrite::Write)];
        deriver.push(index, op, vec![dy, offsets], node.params.clone(), outputs, false);
        deriver.contribute(index, u, du);
    }
    deriver.contribute(index, base, dy);
    if let Some(given) = &mut deriver.gradients[base.index()] {
        given.shared |= given.value == dy;
    }
}

/// The rows of each expert.
fn groups(offsets: &[usize]) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> {
    offsets.windows(2).map(|ends| ends[0]..ends[1]).enumerate()
}

/// `x · w[e]ᵀ` for the rows of each expert; zeros for rows of none.
pub fn grouped_linear(x: &[f64], w: &[f64], offsets: &[usize], inner: usize) -> Vec<f64> {
    let matrix = w.len() / (offsets.len() - 1);
    let out = matrix / inner;
    let mut y = vec![0.0; x.len() / inner * out];
    for (expert, rows) in groups(offsets) {
        let product =
            linear(&x[rows.start * inner..rows.end * inner], &w[expert * matrix..][..matrix], None, inner);
        y[rows.start * out..rows.end * out].copy_from_slice(&product);
    }
    y
}

/// dx and dw of [`grouped_linear`].
pub fn grouped_linear_backward(
    x: &[f64],
    w: &[f64],
    dy: &[f64],
    offsets: &[usize],
    inner: usize,
) -> [Vec<f64>; 2] {
    let matrix = w.len() / (offsets.len() - 1);
    let out = matrix / inner;
    let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; w.len()]);
    for (expert, rows) in groups(offsets) {
        let (of_x, of_w) = (rows.start * inner..rows.end * inner, expert * matrix..(expert + 1) * matrix);
        let dy = &dy[rows.start * out..rows.end * out];
        let [of_rows, of_weight, _] = linear_backward(&x[of_x.clone()], &w[of_w.clone()], dy, inner);
        dx[of_x].copy_from_slice(&of_rows);
        dw[of_w].copy_from_slice(&of_weight);
    }
    [dx, dw]
}

fn offsets(interpreter: &Interpreter<'_>, offsets: Value) -> Vec<usize> {
    interpreter.indices(offsets).into_iter().map(|offset| offset as usize).collect()
}

pub(super) fn forward(interpreter: &Interpreter<'_>, node: &Node) -> Vec<Vec<f64>> {
    let (x, w) = (node.inputs[0], interpreter.param(node.params[0]));
    vec![grouped_linear(interpreter.value(x), w, &offsets(interpreter, node.inputs[1]), interpreter.width(x))]
}

pub(super) fn forward_add(interpreter: &Interpreter<'_>, node: &Node, scale: f64) -> Vec<Vec<f64>> {
    let [base, u] = [node.inputs[0], node.inputs[1]];
    let (w, offsets) = (interpreter.param(node.params[0]), offsets(interpreter, node.inputs[2]));
    let product = grouped_linear(interpreter.value(u), w, &offsets, interpreter.width(u));
    vec![interpreter.value(base).iter().zip(product).map(|(base, product)| base + scale * product).collect()]
}

pub(super) fn backward_input(interpreter: &Interpreter<'_>, node: &GradNode, scale: f64) -> Gradients {
    let (dy, w) = (interpreter.value(node.inputs[0]), interpreter.param(node.params[0]));
    let (out, offsets) = (interpreter.width(node.inputs[0]), offsets(interpreter, node.inputs[1]));
    let inner = w.len() / (offsets.len() - 1) / out;
    let x = vec![0.0; dy.len() / out * inner];
    let [dx, _] = grouped_linear_backward(&x, w, dy, &offsets, inner);
    Gradients::of_values(vec![dx.into_iter().map(|dx| scale * dx).collect()])
}

pub(super) fn backward_params(
    interpreter: &Interpreter<'_>,
    node: &GradNode,
    of: &Node,
    scale: f64,
) -> Gradients {
    let [x, dy] = [0, 1].map(|place| interpreter.value(node.inputs[place]));
    let (w, offsets) = (interpreter.param(of.params[0]), offsets(interpreter, node.inputs[2]));
    let [_, dw] = grouped_linear_backward(x, w, dy, &offsets, interpreter.width(node.inputs[0]));
    let dw = dw.into_iter().map(|dw| scale * dw).collect();
    Gradients { values: Vec::new(), params: vec![(of.params[0], dw)] }
}
