//! RMSNorm of each head, then RoPE.

use super::rms_norm::{NormOptions, rms_norm, rms_norm_backward};
use super::rope::rotate;
use crate::gradient::Deriver;
use crate::reference::{Gradients, Interpreter};
use crate::{Builder, GradNode, GradOp, GradWrite, GraphError, Node, Op, ParamId, Value};

impl Builder {
    /// RMSNorm of each head, then RoPE.
    pub fn head_norm_rope(
        &mut self,
        x: Value,
        weight: ParamId,
        heads: u64,
        norm: impl Into<NormOptions>,
    ) -> Result<Value, GraphError> {
        let NormOptions { eps, clamp: _ } = norm.into();
        let op = Op::HeadNormRope { heads, eps, rotary: self.rotary.unwrap_or(0) };
        let head_dim = self.rotated_dim(op, x, heads)?;
        self.expect_vector(op, weight, head_dim)?;
        let positions = self.stream_of(op, x)?.positions;
        let outputs = [self.activation_like(x, heads * head_dim), self.statistic_like(x, heads)];
        self.push(op, &[x, positions], &[weight], &outputs).map(|outputs| outputs[0])
    }
}

pub(super) fn derive(deriver: &mut Deriver<'_>, index: usize, node: &Node) {
    let Some(dy) = deriver.gradient(node.outputs[0]) else { return };
    let (x, positions, rstd) = (node.inputs[0], node.inputs[1], node.outputs[1]);
    let dx = deriver.needs(x).then(|| deriver.fresh(x));
    let outputs = dx.map(|dx| (dx, GradWrite::Write)).into_iter().collect();
    let inputs = vec![x, rstd, dy, positions];
    deriver.push(index, GradOp::HeadNormRope(node.op), inputs, node.params.clone(), outputs, true);
    if let Some(dx) = dx {
        deriver.contribute(index, x, dx);
    }
}

pub(super) fn forward(
    interpreter: &Interpreter<'_>,
    node: &Node,
    heads: u64,
    eps: f64,
    rotary: usize,
) -> Vec<Vec<f64>> {
    let [normed, rstd] = rms_norm(interpreter.value(node.inputs[0]), interpreter.param(node.params[0]), eps);
    vec![rotate(interpreter, &normed, node.inputs[1], heads, rotary, 1.0), rstd]
}

pub(super) fn backward(
    interpreter: &Interpreter<'_>,
    node: &GradNode,
    of: &Node,
    heads: u64,
    rotary: usize,
) -> Gradients {
    let [x, rstd, dy] = [0, 1, 2].map(|place| interpreter.value(node.inputs[place]));
    let turned_back = rotate(interpreter, dy, of.inputs[1], heads, rotary, -1.0);
    let [dx, dw] = rms_norm_backward(x, rstd, interpreter.param(of.params[0]), &turned_back);
    Gradients { values: vec![dx], params: vec![(of.params[0], dw)] }
}

#[cfg(test)]
mod tests {
    use crate::reference::finite_differences::{DATA_ROWS, VOCAB, data, mismatch, specs};
    use crate::{Builder, Role, Rotary};

    #[test]
    fn gradient_where_its_operand_is_read_elsewhere_too() {
        let mut b = Builder::new(&[DATA_ROWS]);
        b.rotary(Rotary { frequencies: vec![1.0, 0.1], scale: 1.1, dynamic: None });
        let params = specs(&[("table", &[VOCAB, 8]), ("n", &[4]), ("last", &[8])]);
        b.unit("all", Role::Other, params).unwrap();
        let [table, n, last] = ["table", "n", "last"].map(|name| b.param(name).unwrap());
        let x = b.embedding(b.ids(), table).unwrap();
        let turned = b.head_norm_rope(x, n, 2, 1e-5).unwrap();
        let (_, normed) = b.add_rms_norm(x, turned, last, 1e-5).unwrap();
        b.head_loss(normed, table).unwrap();
        assert_eq!(mismatch(&b.finish().unwrap(), &[data()], &[]), None);
    }
}
