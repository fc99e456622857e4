//! The head: projection to the vocabulary, softmax and cross-entropy.

use super::linear::{linear, linear_backward};
use crate::gradient::Deriver;
use crate::reference::{Gradients, Machine};
use crate::{
    Builder, GradNode, GradOp, GradWrite, GraphError, Kind, Node, Op, ParamId, Rows, Value, ValueInfo,
};

impl Builder {
    /// The loss of `x` for the labels of its stream. Every forward has a loss; of several, the sum is trained.
    pub fn head_loss(&mut self, x: Value, weight: ParamId) -> Result<Value, GraphError> {
        let labels = self.stream_of(Op::HeadLoss, x)?.labels;
        self.head_loss_of(x, labels, weight)
    }

    /// The loss of `x` for these labels. Labels that are `k` wide belong to `k` rows of `x` for each of theirs.
    pub fn head_loss_of(&mut self, x: Value, labels: Value, weight: ParamId) -> Result<Value, GraphError> {
        let [_, inner] = self.param_shape(Op::HeadLoss, weight, "the weight")?;
        self.expect_width(Op::HeadLoss, x, inner)?;
        self.expect_kind(Op::HeadLoss, labels, Kind::Index)?;
        let (found, expected) = (self.info(labels), self.info(x).rows);
        if found.rows.times(found.width) != expected {
            let found = format!("{:?}, {} wide", found.rows, found.width);
            return Err(self.shape_error(Op::HeadLoss, "the labels", &format!("{expected:?}"), found));
        }
        let loss = ValueInfo { rows: Rows::Fixed(1), width: 1, kind: Kind::Statistic };
        self.push(Op::HeadLoss, &[x, labels], &[weight], &[loss]).map(|outputs| outputs[0])
    }
}

pub(super) fn derive(deriver: &mut Deriver<'_>, index: usize, node: &Node) {
    let (x, labels, loss) = (node.inputs[0], node.inputs[1], node.outputs[0]);
    let dx = deriver.needs(x).then(|| deriver.fresh(x));
    let outputs = [Some(loss), dx].into_iter().flatten().map(|value| (value, GradWrite::Write)).collect();
    deriver.push(index, GradOp::HeadLoss, vec![x, labels], node.params.clone(), outputs, true);
    if let Some(dx) = dx {
        deriver.contribute(index, x, dx);
    }
}

/// The sum of the losses of the rows with a label ≥ 0, and dx and dw of it times `scale`.
pub fn head_loss(x: &[f64], w: &[f64], labels: &[i64], scale: f64) -> (f64, [Vec<f64>; 2]) {
    let hidden = x.len() / labels.len();
    let mut dlogits = linear(x, w, None, hidden);
    let mut loss = 0.0;
    for (logits, label) in dlogits.chunks_exact_mut(w.len() / hidden).zip(labels) {
        let Ok(label) = usize::try_from(*label) else {
            logits.fill(0.0);
            continue;
        };
        let greatest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = greatest + logits.iter().map(|logit| (logit - greatest).exp()).sum::<f64>().ln();
        loss += lse - logits[label];
        for logit in logits.iter_mut() {
            *logit = (*logit - lse).exp() * scale;
        }
        logits[label] -= scale;
    }
    let [dx, dw, _] = linear_backward(x, w, &dlogits, hidden);
    (loss, [dx, dw])
}

pub(super) fn forward(machine: &Machine<'_>, node: &Node) -> Vec<Vec<f64>> {
    let (x, labels) = (machine.value(node.inputs[0]), machine.indices(node.inputs[1]));
    vec![vec![head_loss(x, machine.param(node.params[0]), &labels, 1.0).0]]
}

pub(super) fn backward(machine: &Machine<'_>, node: &GradNode, of: &Node) -> Gradients {
    let (x, labels) = (machine.value(node.inputs[0]), machine.indices(node.inputs[1]));
    let (loss, [dx, dw]) = head_loss(x, machine.param(of.params[0]), &labels, 1.0);
    Gradients { values: vec![vec![loss], dx], params: vec![(of.params[0], dw)] }
}

#[cfg(test)]
mod tests {
    use crate::reference::finite_differences::{DATA_ROWS, VOCAB, data, mismatch, specs};
    use crate::{Builder, Role};

    #[test]
    fn gradient_of_the_sum_of_two_losses_over_one_value() {
        let mut b = Builder::new(&[DATA_ROWS]);
        b.unit("all", Role::Other, specs(&[("table", &[VOCAB, 4]), ("other", &[VOCAB, 4])])).unwrap();
        let [table, other] = ["table", "other"].map(|name| b.param(name).unwrap());
        let x = b.embedding(b.ids(), table).unwrap();
        b.head_loss(x, table).unwrap();
        b.head_loss(x, other).unwrap();
        assert_eq!(mismatch(&b.finish().unwrap(), &[data()], &[]), None);
    }

    #[test]
    fn labels_that_are_wide_belong_to_several_rows_of_a_token() {
        let mut b = Builder::new(&[DATA_ROWS]);
        b.unit("all", Role::Other, specs(&[("table", &[VOCAB, 4]), ("head", &[VOCAB, 4])])).unwrap();
        let [table, head] = ["table", "head"].map(|name| b.param(name).unwrap());
        let (ids, labels) = (b.input(0, 3), b.input(0, 3));
        let x = b.embedding(ids, table).unwrap();
        let error = b.head_loss(x, head).unwrap_err().to_string();
        assert!(
            error.contains("should be one row for each token of a stream, and is Times(0, 3)"),
            "{error}"
        );
        let error = b.head_loss_of(x, b.stream(0).labels, head).unwrap_err().to_string();
        assert!(error.contains("the labels should be Times(0, 3), and is Stream(0), 1 wide"), "{error}");
        b.head_loss_of(x, labels, head).unwrap();
        let numbers = |factor: i64| (0..3 * DATA_ROWS as i64).map(|at| at * factor % VOCAB as i64).collect();
        assert_eq!(
            mismatch(&b.finish().unwrap(), &[data()], &[(ids, numbers(3)), (labels, numbers(5))]),
            None
        );
    }
}
