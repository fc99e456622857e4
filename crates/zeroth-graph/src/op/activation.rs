//! An activation without a gate.

use zeroth_base::ActivationFn;

use crate::gradient::Deriver;
use crate::reference::{Gradients, Interpreter};
use crate::{Builder, GradNode, GradOp, GraphError, Kind, Node, Op, Value};

impl Builder {
    /// `f(x)`, f the activation.
    pub fn activation(&mut self, activation: ActivationFn, x: Value) -> Result<Value, GraphError> {
        let op = Op::Activation(activation);
        self.expect_kind(op, x, Kind::Activation)?;
        let width = self.info(x).width;
        self.push(op, &[x], &[], &[self.activation_like(x, width)]).map(|outputs| outputs[0])
    }
}

pub(super) fn derive(deriver: &mut Deriver<'_>, index: usize, node: &Node, activation: ActivationFn) {
    let Some(dy) = deriver.gradient(node.outputs[0]) else { return };
    deriver.one_to_one(index, node, GradOp::Activation(activation), vec![node.inputs[0], dy]);
}

/// f(x).
pub fn activation(activation: ActivationFn, x: &[f64]) -> Vec<f64> {
    x.iter().map(|x| activation.value(*x)).collect()
}

/// dx of [`activation`].
pub fn activation_backward(activation: ActivationFn, x: &[f64], dy: &[f64]) -> Vec<f64> {
    x.iter().zip(dy).map(|(x, dy)| dy * activation.slope(*x)).collect()
}

pub(super) fn forward(interpreter: &Interpreter<'_>, node: &Node, f: ActivationFn) -> Vec<Vec<f64>> {
    vec![activation(f, interpreter.value(node.inputs[0]))]
}

pub(super) fn backward(interpreter: &Interpreter<'_>, node: &GradNode, f: ActivationFn) -> Gradients {
    let [x, dy] = [0, 1].map(|place| interpreter.value(node.inputs[place]));
    Gradients::of_values(vec![activation_backward(f, x, dy)])
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
            b.unit("all", Role::Other, specs(&[("table", &[VOCAB, 4]), ("head", &[VOCAB, 4])])).unwrap();
            let [table, head] = ["table", "head"].map(|name| b.param(name).unwrap());
            let x = b.embedding(b.ids(), table).unwrap();
            let y = b.activation(activation, x).unwrap();
            // Another use of x: its gradient is a sum.
            let y = b.gated_activation(activation, x, y).unwrap();
            b.head_loss(y, head).unwrap();
            assert_eq!(mismatch(&b.finish().unwrap(), &[data()], &[]), None, "{activation:?}");
        }
    }
}
