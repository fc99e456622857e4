//! Matmul with a weight, and a bias.

use crate::gradient::{Deriver, Gradient};
use crate::reference::{Gradients, Interpreter};
use crate::{Builder, GradNode, GradOp, GradWrite, GraphError, Node, Op, ParamId, Value};

impl Builder {
    /// `x · wᵀ`, plus `bias` where it is given.
    pub fn linear(&mut self, x: Value, weight: ParamId, bias: Option<ParamId>) -> Result<Value, GraphError> {
        let [out, inner] = self.param_shape(Op::Linear, weight, "the weight")?;
        self.expect_width(Op::Linear, x, inner)?;
        let mut params = vec![weight];
        if let Some(bias) = bias {
            let [width] = self.param_shape(Op::Linear, bias, "the bias")?;
            self.expect(Op::Linear, "the bias's width", out, width)?;
            params.push(bias);
        }
        self.push(Op::Linear, &[x], &params, &[self.activation_like(x, out)]).map(|outputs| outputs[0])
    }
}

pub(super) fn derive(deriver: &mut Deriver<'_>, index: usize, node: &Node) {
    let Some(dy) = deriver.gradient(node.outputs[0]) else { return };
    let x = node.inputs[0];
    deriver.push(index, GradOp::LinearParams, vec![x, dy], Vec::new(), Vec::new(), true);
    if !deriver.needs(x) {
        return;
    }
    let weight = vec![node.params[0]];
    // A linear accumulates into an existing gradient: q, k and v share one norm.
    if let Some(Gradient { value, shared: false }) = deriver.gradients[x.index()] {
        let outputs = vec![(value, GradWrite::Add)];
        deriver.push(index, GradOp::LinearInput, vec![dy], weight, outputs, false);
    } else {
        let dx = deriver.fresh(x);
        let outputs = vec![(dx, GradWrite::Write)];
        deriver.push(index, GradOp::LinearInput, vec![dy], weight, outputs, false);
        deriver.contribute(index, x, dx);
    }
}

/// x [T, I] · wᵀ [O, I] + bias `[O]`, as [T, O].
pub fn linear(x: &[f64], w: &[f64], bias: Option<&[f64]>, inner: usize) -> Vec<f64> {
    let dot = |x: &[f64], w: &[f64]| x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>();
    let row = |x| {
        let column = move |(o, w): (usize, &[f64])| dot(x, w) + bias.map_or(0.0, |bias| bias[o]);
        w.chunks_exact(inner).enumerate().map(column)
    };
    x.chunks_exact(inner).flat_map(row).collect()
}

/// dx, dw and db of [`linear`].
pub fn linear_backward(x: &[f64], w: &[f64], dy: &[f64], inner: usize) -> [Vec<f64>; 3] {
    let out = w.len() / inner;
    let (dw, db) = params_backward(x, dy, inner, out);
    [input_backward(w, dy, inner, out), dw, db]
}

fn input_backward(w: &[f64], dy: &[f64], inner: usize, out: usize) -> Vec<f64> {
    let mut dx = vec![0.0; dy.len() / out * inner];
    for (dx, dy) in dx.chunks_exact_mut(inner).zip(dy.chunks_exact(out)) {
        for (w, dy) in w.chunks_exact(inner).zip(dy) {
            dx.iter_mut().zip(w).for_each(|(dx, w)| *dx += dy * w);
        }
    }
    dx
}

fn params_backward(x: &[f64], dy: &[f64], inner: usize, out: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut dw, mut db) = (vec![0.0; out * inner], vec![0.0; out]);
    for (x, dy) in x.chunks_exact(inner).zip(dy.chunks_exact(out)) {
        for (o, dy) in dy.iter().enumerate() {
            db[o] += dy;
            dw[o * inner..][..inner].iter_mut().zip(x).for_each(|(dw, x)| *dw += dy * x);
        }
    }
    (dw, db)
}

pub(super) fn forward(interpreter: &Interpreter<'_>, node: &Node) -> Vec<Vec<f64>> {
    let bias = node.params.get(1).map(|bias| interpreter.param(*bias));
    let inner = interpreter.width(node.inputs[0]);
    vec![linear(interpreter.value(node.inputs[0]), interpreter.param(node.params[0]), bias, inner)]
}

pub(super) fn backward_input(interpreter: &Interpreter<'_>, node: &GradNode) -> Gradients {
    let (dy, w) = (interpreter.value(node.inputs[0]), interpreter.param(node.params[0]));
    let out = interpreter.width(node.inputs[0]);
    Gradients::of_values(vec![input_backward(w, dy, w.len() / out, out)])
}

pub(super) fn backward_params(interpreter: &Interpreter<'_>, node: &GradNode, of: &Node) -> Gradients {
    let [x, dy] = [0, 1].map(|place| interpreter.value(node.inputs[place]));
    let [inner, out] = [0, 1].map(|place| interpreter.width(node.inputs[place]));
    let (dw, db) = params_backward(x, dy, inner, out);
    Gradients { values: Vec::new(), params: of.params.iter().copied().zip([dw, db]).collect() }
}

#[cfg(test)]
mod tests {
    use crate::reference::finite_differences::{DATA_ROWS, VOCAB, data, mismatch, specs};
    use crate::{Builder, Role};

    #[test]
    fn gradients_of_input_weight_and_bias() {
        let mut b = Builder::new(&[DATA_ROWS]);
        let params = specs(&[("table", &[VOCAB, 4]), ("w", &[3, 4]), ("bias", &[3]), ("head", &[VOCAB, 3])]);
        b.unit("all", Role::Other, params).unwrap();
        let [table, w, bias, head] = ["table", "w", "bias", "head"].map(|name| b.param(name).unwrap());
        let x = b.embedding(b.ids(), table).unwrap();
        // Two linears add to the gradient of x.
        let (y, z) = (b.linear(x, w, Some(bias)).unwrap(), b.linear(x, w, None).unwrap());
        let y = b.swiglu(y, z).unwrap();
        b.head_loss(y, head).unwrap();
        assert_eq!(mismatch(&b.finish().unwrap(), &[data()], &[]), None);
    }
}
