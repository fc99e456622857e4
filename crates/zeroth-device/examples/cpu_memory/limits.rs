//! What the memory gives: a triad and a copy, with stores that go past the caches and with ordinary ones.
#![allow(unsafe_code, reason = "stores past the caches take pointers")]

use zeroth_device::cpu::{Chunks, Pool};

/// Elements that one task moves.
const PIECE: usize = 64 << 10;

/// to = x + 3 · y.
pub(crate) fn triad(pool: &Pool, x: &[f32], y: &[f32], to: &mut [f32], past: bool) {
    each(pool, to, |at, to| {
        let (x, y) = (&x[at..][..to.len()], &y[at..][..to.len()]);
        if past && wide() {
            // SAFETY: `wide` has found the instructions.
            unsafe { past::triad(x, y, to) };
        } else {
            for ((to, x), y) in to.iter_mut().zip(x).zip(y) {
                *to = x + 3.0 * y;
            }
        }
    });
}

/// to = from.
pub(crate) fn copy(pool: &Pool, from: &[f32], to: &mut [f32], past: bool) {
    each(pool, to, |at, to| {
        let from = &from[at..][..to.len()];
        if past && wide() {
            // SAFETY: `wide` has found the instructions.
            unsafe { past::copy(from, to) };
        } else {
            // Not `copy_from_slice`: the system's copy may choose stores past the caches by itself.
            for (to, from) in to.chunks_mut(1024).zip(from.chunks(1024)) {
                to.copy_from_slice(from);
            }
        }
    });
}

fn each(pool: &Pool, to: &mut [f32], task: impl Fn(usize, &mut [f32]) + Sync) {
    pool.each(Chunks::new(to, PIECE), |index, to| task(index * PIECE, to));
}

#[cfg(target_arch = "x86_64")]
fn wide() -> bool {
    is_x86_feature_detected!("avx512f")
}

#[cfg(target_arch = "x86_64")]
mod past {
    use std::arch::x86_64::{_mm_sfence, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_stream_ps};

    #[target_feature(enable = "avx512f")]
    pub(super) fn triad(x: &[f32], y: &[f32], to: &mut [f32]) {
        assert!(to.as_ptr().addr().is_multiple_of(64) && to.len().is_multiple_of(16));
        let three = _mm512_set1_ps(3.0);
        for at in (0..to.len()).step_by(16) {
            // SAFETY: all three have 16 elements at `at`, and the place written is aligned to 64 bytes.
            unsafe {
                let (x, y) = (_mm512_loadu_ps(x.as_ptr().add(at)), _mm512_loadu_ps(y.as_ptr().add(at)));
                _mm512_stream_ps(to.as_mut_ptr().add(at), _mm512_fmadd_ps(three, y, x));
            }
        }
        _mm_sfence();
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn copy(from: &[f32], to: &mut [f32]) {
        assert!(to.as_ptr().addr().is_multiple_of(64) && to.len().is_multiple_of(16));
        for at in (0..to.len()).step_by(16) {
            // SAFETY: as above.
            unsafe { _mm512_stream_ps(to.as_mut_ptr().add(at), _mm512_loadu_ps(from.as_ptr().add(at))) };
        }
        _mm_sfence();
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn wide() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
mod past {
    pub(super) unsafe fn triad(_: &[f32], _: &[f32], _: &mut [f32]) {}
    pub(super) unsafe fn copy(_: &[f32], _: &mut [f32]) {}
}
