//! The sum of any number of ranks' bf16 blocks with its squares, in one pass: the sums stay in registers, where the portable
//! loops write and read them again for every rank.
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]

use std::arch::x86_64::{
    __m512, _mm512_add_ps, _mm512_castps512_ps256, _mm512_cvtps_pd, _mm512_extractf32x8_ps, _mm512_fmadd_pd,
    _mm512_loadu_pd, _mm512_setzero_ps, _mm512_storeu_pd, _mm512_stream_ps,
};

use zeroth_base::DType;
use zeroth_kernel::{BLOCK, Element};

use crate::avx512_bf16::{
    LANES, LINE, load, load_f32, nearest, prefetch, store_f32, store_low_halves, widen,
};
use crate::isa::Isa;
use crate::norm::{SQUARES, fold};

/// Vectors summed together over all ranks; more would not leave enough registers.
const VECTORS: usize = 8;

/// Whether this kernel sums parts of type `A` under `isa`.
pub(super) fn fits<A: Element>(isa: Isa) -> bool {
    matches!(isa, Isa::Avx512 | Isa::Amx) && A::DTYPE == DType::Bf16
}

/// A cache line of f32.
#[repr(C, align(64))]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct F32Line([f32; LANES]);

/// `to` = the sum of `part(rank)` over ranks, plus `to` itself with `add`; returns the sum of squares of `to`, in the tree of
/// [`crate::norm`]. With `non_temporal` stores bypass the caches where `to` is aligned to them.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
pub(super) fn sum_block<'a>(
    ranks: usize,
    part: impl Fn(usize) -> &'a [u16; BLOCK],
    to: &mut [f32; BLOCK],
    add: bool,
    non_temporal: bool,
) -> f64 {
    if non_temporal
        && !add
        && let Ok(lines) = bytemuck::try_cast_slice_mut::<f32, F32Line>(to)
    {
        return sum(ranks, part, |vector, sum| {
            // SAFETY: the line is aligned to 64 bytes.
            unsafe { _mm512_stream_ps(lines[vector].0.as_mut_ptr(), sum) };
            sum
        });
    }
    let (vectors, _) = to.as_chunks_mut();
    sum(ranks, part, |vector, sum| {
        let sum = if add { _mm512_add_ps(load_f32(&vectors[vector]), sum) } else { sum };
        store_f32(sum, &mut vectors[vector]);
        sum
    })
}

/// As [`sum_block`], rounded to bf16; the squares are those of the rounded sums.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
pub(super) fn sum_block_bf16<'a>(
    ranks: usize,
    part: impl Fn(usize) -> &'a [u16; BLOCK],
    to: &mut [u16; BLOCK],
    add: bool,
) -> f64 {
    let (vectors, _) = to.as_chunks_mut();
    sum(ranks, part, |vector, sum| {
        let rounded = nearest(if add { _mm512_add_ps(load(&vectors[vector]), sum) } else { sum });
        store_low_halves(rounded, &mut vectors[vector]);
        widen(rounded)
    })
}

/// Sums a block and passes every vector of sums to `store`, which returns it as stored; returns the sum of squares of that.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
fn sum<'a>(
    ranks: usize,
    part: impl Fn(usize) -> &'a [u16; BLOCK],
    mut store: impl FnMut(usize, __m512) -> __m512,
) -> f64 {
    const PER_BLOCK: usize = BLOCK / LANES;
    let mut squares = [0.0; SQUARES];
    for first in (0..PER_BLOCK).step_by(VECTORS) {
        let mut sums = [_mm512_setzero_ps(); VECTORS];
        for rank in 0..ranks {
            let (vectors, _) = part(rank).as_chunks::<LANES>();
            for (i, sum) in sums.iter_mut().enumerate() {
                let from = &vectors[first + i];
                if (i * LANES).is_multiple_of(LINE) {
                    prefetch(from);
                }
                // Not added to zero: -0 must stay.
                *sum = if rank == 0 { load(from) } else { _mm512_add_ps(*sum, load(from)) };
            }
        }
        let (lanes, _) = squares.as_chunks_mut::<LANES>();
        for (i, sum) in sums.into_iter().enumerate() {
            let vector = first + i;
            add_squares(store(vector, sum), &mut lanes[vector % (SQUARES / LANES)]);
        }
    }
    fold(squares)
}

/// Adds the squares of 16 numbers to as many sums.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn add_squares(values: __m512, sums: &mut [f64; LANES]) {
    let halves = [_mm512_castps512_ps256(values), _mm512_extractf32x8_ps::<1>(values)];
    for (half, sums) in halves.into_iter().zip(sums.as_chunks_mut::<{ LANES / 2 }>().0) {
        let wide = _mm512_cvtps_pd(half);
        // SAFETY: the array is 512 bits.
        unsafe {
            _mm512_storeu_pd(sums.as_mut_ptr(), _mm512_fmadd_pd(wide, wide, _mm512_loadu_pd(sums.as_ptr())));
        }
    }
}
