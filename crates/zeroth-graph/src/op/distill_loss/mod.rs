//! Knowledge distillation: cross-entropy, and the divergence of a student's distribution from its teacher's.

mod reference;
#[cfg(test)]
mod tests;

use crate::gradient::Deriver;
use crate::reference::{Gradients, Interpreter};
use crate::{
    Builder, DistillSpec, EvaluatedLoss, GradNode, GradOp, GradWrite, GraphError, Kind, LossInfo, LossPart,
    Node, Op, ParamId, Rows, SliceLogits, TeacherKind, Value, ValueInfo,
};

pub use reference::{TeacherRows, distill_loss};

/// What a student is distilled from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Teacher {
    /// The teacher's last hidden state [T, H'] and its head [V', H'].
    Hidden {
        /// The hidden state.
        x: Value,
        /// The head's weight, frozen.
        weight: ParamId,
    },
    /// The most likely tokens of the teacher, computed before, and their log-probabilities at the loss's temperature over its whole
    /// vocabulary.
    TopK {
        /// Tokens [T, k], of [`Kind::Index`].
        ids: Value,
        /// Their log-probabilities [T, k], of [`Kind::Statistic`].
        log_probs: Value,
        /// The teacher's vocabulary.
        vocab: u64,
        /// Whether the probability of all other tokens is one more outcome; else both distributions are renormalised over the k.
        tail: bool,
    },
}

impl Builder {
    /// The losses of `x` for the labels of its stream: cross-entropy, in the part `ce_loss` with weight 1 - alpha, and the divergence
    /// from a teacher, in the part `kd_loss` with weight alpha. The divergence is over the tokens that both vocabularies have, the
    /// first of either; cross-entropy over the student's.
    pub fn distill_loss(
        &mut self,
        x: Value,
        weight: ParamId,
        teacher: Teacher,
        spec: DistillSpec,
        alpha: f64,
    ) -> Result<[Value; 2], GraphError> {
        let ce = LossPart { name: LossPart::CROSS_ENTROPY.name, weight: 1.0 - alpha };
        let (ce_part, kd_part) =
            (self.named_loss_part(ce)?, self.named_loss_part(LossPart { name: "kd_loss", weight: alpha })?);
        let kind = match teacher {
            Teacher::Hidden { .. } => TeacherKind::Hidden,
            Teacher::TopK { vocab, tail, .. } => TeacherKind::TopK { vocab, tail },
        };
        let op = Op::DistillLoss { ce_part, kd_part, spec, teacher: kind };
        let DistillSpec { beta, temperature, .. } = spec;
        let shares = [("alpha", alpha), ("beta", beta)];
        if let Some((what, share)) = shares.iter().find(|(_, share)| !(0.0..=1.0).contains(share)) {
            return Err(self.shape_error(op, what, "at least 0 and at most 1", share.to_string()));
        }
        if !(temperature > 0.0 && temperature.is_finite()) {
            let found = temperature.to_string();
            return Err(self.shape_error(op, "the temperature", "above 0 and finite", found));
        }
        let [_, inner] = self.param_shape(op, weight, "the weight")?;
        self.expect_width(op, x, inner)?;
        let labels = self.stream_of(op, x)?.labels;
        let (mut inputs, mut params) = (vec![x, labels], vec![weight]);
        match teacher {
            Teacher::Hidden { x: hidden, weight } => {
                let [_, inner] = self.param_shape(op, weight, "the teacher's weight")?;
                self.expect_width(op, hidden, inner)?;
                let spec = &self.graph.param(weight).spec;
                if spec.trainable {
                    return Err(GraphError::TrainedTeacher { name: spec.name.clone() });
                }
                inputs.push(hidden);
                params.push(weight);
            }
            Teacher::TopK { ids, log_probs, vocab, .. } => {
                self.expect_kind(op, ids, Kind::Index)?;
                self.expect_kind(op, log_probs, Kind::Statistic)?;
                let k = self.info(ids).width;
                self.expect(op, "the width of the log-probabilities", k, self.info(log_probs).width)?;
                if k == 0 || k > vocab {
                    let expected = format!("at least 1 and at most the teacher's vocabulary of {vocab}");
                    return Err(self.shape_error(op, "the tokens of a row", &expected, k.to_string()));
                }
                inputs.extend([ids, log_probs]);
            }
        }
        for operand in &inputs[2..] {
            self.expect_rows(op, *operand, x)?;
        }
        let loss = ValueInfo { rows: Rows::Fixed(1), width: 1, kind: Kind::Statistic };
        self.push(op, &inputs, &params, &[loss; 2]).map(|outputs| [outputs[0], outputs[1]])
    }
}

/// What it is as a loss. Evaluation computes the student's cross-entropy, without a teacher or its cache.
pub(super) const fn info(ce_part: usize, kd_part: usize, teacher: TeacherKind) -> LossInfo {
    let ids = match teacher {
        TeacherKind::Hidden => None,
        TeacherKind::TopK { vocab, .. } => Some((2, vocab)),
    };
    let op = Op::HeadLoss { part: ce_part };
    LossInfo {
        parts: [Some(ce_part), Some(kd_part)],
        labels: 1,
        head: Some(SliceLogits::F32),
        ids,
        evaluated: Some(EvaluatedLoss { op, inputs: 2, params: 1, outputs: 1 }),
    }
}

/// Nothing flows into the teacher.
pub(super) fn derive(deriver: &mut Deriver<'_>, index: usize, node: &Node) {
    let (x, losses) = (node.inputs[0], [node.outputs[0], node.outputs[1]]);
    let dx = deriver.needs(x).then(|| deriver.fresh(x));
    let outputs = losses.into_iter().chain(dx).map(|value| (value, GradWrite::Write)).collect();
    deriver.push(index, GradOp::DistillLoss, node.inputs.clone(), node.params.clone(), outputs, true);
    if let Some(dx) = dx {
        deriver.contribute(index, x, dx);
    }
}

/// The losses of a node, and dx and dw of their sum with these weights.
fn losses(
    interpreter: &Interpreter<'_>,
    of: &Node,
    inputs: &[Value],
    weights: [f64; 2],
) -> ([f64; 2], [Vec<f64>; 2]) {
    let Op::DistillLoss { spec, teacher, .. } = of.op else { unreachable!("called for this op's nodes") };
    let (x, labels) = (interpreter.value(inputs[0]), interpreter.indices(inputs[1]));
    let w = interpreter.param(of.params[0]);
    let ids;
    let teacher = match teacher {
        TeacherKind::Hidden => {
            TeacherRows::Hidden { x: interpreter.value(inputs[2]), w: interpreter.param(of.params[1]) }
        }
        TeacherKind::TopK { vocab, tail } => {
            ids = interpreter.indices(inputs[2]);
            TeacherRows::TopK {
                ids: &ids,
                log_probs: interpreter.value(inputs[3]),
                vocab: vocab as usize,
                tail,
            }
        }
    };
    distill_loss(x, w, &labels, &teacher, spec, weights)
}

pub(super) fn forward(interpreter: &Interpreter<'_>, node: &Node) -> Vec<Vec<f64>> {
    losses(interpreter, node, &node.inputs, [0.0; 2]).0.map(|loss| vec![loss]).to_vec()
}

pub(super) fn backward(interpreter: &Interpreter<'_>, node: &GradNode, of: &Node) -> Gradients {
    let mut weights = [0.0; 2];
    let parts = of.op.loss_parts().map(|part| interpreter.graph().loss_parts[part].weight);
    weights.iter_mut().zip(parts).for_each(|(weight, part)| *weight = part);
    let ([ce, kd], [dx, dw]) = losses(interpreter, of, &node.inputs, weights);
    Gradients { values: vec![vec![ce], vec![kd], dx], params: vec![(of.params[0], dw)] }
}
