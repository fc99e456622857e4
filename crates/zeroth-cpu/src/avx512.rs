//! What kernels on AMX tiles share beside the products: scratch cut into panels, powers of 2, masks.
#![allow(unsafe_code, reason = "vector instructions take pointers")]

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_add_epi32, _mm512_add_ps, _mm512_castps_si512, _mm512_castsi512_ps,
    _mm512_cvtne2ps_pbh, _mm512_fmadd_ps, _mm512_max_ps, _mm512_set1_ps, _mm512_slli_epi32, _mm512_sub_ps,
};

use super::gemm::{ALIGN, ask_to_write};
use super::math::{POWERS, ROUND};

/// [`crate::math::exp2`] of 16 numbers.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn exp2(x: __m512) -> __m512 {
    let round = _mm512_set1_ps(ROUND);
    // The second operand is what comes out where one is no number.
    let near = _mm512_max_ps(_mm512_set1_ps(-126.0), x);
    let shifted = _mm512_add_ps(near, round);
    let t = _mm512_sub_ps(near, _mm512_sub_ps(shifted, round));
    let mut p = _mm512_set1_ps(POWERS[0]);
    for &coefficient in &POWERS[1..] {
        p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(coefficient));
    }
    let value = _mm512_castps_si512(_mm512_fmadd_ps(p, t, _mm512_set1_ps(1.0)));
    _mm512_castsi512_ps(_mm512_add_epi32(value, _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted))))
}

/// Bits `from` to `to` of 32.
#[inline]
pub(super) fn bits(from: usize, to: usize) -> u32 {
    let below = |count: usize| if count >= 32 { u32::MAX } else { (1 << count) - 1 };
    below(to) & !below(from)
}

/// What is left of a buffer that is cut up, from a cache line on.
pub(super) struct Room<'a>(&'a mut [f32]);

impl<'a> Room<'a> {
    pub(super) fn new(buffer: &'a mut [f32]) -> Self {
        let skip = buffer.as_ptr().align_offset(64).min(ALIGN);
        Self(&mut buffer[skip..])
    }

    /// Cuts off `count` f32 elements.
    pub(super) fn f32(&mut self, count: usize) -> &'a mut [f32] {
        let (front, rest) = std::mem::take(&mut self.0).split_at_mut(count);
        self.0 = rest;
        front
    }

    /// Cuts off `count` bf16 elements, an even number.
    pub(super) fn bf16(&mut self, count: usize) -> &'a mut [u16] {
        bytemuck::cast_slice_mut(self.f32(count / 2))
    }
}

/// Asks for the lines of a row that will be written. Where rows are far apart, the processor does not do so by itself.
#[inline]
pub(super) fn ask_to_write_row<T>(row: &[T]) {
    for line in row.chunks(64 / size_of::<T>()) {
        ask_to_write(line.as_ptr().cast());
    }
}

/// 32 numbers rounded to bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) fn joined(halves: [__m512; 2]) -> __m512i {
    // SAFETY: both are 512 bits.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(halves[1], halves[0])) }
}

/// The column of a row that stands in column `column` of two rows that were merged by halves of 4: the order in which two
/// lines are merged fastest.
pub(super) const fn merged(column: usize) -> usize {
    let (half, at) = (column / 16, column % 16);
    at / 4 * 8 + half * 4 + at % 4
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Isa, math};

    #[test]
    fn sixteen_powers_of_two_are_those_of_math() {
        #[target_feature(enable = "avx512f")]
        fn each(x: [f32; 16]) -> [f32; 16] {
            // SAFETY: both are 16 numbers.
            unsafe { std::mem::transmute(exp2(std::mem::transmute::<[f32; 16], __m512>(x))) }
        }
        if !Isa::available().contains(&Isa::Amx) {
            return;
        }
        for first in (-1400..200).step_by(16) {
            let x = std::array::from_fn(|lane| (first + lane as i32) as f32 * 0.1);
            // SAFETY: a machine with tiles has AVX-512.
            let found = unsafe { each(x) };
            assert_eq!(found.map(f32::to_bits), x.map(|x| math::exp2::<true>(x).to_bits()));
        }
        // SAFETY: as above.
        assert!(unsafe { each([f32::NAN; 16]) }.iter().all(|power| power.is_nan()));
    }

    #[test]
    fn bits_are_those_between() {
        assert_eq!(
            [bits(0, 32), bits(0, 40), bits(3, 5), bits(5, 5), bits(40, 50)],
            [u32::MAX, u32::MAX, 24, 0, 0]
        );
    }
}
