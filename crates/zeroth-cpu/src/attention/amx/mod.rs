//! Attention on AMX tiles, for bf16. The instructions are written in assembly, because the compiler has no stable names for
//! them.
//!
//! All matrices that tiles read or write are panels of scratch, 32 rows or columns each, so all tiles are configured in
//! full once. What a panel holds beyond a sequence's end or a head's last element is arbitrary: it reaches only rows and
//! columns of results that nobody reads. Along a sum, panels are filled up with zeros.
#![allow(unsafe_code, reason = "tile and vector instructions take pointers")]

mod backward;
mod forward;
mod score_grads;
mod softmax;
mod store;
mod tile_matmul;

use std::arch::asm;
use std::arch::x86_64::{
    __m512, _mm512_add_epi32, _mm512_add_ps, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_fmadd_ps,
    _mm512_max_ps, _mm512_set1_ps, _mm512_slli_epi32, _mm512_sub_ps,
};

pub(super) use backward::backward;
pub(super) use forward::forward;
use zeroth_base::DType;

use super::blocking::PANEL;
use crate::avx512::bits;
use crate::isa::Isa;
use crate::math::ROUND;
use zeroth_kernel::AttentionDims;
use zeroth_kernel::Element;

/// Bytes of a step of a panel: two tiles of 16 lines of 64 bytes. Elements of a line.
const STEP: usize = 2048;
const LINE: usize = 32;
/// Numbers of a register.
const LANES: usize = 16;

/// Whether tiles multiply this type on this path.
pub(super) fn fit<T: Element>(path: Isa) -> bool {
    path == Isa::Amx && T::DTYPE == DType::Bf16
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
        // SAFETY: `Isa::available` has asked for the tiles, and the configuration is within their sizes.
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

/// Bits of the queries among 32, from row `query` on, that see each of 32 keys from row `key` on, in a sequence that ends at
/// `end`; `None` where all of them see all keys.
fn seen(dims: &AttentionDims, end: usize, key: usize, query: usize) -> Option<[u32; PANEL]> {
    let behind = query + PANEL;
    if key + PANEL <= query + 1 && behind <= dims.end_query(end, key) {
        return None;
    }
    Some(std::array::from_fn(|row| {
        let key = key + row;
        if key >= end {
            return 0;
        }
        let last = dims.end_query(end, key).clamp(query, behind);
        bits(key.clamp(query, last) - query, last - query)
    }))
}

/// The series of (2^t - 1) / t for t within half of 0, highest first; relative error of 2^t below 3e-6, far below that of a
/// weight rounded to bf16.
const SERIES: [f32; 4] = [9.582_853e-3, 5.590_642_6e-2, 0.240_241, 0.693_124_2];

/// 2 to the power x of 16 numbers up to 126; below -126 it stays 2^-126.
#[inline]
#[target_feature(enable = "avx512f")]
fn power(x: __m512) -> __m512 {
    let round = _mm512_set1_ps(ROUND);
    // The second operand is what comes out where one is no number.
    let near = _mm512_max_ps(_mm512_set1_ps(-126.0), x);
    let shifted = _mm512_add_ps(near, round);
    let t = _mm512_sub_ps(near, _mm512_sub_ps(shifted, round));
    let mut p = _mm512_set1_ps(SERIES[0]);
    for &coefficient in &SERIES[1..] {
        p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(coefficient));
    }
    let value = _mm512_castps_si512(_mm512_fmadd_ps(p, t, _mm512_set1_ps(1.0)));
    _mm512_castsi512_ps(_mm512_add_epi32(value, _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_are_near_enough() {
        #[target_feature(enable = "avx512f")]
        fn each(x: [f32; 16]) -> [f32; 16] {
            // SAFETY: both are 16 numbers.
            unsafe { std::mem::transmute(power(std::mem::transmute::<[f32; 16], __m512>(x))) }
        }
        if !Isa::available().contains(&Isa::Amx) {
            return;
        }
        for first in (-13_000..1000).step_by(16) {
            let x: [f32; 16] = std::array::from_fn(|lane| (first + lane as i32) as f32 * 0.01);
            // SAFETY: a machine with tiles has AVX-512.
            for (x, found) in x.into_iter().zip(unsafe { each(x) }) {
                let expected = f64::from(x.max(-126.0)).exp2();
                assert!((f64::from(found) / expected - 1.0).abs() < 3.2e-6, "2^{x} is not {found}");
            }
        }
        // SAFETY: as above.
        assert!(unsafe { each([f32::NAN; 16]) }.iter().all(|power| power.is_nan()));
    }
}
