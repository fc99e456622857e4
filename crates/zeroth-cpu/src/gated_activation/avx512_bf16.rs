//! SwiGLU forward and backward for bf16. In the portable loops arithmetic takes longer than memory.
//!
//! exp is a power of two here, not [`crate::math::sigmoid`]: the results differ from the portable loops in the last place, so
//! only [`Isa::Amx`] takes this kernel. Even and odd elements are computed in a vector each, because
//! separating them takes one instruction where widening in order takes two.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]

use std::arch::x86_64::{
    __m512, __m512i, _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512, _mm512_castps_si512,
    _mm512_castsi512_ps, _mm512_div_ps, _mm512_fmadd_ps, _mm512_loadu_si512, _mm512_max_ps, _mm512_min_ps,
    _mm512_mul_ps, _mm512_permutexvar_epi16, _mm512_set1_epi32, _mm512_set1_ps, _mm512_slli_epi32,
    _mm512_sub_ps,
};
use std::f32::consts::LOG2_E;

use zeroth_base::{ActivationFn, DType};
use zeroth_kernel::Element;

use crate::avx512_bf16::{LANES, LINE, Subnormals, prefetch, store_line};
use crate::isa::Isa;
use crate::math::{EXP2_COEFFICIENTS, ROUND_MAGIC};

type Line = [u16; LINE];

/// Whether this kernel computes `activation` of `T` under `isa`.
pub(super) fn fits<T: Element>(isa: Isa, activation: ActivationFn) -> bool {
    isa == Isa::Amx && T::DTYPE == DType::Bf16 && activation == ActivationFn::Silu
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) fn forward(gate: &[u16], up: &[u16], y: &mut [u16]) {
    let order = even_odd_order();
    let ((gates, gate_tail), (ups, up_tail)) = (gate.as_chunks(), up.as_chunks());
    let (lines, y_tail) = y.as_chunks_mut();
    for ((gate, up), y) in gates.iter().zip(ups).zip(lines) {
        prefetch(gate);
        prefetch(up);
        forward_line(order, gate, up, y);
    }
    if !y_tail.is_empty() {
        let mut y = [0; LINE];
        forward_line(order, &padded(gate_tail), &padded(up_tail), &mut y);
        y_tail.copy_from_slice(&y[..y_tail.len()]);
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn forward_line(order: __m512i, gate: &Line, up: &Line, y: &mut Line) {
    let [gate, up] = [gate, up].map(|line| load_even_odd(line));
    let silu_up = |i: usize| _mm512_mul_ps(_mm512_div_ps(gate[i], one_plus_exp(gate[i])), up[i]);
    store_even_odd(order, [silu_up(0), silu_up(1)], y);
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) fn backward(dy: &[u16], gate: &[u16], up: &[u16], dgate: &mut [u16], dup: &mut [u16]) {
    let order = even_odd_order();
    let [(dys, dy_tail), (gates, gate_tail), (ups, up_tail)] = [dy, gate, up].map(<[u16]>::as_chunks);
    let [(dgates, dgate_tail), (dups, dup_tail)] = [dgate, dup].map(<[u16]>::as_chunks_mut);
    for (((dy, gate), up), (dgate, dup)) in dys.iter().zip(gates).zip(ups).zip(dgates.iter_mut().zip(dups)) {
        prefetch(dy);
        prefetch(gate);
        prefetch(up);
        backward_line(order, [dy, gate, up], dgate, dup);
    }
    if !dgate_tail.is_empty() {
        let (mut dgate, mut dup) = ([0; LINE], [0; LINE]);
        let [dy, gate, up] = [dy_tail, gate_tail, up_tail].map(padded);
        backward_line(order, [&dy, &gate, &up], &mut dgate, &mut dup);
        dgate_tail.copy_from_slice(&dgate[..dgate_tail.len()]);
        dup_tail.copy_from_slice(&dup[..dup_tail.len()]);
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn backward_line(order: __m512i, inputs: [&Line; 3], to_dgate: &mut Line, to_dup: &mut Line) {
    let one = _mm512_set1_ps(1.0);
    let [dy, gate, up] = inputs.map(|line| load_even_odd(line));
    let (mut dgate, mut dup) = ([one; 2], [one; 2]);
    for i in 0..2 {
        let sigmoid = _mm512_div_ps(one, one_plus_exp(gate[i]));
        let silu = _mm512_mul_ps(gate[i], sigmoid);
        let slope = _mm512_fmadd_ps(silu, _mm512_sub_ps(one, sigmoid), sigmoid);
        dgate[i] = _mm512_mul_ps(_mm512_mul_ps(dy[i], up[i]), slope);
        dup[i] = _mm512_mul_ps(dy[i], silu);
    }
    store_even_odd(order, dgate, to_dgate);
    store_even_odd(order, dup, to_dup);
}

/// A line that begins with `tail` and ends with zeros.
fn padded(tail: &[u16]) -> Line {
    let mut line = [0; LINE];
    line[..tail.len()].copy_from_slice(tail);
    line
}

/// 1 + e^-x; infinite below -88.7.
#[inline]
#[target_feature(enable = "avx512f")]
fn one_plus_exp(x: __m512) -> __m512 {
    let round = _mm512_set1_ps(ROUND_MAGIC);
    let exponent = _mm512_mul_ps(x, _mm512_set1_ps(-LOG2_E));
    // With a NaN, max and min return their second operand. 2^128 has the bits of infinity.
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

/// The even and the odd elements of a line as f32.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_even_odd(line: &Line) -> [__m512; 2] {
    // SAFETY: the array is 512 bits.
    let both = unsafe { _mm512_loadu_si512(line.as_ptr().cast()) };
    let odd = _mm512_and_si512(both, _mm512_set1_epi32(0xffff_0000_u32 as i32));
    [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(both)), _mm512_castsi512_ps(odd)]
}

/// The permutation that interleaves 16 even and 16 odd elements.
#[inline]
#[target_feature(enable = "avx512f")]
fn even_odd_order() -> __m512i {
    let lanes: Line = std::array::from_fn(|lane| (lane / 2 + lane % 2 * LANES) as u16);
    // SAFETY: the array is 512 bits.
    unsafe { _mm512_loadu_si512(lanes.as_ptr().cast()) }
}

/// Rounds even and odd elements and stores them interleaved.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn store_even_odd(order: __m512i, values: [__m512; 2], line: &mut Line) {
    store_line(_mm512_permutexvar_epi16(order, Subnormals::Flush.narrow(values)), line);
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use zeroth_base::ActivationFn::Silu;

    use crate::{Isa, Pool, gated_activation, gated_activation_backward};

    #[test]
    fn extreme_gates_and_nan_match_the_portable_loops() {
        let far = [-3e38, -1e30, -1e3, -100.0, -89.0, -88.0, -87.0, -1.0, 0.0, 1.0, 87.0, 100.0, 1e30, 3e38];
        // Whole lines and a tail.
        let gate: Vec<bf16> = (0..77).map(|i| bf16::from_f32(far[i % far.len()])).collect();
        let with_nan = [&gate[..], &[bf16::NAN, bf16::INFINITY]].concat();
        let up: Vec<bf16> = (0..79).map(|i| bf16::from_f32(if i % 2 == 0 { 0.5 } else { -2.0 })).collect();
        let each = |isa: Isa| {
            let pool = Pool::on_isa(1, isa).unwrap();
            let [mut y, mut dgate, mut dup] = [(); 3].map(|()| vec![bf16::ONE; 79]);
            gated_activation(&pool, Silu, &with_nan, &up, &mut y);
            gated_activation_backward(&pool, Silu, &up, &with_nan, &up, &mut dgate, &mut dup);
            [y, dgate, dup].concat()
        };
        let expected = each(Isa::Portable);
        for &isa in Isa::available() {
            for (at, (found, expected)) in each(isa).iter().zip(&expected).enumerate() {
                let [found, expected] = [found, expected].map(|value| value.to_f32());
                let near = (found - expected).abs() <= expected.abs() / 128.0 + 1e-35;
                let same = found == expected || found.is_nan() && expected.is_nan();
                assert!(same || near, "{isa}, element {at}: {found} is not {expected}");
            }
        }
    }
}
