//! A constant factor.

use crate::gradient::Deriver;
use crate::reference::{Gradients, Interpreter};
use crate::{Builder, GradNode, GradOp, GraphError, Kind, Node, Op, Value};

impl Builder {
    /// `factor · x`.
    pub fn scale(&mut self, x: Value, factor: f64) -> Result<Value, GraphError> {
        let op = Op::Scale { factor };
        self.expect_kind(op, x, Kind::Activation)?;
        if !factor.is_finite() {
            return Err(self.shape_error(op, "the factor", "a finite number", factor.to_string()));
        }
        let width = self.info(x).width;
        self.push(op, &[x], &[], &[self.activation_like(x, width)]).map(|outputs| outputs[0])
    }
}

pub(super) fn derive(deriver: &mut Deriver<'_>, index: usize, node: &Node, factor: f64) {
    let Some(dy) = deriver.gradient(node.outputs[0]) else { return };
    deriver.one_to_one(index, node, GradOp::Scale { factor }, vec![dy]);
}

fn scaled(x: &[f64], factor: f64) -> Vec<f64> {
    x.iter().map(|x| factor * x).collect()
}

pub(super) fn forward(interpreter: &Interpreter<'_>, node: &Node, factor: f64) -> Vec<Vec<f64>> {
    vec![scaled(interpreter.value(node.inputs[0]), factor)]
}

pub(super) fn backward(interpreter: &Interpreter<'_>, node: &GradNode, factor: f64) -> Gradients {
    Gradients::of_values(vec![scaled(interpreter.value(node.inputs[0]), factor)])
}

#[cfg(test)]
mod tests {
    use crate::reference::finite_differences::{DATA_ROWS, VOCAB, data, mismatch, specs};
    use crate::{Builder, Role};

    #[test]
    fn gradient_of_a_scaled_head_input() {
        let mut b = Builder::new(&[DATA_ROWS]);
        b.unit("all", Role::Other, specs(&[("table", &[VOCAB, 4])])).unwrap();
        let table = b.param("table").unwrap();
        let x = b.embedding(b.ids(), table).unwrap();
        let x = b.scale(x, -0.37).unwrap();
        b.head_loss(x, table).unwrap();
        assert_eq!(mismatch(&b.finish().unwrap(), &[data()], &[]), None);
    }
}
