//! The head: projection to the vocabulary, softmax and cross-entropy.

use super::linear::{linear, linear_backward};
use crate::gradient::Deriver;
use crate::reference::{Gradients, Interpreter};
use crate::{
    Builder, GradNode, GradOp, GradWrite, GraphError, Kind, LossInfo, Node, Op, ParamId, Rows, SliceLogits,
    Value, ValueInfo,
};

impl Builder {
    /// The loss of `x` for the labels of its stream, in the current part. Every forward has a loss; of several, the weighted
    /// sum is trained.
    pub fn head_loss(&mut self, x: Value, weight: ParamId) -> Result<Value, GraphError> {
        let labels = self.stream_of(Op::HeadLoss { part: 0 }, x)?.labels;
        self.head_loss_of(x, labels, weight)
    }

    /// The loss of `x` for these labels. Labels that are `k` wide belong to `k` rows of `x` for each of theirs.
    pub fn head_loss_of(&mut self, x: Value, labels: Value, weight: ParamId) -> Result<Value, GraphError> {
        let op = Op::HeadLoss { part: self.loss_part()? };
        let [_, inner] = self.param_shape(op, weight, "the weight")?;
        self.expect_width(op, x, inner)?;
        self.expect_kind(op, labels, Kind::Index)?;
        let (found, expected) = (self.info(labels), self.info(x).rows);
        if found.rows.times(found.width) != expected {
            let found = format!("{:?}, {} wide", found.rows, found.width);
            return Err(self.shape_error(op, "the labels", &format!("{expected:?}"), found));
        }
        let loss = ValueInfo { rows: Rows::Fixed(1), width: 1, kind: Kind::Statistic };
        self.push(op, &[x, labels], &[weight], &[loss]).map(|outputs| outputs[0])
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

/// What it is as a loss.
pub(super) const fn info(part: usize) -> LossInfo {
    let head = Some(SliceLogits::Compute);
    LossInfo { parts: [Some(part), None], labels: 1, head, ids: None, evaluated: None }
}

pub(super) fn forward(interpreter: &Interpreter<'_>, node: &Node) -> Vec<Vec<f64>> {
    let (x, labels) = (interpreter.value(node.inputs[0]), interpreter.indices(node.inputs[1]));
    vec![vec![head_loss(x, interpreter.param(node.params[0]), &labels, 1.0).0]]
}

pub(super) fn backward(interpreter: &Interpreter<'_>, node: &GradNode, of: &Node, part: usize) -> Gradients {
    let (x, labels) = (interpreter.value(node.inputs[0]), interpreter.indices(node.inputs[1]));
    let weight = interpreter.graph().loss_parts[part].weight;
    let (loss, [dx, dw]) = head_loss(x, interpreter.param(of.params[0]), &labels, weight);
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
    fn gradient_of_a_weighted_sum_of_parts() {
        let mut b = Builder::new(&[DATA_ROWS]);
        b.unit("all", Role::Other, specs(&[("table", &[VOCAB, 4]), ("other", &[VOCAB, 4])])).unwrap();
        let [table, other] = ["table", "other"].map(|name| b.param(name).unwrap());
        let x = b.embedding(b.ids(), table).unwrap();
        b.head_loss(x, table).unwrap();
        b.set_loss_part("kd_loss", -0.375);
        b.head_loss(x, other).unwrap();
        // Back to a part that is known.
        b.set_loss_part("ce_loss", 1.0);
        b.head_loss(x, other).unwrap();
        b.set_loss_part("kd_loss", 0.5);
        let error = b.head_loss(x, table).unwrap_err().to_string();
        assert_eq!(
            error,
            "the loss part `kd_loss` has weight -0.375, and 0.5 in unit `all`: a part has one weight"
        );
        b.set_loss_part("aux_loss", f64::NAN);
        let error = b.head_loss(x, table).unwrap_err().to_string();
        assert_eq!(error, "the loss part `aux_loss` in unit `all` has weight NaN: it must be finite");
        let graph = b.finish().unwrap();
        let parts: Vec<_> = graph.loss_parts.iter().map(|part| (part.name, part.weight)).collect();
        assert_eq!(parts, [("ce_loss", 1.0), ("kd_loss", -0.375)]);
        assert_eq!(mismatch(&graph, &[data()], &[]), None);
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
