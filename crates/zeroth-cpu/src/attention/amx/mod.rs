//! Attention on AMX, for bf16.
//!
//! All matrices that AMX reads or writes are panels in scratch, 32 rows or columns each, so TILECFG is loaded once, for full
//! tiles. Panel elements past the end of a sequence or of a head are arbitrary: they reach only rows and columns of results
//! that are never read. Along k, panels are padded with zeros.
#![allow(unsafe_code, reason = "AMX and vector instructions take pointers")]

mod backward;
mod context;
mod forward;
mod softmax;
mod softmax_backward;
mod store;
mod tile_matmul;

use std::arch::x86_64::__m512;

pub(super) use backward::backward;
pub(super) use forward::forward;
use zeroth_base::DType;

use super::blocking::PANEL;
use crate::avx512::{bit_range, exp2_with};
use crate::isa::Isa;
use zeroth_kernel::AttentionDims;
use zeroth_kernel::Element;

/// Bytes of a tile step of a panel: two tiles of 16 rows of 64 bytes.
const STEP: usize = 2048;
/// bf16 elements of a tile row.
const TILE_ROW: usize = 32;
/// f32 lanes of a vector register.
const LANES: usize = 16;

/// Whether AMX runs attention for this type on this instruction set.
pub(super) fn supports<T: Element>(isa: Isa) -> bool {
    isa == Isa::Amx && T::DTYPE == DType::Bf16
}

/// For each of 32 keys from position `key` on, a mask of the queries among 32 from position `query` on that see it, in a sequence
/// of these numbers of queries and keys; `None` where all queries see all keys.
fn visible_queries(
    dims: &AttentionDims,
    [queries, keys]: [usize; 2],
    key: usize,
    query: usize,
) -> Option<[u32; PANEL]> {
    let (end_key, end_query) = (key + PANEL, query + PANEL);
    if end_key <= keys
        && dims.seeing_queries(end_key - 1, queries).start <= query
        && end_query <= dims.seeing_queries(key, queries).end
    {
        return None;
    }
    Some(std::array::from_fn(|row| {
        let key = key + row;
        if key >= keys {
            return 0;
        }
        let seeing = dims.seeing_queries(key, queries);
        let last = seeing.end.clamp(query, end_query);
        bit_range(seeing.start.clamp(query, last) - query, last - query)
    }))
}

/// Coefficients of (2^t - 1) / t for |t| ≤ 1/2, highest order first. The relative error of 2^t is below 3e-6, far below the
/// rounding of a weight to bf16.
const EXP2_FAST: [f32; 4] = [9.582_853e-3, 5.590_642_6e-2, 0.240_241, 0.693_124_2];

/// 2^x of 16 elements with the short polynomial.
#[inline]
#[target_feature(enable = "avx512f")]
fn exp2_fast(x: __m512) -> __m512 {
    exp2_with(x, &EXP2_FAST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp2_fast_is_within_its_error_bound() {
        #[target_feature(enable = "avx512f")]
        fn each(x: [f32; 16]) -> [f32; 16] {
            // SAFETY: both are 16 f32.
            unsafe { std::mem::transmute(exp2_fast(std::mem::transmute::<[f32; 16], __m512>(x))) }
        }
        if !Isa::available().contains(&Isa::Amx) {
            return;
        }
        for first in (-13_000..1000).step_by(16) {
            let x: [f32; 16] = std::array::from_fn(|lane| (first + lane as i32) as f32 * 0.01);
            // SAFETY: AMX implies AVX-512.
            for (x, found) in x.into_iter().zip(unsafe { each(x) }) {
                let expected = f64::from(x.max(-126.0)).exp2();
                assert!((f64::from(found) / expected - 1.0).abs() < 3.2e-6, "2^{x} is not {found}");
            }
        }
        // SAFETY: as above.
        assert!(unsafe { each([f32::NAN; 16]) }.iter().all(|exp2_fast| exp2_fast.is_nan()));
    }
}
