//! Dropout.

use crate::gradient::Deriver;
use crate::reference::{Gradients, Interpreter};
use crate::{Builder, GradNode, GradOp, GraphError, Node, Op, Value};

impl Builder {
    /// Dropout; no op where the probability is 0.
    pub fn dropout(&mut self, x: Value, probability: f64) -> Result<Value, GraphError> {
        if probability == 0.0 {
            return Ok(x);
        }
        let op = Op::Dropout { probability, salt: self.dropouts };
        self.expect_probability(op, probability)?;
        self.stream_of(op, x)?;
        self.dropouts += 1;
        let width = self.info(x).width;
        self.push(op, &[x], &[], &[self.activation_like(x, width)]).map(|outputs| outputs[0])
    }

    pub(super) fn expect_probability(&self, op: Op, probability: f64) -> Result<(), GraphError> {
        if (0.0..1.0).contains(&probability) {
            return Ok(());
        }
        Err(self.shape_error(op, "the probability", "at least 0 and below 1", probability.to_string()))
    }
}

pub(super) fn derive(deriver: &mut Deriver<'_>, index: usize, node: &Node) {
    let Some(dy) = deriver.gradient(node.outputs[0]) else { return };
    deriver.one_to_one(index, node, GradOp::Dropout(node.op), vec![dy]);
}

/// The factor of an element: it depends on salt and index alone, the same in forward and backward.
pub(super) fn factor(at: usize, probability: f64, salt: u32) -> f64 {
    let hash = (at as u64 ^ u64::from(salt) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    if (hash >> 40) as f64 / f64::from(1 << 24) < probability { 0.0 } else { 1.0 / (1.0 - probability) }
}

fn mask(x: &[f64], probability: f64, salt: u32) -> Vec<f64> {
    x.iter().enumerate().map(|(at, x)| x * factor(at, probability, salt)).collect()
}

pub(super) fn forward(
    interpreter: &Interpreter<'_>,
    node: &Node,
    probability: f64,
    salt: u32,
) -> Vec<Vec<f64>> {
    vec![mask(interpreter.value(node.inputs[0]), probability, salt)]
}

pub(super) fn backward(
    interpreter: &Interpreter<'_>,
    node: &GradNode,
    probability: f64,
    salt: u32,
) -> Gradients {
    Gradients::of_values(vec![mask(interpreter.value(node.inputs[0]), probability, salt)])
}

#[cfg(test)]
mod tests {
    use crate::reference::finite_differences::{DATA_ROWS, VOCAB, data, mismatch, specs};
    use crate::{Builder, Role};

    #[test]
    fn gradient_through_the_mask_of_forward() {
        let mut b = Builder::new(&[DATA_ROWS]);
        b.unit("all", Role::Other, specs(&[("table", &[VOCAB, 4]), ("head", &[VOCAB, 4])])).unwrap();
        let [table, head] = ["table", "head"].map(|name| b.param(name).unwrap());
        let x = b.embedding(b.ids(), table).unwrap();
        let x = b.dropout(x, 0.4).unwrap();
        let x = b.dropout(x, 0.2).unwrap();
        b.head_loss(x, head).unwrap();
        assert_eq!(mismatch(&b.finish().unwrap(), &[data()], &[]), None);
    }
}
