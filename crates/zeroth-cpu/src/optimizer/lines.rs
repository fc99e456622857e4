//! AdamW beside weights in bf16, 16 elements at a time: the same roundings as the loops over `adam`, `join` and `separate`,
//! which this is compared with.
//!
//! One loop reads and writes all five: weights are joined with their rests and taken apart again while others are divided. Loops of
//! their own would add to the time, because they have nothing to divide.
#![allow(unsafe_code, reason = "vector instructions take pointers, and are for machines that have them")]

use std::arch::x86_64::{
    __m512, __m512i, _CMP_EQ_OQ, _MM_HINT_T0, _mm_prefetch, _mm256_mask_storeu_epi16,
    _mm256_maskz_loadu_epi16, _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512, _mm512_castps_si512,
    _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cmpeq_epi32_mask, _mm512_cvtepi16_epi32,
    _mm512_cvtepi32_epi16, _mm512_cvtepu16_epi32, _mm512_div_ps, _mm512_fmadd_ps, _mm512_fnmadd_ps,
    _mm512_mask_mov_ps, _mm512_mask_storeu_ps, _mm512_mask_sub_epi32, _mm512_maskz_loadu_ps, _mm512_mul_ps,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_sqrt_ps, _mm512_sub_epi32, _mm512_sub_ps,
};

use half::bf16;
use zeroth_base::DType;

use crate::isa::Isa;
use crate::lines::{LANES, nearest, widened};
use crate::stream::{LINE, PAGE};
use zeroth_kernel::Element;
use zeroth_kernel::{Optimizer, StepNumbers};

/// What is updated, all of one length.
pub(super) struct States<'a> {
    pub(super) weights: &'a mut [bf16],
    pub(super) rests: &'a mut [i16],
    pub(super) first: &'a mut [f32],
    pub(super) second: &'a mut [f32],
}

/// Whether these lines take an update of gradients `G` and moments `M`.
pub(super) fn fit<G: Element, M: Element>(path: Isa, optimizer: Optimizer) -> bool {
    let is_vector = matches!(path, Isa::Avx512 | Isa::Amx);
    is_vector && optimizer == Optimizer::AdamW && G::DTYPE != DType::F16 && M::DTYPE == DType::F32
}

/// One step, with the inverse of the root of the bias correction.
pub(super) fn adamw<G: Element>(s: &StepNumbers, inverse: f32, grads: &[G], states: States<'_>) {
    let count = grads.len();
    let States { weights, rests, first, second } = &states;
    let lengths = [weights.len(), rests.len(), first.len(), second.len()];
    assert!(lengths == [count; 4], "{count} gradients of {lengths:?} elements");
    // SAFETY: `fit` has seen a path with these instructions, and all are of one length.
    unsafe { run(s, inverse, grads, states) }
}

/// # Safety
/// All slices are of one length.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn run<G: Element>(s: &StepNumbers, inverse: f32, grads: &[G], states: States<'_>) {
    let States { weights, rests, first, second } = states;
    let all = |value: f32| _mm512_set1_ps(value);
    let (beta1, beta1_rest, beta2, beta2_rest) =
        (all(s.beta1), all(s.beta1_rest), all(s.beta2), all(s.beta2_rest));
    let (unscale, clip, eps) = (all(s.unscale), all(s.clip), all(s.eps));
    let (decay, rate) = (all(s.decay_rate), all(s.adam_rate));
    let (by, inverse, endless) = (all(s.root_correction), all(inverse), all(f32::INFINITY));
    for at in (0..grads.len()).step_by(LANES) {
        let mask = u16::MAX >> (LANES - LANES.min(grads.len() - at));
        ask(first.as_ptr(), at);
        ask(second.as_ptr(), at);
        ask(grads.as_ptr(), at);
        ask(weights.as_ptr(), at);
        ask(rests.as_ptr(), at);
        // SAFETY: the mask leaves the elements that there are, of every slice.
        unsafe {
            let read = |from: *const f32| _mm512_maskz_loadu_ps(mask, from.add(at));
            let halves = |from: *const i16| _mm256_maskz_loadu_epi16(mask, from.add(at));
            let g = match G::DTYPE {
                DType::F32 => read(grads.as_ptr().cast()),
                _ => widened(_mm512_cvtepu16_epi32(halves(grads.as_ptr().cast()))),
            };
            let g = _mm512_mul_ps(_mm512_mul_ps(g, unscale), clip);
            let m = _mm512_fmadd_ps(beta1, read(first.as_ptr()), _mm512_mul_ps(beta1_rest, g));
            let v =
                _mm512_fmadd_ps(beta2, read(second.as_ptr()), _mm512_mul_ps(beta2_rest, _mm512_mul_ps(g, g)));
            _mm512_mask_storeu_ps(first.as_mut_ptr().add(at), mask, m);
            _mm512_mask_storeu_ps(second.as_mut_ptr().add(at), mask, v);
            let root = _mm512_sqrt_ps(v);
            let mut quotient = _mm512_mul_ps(root, inverse);
            for _ in 0..2 {
                quotient = _mm512_fmadd_ps(_mm512_fnmadd_ps(quotient, by, root), inverse, quotient);
            }
            let is_nonfinite = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(root, endless);
            let denominator = _mm512_add_ps(_mm512_mask_mov_ps(quotient, is_nonfinite, root), eps);
            let weight = widened(_mm512_cvtepu16_epi32(halves(weights.as_ptr().cast())));
            let rest = _mm512_cvtepi16_epi32(halves(rests.as_ptr()));
            let p = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(weight), rest));
            let step = _mm512_fmadd_ps(decay, p, _mm512_mul_ps(rate, _mm512_div_ps(m, denominator)));
            let (upper, rest) = apart(_mm512_sub_ps(p, step));
            let store = |to: *mut i16, values| _mm256_mask_storeu_epi16(to.add(at), mask, values);
            store(weights.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(upper));
            store(rests.as_mut_ptr(), _mm512_cvtepi32_epi16(rest));
        }
    }
}

/// Asks for the line that is read a page after element `at`, once a line: the processor's own asking ahead ends with a page,
/// and of five that are read at once each has a page of its own. Without it this takes a fifth longer.
#[inline(always)]
fn ask<T>(from: *const T, at: usize) {
    if (at * size_of::<T>()).is_multiple_of(LINE) {
        // SAFETY: part of every x86-64 processor; a hint may have any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(at).wrapping_byte_add(PAGE).cast()) };
    }
}

/// Master weights, settled: weights in bf16 in the lower half of each lane, and what master weights are beside them.
#[inline]
#[target_feature(enable = "avx512f")]
fn apart(master: __m512) -> (__m512i, __m512i) {
    let bits = _mm512_castps_si512(master);
    let lower = _mm512_and_si512(bits, _mm512_set1_epi32(0x1_ffff));
    let halfway = _mm512_cmpeq_epi32_mask(lower, _mm512_set1_epi32(0x8000));
    let bits = _mm512_mask_sub_epi32(bits, halfway, bits, _mm512_set1_epi32(1));
    let upper = nearest(_mm512_castsi512_ps(bits));
    (upper, _mm512_sub_epi32(bits, _mm512_castps_si512(widened(upper))))
}
