//! Backward, op by op.

use super::{Machine, log_sum, mask, norm_backward};
use crate::{GradNode, GradOp, GradWrite, Op, ParamId};

impl Machine<'_> {
    pub(super) fn backward(&mut self, node: &GradNode) {
        let get = |place: usize| &self.values[node.inputs[place].index()];
        let forward = &self.graph.nodes[node.of];
        let rows = self.rows();
        // Gradients by parameter, and values by output.
        let mut param_grads: Vec<(ParamId, Vec<f64>)> = Vec::new();
        let mut outputs: Vec<Vec<f64>> = Vec::new();
        match node.op {
            GradOp::HeadLoss => {
                let weight = forward.params[0];
                let (x, hidden) = (get(0), self.width(node.inputs[0]));
                let mut dw = vec![0.0; self.params[weight.index()].len()];
                let (mut dx, mut loss) = (vec![0.0; x.len()], 0.0);
                for row in (0..rows).filter(|row| self.data.labels[*row] >= 0) {
                    let (logits, label) = (self.logits(x, weight, row), self.data.labels[row] as usize);
                    let total = log_sum(&logits);
                    loss += total - logits[label];
                    for (token, logit) in logits.iter().enumerate() {
                        let d = (logit - total).exp() - f64::from(u8::from(token == label));
                        for h in 0..hidden {
                            dw[token * hidden + h] += d * x[row * hidden + h];
                            dx[row * hidden + h] += d * self.params[weight.index()][token * hidden + h];
                        }
                    }
                }
                outputs = vec![vec![loss], dx];
                param_grads.push((weight, dw));
            }
            GradOp::LinearInput => {
                let (dy, weight) = (get(0), &self.params[node.params[0].index()]);
                let out = dy.len() / rows;
                let inner = weight.len() / out;
                let dx = |at: usize| {
                    (0..out).map(|o| dy[at / inner * out + o] * weight[o * inner + at % inner]).sum::<f64>()
                };
                outputs.push((0..rows * inner).map(dx).collect());
            }
            GradOp::LinearParams => {
                let (x, dy) = (get(0), get(1));
                let (inner, out) = (x.len() / rows, dy.len() / rows);
                let dw = |at: usize| {
                    (0..rows).map(|row| dy[row * out + at / inner] * x[row * inner + at % inner]).sum::<f64>()
                };
                param_grads.push((forward.params[0], (0..out * inner).map(dw).collect()));
                if let Some(bias) = forward.params.get(1) {
                    let db = |o: usize| (0..rows).map(|row| dy[row * out + o]).sum::<f64>();
                    param_grads.push((*bias, (0..out).map(db).collect()));
                }
            }
            GradOp::HeadNormRope(Op::HeadNormRope { heads, rotary, .. }) => {
                let weight = &self.params[forward.params[0].index()];
                let normed = self.rotate(rotary, get(2), heads as usize, -1.0);
                let (dx, dw) = norm_backward(get(0), get(1), &normed, weight);
                outputs.push(dx);
                param_grads.push((forward.params[0], dw));
            }
            GradOp::RmsNorm(_) | GradOp::AddRmsNorm(_) => {
                let weight = &self.params[forward.params[0].index()];
                let (mut dx, dw) = norm_backward(get(0), get(1), get(2), weight);
                if node.inputs.len() > 3 {
                    dx.iter_mut().zip(get(3)).for_each(|(dx, dh)| *dx += dh);
                }
                outputs.push(dx);
                param_grads.push((forward.params[0], dw));
            }
            GradOp::Rope(Op::Rope { heads, rotary }) => {
                outputs.push(self.rotate(rotary, get(0), heads as usize, -1.0))
            }
            GradOp::Attention(Op::Attention { heads, kv_heads, window, scale }) => {
                let (q, k, v, o, lse, dy) = (get(0), get(1), get(2), get(3), get(4), get(5));
                let (heads, shared) = (heads as usize, (heads / kv_heads) as usize);
                let (dim, kv) = (self.width(node.inputs[0]) / heads, self.width(node.inputs[1]));
                let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
                for row in 0..rows {
                    for head in 0..heads {
                        let (at, group) = (row * heads * dim + head * dim, head / shared * dim);
                        let delta: f64 = (at..at + dim).map(|i| dy[i] * o[i]).sum();
                        for (key, score) in self.scores(q, k, (at, group), (dim, kv), row, window, scale) {
                            let p = (score - lse[row * heads + head]).exp();
                            let there = key * kv + group;
                            let dp: f64 = (0..dim).map(|d| dy[at + d] * v[there + d]).sum();
                            let ds = p * (dp - delta) * scale;
                            for d in 0..dim {
                                dv[there + d] += p * dy[at + d];
                                dq[at + d] += ds * k[there + d];
                                dk[there + d] += ds * q[at + d];
                            }
                        }
                    }
                }
                outputs = vec![dq, dk, dv];
            }
            GradOp::GatedActivation(activation) => {
                let each = get(0).iter().zip(get(1)).zip(get(2));
                let (dgate, dup) = each
                    .map(|((gate, up), dy)| (dy * up * activation.slope(*gate), dy * activation.value(*gate)))
                    .unzip();
                outputs = vec![dgate, dup];
            }
            GradOp::Dropout(Op::Dropout { probability, salt }) => {
                outputs.push(mask(get(0), probability, salt));
            }
            GradOp::Embedding => {
                let (dx, width) = (get(1), get(1).len() / rows);
                let mut table = vec![0.0; self.params[forward.params[0].index()].len()];
                for (row, id) in self.data.ids.iter().enumerate() {
                    for i in 0..width {
                        table[id * width + i] += dx[row * width + i];
                    }
                }
                param_grads.push((forward.params[0], table));
            }
            GradOp::Sum => outputs.push(get(0).iter().zip(get(1)).map(|(a, b)| a + b).collect()),
            other => panic!("{other:?} carries an op of another kind"),
        }
        for (param, gradient) in
            param_grads.into_iter().filter(|(param, _)| node.accumulates_into.contains(param))
        {
            self.gradients[param.index()].iter_mut().zip(gradient).for_each(|(sum, add)| *sum += add);
        }
        for ((value, landing), output) in node.outputs.iter().zip(outputs) {
            let there = &mut self.values[value.index()];
            match landing {
                GradWrite::Write => *there = output,
                GradWrite::Add => there.iter_mut().zip(output).for_each(|(sum, add)| *sum += add),
            }
        }
    }
}
