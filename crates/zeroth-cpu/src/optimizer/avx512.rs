//! AdamW over bf16 weights whose master weights are stored as low-order bits, 16 elements at a time. Every rounding is that of
//! the loops over `adam`, `join` and `split`, so the bits are the same.
//!
//! One loop reads and writes all five arrays: joining and splitting the master weights overlaps with the divisions. As loops
//! of their own they would add to the time.

use std::arch::x86_64::{
    __m512, __m512i, _CMP_EQ_OQ, _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512, _mm512_castps_si512,
    _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cmpeq_epi32_mask, _mm512_div_ps, _mm512_fmadd_ps,
    _mm512_fnmadd_ps, _mm512_mask_mov_ps, _mm512_mask_sub_epi32, _mm512_mul_ps, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_sqrt_ps, _mm512_sub_epi32, _mm512_sub_ps,
};

use zeroth_base::DType;
use zeroth_kernel::{Element, Optimizer, StepNumbers};

use crate::avx512_bf16::{
    LANES, load, load_f32, load_i16, nearest, prefetch, store_f32, store_low_halves, widen,
};
use crate::isa::Isa;

/// The arrays that a step updates, all of one length.
pub(super) struct States<'a> {
    pub(super) weights: &'a mut [u16],
    pub(super) low_bits: &'a mut [i16],
    pub(super) first: &'a mut [f32],
    pub(super) second: &'a mut [f32],
}

/// Whether this kernel updates with gradients `G` and moments `M` under `isa`.
pub(super) fn fits<G: Element, M: Element>(isa: Isa, optimizer: Optimizer) -> bool {
    let has_avx512 = matches!(isa, Isa::Avx512 | Isa::Amx);
    has_avx512 && optimizer == Optimizer::AdamW && G::DTYPE != DType::F16 && M::DTYPE == DType::F32
}

/// One step. `inverse` is that of the square root of the bias correction.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) fn adamw<G: Element>(s: &StepNumbers, inverse: f32, grads: &[G], states: States<'_>) {
    let States { weights, low_bits, first, second } = states;
    let (count, lengths) = (grads.len(), [weights.len(), low_bits.len(), first.len(), second.len()]);
    assert!(lengths == [count; 4], "{count} gradients of {lengths:?} elements");
    let ((grads, grads_tail), (weights, weights_tail)) = (grads.as_chunks(), weights.as_chunks_mut());
    let (low_bits, low_bits_tail) = low_bits.as_chunks_mut();
    let ((first, first_tail), (second, second_tail)) = (first.as_chunks_mut(), second.as_chunks_mut());
    let arrays = grads.iter().zip(weights).zip(low_bits).zip(first.iter_mut().zip(second));
    for (vector, (((grads, weights), low_bits), (first, second))) in arrays.enumerate() {
        // Five arrays take more pages than the hardware prefetcher follows: without these a step takes a fifth longer. A
        // line of 16-bit elements is two vectors.
        prefetch(first);
        prefetch(second);
        if vector.is_multiple_of(2) || G::DTYPE == DType::F32 {
            prefetch(grads);
        }
        if vector.is_multiple_of(2) {
            prefetch(weights);
            prefetch(low_bits);
        }
        update(s, inverse, grads, weights, low_bits, first, second);
    }
    if !grads_tail.is_empty() {
        let (mut weights, mut low_bits) = (padded(weights_tail), padded(low_bits_tail));
        let (mut first, mut second) = (padded(first_tail), padded(second_tail));
        update(s, inverse, &padded(grads_tail), &mut weights, &mut low_bits, &mut first, &mut second);
        weights_tail.copy_from_slice(&weights[..weights_tail.len()]);
        low_bits_tail.copy_from_slice(&low_bits[..low_bits_tail.len()]);
        first_tail.copy_from_slice(&first[..first_tail.len()]);
        second_tail.copy_from_slice(&second[..second_tail.len()]);
    }
}

/// A vector's elements that begin with `tail` and end with zeros.
fn padded<T: bytemuck::Pod>(tail: &[T]) -> [T; LANES] {
    let mut padded = [T::zeroed(); LANES];
    padded[..tail.len()].copy_from_slice(tail);
    padded
}

/// One step of 16 elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn update<G: Element>(
    s: &StepNumbers,
    inverse: f32,
    grads: &[G; LANES],
    weights: &mut [u16; LANES],
    low_bits: &mut [i16; LANES],
    first: &mut [f32; LANES],
    second: &mut [f32; LANES],
) {
    let all = |value: f32| _mm512_set1_ps(value);
    let g = match G::DTYPE {
        DType::F32 => load_f32(bytemuck::cast_ref(grads)),
        _ => load(bytemuck::cast_ref(grads)),
    };
    let g = _mm512_mul_ps(_mm512_mul_ps(g, all(s.unscale)), all(s.clip));
    let m = _mm512_fmadd_ps(all(s.beta1), load_f32(first), _mm512_mul_ps(all(s.beta1_rest), g));
    let squared = _mm512_mul_ps(g, g);
    let v = _mm512_fmadd_ps(all(s.beta2), load_f32(second), _mm512_mul_ps(all(s.beta2_rest), squared));
    store_f32(m, first);
    store_f32(v, second);
    let (root, by, inverse) = (_mm512_sqrt_ps(v), all(s.root_correction), all(inverse));
    let mut quotient = _mm512_mul_ps(root, inverse);
    for _ in 0..2 {
        quotient = _mm512_fmadd_ps(_mm512_fnmadd_ps(quotient, by, root), inverse, quotient);
    }
    let is_infinite = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(root, all(f32::INFINITY));
    let denominator = _mm512_add_ps(_mm512_mask_mov_ps(quotient, is_infinite, root), all(s.eps));
    let p = join(load(weights), load_i16(low_bits));
    let step = _mm512_mul_ps(all(s.adam_rate), _mm512_div_ps(m, denominator));
    let step = _mm512_fmadd_ps(all(s.decay_rate), p, step);
    let (upper, lower) = split(_mm512_sub_ps(p, step));
    store_low_halves(upper, weights);
    store_low_halves(lower, low_bits);
}

/// Master weights of bf16 weights and low-order bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn join(weights: __m512, low_bits: __m512i) -> __m512 {
    _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(weights), low_bits))
}

/// Master weights as [`zeroth_kernel::canonical_master`] makes them: bf16 weights and low-order bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn split(master: __m512) -> (__m512i, __m512i) {
    let bits = _mm512_castps_si512(master);
    let lower = _mm512_and_si512(bits, _mm512_set1_epi32(0x1_ffff));
    let is_halfway = _mm512_cmpeq_epi32_mask(lower, _mm512_set1_epi32(0x8000));
    let bits = _mm512_mask_sub_epi32(bits, is_halfway, bits, _mm512_set1_epi32(1));
    let upper = nearest(_mm512_castsi512_ps(bits));
    (upper, _mm512_sub_epi32(bits, _mm512_castps_si512(widen(upper))))
}
