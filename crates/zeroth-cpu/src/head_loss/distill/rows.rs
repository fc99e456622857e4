//! The losses of one row, and its gradient in place of the student's logits.
//!
//! Everything is a function of log-probabilities, so that nothing overflows and a student that equals its teacher has a divergence
//! and a gradient of exactly 0.

use std::f32::consts::LOG2_E;
use std::marker::PhantomData;
use std::ops::Range;

use crate::isa::{Isa, each_isa};
use crate::math::{self, LANES};
use zeroth_kernel::{Distillation, Element};

/// The losses of a row; the divergence without its factor.
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C)]
pub(super) struct RowLosses {
    pub(super) ce: f32,
    pub(super) kd: f32,
}

const NO_LOSS: RowLosses = RowLosses { ce: 0.0, kd: 0.0 };

/// What does not depend on the row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terms {
    beta: f32,
    /// 1 / temperature.
    inverse: f32,
    /// The factor of the divergence.
    pub(super) factor: f32,
    /// The factors of the gradients of cross-entropy and divergence.
    ce_scale: f32,
    kd_scale: f32,
}

impl Terms {
    pub(super) fn new(distillation: Distillation, [ce_scale, kd_scale]: [f32; 2]) -> Self {
        let (inverse, factor) = (1.0 / distillation.temperature, distillation.factor());
        let kd_scale = kd_scale * factor * inverse;
        Self { beta: distillation.beta, inverse, factor, ce_scale, kd_scale }
    }

    /// The divergence alone, of logits that are scaled already.
    fn of_outcomes(self) -> Self {
        Self { inverse: 1.0, ce_scale: 0.0, kd_scale: 1.0, ..self }
    }
}

/// A log-softmax at a temperature.
#[derive(Clone, Copy)]
struct LogSoftmax {
    max: f32,
    inverse: f32,
    log_sum: f32,
}

impl LogSoftmax {
    /// That of log-probabilities: they are what they are.
    const NORMALISED: Self = Self { max: 0.0, inverse: 1.0, log_sum: 0.0 };

    #[inline(always)]
    fn new<const FMA: bool>(logits: &[f32], inverse: f32) -> Self {
        let max = math::max_of(logits);
        let scale = inverse * LOG2_E;
        let sum = math::sum_of(logits, |logit| math::exp2::<FMA>((logit - max) * scale));
        Self { max, inverse, log_sum: sum.ln() }
    }

    /// The log-probability of a logit.
    #[inline(always)]
    fn at(self, logit: f32) -> f32 {
        (logit - self.max) * self.inverse - self.log_sum
    }
}

#[inline(always)]
fn exp<const FMA: bool>(x: f32) -> f32 {
    math::exp2::<FMA>(x * LOG2_E)
}

/// The log of the mixture of two probabilities, given their logs: log-sum-exp with the larger one outside.
#[inline(always)]
fn log_mixture<const FMA: bool>(student: f32, teacher: f32, beta: f32) -> f32 {
    let teacher_is_larger = teacher >= student;
    let (larger, smaller) = if teacher_is_larger { (teacher, student) } else { (student, teacher) };
    let (share, other) = if teacher_is_larger { (beta, 1.0 - beta) } else { (1.0 - beta, beta) };
    // 1 - other + other · ratio: exactly 1 where both are equal.
    let ratio = exp::<FMA>(smaller - larger);
    let sum = 1.0 + other * (ratio - 1.0);
    larger + math::ln::<FMA>(if sum < share { share } else { sum })
}

/// Replaces logits by `term` of each, in the type of the gradient, and returns the sum of its second results in the order of
/// [`math::sum_of`].
#[inline(always)]
fn replace<E: Element>(
    logits: &mut [f32],
    range: Range<usize>,
    teacher: &[f32],
    term: impl Fn(f32, f32) -> (f32, f32),
) -> f32 {
    let mut lanes = [0.0f32; LANES];
    replace_chunks::<E>(logits, range, |at, z| {
        let (count, mut t) = (LANES.min(teacher.len() - at), [0.0f32; LANES]);
        t[..count].copy_from_slice(&teacher[at..at + count]);
        let (mut gradients, mut losses) = ([0.0f32; LANES], [0.0f32; LANES]);
        for lane in 0..LANES {
            (gradients[lane], losses[lane]) = term(z[lane], t[lane]);
        }
        for (lane, loss) in lanes.iter_mut().zip(&losses[..count]) {
            *lane += loss;
        }
        gradients
    });
    math::add_lanes(lanes)
}

/// [`replace`] of logits that the teacher does not have.
#[inline(always)]
fn replace_others<E: Element>(logits: &mut [f32], range: Range<usize>, term: impl Fn(f32) -> f32) {
    replace_chunks::<E>(logits, range, |_, z| z.map(&term));
}

/// Replaces logits by gradients, some at a time. The gradient's narrower type is stored from the start of the row on, behind what is
/// still to be read.
#[inline(always)]
fn replace_chunks<E: Element>(
    logits: &mut [f32],
    range: Range<usize>,
    mut gradients: impl FnMut(usize, [f32; LANES]) -> [f32; LANES],
) {
    for at in range.clone().step_by(LANES) {
        let (count, mut z) = (LANES.min(range.end - at), [0.0f32; LANES]);
        z[..count].copy_from_slice(&logits[at..at + count]);
        let mut out = [E::default(); LANES];
        for (out, gradient) in out.iter_mut().zip(gradients(at, z)) {
            *out = E::from_f32(gradient);
        }
        bytemuck::cast_slice_mut::<f32, E>(logits)[at..at + count].copy_from_slice(&out[..count]);
    }
}

/// Sums two terms over two slices in the order of [`math::sum_of`].
#[inline(always)]
fn sums_of_two([a, b]: [&[f32]; 2], term: impl Fn(f32, f32) -> [f32; 2]) -> [f32; 2] {
    let mut lanes = [[0.0f32; LANES]; 2];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            let [first, second] = term(a[lane], b[lane]);
            lanes[0][lane] += first;
            lanes[1][lane] += second;
        }
    }
    for (lane, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        let [first, second] = term(*a, *b);
        lanes[0][lane] += first;
        lanes[1][lane] += second;
    }
    lanes.map(math::add_lanes)
}

/// The distributions of a row: both over the tokens that both have, and the student's of cross-entropy.
#[derive(Clone, Copy)]
struct Distributions {
    student: LogSoftmax,
    teacher: LogSoftmax,
    ce: LogSoftmax,
}

/// The divergence of the first tokens from those of the teacher; replaces their logits by the gradient of both losses. Returns the
/// divergence, and the unrounded gradient of `label`, if that is one of them, without its own term.
///
/// With `SAME` the student's distribution is that of cross-entropy.
#[inline(always)]
fn divergence<E: Element, const FMA: bool, const SAME: bool>(
    logits: &mut [f32],
    teacher: &[f32],
    of: Distributions,
    label: Option<usize>,
    terms: Terms,
) -> (f32, Option<f32>) {
    let Distributions { student: s, teacher: t, ce } = of;
    let Terms { beta, ce_scale, kd_scale, .. } = terms;
    let of_label = label.filter(|label| *label < teacher.len()).map(|label| (logits[label], teacher[label]));
    let range = 0..teacher.len();
    let of_ce = |z: f32, p: f32| ce_scale * if SAME { p } else { exp::<FMA>(ce.at(z)) };
    if beta == 0.0 {
        let term = |z: f32, y: f32| {
            let (log_s, log_t) = (s.at(z), t.at(y));
            let (p, q) = (exp::<FMA>(log_s), exp::<FMA>(log_t));
            (of_ce(z, p) + kd_scale * (p - q), q * (log_t - log_s))
        };
        let kd = replace::<E>(logits, range, teacher, term);
        (kd, of_label.map(|(z, y)| term(z, y).0))
    } else if beta == 1.0 {
        let kd = math::sum_of_two([&logits[range.clone()], teacher], |z, y| {
            let log_s = s.at(z);
            exp::<FMA>(log_s) * (log_s - t.at(y))
        });
        let term = |z: f32, y: f32| {
            let log_s = s.at(z);
            let p = exp::<FMA>(log_s);
            (of_ce(z, p) + kd_scale * (p * (log_s - t.at(y) - kd)), 0.0)
        };
        replace::<E>(logits, range, teacher, term);
        (kd, of_label.map(|(z, y)| term(z, y).0))
    } else {
        let [of_student, of_teacher] = sums_of_two([&logits[range.clone()], teacher], |z, y| {
            let (log_s, log_t) = (s.at(z), t.at(y));
            let mixture = log_mixture::<FMA>(log_s, log_t, beta);
            [exp::<FMA>(log_s) * (log_s - mixture), exp::<FMA>(log_t) * (log_t - mixture)]
        });
        let kd_scale = kd_scale * (1.0 - beta);
        let term = |z: f32, y: f32| {
            let (log_s, log_t) = (s.at(z), t.at(y));
            let p = exp::<FMA>(log_s);
            let mixture = log_mixture::<FMA>(log_s, log_t, beta);
            (of_ce(z, p) + kd_scale * (p * (log_s - mixture - of_student)), 0.0)
        };
        replace::<E>(logits, range, teacher, term);
        let kd = beta * of_teacher + (1.0 - beta) * of_student;
        (kd, of_label.map(|(z, y)| term(z, y).0))
    }
}

each_isa! {
    /// The losses of a row with the teacher's logits of the tokens that both have, the first of the student's.
    fn online_body<E>(_stored: PhantomData<E>, fma: bool, logits: &mut [f32], teacher: &[f32], label: usize, terms: Terms) -> RowLosses {
        if fma {
            online_with::<E, true>(logits, teacher, label, terms)
        } else {
            online_with::<E, false>(logits, teacher, label, terms)
        }
    }
}

/// The losses of a row; replaces the student's logits by their gradient, in the type of that. `teacher` are the teacher's logits of
/// the tokens that both have.
pub(super) fn online<E: Element>(
    isa: Isa,
    logits: &mut [f32],
    teacher: &[f32],
    label: i32,
    terms: Terms,
) -> RowLosses {
    match usize::try_from(label) {
        Ok(label) => online_body(isa, PhantomData::<E>, math::has_fma(isa), logits, teacher, label, terms),
        Err(_) => {
            logits.fill(0.0);
            NO_LOSS
        }
    }
}

#[inline(always)]
fn online_with<E: Element, const FMA: bool>(
    logits: &mut [f32],
    teacher: &[f32],
    label: usize,
    terms: Terms,
) -> RowLosses {
    let (shared, vocab) = (teacher.len(), logits.len());
    let ce = LogSoftmax::new::<FMA>(logits, 1.0);
    let same = terms.inverse == 1.0 && shared == vocab;
    let student = if same { ce } else { LogSoftmax::new::<FMA>(&logits[..shared], terms.inverse) };
    let of = Distributions { student, teacher: LogSoftmax::new::<FMA>(teacher, terms.inverse), ce };
    let label_logit = logits[label];
    let others = |z: f32| terms.ce_scale * exp::<FMA>(ce.at(z));
    let (kd, at_label) = if same {
        divergence::<E, FMA, true>(logits, teacher, of, Some(label), terms)
    } else {
        divergence::<E, FMA, false>(logits, teacher, of, Some(label), terms)
    };
    replace_others::<E>(logits, shared..vocab, others);
    let at_label = at_label.unwrap_or_else(|| others(label_logit)) - terms.ce_scale;
    bytemuck::cast_slice_mut::<f32, E>(logits)[label] = E::from_f32(at_label);
    RowLosses { ce: -ce.at(label_logit), kd }
}

/// The cached tokens of a row, with room for its outcomes.
pub(super) struct Cached<'a> {
    ids: &'a [i32],
    log_probs: &'a [f32],
    /// Tokens that both vocabularies have.
    shared: usize,
    tail: bool,
    /// The tokens of `ids` below `shared`.
    known: &'a mut [u32],
    /// Their logits.
    logits: &'a mut [f32],
    /// Logits of the outcomes: the known tokens, then all others.
    student: &'a mut [f32],
    /// The teacher's log-probabilities of the outcomes.
    teacher: &'a mut [f32],
}

impl<'a> Cached<'a> {
    /// f32 elements of scratch per thread.
    pub(super) const fn scratch(k: usize) -> usize {
        if k == 0 { 0 } else { 4 * (k + 1) }
    }

    pub(super) fn new(
        ids: &'a [i32],
        log_probs: &'a [f32],
        shared: usize,
        tail: bool,
        scratch: &'a mut [f32],
    ) -> Self {
        let places = ids.len() + 1;
        let (known, scratch) = scratch.split_at_mut(places);
        let (logits, scratch) = scratch.split_at_mut(places);
        let (student, scratch) = scratch.split_at_mut(places);
        let teacher = &mut scratch[..places];
        let known = bytemuck::cast_slice_mut(known);
        Self { ids, log_probs, shared, tail, known, logits, student, teacher }
    }
}

each_isa! {
    fn offline_body<E>(_stored: PhantomData<E>, fma: bool, logits: &mut [f32], cached: Cached, label: usize, terms: Terms) -> RowLosses {
        if fma {
            offline_with::<E, true>(logits, cached, label, terms)
        } else {
            offline_with::<E, false>(logits, cached, label, terms)
        }
    }
}

/// [`online`] with the teacher's cached log-probabilities.
pub(super) fn offline<E: Element>(
    isa: Isa,
    logits: &mut [f32],
    cached: Cached,
    label: i32,
    terms: Terms,
) -> RowLosses {
    match usize::try_from(label) {
        Ok(label) => offline_body(isa, PhantomData::<E>, math::has_fma(isa), logits, cached, label, terms),
        Err(_) => {
            logits.fill(0.0);
            NO_LOSS
        }
    }
}

#[inline(always)]
fn offline_with<E: Element, const FMA: bool>(
    logits: &mut [f32],
    cached: Cached,
    label: usize,
    terms: Terms,
) -> RowLosses {
    let Cached { ids, log_probs, shared, tail, known, logits: of_known, student, teacher } = cached;
    let (vocab, label_logit) = (logits.len(), logits[label]);
    let ce = LogSoftmax::new::<FMA>(logits, 1.0);
    let mut count = 0;
    for (id, log_prob) in ids.iter().zip(log_probs) {
        // Others belong to the tail.
        if let Some(id) = usize::try_from(*id).ok().filter(|id| *id < shared) {
            known[count] = id as u32;
            of_known[count] = logits[id];
            student[count] = logits[id] * terms.inverse;
            teacher[count] = *log_prob;
            count += 1;
        }
    }
    let has_tail = tail && count < shared;
    let mut outcomes = count;
    // The distribution of the tail's tokens among themselves.
    let mut within = LogSoftmax::NORMALISED;
    if has_tail {
        known[..count].iter().for_each(|id| logits[*id as usize] = f32::NEG_INFINITY);
        within = LogSoftmax::new::<FMA>(&logits[..shared], terms.inverse);
        // Where little is left, the rounding of an f32 sum would be a large part of it.
        let listed: f64 = teacher[..count].iter().map(|log_prob| f64::from(*log_prob).exp()).sum();
        student[count] = within.max * within.inverse + within.log_sum;
        teacher[count] = ((1.0 - listed) as f32).max(Distillation::LEAST_TAIL).ln();
        outcomes += 1;
    }
    let (student, teacher) = (&mut student[..outcomes], &teacher[..outcomes]);
    let of_student = LogSoftmax::new::<FMA>(student, 1.0);
    let of_teacher = if has_tail { LogSoftmax::NORMALISED } else { LogSoftmax::new::<FMA>(teacher, 1.0) };
    let of = Distributions { student: of_student, teacher: of_teacher, ce: of_student };
    let (kd, _) = divergence::<f32, FMA, true>(student, teacher, of, None, terms.of_outcomes());
    let slopes = &*student;
    // Each token's share of the tail's gradient.
    let tail_scale = if has_tail { terms.kd_scale * slopes[count] } else { 0.0 };
    let of_ce = |z: f32| terms.ce_scale * exp::<FMA>(ce.at(z));
    let of_tail = |z: f32| of_ce(z) + tail_scale * exp::<FMA>(within.at(z));
    if has_tail {
        replace_others::<E>(logits, 0..shared, of_tail);
    } else {
        replace_others::<E>(logits, 0..shared, of_ce);
    }
    replace_others::<E>(logits, shared..vocab, of_ce);
    let gradient = bytemuck::cast_slice_mut::<f32, E>(logits);
    let in_tail = has_tail && label < shared;
    let at_label = if in_tail { of_tail(label_logit) } else { of_ce(label_logit) };
    gradient[label] = E::from_f32(at_label - terms.ce_scale);
    for ((id, z), slope) in known[..count].iter().zip(&*of_known).zip(slopes) {
        let own = if *id as usize == label { terms.ce_scale } else { 0.0 };
        gradient[*id as usize] = E::from_f32(of_ce(*z) - own + terms.kd_scale * slope);
    }
    RowLosses { ce: -ce.at(label_logit), kd }
}
