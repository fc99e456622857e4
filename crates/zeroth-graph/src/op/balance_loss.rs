//! The auxiliary loss that balances the load of experts, over all layers together.

use crate::gradient::Deriver;
use crate::reference::{Gradients, Interpreter};
use crate::{
    Builder, GradNode, GradOp, GradWrite, GraphError, Kind, LossInfo, Node, Op, Rows, Value, ValueInfo,
};

impl Builder {
    /// The auxiliary loss of the routing that `balance` sums over `layers`, in the current part. It is counted once for every
    /// trained token of the first stream, so that the weight of a micro-batch is its share of them.
    pub fn balance_loss(&mut self, balance: Value, layers: u64) -> Result<Value, GraphError> {
        let op = Op::BalanceLoss { part: self.loss_part()?, layers };
        self.expect_kind(op, balance, Kind::Statistic)?;
        if layers == 0 {
            return Err(self.shape_error(op, "the layers", "at least 1", "0".to_owned()));
        }
        let labels = self.stream(0).labels;
        let loss = ValueInfo { rows: Rows::Fixed(1), width: 1, kind: Kind::Statistic };
        self.push(op, &[balance, labels], &[], &[loss]).map(|outputs| outputs[0])
    }
}

/// What it is as a loss.
pub(super) const fn info(part: usize) -> LossInfo {
    LossInfo { parts: [Some(part), None], labels: 1, head: None, ids: None, evaluated: None }
}

pub(super) fn derive(deriver: &mut Deriver<'_>, index: usize, node: &Node) {
    let (balance, labels, loss) = (node.inputs[0], node.inputs[1], node.outputs[0]);
    let slopes = deriver.fresh_statistic(balance);
    let outputs = [loss, slopes].map(|value| (value, GradWrite::Write)).to_vec();
    deriver.push(index, GradOp::BalanceLoss, vec![balance, labels], Vec::new(), outputs, false);
    deriver.contribute(index, balance, slopes);
}

/// n · E · Σ f · P, and its gradient times `scale`: f and P are the rows of `balance` divided by `layers` · `rows`, n the trained
/// tokens. Nothing flows through f, which counts.
pub fn balance_loss(
    balance: &[f64],
    layers: usize,
    rows: usize,
    trained: usize,
    scale: f64,
) -> (f64, Vec<f64>) {
    let experts = balance.len() / 2;
    let (counts, probabilities) = balance.split_at(experts);
    let total = (layers * rows) as f64;
    let factor = trained as f64 * experts as f64 / (total * total);
    let loss = counts.iter().zip(probabilities).map(|(count, p)| count * p).sum::<f64>() * factor;
    let slopes = counts.iter().map(|count| count * factor * scale);
    (loss, vec![0.0; experts].into_iter().chain(slopes).collect())
}

/// The loss and its gradient times `scale`.
fn loss(
    interpreter: &Interpreter<'_>,
    [balance, labels]: [Value; 2],
    layers: u64,
    scale: f64,
) -> (f64, Vec<f64>) {
    let labels = interpreter.indices(labels);
    let trained = labels.iter().filter(|label| **label >= 0).count();
    balance_loss(interpreter.value(balance), layers as usize, labels.len(), trained, scale)
}

pub(super) fn forward(interpreter: &Interpreter<'_>, node: &Node, layers: u64) -> Vec<Vec<f64>> {
    vec![vec![loss(interpreter, [node.inputs[0], node.inputs[1]], layers, 1.0).0]]
}

pub(super) fn backward(
    interpreter: &Interpreter<'_>,
    node: &GradNode,
    part: usize,
    layers: u64,
) -> Gradients {
    let weight = interpreter.graph().loss_parts[part].weight;
    let (loss, slopes) = loss(interpreter, [node.inputs[0], node.inputs[1]], layers, weight);
    Gradients::of_values(vec![vec![loss], slopes])
}
