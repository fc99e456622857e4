//! Forward, op by op.

use super::{Machine, log_sum, mask, norm};
use crate::{Node, Op};

impl Machine<'_> {
    pub(super) fn forward(&mut self, node: &Node) {
        let get = |place: usize| &self.values[node.inputs[place].index()];
        let rows = self.rows();
        let outputs: Vec<Vec<f64>> = match node.op {
            Op::Embedding => {
                let (table, width) = (&self.params[node.params[0].index()], self.width(node.outputs[0]));
                vec![
                    self.data
                        .ids
                        .iter()
                        .flat_map(|id| &table[id * width..(id + 1) * width])
                        .copied()
                        .collect(),
                ]
            }
            Op::Linear => {
                let (x, inner, out) = (get(0), self.width(node.inputs[0]), self.width(node.outputs[0]));
                let weight = &self.params[node.params[0].index()];
                let bias = node.params.get(1).map(|bias| &self.params[bias.index()]);
                let mut y = vec![0.0; rows * out];
                for (at, y) in y.iter_mut().enumerate() {
                    let (row, column) = (at / out, at % out);
                    *y = (0..inner).map(|i| x[row * inner + i] * weight[column * inner + i]).sum::<f64>()
                        + bias.map_or(0.0, |bias| bias[column]);
                }
                vec![y]
            }
            Op::RmsNorm { eps } => norm(get(0), &self.params[node.params[0].index()], eps),
            Op::HeadNormRope { heads, eps, rotary } => {
                let mut outputs = norm(get(0), &self.params[node.params[0].index()], eps);
                outputs[0] = self.rotate(rotary, &outputs[0], heads as usize, 1.0);
                outputs
            }
            Op::AddRmsNorm { eps } => {
                let sum: Vec<f64> = get(0).iter().zip(get(1)).map(|(r, x)| r + x).collect();
                let mut outputs = norm(&sum, &self.params[node.params[0].index()], eps);
                outputs.insert(0, sum);
                outputs
            }
            Op::Rope { heads, rotary } => vec![self.rotate(rotary, get(0), heads as usize, 1.0)],
            Op::Attention { heads, kv_heads, window, scale } => {
                let (q, k, v) = (get(0), get(1), get(2));
                let (heads, shared) = (heads as usize, (heads / kv_heads) as usize);
                let dim = self.width(node.inputs[0]) / heads;
                let kv = self.width(node.inputs[1]);
                let (mut o, mut lse) = (vec![0.0; rows * heads * dim], vec![0.0; rows * heads]);
                for row in 0..rows {
                    for head in 0..heads {
                        let at = row * heads * dim + head * dim;
                        let scores =
                            self.scores(q, k, (at, head / shared * dim), (dim, kv), row, window, scale);
                        let greatest = scores.iter().fold(f64::MIN, |a, (_, b)| a.max(*b));
                        let total: f64 = scores.iter().map(|(_, score)| (score - greatest).exp()).sum();
                        lse[row * heads + head] = greatest + total.ln();
                        for (key, score) in scores {
                            let p = (score - lse[row * heads + head]).exp();
                            for d in 0..dim {
                                o[at + d] += p * v[key * kv + head / shared * dim + d];
                            }
                        }
                    }
                }
                vec![o, lse]
            }
            Op::GatedActivation(activation) => {
                vec![get(0).iter().zip(get(1)).map(|(gate, up)| activation.value(*gate) * up).collect()]
            }
            Op::Dropout { probability, salt } => vec![mask(get(0), probability, salt)],
            Op::HeadLoss => {
                let trained = (0..rows).filter(|row| self.data.labels[*row] >= 0);
                let loss = trained.map(|row| {
                    let logits = self.logits(get(0), node.params[0], row);
                    log_sum(&logits) - logits[self.data.labels[row] as usize]
                });
                vec![vec![loss.sum()]]
            }
        };
        for (value, output) in node.outputs.iter().zip(outputs) {
            self.values[value.index()] = output;
        }
    }
}
