//! RMSNorm.

use crate::gradient::{Deriver, Gradient};
use crate::reference::{Gradients, Interpreter};
use crate::{Builder, GradNode, GradOp, GradWrite, GraphError, Node, Op, ParamId, Value};

/// What a model says of a norm; its operands say the rest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormOptions {
    /// What is added to the variance.
    pub eps: f64,
    /// Whether a run in fp16 limits the sums that are normed: they leave its range in some models.
    pub clamp: bool,
}

impl NormOptions {
    /// RMSNorm.
    pub const fn rms(eps: f64) -> Self {
        Self { eps, clamp: false }
    }

    /// The same, of sums that leave the range of fp16.
    #[must_use]
    pub const fn clamped(self) -> Self {
        Self { clamp: true, ..self }
    }
}

impl From<f64> for NormOptions {
    fn from(eps: f64) -> Self {
        Self::rms(eps)
    }
}

impl Builder {
    /// RMSNorm of `x`.
    pub fn rms_norm(
        &mut self,
        x: Value,
        weight: ParamId,
        norm: impl Into<NormOptions>,
    ) -> Result<Value, GraphError> {
        let NormOptions { eps, clamp: _ } = norm.into();
        let op = Op::RmsNorm { eps };
        let width = self.info(x).width;
        self.expect_vector(op, weight, width)?;
        let outputs = [self.activation_like(x, width), self.statistic_like(x, 1)];
        self.push(op, &[x], &[weight], &outputs).map(|outputs| outputs[0])
    }
}

pub(super) fn derive(deriver: &mut Deriver<'_>, index: usize, node: &Node) {
    let Some(dy) = deriver.gradient(node.outputs[0]) else { return };
    let (x, rstd) = (node.inputs[0], node.outputs[1]);
    let mut inputs = vec![x, rstd, dy];
    inputs.extend(deriver.gradient(x));
    // Without trainable parameters before it, only the weight's gradient is computed.
    let dx = deriver.needs(x).then(|| deriver.fresh(x));
    let outputs = dx.map(|dx| (dx, GradWrite::Write)).into_iter().collect();
    deriver.push(index, GradOp::RmsNorm(node.op), inputs, node.params.clone(), outputs, true);
    // It includes the earlier gradient, so it replaces it.
    deriver.gradients[x.index()] = dx.map(|value| Gradient { value, shared: false });
}

/// y and rstd of groups as wide as the weight: rows for a norm, heads for the norm of q or k.
pub fn rms_norm(x: &[f64], w: &[f64], eps: f64) -> [Vec<f64>; 2] {
    let width = w.len();
    let rstd = |x: &[f64]| 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / width as f64 + eps).sqrt();
    let rstd: Vec<f64> = x.chunks_exact(width).map(rstd).collect();
    let y = x.iter().enumerate().map(|(at, x)| x * rstd[at / width] * w[at % width]).collect();
    [y, rstd]
}

/// dx and dw of [`rms_norm`].
pub fn rms_norm_backward(x: &[f64], rstd: &[f64], w: &[f64], dy: &[f64]) -> [Vec<f64>; 2] {
    let width = w.len();
    let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; width]);
    for (group, r) in rstd.iter().enumerate() {
        let at = |i: usize| group * width + i;
        let dot: f64 = (0..width).map(|i| dy[at(i)] * w[i] * x[at(i)]).sum();
        for i in 0..width {
            dx[at(i)] = r * dy[at(i)] * w[i] - r * r * r * x[at(i)] * dot / width as f64;
            dw[i] += dy[at(i)] * x[at(i)] * r;
        }
    }
    [dx, dw]
}

pub(super) fn forward(interpreter: &Interpreter<'_>, node: &Node, eps: f64) -> Vec<Vec<f64>> {
    rms_norm(interpreter.value(node.inputs[0]), interpreter.param(node.params[0]), eps).into()
}

/// Of a residual add and norm too: x is then the sum.
pub(super) fn backward(interpreter: &Interpreter<'_>, node: &GradNode, of: &Node) -> Gradients {
    let [x, rstd, dy] = [0, 1, 2].map(|place| interpreter.value(node.inputs[place]));
    let [mut dx, dw] = rms_norm_backward(x, rstd, interpreter.param(of.params[0]), dy);
    if let Some(earlier) = node.inputs.get(3) {
        dx.iter_mut().zip(interpreter.value(*earlier)).for_each(|(dx, dh)| *dx += dh);
    }
    Gradients { values: vec![dx], params: vec![(of.params[0], dw)] }
}

#[cfg(test)]
mod tests {
    use crate::reference::finite_differences::{DATA_ROWS, VOCAB, data, mismatch, specs};
    use crate::{Builder, Role};

    #[test]
    fn gradient_with_and_without_another_use_of_its_operand() {
        for again in [false, true] {
            let mut b = Builder::new(&[DATA_ROWS]);
            let params = specs(&[("table", &[VOCAB, 4]), ("w", &[4]), ("head", &[VOCAB, 4])]);
            b.unit("all", Role::Other, params).unwrap();
            let [table, w, head] = ["table", "w", "head"].map(|name| b.param(name).unwrap());
            let x = b.embedding(b.ids(), table).unwrap();
            let y = b.rms_norm(x, w, 1e-5).unwrap();
            let y = if again { b.swiglu(y, x).unwrap() } else { y };
            b.head_loss(y, head).unwrap();
            assert_eq!(mismatch(&b.finish().unwrap(), &[data()], &[]), None, "{again}");
        }
    }
}
