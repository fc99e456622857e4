//! Rotary embedding of the heads of q or k.

use crate::gradient::Deriver;
use crate::reference::{Gradients, Interpreter};
use crate::{Builder, GradNode, GradOp, GraphError, Node, Op, Value};

impl Builder {
    /// RoPE of `x`, by the positions of its stream.
    pub fn rope(&mut self, x: Value, heads: u64) -> Result<Value, GraphError> {
        let op = Op::Rope { heads, rotary: self.rotary.unwrap_or(0) };
        let head_dim = self.rotated_dim(op, x, heads)?;
        let positions = self.stream_of(op, x)?.positions;
        self.push(op, &[x, positions], &[], &[self.activation_like(x, heads * head_dim)])
            .map(|outputs| outputs[0])
    }

    /// The width of a rotated head.
    pub(super) fn rotated_dim(&self, op: Op, x: Value, heads: u64) -> Result<u64, GraphError> {
        let head_dim = self.head_dim(op, x, heads)?;
        if !head_dim.is_multiple_of(2) {
            return Err(self.shape_error(op, "a head's width", "even", head_dim.to_string()));
        }
        let Some(rotary) = self.rotary else {
            return Err(GraphError::NoRotary { op: op.name(), unit: self.unit_name().to_owned() });
        };
        let frequencies = self.graph.rotaries[rotary].frequencies.len() as u64;
        self.expect(op, "the number of rotary frequencies", head_dim / 2, frequencies)?;
        Ok(head_dim)
    }
}

pub(super) fn derive(deriver: &mut Deriver<'_>, index: usize, node: &Node) {
    let Some(dy) = deriver.gradient(node.outputs[0]) else { return };
    deriver.one_to_one(index, node, GradOp::Rope(node.op), vec![dy, node.inputs[1]]);
}

/// x [T, heads · D] with element i of each head and element i + P rotated, for the P pairs of cosines and sines [T, P].
pub fn rope(x: &[f64], heads: usize, head_dim: usize, cos: &[f64], sin: &[f64]) -> Vec<f64> {
    let (mut y, width) = (x.to_vec(), heads * head_dim);
    let pairs = cos.len() / (x.len() / width).max(1);
    for (row, head) in (0..x.len() / width).flat_map(|row| (0..heads).map(move |head| (row, head))) {
        for i in 0..pairs {
            let (a, angle) = (row * width + head * head_dim + i, row * pairs + i);
            y[a] = x[a] * cos[angle] - x[a + pairs] * sin[angle];
            y[a + pairs] = x[a + pairs] * cos[angle] + x[a] * sin[angle];
        }
    }
    y
}

/// Rotates by the angles of a stream's positions; `direction` is -1 for back.
pub(super) fn rotate(
    interpreter: &Interpreter<'_>,
    x: &[f64],
    positions: Value,
    heads: u64,
    rotary: usize,
    direction: f64,
) -> Vec<f64> {
    let (rotary, data) = (&interpreter.graph().rotaries[rotary], interpreter.data_of(positions));
    let angle = |(row, position): (usize, &i64)| {
        let frequencies = rotary.frequencies_at(data.length_at(row));
        frequencies.map(|frequency| *position as f64 * frequency * direction).collect::<Vec<f64>>()
    };
    let angles: Vec<f64> = interpreter.indices(positions).iter().enumerate().flat_map(angle).collect();
    let [cos, sin] = [f64::cos, f64::sin]
        .map(|function| angles.iter().map(|angle| function(*angle) * rotary.scale).collect::<Vec<f64>>());
    let rows = interpreter.indices(positions).len();
    rope(x, heads as usize, x.len() / rows / heads as usize, &cos, &sin)
}

pub(super) fn forward(
    interpreter: &Interpreter<'_>,
    node: &Node,
    heads: u64,
    rotary: usize,
) -> Vec<Vec<f64>> {
    vec![rotate(interpreter, interpreter.value(node.inputs[0]), node.inputs[1], heads, rotary, 1.0)]
}

pub(super) fn backward(
    interpreter: &Interpreter<'_>,
    node: &GradNode,
    of: &Node,
    heads: u64,
    rotary: usize,
) -> Gradients {
    let dy = interpreter.value(node.inputs[0]);
    Gradients::of_values(vec![rotate(interpreter, dy, of.inputs[1], heads, rotary, -1.0)])
}

#[cfg(test)]
mod tests {
    use crate::reference::finite_differences::{DATA_ROWS, VOCAB, data, mismatch, specs};
    use crate::{Builder, Role, Rotary};

    #[test]
    fn gradient_through_two_rotary_embeddings() {
        let mut b = Builder::new(&[DATA_ROWS]);
        b.unit("all", Role::Other, specs(&[("table", &[VOCAB, 8]), ("head", &[VOCAB, 8])])).unwrap();
        let [table, head] = ["table", "head"].map(|name| b.param(name).unwrap());
        let mut x = b.embedding(b.ids(), table).unwrap();
        for (frequencies, heads) in [(vec![1.0, 0.1], 2), (vec![1.0, 0.3, 0.1, 0.03], 1), (vec![1.0, 0.1], 2)]
        {
            b.rotary(Rotary { frequencies, scale: 1.1, dynamic: None });
            x = b.rope(x, heads).unwrap();
        }
        b.head_loss(x, head).unwrap();
        let graph = b.finish().unwrap();
        assert_eq!(graph.rotaries.len(), 2, "equal ones are kept once");
        assert_eq!(mismatch(&graph, &[data()], &[]), None);
    }
}
