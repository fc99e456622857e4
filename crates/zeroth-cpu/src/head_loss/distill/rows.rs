//! The losses of one row, and its gradient in place of the student's logits.
//!
//! Everything is a function of log-probabilities, so that nothing overflows and a student that equals its teacher has a divergence
//! and a gradient of exactly 0.

use std::f32::consts::LOG2_E;
use std::marker::PhantomData;
use std::ops::Range;

use crate::isa::{Isa, each_isa};
use crate::math::{self, LANES};
use zeroth_kernel::{DivergenceSpec, Element};

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
    pub(super) fn new(distillation: DivergenceSpec, [ce_scale, kd_scale]: [f32; 2]) -> Self {
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
pub(in crate::head_loss) struct LogSoftmax {
    max: f32,
    inverse: f32,
    log_sum: f32,
}

each_isa! {
    /// The log-softmax of some logits over 1 / `inverse`.
    pub(in crate::head_loss) fn log_softmax(fma: bool, logits: &[f32], inverse: f32) -> LogSoftmax {
        if fma { LogSoftmax::new::<true>(logits, inverse) } else { LogSoftmax::new::<false>(logits, inverse) }
    }
}

impl LogSoftmax {
    /// That of log-probabilities: they are what they are.
    const NORMALISED: Self = Self { max: 0.0, inverse: 1.0, log_sum: 0.0 };

    #[inline(always)]
    fn new<const FMA: bool>(logits: &[f32], inverse: f32) -> Self {
        let (max, scale) = (math::max_of(logits), inverse * LOG2_E);
        let mut lanes = [0.0f32; LANES];
        let (whole, rest) = logits.as_chunks::<LANES>();
        for logits in whole {
            for lane in 0..LANES {
                lanes[lane] += math::exp2::<FMA>((logits[lane] - max) * scale);
            }
        }
        for (lane, logit) in lanes.iter_mut().zip(rest) {
            *lane += math::exp2::<FMA>((logit - max) * scale);
        }
        Self { max, inverse, log_sum: math::add_lanes(lanes).ln() }
    }

    /// Whether its sum is finite and no logit infinite.
    pub(in crate::head_loss) const fn is_finite(self) -> bool {
        self.max.is_finite() && self.log_sum.is_finite()
    }

    /// The log-probability of a logit.
    #[inline(always)]
    pub(in crate::head_loss) fn at(self, logit: f32) -> f32 {
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

/// Some values from `at` on; zeros past their end.
#[inline(always)]
fn load(values: &[f32], at: usize, count: usize) -> [f32; LANES] {
    let mut lanes = [0.0f32; LANES];
    lanes[..count].copy_from_slice(&values[at..at + count]);
    lanes
}

/// Stores gradients in place of the logits that they were computed from. Their narrower type is stored from the start of the row on,
/// behind what is still to be read.
#[inline(always)]
fn store<E: Element>(logits: &mut [f32], at: usize, count: usize, gradients: [f32; LANES]) {
    let mut out = [E::default(); LANES];
    for lane in 0..LANES {
        out[lane] = E::from_f32(gradients[lane]);
    }
    bytemuck::cast_slice_mut::<f32, E>(logits)[at..at + count].copy_from_slice(&out[..count]);
}

/// KL(teacher‖student), KL(student‖teacher), or the divergence from the mixture of both.
const FORWARD: u8 = 0;
const REVERSE: u8 = 1;
const MIXED: u8 = 2;

/// The distributions of a row: both over the tokens that both have, and the student's of cross-entropy. With `SAME` that is the
/// student's. Its methods are no closures: those would be compiled without the instructions of the ISA that calls them.
#[derive(Clone, Copy)]
struct Divergence<const FMA: bool, const SAME: bool, const KIND: u8> {
    student: LogSoftmax,
    teacher: LogSoftmax,
    ce: LogSoftmax,
    beta: f32,
    ce_scale: f32,
    kd_scale: f32,
    /// The sum of the first terms.
    mean: f32,
}

impl<const FMA: bool, const SAME: bool, const KIND: u8> Divergence<FMA, SAME, KIND> {
    /// What a logit and the teacher's add to the sums that the gradient needs: of KL(student‖other) and of KL(teacher‖mixture).
    #[inline(always)]
    fn terms(&self, z: f32, y: f32) -> [f32; 2] {
        let (log_s, log_t) = (self.student.at(z), self.teacher.at(y));
        if KIND == REVERSE {
            return [exp::<FMA>(log_s) * (log_s - log_t), 0.0];
        }
        let mixture = log_mixture::<FMA>(log_s, log_t, self.beta);
        [exp::<FMA>(log_s) * (log_s - mixture), exp::<FMA>(log_t) * (log_t - mixture)]
    }

    /// The gradient of a logit by both losses, without the label's own term; and the term of a forward divergence.
    #[inline(always)]
    fn gradient(&self, z: f32, y: f32) -> (f32, f32) {
        let (log_s, log_t) = (self.student.at(z), self.teacher.at(y));
        let p = exp::<FMA>(log_s);
        let of_ce = self.ce_scale * if SAME { p } else { exp::<FMA>(self.ce.at(z)) };
        let (slope, term) = match KIND {
            FORWARD => {
                let q = exp::<FMA>(log_t);
                (p - q, q * (log_t - log_s))
            }
            REVERSE => (p * (log_s - log_t - self.mean), 0.0),
            _ => (p * (log_s - log_mixture::<FMA>(log_s, log_t, self.beta) - self.mean), 0.0),
        };
        (of_ce + self.kd_scale * slope, term)
    }

    /// The sums of [`Self::terms`], in the order of [`math::sum_of`].
    #[inline(always)]
    fn sums(&self, logits: &[f32], teacher: &[f32]) -> [f32; 2] {
        let mut lanes = [[0.0f32; LANES]; 2];
        for at in (0..teacher.len()).step_by(LANES) {
            let count = LANES.min(teacher.len() - at);
            let (z, y) = (load(logits, at, count), load(teacher, at, count));
            let mut terms = [[0.0f32; LANES]; 2];
            for lane in 0..LANES {
                [terms[0][lane], terms[1][lane]] = self.terms(z[lane], y[lane]);
            }
            for (lanes, terms) in lanes.iter_mut().zip(terms) {
                lanes.iter_mut().zip(&terms[..count]).for_each(|(lane, term)| *lane += term);
            }
        }
        lanes.map(math::add_lanes)
    }

    /// Replaces logits by their gradients; returns the sum of a forward divergence.
    #[inline(always)]
    fn replace<E: Element>(&self, logits: &mut [f32], teacher: &[f32]) -> f32 {
        let mut lanes = [0.0f32; LANES];
        for at in (0..teacher.len()).step_by(LANES) {
            let count = LANES.min(teacher.len() - at);
            let (z, y) = (load(logits, at, count), load(teacher, at, count));
            let (mut gradients, mut terms) = ([0.0f32; LANES], [0.0f32; LANES]);
            for lane in 0..LANES {
                (gradients[lane], terms[lane]) = self.gradient(z[lane], y[lane]);
            }
            store::<E>(logits, at, count, gradients);
            lanes.iter_mut().zip(&terms[..count]).for_each(|(lane, term)| *lane += term);
        }
        math::add_lanes(lanes)
    }

    /// The divergence; replaces the logits of the tokens that both have by the gradient of both losses. Also returns the unrounded
    /// gradient of `label`, if that is one of them.
    #[inline(always)]
    fn run<E: Element>(
        mut self,
        logits: &mut [f32],
        teacher: &[f32],
        label: Option<usize>,
    ) -> (f32, Option<f32>) {
        let of_label =
            label.filter(|label| *label < teacher.len()).map(|label| (logits[label], teacher[label]));
        let mut kd = 0.0;
        if KIND != FORWARD {
            let [of_student, of_teacher] = self.sums(logits, teacher);
            self.mean = of_student;
            kd = of_student;
            if KIND == MIXED {
                kd = self.beta * of_teacher + (1.0 - self.beta) * of_student;
                // The derivative of the mixture cancels between both terms.
                self.kd_scale *= 1.0 - self.beta;
            }
        }
        let forward = self.replace::<E>(logits, teacher);
        let at_label = of_label.map(|(z, y)| self.gradient(z, y).0);
        (if KIND == FORWARD { forward } else { kd }, at_label)
    }
}

/// [`Divergence::run`] of the kind that `beta` names.
#[inline(always)]
fn divergence<E: Element, const FMA: bool, const SAME: bool>(
    logits: &mut [f32],
    teacher: &[f32],
    [student, of_teacher, ce]: [LogSoftmax; 3],
    label: Option<usize>,
    terms: Terms,
) -> (f32, Option<f32>) {
    let Terms { beta, ce_scale, kd_scale, .. } = terms;
    let (mean, t) = (0.0, of_teacher);
    if beta == 0.0 {
        let of = Divergence::<FMA, SAME, FORWARD> { student, teacher: t, ce, beta, ce_scale, kd_scale, mean };
        of.run::<E>(logits, teacher, label)
    } else if beta == 1.0 {
        let of = Divergence::<FMA, SAME, REVERSE> { student, teacher: t, ce, beta, ce_scale, kd_scale, mean };
        of.run::<E>(logits, teacher, label)
    } else {
        let of = Divergence::<FMA, SAME, MIXED> { student, teacher: t, ce, beta, ce_scale, kd_scale, mean };
        of.run::<E>(logits, teacher, label)
    }
}

/// The gradient of logits that the teacher does not list: of cross-entropy, and of their share of a tail.
#[derive(Clone, Copy)]
struct Others<const FMA: bool> {
    ce: LogSoftmax,
    ce_scale: f32,
    /// The distribution of the tail's tokens among themselves.
    within: LogSoftmax,
    tail_scale: f32,
}

impl<const FMA: bool> Others<FMA> {
    /// Of cross-entropy alone.
    #[inline(always)]
    const fn of_ce(ce: LogSoftmax, ce_scale: f32) -> Self {
        Self { ce, ce_scale, within: LogSoftmax::NORMALISED, tail_scale: 0.0 }
    }

    #[inline(always)]
    fn gradient<const TAIL: bool>(&self, z: f32) -> f32 {
        let of_ce = self.ce_scale * exp::<FMA>(self.ce.at(z));
        if TAIL { of_ce + self.tail_scale * exp::<FMA>(self.within.at(z)) } else { of_ce }
    }

    /// Replaces logits by their gradients.
    #[inline(always)]
    fn replace<E: Element, const TAIL: bool>(&self, logits: &mut [f32], range: Range<usize>) {
        for at in range.clone().step_by(LANES) {
            let count = LANES.min(range.end - at);
            let z = load(logits, at, count);
            let mut gradients = [0.0f32; LANES];
            for lane in 0..LANES {
                gradients[lane] = self.gradient::<TAIL>(z[lane]);
            }
            store::<E>(logits, at, count, gradients);
        }
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
    let Ok(label) = usize::try_from(label) else {
        logits.fill(0.0);
        return NO_LOSS;
    };
    online_body(isa, PhantomData::<E>, math::has_fma(isa), logits, teacher, label, terms)
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
    let of = [student, LogSoftmax::new::<FMA>(teacher, terms.inverse), ce];
    let label_logit = logits[label];
    let (kd, at_label) = if same {
        divergence::<E, FMA, true>(logits, teacher, of, Some(label), terms)
    } else {
        divergence::<E, FMA, false>(logits, teacher, of, Some(label), terms)
    };
    let others = Others::<FMA>::of_ce(ce, terms.ce_scale);
    others.replace::<E, false>(logits, shared..vocab);
    let at_label = at_label.unwrap_or_else(|| others.gradient::<false>(label_logit)) - terms.ce_scale;
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
    let Ok(label) = usize::try_from(label) else {
        logits.fill(0.0);
        return NO_LOSS;
    };
    offline_body(isa, PhantomData::<E>, math::has_fma(isa), logits, cached, label, terms)
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
        teacher[count] = ((1.0 - listed) as f32).max(DivergenceSpec::LEAST_TAIL).ln();
        outcomes += 1;
    }
    let (student, teacher) = (&mut student[..outcomes], &teacher[..outcomes]);
    let of_student = LogSoftmax::new::<FMA>(student, 1.0);
    let of_teacher = if has_tail { LogSoftmax::NORMALISED } else { LogSoftmax::new::<FMA>(teacher, 1.0) };
    let of = [of_student, of_teacher, of_student];
    let (kd, _) = divergence::<f32, FMA, true>(student, teacher, of, None, terms.of_outcomes());
    let slopes = &*student;
    let mut others = Others::<FMA>::of_ce(ce, terms.ce_scale);
    let in_tail = has_tail && label < shared;
    let at_label;
    if has_tail {
        // Each token's share of the tail's gradient.
        (others.within, others.tail_scale) = (within, terms.kd_scale * slopes[count]);
        at_label = if in_tail {
            others.gradient::<true>(label_logit)
        } else {
            others.gradient::<false>(label_logit)
        };
        others.replace::<E, true>(logits, 0..shared);
    } else {
        at_label = others.gradient::<false>(label_logit);
        others.replace::<E, false>(logits, 0..shared);
    }
    others.replace::<E, false>(logits, shared..vocab);
    let gradient = bytemuck::cast_slice_mut::<f32, E>(logits);
    gradient[label] = E::from_f32(at_label - terms.ce_scale);
    for ((id, z), slope) in known[..count].iter().zip(&*of_known).zip(slopes) {
        let own = if *id as usize == label { terms.ce_scale } else { 0.0 };
        let of_ce = others.gradient::<false>(*z) - own;
        gradient[*id as usize] = E::from_f32(of_ce + terms.kd_scale * slope);
    }
    RowLosses { ce: -ce.at(label_logit), kd }
}
