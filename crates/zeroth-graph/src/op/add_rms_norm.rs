//! Residual add and RMSNorm. Both in f64 are those of the norm, over the sum.

use super::rms_norm::{NormOptions, rms_norm};
use crate::gradient::Deriver;
use crate::reference::Interpreter;
use crate::{Builder, GradOp, GradWrite, GraphError, Node, Op, ParamId, Value};

impl Builder {
    /// Residual add and RMSNorm: returns the sum and its norm.
    pub fn add_rms_norm(
        &mut self,
        residual: Value,
        x: Value,
        weight: ParamId,
        norm: impl Into<NormOptions>,
    ) -> Result<(Value, Value), GraphError> {
        let NormOptions { eps, clamp } = norm.into();
        let op = Op::AddRmsNorm { eps, clamp };
        let width = self.info(residual).width;
        self.expect_like(op, x, residual)?;
        self.expect_vector(op, weight, width)?;
        let outputs =
            [self.activation_like(x, width), self.activation_like(x, width), self.statistic_like(x, 1)];
        let outputs = self.push(op, &[residual, x], &[weight], &outputs)?;
        Ok((outputs[0], outputs[1]))
    }
}

/// The sum's gradient is that of both summands: one value serves both and is shared.
pub(super) fn derive(deriver: &mut Deriver<'_>, index: usize, node: &Node) {
    let (sum, normed, rstd) = (node.outputs[0], node.outputs[1], node.outputs[2]);
    let Some(dy) = deriver.gradient(normed) else {
        // Only the sum is used: its gradient passes through.
        if let Some(dh) = deriver.gradient(sum) {
            deriver.share(index, node, dh);
        }
        return;
    };
    let mut inputs = vec![sum, rstd, dy];
    inputs.extend(deriver.gradient(sum));
    let needed = node.inputs.iter().any(|input| deriver.needs(*input));
    let gradient = needed.then(|| deriver.fresh(sum));
    let outputs = gradient.map(|gradient| (gradient, GradWrite::Write)).into_iter().collect();
    deriver.push(index, GradOp::AddRmsNorm(node.op), inputs, node.params.clone(), outputs, true);
    if let Some(gradient) = gradient {
        deriver.share(index, node, gradient);
    }
}

pub(super) fn forward(interpreter: &Interpreter<'_>, node: &Node, eps: f64) -> Vec<Vec<f64>> {
    let [residual, x] = [0, 1].map(|place| interpreter.value(node.inputs[place]));
    let sum: Vec<f64> = residual.iter().zip(x).map(|(r, x)| r + x).collect();
    let [y, rstd] = rms_norm(&sum, interpreter.param(node.params[0]), eps);
    vec![sum, y, rstd]
}

#[cfg(test)]
mod tests {
    use crate::reference::finite_differences::{DATA_ROWS, VOCAB, data, mismatch, specs};
    use crate::{Builder, Role};

    #[test]
    fn gradient_of_the_sum_and_of_its_norm() {
        for [uses_sum, uses_norm] in [[true, true], [false, true], [true, false]] {
            let mut b = Builder::new(&[DATA_ROWS]);
            let params = specs(&[("table", &[VOCAB, 4]), ("a", &[4]), ("w", &[4]), ("head", &[VOCAB, 4])]);
            b.unit("all", Role::Other, params).unwrap();
            let [table, a, w, head] = ["table", "a", "w", "head"].map(|name| b.param(name).unwrap());
            let x = b.embedding(b.ids(), table).unwrap();
            let normed = b.rms_norm(x, a, 1e-5).unwrap();
            let (sum, y) = b.add_rms_norm(x, normed, w, 1e-5).unwrap();
            let y = match [uses_sum, uses_norm] {
                [true, true] => b.swiglu(sum, y).unwrap(),
                [true, false] => sum,
                _ => y,
            };
            b.head_loss(y, head).unwrap();
            assert_eq!(mismatch(&b.finish().unwrap(), &[data()], &[]), None, "{uses_sum} {uses_norm}");
        }
    }
}
