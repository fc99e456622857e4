//! Optimizers, written operation by operation: a device that performs the same roundings gets the same bits.

#![allow(unsafe_code, reason = "vector kernels run where their instructions were detected")]

#[cfg(target_arch = "x86_64")]
mod avx512;
mod launch;

use half::bf16;
use zeroth_base::DType;

use zeroth_kernel::{MOMENTS, Optimizer, Rounding, StepNumbers, canonical_master, join_low_bits, low_bits};

use super::check_len;
use super::isa::{Isa, each_isa};
use super::pool::Pool;
use super::work_partition::{Chunks, Optional};
use super::{math, stream};
use zeroth_base::halves;
use zeroth_kernel::Element;

/// Elements per task, at most and at least. Every task restarts the hardware prefetcher, and its last prefetches are wasted.
const PIECES: [usize; 2] = [32_768, 8192];
/// Elements whose weights are stored while their master weights are in L1; a divisor of a task's elements.
const NEAR: usize = 1024;
/// Elements whose random numbers are drawn together; a divisor of [`NEAR`].
const DRAW: usize = 256;

/// Moments of a range of a flat buffer; `None` where the optimizer has none, or SGD has no momentum.
pub struct Moments<'a, M> {
    /// The buffers, in the order of [`zeroth_kernel::Moment::ALL`].
    pub buffers: [Option<&'a mut [M]>; MOMENTS],
    /// Stochastic rounding of bf16 moments and the number of the applied step, from 1; `None` rounds to nearest.
    pub rounding: Option<(Rounding, u64)>,
}

/// Master weights of a range of a flat buffer: see [`zeroth_kernel::MasterForm`].
pub enum Master<'a> {
    /// f32 values.
    F32(&'a mut [f32]),
    /// Low-order bits; the high-order bits are the bf16 weights.
    LowBits(&'a mut [i16]),
}

/// One step over a range of a flat buffer: updates master weights and moments in place and writes the weights for compute.
///
/// `weights` is `None` where the master weights are the compute weights (fp32 training).
///
/// # Panics
/// When a moment that the optimizer needs is absent, a buffer has another length, or low-order bits come without bf16 weights.
pub fn optimize<G: Element, M: Element, T: Element>(
    pool: &Pool,
    optimizer: Optimizer,
    step: &StepNumbers,
    grads: &[G],
    master: Master<'_>,
    moments: Moments<'_, M>,
    weights: Option<&mut [T]>,
) {
    let (elements, isa) = (grads.len(), pool.isa());
    let Moments { buffers, rounding } = moments;
    let stochastic =
        rounding.filter(|_| M::DTYPE == DType::Bf16).map(|(rounding, step)| StochasticRounding {
            isa,
            key: halves(rounding.seed),
            step: step as u32,
            flat: rounding.flat,
            first: rounding.first,
        });
    let (whole, low_bits) = match master {
        Master::F32(master) => (Some(master), None),
        Master::LowBits(low_bits) => (None, Some(low_bits)),
    };
    let canonical = weights.is_some() && T::DTYPE == DType::Bf16;
    assert!(low_bits.is_none() || canonical, "low-order bits of master weights need bf16 weights");
    // Weights are written without having been read, unless they are joined with low-order bits.
    let past = whole.is_some()
        && weights.as_ref().is_some_and(|weights| stream::bypasses_cache(size_of_val(&**weights)));
    let inverse = exact_inverse(isa, step.root_correction);
    let piece = piece(elements, pool.threads());
    let shape = [elements, piece, elements.div_ceil(piece)];
    let (whole, low_bits) = (cut("master", whole, shape), cut("low bits of master", low_bits, shape));
    let [first, second, third] = buffers.map(|buffer| cut("moments", buffer, shape));
    let weights = cut("weights", weights, shape);
    pool.each((whole, low_bits, (first, second, third), weights), |task, parts| {
        let (mut whole, mut low_bits, (first, second, third), mut weights) = parts;
        let mut moments = [first, second, third];
        let mut joined = [0.0; NEAR];
        #[cfg(target_arch = "x86_64")]
        let by_avx512 = avx512::fits::<G, M>(isa, optimizer) && stochastic.is_none();
        for at in (0..piece.min(elements - task * piece)).step_by(NEAR) {
            let place = task * piece + at;
            let near = at..at + NEAR.min(elements - place);
            let stochastic = stochastic.map(|stochastic| StochasticRounding {
                first: stochastic.first + place as u64,
                ..stochastic
            });
            #[cfg_attr(
                not(target_arch = "x86_64"),
                allow(unused_mut, reason = "only the vector kernel changes them here")
            )]
            let mut moments = moments
                .each_mut()
                .map(|moment| moment.as_deref_mut().map(|moment| &mut moment[near.clone()]));
            let mut weights = weights.as_deref_mut().map(|weights| &mut weights[near.clone()]);
            let mut low_bits = low_bits.as_deref_mut().map(|low_bits| &mut low_bits[near.clone()]);
            #[cfg(target_arch = "x86_64")]
            if let (true, Some(inverse), Some(weights), Some(low_bits), [Some(first), Some(second), _]) =
                (by_avx512, inverse, &mut weights, &mut low_bits, &mut moments)
            {
                let states = avx512::States {
                    weights: bytemuck::cast_slice_mut(weights),
                    low_bits,
                    first: bytemuck::cast_slice_mut(first),
                    second: bytemuck::cast_slice_mut(second),
                };
                // SAFETY: `fits` has found the instructions.
                unsafe { avx512::adamw(step, inverse, &grads[place..][..near.len()], states) };
                continue;
            }
            let master = match (&mut whole, &low_bits, &weights) {
                (_, Some(low_bits), Some(weights)) => {
                    join(isa, weights, low_bits, &mut joined);
                    &mut joined[..near.len()]
                }
                (Some(whole), ..) => &mut whole[near],
                _ => unreachable!("low-order bits come with weights, and all else is f32"),
            };
            let grads = &grads[place..][..master.len()];
            update(isa, optimizer, step, inverse, stochastic, grads, master, moments);
            match (&mut weights, &mut low_bits) {
                (Some(weights), Some(low_bits)) => split(isa, master, weights, low_bits),
                (Some(weights), None) => store_weights(isa, master, canonical, weights, past),
                (None, _) => {}
            }
        }
        if past {
            stream::fence();
        }
    });
}

/// Elements per task: a few tasks per thread.
fn piece(elements: usize, threads: usize) -> usize {
    let [most, least] = PIECES;
    (elements / (4 * threads)).next_multiple_of(NEAR).clamp(least, most)
}

/// A buffer of `elements` in `count` pieces of `piece`.
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
    /// Stores the compute weights; with `canonical` the master weights become values that both master forms hold. The caller
    /// fences.
    fn store_weights<T>(master: &mut [f32], canonical: bool, to: &mut [T], past: bool) {
        stream::staged_unfenced(to, past, |at, to| {
            for (to, master) in to.iter_mut().zip(&mut master[at..]) {
                *master = if canonical { canonical_master(*master) } else { *master };
                *to = T::from_f32(*master);
            }
        });
    }
}

each_isa! {
    fn join<T>(weights: &[T], low_bits: &[i16], master: &mut [f32]) {
        for ((master, weight), low) in master.iter_mut().zip(weights).zip(low_bits) {
            *master = join_low_bits(upper_half(weight.to_f32()), *low);
        }
    }
}

each_isa! {
    /// Splits master weights into compute weights and low-order bits.
    fn split<T>(master: &[f32], weights: &mut [T], to: &mut [i16]) {
        for ((master, weight), low) in master.iter().zip(weights).zip(to) {
            let master = canonical_master(*master);
            *weight = T::from_f32(master);
            *low = low_bits(master, upper_half(weight.to_f32()));
        }
    }
}

/// A bf16 from its f32 value.
#[inline(always)]
const fn upper_half(value: f32) -> bf16 {
    bf16::from_bits((value.to_bits() >> 16) as u16)
}

each_isa! {
    fn update<G, M>(
        optimizer: Optimizer,
        s: &StepNumbers,
        inverse: Option<f32>,
        stochastic: Option<StochasticRounding>,
        grads: &[G],
        master: &mut [f32],
        moments: [Option<&mut [M]>; MOMENTS],
    ) {
        match (optimizer, moments) {
            (Optimizer::AdamW, [Some(m), Some(v), _]) => match inverse {
                Some(inverse) => each(s, stochastic, grads, master, [m, v], [0, 1], |g, p, mv| {
                    adam(s, s.decay_rate, g, p, mv, |root| divided(root, s.root_correction, inverse))
                }),
                None => each(s, stochastic, grads, master, [m, v], [0, 1], |g, p, mv| {
                    adam(s, s.decay_rate, g, p, mv, |root| root / s.root_correction)
                }),
            },
            (Optimizer::Adam, [Some(m), Some(v), _]) => {
                each(s, stochastic, grads, master, [m, v], [0, 1], |g, p, mv| {
                    adam(s, 0.0, decayed(s, g, p), p, mv, |root| root / s.root_correction)
                });
            }
            (Optimizer::Sgd, [Some(m), ..]) if s.momentum != 0.0 => {
                each(s, stochastic, grads, master, [m], [0], |g, p, m| sgd(s, decayed(s, g, p), p, m));
            }
            (Optimizer::Sgd, _) if s.momentum == 0.0 => {
                each::<G, M, 0>(s, None, grads, master, [], [], |g, p, []| {
                    ((-s.rate).mul_add(decayed(s, g, p), p), [])
                });
            }
            (Optimizer::Lion, [Some(m), ..]) => each(s, stochastic, grads, master, [m], [0], |g, p, m| lion(s, g, p, m)),
            (Optimizer::Adagrad, [_, Some(v), _]) => {
                each(s, stochastic, grads, master, [v], [1], |g, p, v| adagrad(s, decayed(s, g, p), p, v));
            }
            (Optimizer::AdEmaMix, [Some(m), Some(v), Some(slow)]) => {
                each(s, stochastic, grads, master, [m, v, slow], [0, 1, 2], |g, p, moments| ademamix(s, g, p, moments));
            }
            (optimizer, moments) => {
                let given = moments.map(|moment| moment.is_some());
                panic!("{optimizer:?} needs the moments {:?}; given, of first, second and third: {given:?}", optimizer.moments());
            }
        }
    }
}

/// The gradient with L2 weight decay added.
#[inline(always)]
fn decayed(s: &StepNumbers, g: f32, p: f32) -> f32 {
    if s.decay == 0.0 { g } else { s.decay.mul_add(p, g) }
}

/// `decay` is the fraction of the weight that decoupled decay subtracts together with the step, so that a weight is rounded
/// once. `corrected` divides by the square root of the bias correction.
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

/// The inverse of a divisor for which [`divided`] is exact.
///
/// The square root of an f32 is at least 2^-75, so that with these divisors no intermediate is subnormal.
fn exact_inverse(isa: Isa, by: f32) -> Option<f32> {
    (math::has_fma(isa) && (1e-6..=1.0).contains(&by)).then(|| 1.0 / by)
}

/// root / by from the rounded inverse of `by`, with the bits of a division.
///
/// The first product is within two ulps. Each step adds the exact remainder times the inverse; after the second the quotient
/// is correctly rounded (Markstein's theorem).
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

#[inline(always)]
fn ademamix(s: &StepNumbers, g: f32, p: f32, [m, v, slow]: [f32; 3]) -> (f32, [f32; 3]) {
    let m = s.beta1.mul_add(m, s.beta1_rest * g);
    let v = s.beta2.mul_add(v, s.beta2_rest * (g * g));
    let slow = s.beta3.mul_add(slow, s.beta3_rest * g);
    let along = s.adam_rate.mul_add(m, s.slow_rate * slow) / (v.sqrt() / s.root_correction + s.eps);
    (p - s.decay_rate.mul_add(p, along), [m, v, slow])
}

/// The constants of Philox4x32: see `philox4x32` of zeroth-base.
const PHILOX_ROUNDS: usize = 10;
const PHILOX_MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const PHILOX_WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// The key and the first counter of the random numbers of a range.
#[derive(Clone, Copy)]
struct StochasticRounding {
    isa: Isa,
    key: [u32; 2],
    step: u32,
    flat: u32,
    first: u64,
}

each_isa! {
    /// Random bits of every element from `at` on: the high and the low 16 bits of word n are for moments 2n and 2n + 1.
    fn draw(stochastic: &StochasticRounding, at: usize) -> [[u32; DRAW]; 2] {
        // `philox4x32`, round by round over all elements, so that each round vectorizes.
        let (mut low, mut high) = ([0; DRAW], [0; DRAW]);
        let (mut step, mut flat) = ([stochastic.step; DRAW], [stochastic.flat; DRAW]);
        for i in 0..DRAW {
            [low[i], high[i]] = halves(stochastic.first + (at + i) as u64);
        }
        let mut key = stochastic.key;
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
        for (even, odd) in step.iter_mut().zip(flat).chain(low.iter_mut().zip(high)) {
            *even = (*even & 0xffff_0000) | (odd >> 16);
        }
        [step, low]
    }
}

/// Stochastic rounding to bf16: up or down with probabilities that make `value` the mean. NaN stays NaN.
#[inline(always)]
fn round_stochastically(value: f32, bits: u32) -> f32 {
    let rounded = f32::from_bits(value.to_bits().wrapping_add(bits) & 0xffff_0000);
    if value.is_nan() { value } else { rounded }
}

/// Applies `step` to every element. `which` are the indices of the given moments in `Moment::ALL`.
#[inline(always)]
fn each<G: Element, M: Element, const N: usize>(
    s: &StepNumbers,
    stochastic: Option<StochasticRounding>,
    grads: &[G],
    master: &mut [f32],
    mut moments: [&mut [M]; N],
    which: [usize; N],
    step: impl Fn(f32, f32, [f32; N]) -> (f32, [f32; N]),
) {
    for (number, (grads, master)) in grads.chunks(DRAW).zip(master.chunks_mut(DRAW)).enumerate() {
        let (at, count) = (number * DRAW, grads.len());
        let moments = &mut moments.each_mut().map(|moments| &mut moments[at..][..count]);
        let drawn = stochastic.map(|stochastic| draw(stochastic.isa, &stochastic, at));
        match &drawn {
            None => go(s, grads, master, moments, &step, |value, _, _| value),
            Some(words) => go(s, grads, master, moments, &step, |value, i, moment| {
                let which = which[moment];
                round_stochastically(value, (words[which / 2][i] >> (16 - 16 * (which % 2))) & 0xffff)
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
        let before: [f32; N] = std::array::from_fn(|which| moments[which][i].to_f32());
        let (after, new) = step(g, *p, before);
        *p = after;
        for which in 0..N {
            moments[which][i] = M::from_f32(round(new[which], i, which));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn division_by_the_inverse_has_the_bits_of_a_division() {
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
