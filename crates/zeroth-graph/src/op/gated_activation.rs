//! The product of an activated gate and an up projection.

use zeroth_base::ActivationFn;

use crate::gradient::Deriver;
use crate::reference::{Gradients, Interpreter};
use crate::{Builder, GradNode, GradOp, GraphError, Node, Op, Value};

impl Builder {
    /// `f(gate) · up`, f the activation.
    pub fn gated_activation(
        &mut self,
        activation: ActivationFn,
        gate: Value,
        up: Value,
    ) -> Result<Value, GraphError> {
        let (op, width) = (Op::GatedActivation(activation), self.info(gate).width);
        self.expect_like(op, up, gate)?;
        self.push(op, &[gate, up], &[], &[self.activation_like(gate, width)]).map(|outputs| outputs[0])
    }

    /// `silu(gate) · up`.
    pub fn swiglu(&mut self, gate: Value, up: Value) -> Result<Value, GraphError> {
        self.gated_activation(ActivationFn::Silu, gate, up)
    }
}

pub(super) fn derive(deriver: &mut Deriver<'_>, index: usize, node: &Node, activation: ActivationFn) {
    let Some(dy) = deriver.gradient(node.outputs[0]) else { return };
    let inputs = vec![node.inputs[0], node.inputs[1], dy];
    deriver.many(index, node, GradOp::GatedActivation(activation), inputs);
}

/// f(gate) · up.
pub fn gated_activation(activation: ActivationFn, gate: &[f64], up: &[f64]) -> Vec<f64> {
    gate.iter().zip(up).map(|(gate, up)| activation.value(*gate) * up).collect()
}

/// dgate and dup of [`gated_activation`].
pub fn gated_activation_backward(
    activation: ActivationFn,
    gate: &[f64],
    up: &[f64],
    dy: &[f64],
) -> [Vec<f64>; 2] {
    let dgate = |i: usize| dy[i] * up[i] * activation.slope(gate[i]);
    let dup = |i: usize| dy[i] * activation.value(gate[i]);
    [(0..dy.len()).map(dgate).collect(), (0..dy.len()).map(dup).collect()]
}

pub(super) fn forward(interpreter: &Interpreter<'_>, node: &Node, activation: ActivationFn) -> Vec<Vec<f64>> {
    let [gate, up] = [0, 1].map(|place| interpreter.value(node.inputs[place]));
    vec![gated_activation(activation, gate, up)]
}

pub(super) fn backward(
    interpreter: &Interpreter<'_>,
    node: &GradNode,
    activation: ActivationFn,
) -> Gradients {
    let [gate, up, dy] = [0, 1, 2].map(|place| interpreter.value(node.inputs[place]));
    Gradients::of_values(gated_activation_backward(activation, gate, up, dy).into())
}

#[cfg(test)]
mod tests {
    use super::ActivationFn;
    use crate::reference::finite_differences::{DATA_ROWS, VOCAB, data, mismatch, specs};
    use crate::{Builder, Role};

    #[test]
    fn gradients_of_every_activation() {
        for activation in ActivationFn::ALL {
            let mut b = Builder::new(&[DATA_ROWS]);
            let params = specs(&[("a", &[VOCAB, 4]), ("b", &[VOCAB, 4]), ("head", &[VOCAB, 4])]);
            b.unit("all", Role::Other, params).unwrap();
            let [gate, up, head] = ["a", "b", "head"].map(|name| b.param(name).unwrap());
            let [gate, up] = [gate, up].map(|table| b.embedding(b.ids(), table).unwrap());
            let y = b.gated_activation(activation, gate, up).unwrap();
            b.head_loss(y, head).unwrap();
            assert_eq!(mismatch(&b.finish().unwrap(), &[data()], &[]), None, "{activation:?}");
        }
    }
}
