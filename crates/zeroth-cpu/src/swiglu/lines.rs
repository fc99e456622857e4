//! Both directions for bf16 with the processor's own conversions: in plain loops arithmetic takes longer than memory.
//!
//! Numbers of even and of odd places are in a register each, which takes one instruction where putting them in order takes
//! two.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]

use std::arch::x86_64::{
    __m512, __m512i, _MM_HINT_T0, _mm_prefetch, _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512,
    _mm512_castps_si512, _mm512_castsi512_ps, _mm512_div_ps, _mm512_fmadd_ps, _mm512_loadu_si512,
    _mm512_mask_storeu_epi16, _mm512_maskz_loadu_epi16, _mm512_max_ps, _mm512_min_ps, _mm512_mul_ps,
    _mm512_permutexvar_epi16, _mm512_set1_epi32, _mm512_set1_ps, _mm512_slli_epi32, _mm512_sub_ps,
};
use std::f32::consts::LOG2_E;

use crate::avx512::{bit_range, to_bf16};
use crate::lines::{AHEAD, LANES};
use crate::math::{EXP2_COEFFICIENTS, ROUND_MAGIC};

/// Numbers that are taken at a time.
const LINE: usize = 2 * LANES;

pub(super) fn forward(gate: &[u16], up: &[u16], y: &mut [u16]) {
    assert!(gate.len() == y.len() && up.len() == y.len());
    // SAFETY: the path has the instructions, as `fit` has asked; lengths were checked.
    unsafe { forward_lines(gate, up, y) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn forward_lines(gate: &[u16], up: &[u16], y: &mut [u16]) {
    let order = order();
    for first in (0..y.len()).step_by(LINE) {
        let there = bit_range(0, y.len() - first);
        // SAFETY: what is behind the end is masked.
        let [gate, up] = [gate, up].map(|from| unsafe { halves(from.as_ptr().add(first), there) });
        let y_of =
            |half: usize| _mm512_mul_ps(_mm512_div_ps(gate[half], one_and_power(gate[half])), up[half]);
        // SAFETY: as above.
        unsafe { put([y_of(0), y_of(1)], order, y.as_mut_ptr().add(first), there) }
    }
}

pub(super) fn backward(dy: &[u16], gate: &[u16], up: &[u16], dgate: &mut [u16], dup: &mut [u16]) {
    assert!([gate.len(), up.len(), dgate.len(), dup.len()].iter().all(|len| *len == dy.len()));
    // SAFETY: the path has the instructions, as `fit` has asked; lengths were checked.
    unsafe { backward_lines(dy, gate, up, dgate, dup) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn backward_lines(dy: &[u16], gate: &[u16], up: &[u16], dgate: &mut [u16], dup: &mut [u16]) {
    let (order, one) = (order(), _mm512_set1_ps(1.0));
    for first in (0..dy.len()).step_by(LINE) {
        let there = bit_range(0, dy.len() - first);
        // SAFETY: what is behind the end is masked.
        let [dy, gate, up] = [dy, gate, up].map(|from| unsafe { halves(from.as_ptr().add(first), there) });
        let (mut grads, mut values) = ([one; 2], [one; 2]);
        for half in 0..2 {
            let sigmoid = _mm512_div_ps(one, one_and_power(gate[half]));
            let silu = _mm512_mul_ps(gate[half], sigmoid);
            let slope = _mm512_fmadd_ps(silu, _mm512_sub_ps(one, sigmoid), sigmoid);
            grads[half] = _mm512_mul_ps(_mm512_mul_ps(dy[half], up[half]), slope);
            values[half] = _mm512_mul_ps(dy[half], silu);
        }
        // SAFETY: as above.
        unsafe {
            put(grads, order, dgate.as_mut_ptr().add(first), there);
            put(values, order, dup.as_mut_ptr().add(first), there);
        }
    }
}

/// 1 + e^-x: endless from 88.7 below 0 on.
#[inline]
#[target_feature(enable = "avx512f")]
fn one_and_power(x: __m512) -> __m512 {
    let round = _mm512_set1_ps(ROUND_MAGIC);
    let exponent = _mm512_mul_ps(x, _mm512_set1_ps(-LOG2_E));
    // The second operand is what comes out where one is no number. 2^128 has the bits of infinity.
    let near = _mm512_max_ps(_mm512_set1_ps(-126.0), exponent);
    let near = _mm512_min_ps(_mm512_set1_ps(128.0), near);
    let shifted = _mm512_add_ps(near, round);
    let t = _mm512_sub_ps(near, _mm512_sub_ps(shifted, round));
    let mut p = _mm512_set1_ps(EXP2_COEFFICIENTS[0]);
    for &coefficient in &EXP2_COEFFICIENTS[1..] {
        p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(coefficient));
    }
    let value = _mm512_castps_si512(_mm512_fmadd_ps(p, t, _mm512_set1_ps(1.0)));
    let power = _mm512_add_epi32(value, _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted)));
    _mm512_add_ps(_mm512_castsi512_ps(power), _mm512_set1_ps(1.0))
}

/// The numbers of even and of odd places.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn halves(from: *const u16, there: u32) -> [__m512; 2] {
    // SAFETY: a hint, whatever the address is; and what is not there is masked.
    let both = unsafe {
        _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD).cast());
        _mm512_maskz_loadu_epi16(there, from.cast())
    };
    let odd = _mm512_and_si512(both, _mm512_set1_epi32(0xffff_0000_u32 as i32));
    [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(both)), _mm512_castsi512_ps(odd)]
}

/// Lane 2i takes number i of the first 16, lane 2i + 1 number i of the others.
#[inline]
#[target_feature(enable = "avx512f")]
fn order() -> __m512i {
    let lanes: [u16; LINE] = std::array::from_fn(|lane| (lane / 2 + lane % 2 * LANES) as u16);
    // SAFETY: the array is a register long.
    unsafe { _mm512_loadu_si512(lanes.as_ptr().cast()) }
}

/// Rounds numbers of even and of odd places and writes those that are there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn put(halves: [__m512; 2], order: __m512i, to: *mut u16, there: u32) {
    let line = _mm512_permutexvar_epi16(order, to_bf16(halves));
    // SAFETY: the caller has room for what is there.
    unsafe { _mm512_mask_storeu_epi16(to.cast(), there, line) }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use crate::{Isa, Pool, swiglu, swiglu_backward};

    #[test]
    fn far_gates_and_what_is_no_number_are_those_of_plain_loops() {
        let far = [-3e38, -1e30, -1e3, -100.0, -89.0, -88.0, -87.0, -1.0, 0.0, 1.0, 87.0, 100.0, 1e30, 3e38];
        // Whole lines and a rest.
        let gate: Vec<bf16> = (0..77).map(|i| bf16::from_f32(far[i % far.len()])).collect();
        let with_nan = [&gate[..], &[bf16::NAN, bf16::INFINITY]].concat();
        let up: Vec<bf16> = (0..79).map(|i| bf16::from_f32(if i % 2 == 0 { 0.5 } else { -2.0 })).collect();
        let each = |path: Isa| {
            let pool = Pool::on_isa(1, path).unwrap();
            let [mut y, mut dgate, mut dup] = [(); 3].map(|()| vec![bf16::ONE; 79]);
            swiglu(&pool, &with_nan, &up, &mut y);
            swiglu_backward(&pool, &up, &with_nan, &up, &mut dgate, &mut dup);
            [y, dgate, dup].concat()
        };
        let expected = each(Isa::Portable);
        for &path in Isa::available() {
            for (place, (found, expected)) in each(path).iter().zip(&expected).enumerate() {
                let [found, expected] = [found, expected].map(|value| value.to_f32());
                let near = (found - expected).abs() <= expected.abs() / 128.0 + 1e-35;
                let same = found == expected || found.is_nan() && expected.is_nan();
                assert!(same || near, "{path}, place {place}: {found} is not {expected}");
            }
        }
    }
}
