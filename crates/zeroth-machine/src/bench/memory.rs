//! Memory bandwidth: a STREAM triad and a copy, with non-temporal stores where the CPU has them.
#![allow(unsafe_code, reason = "non-temporal stores take pointers")]

use zeroth_cpu::{Chunks, Pool};

/// The triad: the limit of kernels that read and write.
pub const TRIAD: &str = "triad past the caches";
/// The copy: the limit of copies.
pub const COPY: &str = "copy past the caches";

/// Elements per task.
const PIECE: usize = 64 << 10;

/// to = x + 3 · y.
pub(super) fn triad(pool: &Pool, x: &[f32], y: &[f32], to: &mut [f32]) {
    each(pool, to, |at, to| {
        let (x, y) = (&x[at..][..to.len()], &y[at..][..to.len()]);
        if can_stream(to) {
            // SAFETY: `can_stream` has found the instructions.
            unsafe { non_temporal::triad(x, y, to) };
        } else {
            for ((to, x), y) in to.iter_mut().zip(x).zip(y) {
                *to = x + 3.0 * y;
            }
        }
    });
}

/// to = from. `to` should be aligned to a cache line.
///
/// # Panics
/// When `from` is shorter than `to`.
pub fn copy(pool: &Pool, from: &[f32], to: &mut [f32]) {
    each(pool, to, |at, to| {
        let from = &from[at..][..to.len()];
        if can_stream(to) {
            // SAFETY: `can_stream` has found the instructions.
            unsafe { non_temporal::copy(from, to) };
        } else {
            to.copy_from_slice(from);
        }
    });
}

fn each(pool: &Pool, to: &mut [f32], task: impl Fn(usize, &mut [f32]) + Sync) {
    pool.each(Chunks::new(to, PIECE), |index, to| task(index * PIECE, to));
}

/// Whether non-temporal stores can write this slice.
#[cfg(target_arch = "x86_64")]
fn can_stream(to: &[f32]) -> bool {
    is_x86_feature_detected!("avx512f")
        && to.as_ptr().addr().is_multiple_of(64)
        && to.len().is_multiple_of(16)
}

#[cfg(target_arch = "x86_64")]
mod non_temporal {
    use std::arch::x86_64::{_mm_sfence, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_stream_ps};

    #[target_feature(enable = "avx512f")]
    pub(super) fn triad(x: &[f32], y: &[f32], to: &mut [f32]) {
        assert!(to.as_ptr().addr().is_multiple_of(64) && to.len().is_multiple_of(16));
        assert!(x.len() == to.len() && y.len() == to.len());
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

    /// Elements of a page, and pages copied side by side: the hardware prefetcher does not saturate memory from one page. (The
    /// triad's two sources are enough.) This is not the loop of the copy kernel, which it is the limit of.
    const PAGE: usize = 4096 / size_of::<f32>();
    const TOGETHER: usize = 4;

    #[target_feature(enable = "avx512f")]
    pub(super) fn copy(from: &[f32], to: &mut [f32]) {
        assert!(to.as_ptr().addr().is_multiple_of(64) && to.len().is_multiple_of(16));
        assert!(from.len() == to.len());
        let line = |at: usize, to: &mut [f32]| {
            // SAFETY: as above.
            unsafe { _mm512_stream_ps(to.as_mut_ptr().add(at), _mm512_loadu_ps(from.as_ptr().add(at))) };
        };
        let whole = to.len() / (TOGETHER * PAGE) * (TOGETHER * PAGE);
        for block in (0..whole).step_by(TOGETHER * PAGE) {
            for at in (block..block + PAGE).step_by(16) {
                for page in 0..TOGETHER {
                    line(at + page * PAGE, to);
                }
            }
        }
        for at in (whole..to.len()).step_by(16) {
            line(at, to);
        }
        _mm_sfence();
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn can_stream(_: &[f32]) -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
mod non_temporal {
    pub(super) unsafe fn triad(_: &[f32], _: &[f32], _: &mut [f32]) {}
    pub(super) unsafe fn copy(_: &[f32], _: &mut [f32]) {}
}

#[cfg(test)]
mod tests {
    use super::super::operands::{Operands, of};
    use super::*;

    #[test]
    fn triad_and_copy_write_every_element_at_any_alignment() {
        let pool = Pool::new(2);
        let count = 2 * PIECE + 48;
        let x: Vec<f32> = (0..count).map(|i| i as f32).collect();
        let y: Vec<f32> = (0..count).map(|i| (i % 7) as f32).collect();
        // Aligned, with non-temporal stores, and unaligned, without.
        let mut operands = Operands::new([4 * count]).unwrap();
        let [to] = operands.split().map(of::<f32>);
        for skip in [0, 1, 16] {
            triad(&pool, &x, &y, &mut to[skip..]);
            assert!((skip..count).all(|i| to[i] == x[i - skip] + 3.0 * y[i - skip]));
            copy(&pool, &x, &mut to[skip..]);
            assert_eq!(to[skip..], x[..count - skip]);
        }
    }
}
