//! Optimizers, written op by op: every rounding below is meant, and a device that follows it gets the same bits.

#[cfg(target_arch = "x86_64")]
mod lines;

use half::bf16;
use zeroth_base::DType;

use zeroth_kernel::{Optimizer, Rounding, StepNumbers, canonical_master, join_low_bits, low_bits};

use super::check_len;
use super::cut::{Chunks, Optional};
use super::isa::{Isa, each_isa};
use super::pool::Pool;
use super::{math, stream};
use zeroth_base::halves;
use zeroth_kernel::Element;

/// Elements that one task updates, at most and at least: with every task the processor has to see anew what is read in order,
/// and where it ends, what was read ahead is lost.
const PIECES: [usize; 2] = [32_768, 8192];
/// Elements whose weights are stored while their master weights are in the nearest cache; they divide a task's.
const NEAR: usize = 1024;
/// Elements whose chances are drawn together; they divide those above.
const DRAW: usize = 256;

/// Moments of a piece of a flat; an optimizer without one, or SGD without momentum, has `None`.
pub struct Moments<'a, M> {
    /// The first.
    pub first: Option<&'a mut [M]>,
    /// The second.
    pub second: Option<&'a mut [M]>,
    /// Chance for moments in bf16 and the applied step, counted from 1; without it they are rounded to the nearest.
    pub rounding: Option<(Rounding, u64)>,
}

/// Master weights of a piece of a flat: see [`zeroth_kernel::MasterForm`].
pub enum Master<'a> {
    /// In f32.
    F32(&'a mut [f32]),
    /// What they are beside weights in bf16.
    LowBits(&'a mut [i16]),
}

/// One step over a piece of a flat: master weights and moments in place, and the weights as stored for compute.
///
/// `weights` is `None` where the master weights are the ones computed with (f32 training).
///
/// # Panics
/// When a moment that the optimizer needs is absent, a buffer has another length, or there is a rest without weights in bf16.
pub fn optimize<G: Element, M: Element, T: Element>(
    pool: &Pool,
    optimizer: Optimizer,
    step: &StepNumbers,
    grads: &[G],
    master: Master<'_>,
    moments: Moments<'_, M>,
    weights: Option<&mut [T]>,
) {
    let (elements, path) = (grads.len(), pool.isa());
    let Moments { first, second, rounding } = moments;
    let chance = rounding.filter(|_| M::DTYPE == DType::Bf16).map(|(rounding, step)| Chance {
        path,
        key: halves(rounding.seed),
        step: step as u32,
        flat: rounding.flat,
        first: rounding.first,
    });
    let (whole, rests) = match master {
        Master::F32(master) => (Some(master), None),
        Master::LowBits(rests) => (None, Some(rests)),
    };
    let settles = weights.is_some() && T::DTYPE == DType::Bf16;
    assert!(rests.is_none() || settles, "what master weights are beside weights needs these, in bf16");
    // Master weights and moments were just read and are in the cache; the weights were not, but beside their rests.
    let past =
        whole.is_some() && weights.as_ref().is_some_and(|weights| stream::worth(size_of_val(&**weights)));
    let inverse = exact_inverse(path, step.root_correction);
    let piece = piece(elements, pool.threads());
    let shape = [elements, piece, elements.div_ceil(piece)];
    let (whole, rests) = (cut("master", whole, shape), cut("rests of master", rests, shape));
    let (first, second) = (cut("first", first, shape), cut("second", second, shape));
    let weights = cut("weights", weights, shape);
    pool.each((whole, rests, first, second, weights), |task, parts| {
        let (mut whole, mut rests, mut first, mut second, mut weights) = parts;
        let mut joined = [0.0; NEAR];
        #[cfg(target_arch = "x86_64")]
        let by_lines = lines::fit::<G, M>(path, optimizer) && chance.is_none();
        for at in (0..piece.min(elements - task * piece)).step_by(NEAR) {
            let place = task * piece + at;
            let near = at..at + NEAR.min(elements - place);
            let chance = chance.map(|chance| Chance { first: chance.first + place as u64, ..chance });
            #[cfg_attr(
                not(target_arch = "x86_64"),
                allow(unused_mut, reason = "only lines change them here")
            )]
            let (mut first, mut second) = (
                first.as_deref_mut().map(|first| &mut first[near.clone()]),
                second.as_deref_mut().map(|second| &mut second[near.clone()]),
            );
            let mut weights = weights.as_deref_mut().map(|weights| &mut weights[near.clone()]);
            let mut rests = rests.as_deref_mut().map(|rests| &mut rests[near.clone()]);
            #[cfg(target_arch = "x86_64")]
            if let (true, Some(inverse), Some(weights), Some(rests), Some(first), Some(second)) =
                (by_lines, inverse, &mut weights, &mut rests, &mut first, &mut second)
            {
                let states = lines::States {
                    weights: bytemuck::cast_slice_mut(weights),
                    rests,
                    first: bytemuck::cast_slice_mut(first),
                    second: bytemuck::cast_slice_mut(second),
                };
                lines::adamw(step, inverse, &grads[place..][..near.len()], states);
                continue;
            }
            let master = match (&mut whole, &rests, &weights) {
                (_, Some(rests), Some(weights)) => {
                    join(path, weights, rests, &mut joined);
                    &mut joined[..near.len()]
                }
                (Some(whole), ..) => &mut whole[near],
                _ => unreachable!("a rest has weights, and what has none is whole"),
            };
            let grads = &grads[place..][..master.len()];
            update(path, optimizer, step, inverse, chance, grads, master, first, second);
            match (&mut weights, &mut rests) {
                (Some(weights), Some(rests)) => separate(path, master, weights, rests),
                (Some(weights), None) => store_weights(path, master, settles, weights, past),
                (None, _) => {}
            }
        }
        if past {
            stream::fence();
        }
    });
}

/// Elements of a task: a few tasks for every thread.
fn piece(elements: usize, threads: usize) -> usize {
    let [most, least] = PIECES;
    (elements / (4 * threads)).next_multiple_of(NEAR).clamp(least, most)
}

/// A buffer of `elements`, `piece` at a time, `count` times.
#[track_caller]
fn cut<'a, T: Send>(
    name: &str,
    buffer: Option<&'a mut [T]>,
    [elements, piece, count]: [usize; 3],
) -> Optional<Chunks<'a, T>> {
    if let Some(buffer) = &buffer {
        check_len(name, buffer.len(), elements);
    }
    Optional::new(buffer.map(|buffer| Chunks::new(buffer, piece)), count)
}

each_isa! {
    /// Weights as they are computed with, and, where these are in bf16, master weights as both of their forms hold them; a
    /// fence is still to come.
    fn store_weights<T>(master: &mut [f32], settles: bool, to: &mut [T], past: bool) {
        stream::staged_open(to, past, |at, to| {
            for (to, master) in to.iter_mut().zip(&mut master[at..]) {
                *master = if settles { canonical_master(*master) } else { *master };
                *to = T::from_f32(*master);
            }
        });
    }
}

each_isa! {
    fn join<T>(weights: &[T], rests: &[i16], master: &mut [f32]) {
        for ((master, weight), rest) in master.iter_mut().zip(weights).zip(rests) {
            *master = join_low_bits(upper_half(weight.to_f32()), *rest);
        }
    }
}

each_isa! {
    /// Weights as they are computed with, and what master weights are beside them.
    fn separate<T>(master: &[f32], weights: &mut [T], rests: &mut [i16]) {
        for ((master, weight), to) in master.iter().zip(weights).zip(rests) {
            let master = canonical_master(*master);
            *weight = T::from_f32(master);
            *to = low_bits(master, upper_half(weight.to_f32()));
        }
    }
}

/// A number of bf16 that is at hand as f32.
#[inline(always)]
const fn upper_half(value: f32) -> bf16 {
    bf16::from_bits((value.to_bits() >> 16) as u16)
}

each_isa! {
    fn update<G, M>(
        optimizer: Optimizer,
        s: &StepNumbers,
        inverse: Option<f32>,
        chance: Option<Chance>,
        grads: &[G],
        master: &mut [f32],
        first: Option<&mut [M]>,
        second: Option<&mut [M]>,
    ) {
        match (optimizer, first, second) {
            (Optimizer::AdamW, Some(m), Some(v)) => match inverse {
                Some(inverse) => each(s, chance, grads, master, [m, v], [0, 1], |g, p, mv| {
                    adam(s, s.decay_rate, g, p, mv, |root| divided(root, s.root_correction, inverse))
                }),
                None => each(s, chance, grads, master, [m, v], [0, 1], |g, p, mv| {
                    adam(s, s.decay_rate, g, p, mv, |root| root / s.root_correction)
                }),
            },
            (Optimizer::Adam, Some(m), Some(v)) => {
                each(s, chance, grads, master, [m, v], [0, 1], |g, p, mv| {
                    adam(s, 0.0, decayed(s, g, p), p, mv, |root| root / s.root_correction)
                });
            }
            (Optimizer::Sgd, Some(m), _) if s.momentum != 0.0 => {
                each(s, chance, grads, master, [m], [0], |g, p, m| sgd(s, decayed(s, g, p), p, m));
            }
            (Optimizer::Sgd, _, _) if s.momentum == 0.0 => {
                each::<G, M, 0>(s, None, grads, master, [], [], |g, p, []| {
                    ((-s.rate).mul_add(decayed(s, g, p), p), [])
                });
            }
            (Optimizer::Lion, Some(m), _) => each(s, chance, grads, master, [m], [0], |g, p, m| lion(s, g, p, m)),
            (Optimizer::Adagrad, _, Some(v)) => {
                each(s, chance, grads, master, [v], [1], |g, p, v| adagrad(s, decayed(s, g, p), p, v));
            }
            (optimizer, first, second) => {
                let given = [first.is_some(), second.is_some()];
                panic!("{optimizer:?} needs first and second moments {:?} and has {given:?}", optimizer.moments());
            }
        }
    }
}

/// The gradient with weight decay added to it.
#[inline(always)]
fn decayed(s: &StepNumbers, g: f32, p: f32) -> f32 {
    if s.decay == 0.0 { g } else { s.decay.mul_add(p, g) }
}

/// `decay` is the part of the weight that goes beside the step. Both go in one subtraction: a weight is rounded once.
/// `corrected` divides by the root of the bias correction.
#[inline(always)]
fn adam(
    s: &StepNumbers,
    decay: f32,
    g: f32,
    p: f32,
    [m, v]: [f32; 2],
    corrected: impl Fn(f32) -> f32,
) -> (f32, [f32; 2]) {
    let m = s.beta1.mul_add(m, s.beta1_rest * g);
    let v = s.beta2.mul_add(v, s.beta2_rest * (g * g));
    let denominator = corrected(v.sqrt()) + s.eps;
    (p - decay.mul_add(p, s.adam_rate * (m / denominator)), [m, v])
}

/// The inverse of a divisor with which [`divided`] is exact and quick.
///
/// A root of an f32 is at least 2^-75, so that with such a divisor nothing below comes near the smallest numbers.
fn exact_inverse(path: Isa, by: f32) -> Option<f32> {
    (math::has_fused(path) && (1e-6..=1.0).contains(&by)).then(|| 1.0 / by)
}

/// root / by, rounded to the nearest, from the rounded inverse of `by`: the same bits, without the divider.
///
/// The product is within two units. What a step adds is the exact remainder times the inverse: after the first the
/// quotient is one of the two nearest, and after the second it is the nearest (Markstein's theorem).
#[inline(always)]
fn divided(root: f32, by: f32, inverse: f32) -> f32 {
    let mut quotient = root * inverse;
    for _ in 0..2 {
        quotient = (-quotient).mul_add(by, root).mul_add(inverse, quotient);
    }
    if root == f32::INFINITY { root } else { quotient }
}

#[inline(always)]
fn sgd(s: &StepNumbers, g: f32, p: f32, [m]: [f32; 1]) -> (f32, [f32; 1]) {
    let m = s.velocity.mul_add(m, s.velocity_rest * g);
    let along = if s.nesterov == 0 { m } else { s.momentum.mul_add(m, g) };
    ((-s.rate).mul_add(along, p), [m])
}

#[inline(always)]
fn lion(s: &StepNumbers, g: f32, p: f32, [m]: [f32; 1]) -> (f32, [f32; 1]) {
    let along = s.beta1.mul_add(m, s.beta1_rest * g);
    let moved = if along > 0.0 {
        s.rate
    } else if along < 0.0 {
        -s.rate
    } else {
        0.0
    };
    (p - s.decay_rate.mul_add(p, moved), [s.beta2.mul_add(m, s.beta2_rest * g)])
}

#[inline(always)]
fn adagrad(s: &StepNumbers, g: f32, p: f32, [v]: [f32; 1]) -> (f32, [f32; 1]) {
    let v = g.mul_add(g, v);
    ((-s.adagrad_rate).mul_add(g / (v.sqrt() + s.eps), p), [v])
}

/// The numbers of Philox4x32: see `philox4x32` of zeroth-base.
const PHILOX_ROUNDS: usize = 10;
const PHILOX_MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const PHILOX_WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Where the random numbers of a piece come from.
#[derive(Clone, Copy)]
struct Chance {
    path: Isa,
    key: [u32; 2],
    step: u32,
    flat: u32,
    first: u64,
}

each_isa! {
    /// A word for each element from `at` on: 16 bits for the first moment above 16 for the second.
    fn draw(chance: &Chance, at: usize) -> [u32; DRAW] {
        // `philox4x32`, round by round over all elements, so that a round is vector code.
        let (mut low, mut high) = ([0; DRAW], [0; DRAW]);
        let (mut step, mut flat) = ([chance.step; DRAW], [chance.flat; DRAW]);
        for i in 0..DRAW {
            [low[i], high[i]] = halves(chance.first + (at + i) as u64);
        }
        let mut key = chance.key;
        for _ in 0..PHILOX_ROUNDS {
            for i in 0..DRAW {
                let first = u64::from(PHILOX_MULTIPLIERS[0]) * u64::from(step[i]);
                let second = u64::from(PHILOX_MULTIPLIERS[1]) * u64::from(low[i]);
                step[i] = (second >> 32) as u32 ^ flat[i] ^ key[0];
                flat[i] = second as u32;
                low[i] = (first >> 32) as u32 ^ high[i] ^ key[1];
                high[i] = first as u32;
            }
            key = [key[0].wrapping_add(PHILOX_WEYL[0]), key[1].wrapping_add(PHILOX_WEYL[1])];
        }
        for (first, second) in step.iter_mut().zip(flat) {
            *first = (*first & 0xffff_0000) | (second >> 16);
        }
        step
    }
}

/// One of the two bf16 around `value`, the nearer one the likelier, so that the mean is `value`. What is no number stays.
#[inline(always)]
fn by_chance(value: f32, bits: u32) -> f32 {
    let rounded = f32::from_bits(value.to_bits().wrapping_add(bits) & 0xffff_0000);
    if value.is_nan() { value } else { rounded }
}

/// Goes over all elements. `places` says which of the optimizer's moments (0 first, 1 second) are given.
#[inline(always)]
fn each<G: Element, M: Element, const N: usize>(
    s: &StepNumbers,
    chance: Option<Chance>,
    grads: &[G],
    master: &mut [f32],
    mut moments: [&mut [M]; N],
    places: [u32; N],
    step: impl Fn(f32, f32, [f32; N]) -> (f32, [f32; N]),
) {
    for (number, (grads, master)) in grads.chunks(DRAW).zip(master.chunks_mut(DRAW)).enumerate() {
        let (at, count) = (number * DRAW, grads.len());
        let moments = &mut moments.each_mut().map(|moments| &mut moments[at..][..count]);
        let drawn = chance.map(|chance| draw(chance.path, &chance, at));
        match &drawn {
            None => go(s, grads, master, moments, &step, |value, _, _| value),
            Some(words) => go(s, grads, master, moments, &step, |value, i, place| {
                by_chance(value, (words[i] >> (16 - 16 * places[place])) & 0xffff)
            }),
        }
    }
}

#[inline(always)]
fn go<G: Element, M: Element, const N: usize>(
    s: &StepNumbers,
    grads: &[G],
    master: &mut [f32],
    moments: &mut [&mut [M]; N],
    step: &impl Fn(f32, f32, [f32; N]) -> (f32, [f32; N]),
    round: impl Fn(f32, usize, usize) -> f32,
) {
    for (i, (grad, p)) in grads.iter().zip(master).enumerate() {
        let g = grad.to_f32() * s.unscale * s.clip;
        let before: [f32; N] = std::array::from_fn(|place| moments[place][i].to_f32());
        let (after, new) = step(g, *p, before);
        *p = after;
        for place in 0..N {
            moments[place][i] = M::from_f32(round(new[place], i, place));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn division_by_the_inverse_is_the_division_for_every_fraction() {
        for by in [1.0, 0.031_622_78, 0.308_7, 0.999_999_94, 0.500_000_06, 1e-6] {
            for bits in (1.0f32.to_bits()..2.0f32.to_bits()).step_by(3) {
                let root = f32::from_bits(bits);
                assert_eq!(divided(root, by, 1.0 / by), root / by, "{root:?} / {by:?}");
            }
            for root in [0.0, f32::from_bits(1).sqrt(), 1e-19, f32::MAX.sqrt(), f32::INFINITY] {
                assert_eq!(divided(root, by, 1.0 / by), root / by, "{root:?} / {by:?}");
            }
            assert!(divided(f32::NAN, by, 1.0 / by).is_nan());
        }
    }
}
