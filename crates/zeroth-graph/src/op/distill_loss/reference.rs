//! The distillation loss and its gradient in f64.

use super::DistillSpec;
use crate::op::linear::{linear, linear_backward};

/// The least probability of a tail: what is left of 1 in f32 beside the probabilities of the listed tokens is not known better.
const LEAST_TAIL: f64 = 1.0 / (1 << 24) as f64;

/// A teacher's rows: [`super::Teacher`] with its numbers.
#[derive(Debug, Clone, Copy)]
pub enum TeacherRows<'a> {
    /// The hidden state [rows, H'] and the head [V', H'].
    Hidden {
        /// The hidden state.
        x: &'a [f64],
        /// The head.
        w: &'a [f64],
    },
    /// Cached log-probabilities. A token that is not in both vocabularies belongs to the tail.
    TopK {
        /// Tokens [rows, k].
        ids: &'a [i64],
        /// Their log-probabilities.
        log_probs: &'a [f64],
        /// The teacher's vocabulary.
        vocab: usize,
        /// Whether the other tokens are one more outcome.
        tail: bool,
    },
}

/// The sums over the rows with a label ≥ 0 of the cross-entropy and of the divergence from the teacher, and dx and dw of both, each
/// times its weight.
pub fn distill_loss(
    x: &[f64],
    w: &[f64],
    labels: &[i64],
    teacher: &TeacherRows<'_>,
    spec: DistillSpec,
    [ce_weight, kd_weight]: [f64; 2],
) -> ([f64; 2], [Vec<f64>; 2]) {
    let hidden = x.len() / labels.len();
    let vocab = w.len() / hidden;
    let mut dlogits = linear(x, w, None, hidden);
    let teacher_logits = match teacher {
        TeacherRows::Hidden { x, w } => linear(x, w, None, x.len() / labels.len()),
        TeacherRows::TopK { .. } => Vec::new(),
    };
    let factor = if spec.squared { spec.temperature * spec.temperature } else { 1.0 };
    let mut sums = [0.0; 2];
    for (row, (logits, label)) in dlogits.chunks_exact_mut(vocab).zip(labels).enumerate() {
        let Ok(label) = usize::try_from(*label) else {
            logits.fill(0.0);
            continue;
        };
        let (kd, kd_gradient) = match teacher {
            TeacherRows::Hidden { .. } => {
                let width = teacher_logits.len() / labels.len();
                online(logits, &teacher_logits[row * width..][..width], spec)
            }
            TeacherRows::TopK { ids, log_probs, vocab, tail } => {
                let k = ids.len() / labels.len();
                let listed = ids[row * k..][..k].iter().zip(&log_probs[row * k..][..k]);
                offline(logits, listed, *vocab, *tail, spec)
            }
        };
        let log_probs = log_softmax(logits, 1.0);
        sums[0] -= log_probs[label];
        sums[1] += factor * kd;
        for (logit, log_prob) in logits.iter_mut().zip(log_probs) {
            *logit = ce_weight * log_prob.exp();
        }
        logits[label] -= ce_weight;
        for (logit, gradient) in logits.iter_mut().zip(kd_gradient) {
            *logit += kd_weight * factor * gradient / spec.temperature;
        }
    }
    let [dx, dw, _] = linear_backward(x, w, &dlogits, hidden);
    (sums, [dx, dw])
}

fn log_sum_exp(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let greatest = values.clone().fold(f64::NEG_INFINITY, f64::max);
    if greatest == f64::NEG_INFINITY {
        greatest
    } else {
        greatest + values.map(|value| (value - greatest).exp()).sum::<f64>().ln()
    }
}

fn log_softmax(logits: &[f64], temperature: f64) -> Vec<f64> {
    let scaled = logits.iter().map(|logit| logit / temperature);
    let lse = log_sum_exp(scaled.clone());
    scaled.map(|logit| logit - lse).collect()
}

/// The divergence of the student from the teacher, given the log-probabilities of both over the same outcomes, and its gradient by
/// the student's logits.
fn divergence(student: &[f64], teacher: &[f64], beta: f64) -> (f64, Vec<f64>) {
    let kl = |p: &[f64], q: &[f64]| -> f64 { p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum() };
    // Of KL(s‖other), times `share`.
    let reverse = |other: &[f64], share: f64| {
        let mean = kl(student, other);
        student.iter().zip(other).map(|(s, o)| share * s.exp() * (s - o - mean)).collect()
    };
    if beta == 0.0 {
        let gradient = student.iter().zip(teacher).map(|(s, t)| s.exp() - t.exp()).collect();
        (kl(teacher, student), gradient)
    } else if beta == 1.0 {
        (kl(student, teacher), reverse(teacher, 1.0))
    } else {
        let mixed = student.iter().zip(teacher);
        let mixture: Vec<f64> =
            mixed.map(|(s, t)| log_sum_exp([s + (1.0 - beta).ln(), t + beta.ln()].into_iter())).collect();
        let value = beta * kl(teacher, &mixture) + (1.0 - beta) * kl(student, &mixture);
        // The derivative of the mixture cancels between both.
        (value, reverse(&mixture, 1.0 - beta))
    }
}

/// The divergence, and its gradient by the student's scaled logits, over the tokens that both vocabularies have.
fn online(student: &[f64], teacher: &[f64], spec: DistillSpec) -> (f64, Vec<f64>) {
    let shared = student.len().min(teacher.len());
    let [student, teacher] =
        [student, teacher].map(|logits| log_softmax(&logits[..shared], spec.temperature));
    divergence(&student, &teacher, spec.beta)
}

/// The same from the teacher's log-probabilities of some tokens.
fn offline<'a>(
    student: &[f64],
    listed: impl Iterator<Item = (&'a i64, &'a f64)>,
    vocab: usize,
    tail: bool,
    spec: DistillSpec,
) -> (f64, Vec<f64>) {
    let shared = student.len().min(vocab);
    let known = |(id, log_prob): (&i64, &f64)| {
        let id = usize::try_from(*id).ok().filter(|id| *id < shared)?;
        Some((id, *log_prob))
    };
    let (ids, mut teacher): (Vec<usize>, Vec<f64>) = listed.filter_map(known).unzip();
    let mut gradient = vec![0.0; shared];
    let scaled: Vec<f64> = student[..shared].iter().map(|logit| logit / spec.temperature).collect();
    let others: Vec<usize> = (0..shared).filter(|id| tail && !ids.contains(id)).collect();
    let mut outcomes: Vec<f64> = ids.iter().map(|id| scaled[*id]).collect();
    if others.is_empty() {
        // Nothing is left for a tail.
        let lse = log_sum_exp(teacher.iter().copied());
        for log_prob in &mut teacher {
            *log_prob -= lse;
        }
    } else {
        let rest = 1.0 - teacher.iter().map(|log_prob| log_prob.exp()).sum::<f64>();
        teacher.push(rest.max(LEAST_TAIL).ln());
        outcomes.push(log_sum_exp(others.iter().map(|id| scaled[*id])));
    }
    let student = log_softmax(&outcomes, 1.0);
    let (value, of_outcomes) = divergence(&student, &teacher, spec.beta);
    for (id, slope) in ids.iter().zip(&of_outcomes) {
        gradient[*id] = *slope;
    }
    for id in &others {
        // Each token's share of the tail.
        gradient[*id] = of_outcomes[ids.len()] * (scaled[*id] - outcomes[ids.len()]).exp();
    }
    (value, gradient)
}
