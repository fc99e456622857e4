//! Attention on AMX tiles, for bf16. The instructions are written in assembly, because the compiler has no stable names for
//! them.
//!
//! All matrices that tiles read or write are panels of scratch, 32 rows or columns each, so all tiles are configured in
//! full once. What a panel holds beyond a sequence's end or a head's last element is arbitrary: it reaches only rows and
//! columns of results that nobody reads. Along a sum, panels are filled up with zeros.
#![allow(unsafe_code, reason = "tile and vector instructions take pointers")]

mod backward;
mod differentiate;
mod forward;
mod queue;
mod softmax;

use std::arch::asm;
use std::arch::x86_64::{
    __m512, _mm512_add_epi32, _mm512_add_ps, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_fmadd_ps,
    _mm512_max_ps, _mm512_set1_ps, _mm512_slli_epi32, _mm512_sub_ps,
};

pub(super) use backward::backward;
pub(super) use forward::forward;
use zeroth_base::DType;

use super::sizes::ALIGN;
use crate::cpu::element::Element;
use crate::cpu::math::{POWERS, ROUND};
use crate::cpu::path::Path;

/// Bytes of a step of a panel: two tiles of 16 lines of 64 bytes. Elements of a line.
const STEP: usize = 2048;
const LINE: usize = 32;

/// Whether tiles multiply this type on this path.
pub(super) fn fit<T: Element>(path: Path) -> bool {
    path == Path::Amx && T::DTYPE == DType::Bf16
}

/// The calling thread's tiles, all configured in full, until it is dropped.
struct Tiles;

/// What `ldtilecfg` reads: palette 1, and rows and bytes a row of each tile.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    reserved: [u8; 15],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Tiles {
    fn configure() -> Self {
        let mut config = Config { palette: 1, reserved: [0; 15], row_bytes: [0; 16], rows: [0; 16] };
        config.row_bytes[..8].fill(64);
        config.rows[..8].fill(16);
        // SAFETY: `Path::available` has asked for the tiles, and the configuration is within their sizes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) }
        Self
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // The thread's state is small again for whoever switches it.
        // SAFETY: as in `configure`.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }
}

/// [`crate::cpu::math::exp2`] of 16 numbers.
#[inline]
#[target_feature(enable = "avx512f")]
fn exp2(x: __m512) -> __m512 {
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
fn bits(from: usize, to: usize) -> u32 {
    let below = |count: usize| if count >= 32 { u32::MAX } else { (1 << count) - 1 };
    below(to) & !below(from)
}

/// What is left of a buffer that is cut up, from a cache line on.
struct Room<'a>(&'a mut [f32]);

impl<'a> Room<'a> {
    fn new(buffer: &'a mut [f32]) -> Self {
        let skip = buffer.as_ptr().align_offset(64).min(ALIGN);
        Self(&mut buffer[skip..])
    }

    /// Cuts off `count` f32 elements.
    fn f32(&mut self, count: usize) -> &'a mut [f32] {
        let (front, rest) = std::mem::take(&mut self.0).split_at_mut(count);
        self.0 = rest;
        front
    }

    /// Cuts off `count` bf16 elements, an even number.
    fn bf16(&mut self, count: usize) -> &'a mut [u16] {
        bytemuck::cast_slice_mut(self.f32(count / 2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::math;

    #[test]
    fn sixteen_powers_of_two_are_those_of_math() {
        #[target_feature(enable = "avx512f")]
        fn each(x: [f32; 16]) -> [f32; 16] {
            // SAFETY: both are 16 numbers.
            unsafe { std::mem::transmute(exp2(std::mem::transmute::<[f32; 16], __m512>(x))) }
        }
        if !Path::available().contains(&Path::Amx) {
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
