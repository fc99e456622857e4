//! Non-temporal stores and prefetches, for results larger than the cache.
//!
//! An ordinary store reads its cache line first; a non-temporal one does not, which saves a third of a copy's traffic and
//! half of a fill's. It pays where the result exceeds the cache and was not just read: moments updated in place are in L1
//! already, and non-temporal stores halve their speed.

use bytemuck::Pod;

use super::isa::Isa;

/// Elements computed in L1 before they are stored to memory.
pub(super) const STAGE: usize = 256;
/// Bytes from which a result is stored non-temporally: twice the L2 of current server CPUs.
const NON_TEMPORAL_MIN: usize = 4 << 20;
/// Bytes of a cache line.
pub(super) const CACHE_LINE: usize = 64;
/// Bytes of a base page.
pub(super) const PAGE: usize = 4096;

/// Whether a result of this size is stored non-temporally.
pub(super) const fn bypasses_cache(bytes: usize) -> bool {
    cfg!(target_arch = "x86_64") && bytes >= NON_TEMPORAL_MIN
}

/// A cache-line-aligned staging buffer.
#[repr(C, align(64))]
struct Stage<T>([T; STAGE]);

/// Fills `to` chunk by chunk with `compute(first element, chunk)`, with non-temporal stores if `non_temporal`.
///
/// `compute` must write every element; their previous values are arbitrary.
#[inline(always)]
pub(super) fn staged<T: Pod>(to: &mut [T], non_temporal: bool, compute: impl FnMut(usize, &mut [T])) {
    staged_unfenced(to, non_temporal, compute);
    if non_temporal {
        fence();
    }
}

/// [`staged`] without the fence, for one of many small results. The caller must call [`fence`] after the last one.
#[inline(always)]
pub(super) fn staged_unfenced<T: Pod>(
    to: &mut [T],
    non_temporal: bool,
    mut compute: impl FnMut(usize, &mut [T]),
) {
    if !non_temporal {
        compute(0, to);
        return;
    }
    // Ordinary stores up to the first cache line, so that all chunks after it are aligned.
    let head = to.as_ptr().align_offset(CACHE_LINE).min(to.len());
    let (before, rest) = to.split_at_mut(head);
    compute(0, before);
    let mut stage = Stage([T::zeroed(); STAGE]);
    for (piece, to) in rest.chunks_mut(STAGE).enumerate() {
        let from = &mut stage.0[..to.len()];
        compute(head + piece * STAGE, from);
        store_non_temporal(from, to);
    }
}

/// Copies `from` to `to` with non-temporal stores, if `to` is aligned to cache lines.
///
/// The caller must call [`fence`] after the last copy, before it notifies another thread.
#[inline(always)]
pub(super) fn store_non_temporal<T: Pod>(from: &[T], to: &mut [T]) {
    assert!(from.len() == to.len(), "{} elements do not fill {}", from.len(), to.len());
    #[cfg(target_arch = "x86_64")]
    if to.as_ptr().addr().is_multiple_of(CACHE_LINE) {
        store_lines(bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to));
        return;
    }
    to.copy_from_slice(from);
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "non-temporal stores take pointers")]
#[inline(always)]
fn store_lines(from: &[u8], to: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    let whole = from.len() / CACHE_LINE * CACHE_LINE;
    for at in (0..whole).step_by(size_of::<__m128i>()) {
        // SAFETY: both slices have at least `whole` bytes, and `to` is aligned to a cache line, so every address is aligned.
        // SSE2 is part of x86-64.
        unsafe {
            let value = _mm_loadu_si128(from.as_ptr().add(at).cast());
            _mm_stream_si128(to.as_mut_ptr().add(at).cast(), value);
        }
    }
    to[whole..].copy_from_slice(&from[whole..]);
}

/// Copies `from` to `to` with non-temporal stores.
///
/// The caller must call [`fence`] after the last copy, before it notifies another thread.
pub(super) fn copy<T: Pod>(isa: Isa, from: &[T], to: &mut [T]) {
    assert!(from.len() == to.len(), "{} elements do not fill {}", from.len(), to.len());
    let (from, to): (&[u8], &mut [u8]) = (bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to));
    // Ordinary stores up to the first cache line.
    let head = to.as_ptr().align_offset(CACHE_LINE).min(to.len());
    let ((from_head, from), (to_head, to)) = (from.split_at(head), to.split_at_mut(head));
    to_head.copy_from_slice(from_head);
    let done = match isa {
        #[cfg(target_arch = "x86_64")]
        #[allow(unsafe_code, reason = "calls functions compiled for instructions found at run time")]
        // SAFETY: these instruction sets are available only with AVX-512.
        Isa::Avx512 | Isa::Amx if !to.is_empty() => unsafe { pages::copy(from, to) },
        _ => 0,
    };
    let mut from = &from[done..];
    for to in to[done..].chunks_mut(STAGE) {
        prefetch_next_page(from, 0, to.len());
        let (piece, rest) = from.split_at(to.len());
        store_non_temporal(piece, to);
        from = rest;
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "vector instructions take pointers")]
mod pages {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch, _mm512_loadu_si512, _mm512_stream_si512};

    use super::{CACHE_LINE, PAGE};

    /// Pages copied in parallel, one cache line of each in turn. The hardware prefetcher follows each page separately, and a
    /// single stream does not saturate the memory bandwidth.
    const PAGES: usize = 4;

    /// Copies whole groups of pages and returns the number of bytes. `to` is aligned to a cache line.
    #[target_feature(enable = "avx512f")]
    pub(super) fn copy(from: &[u8], to: &mut [u8]) -> usize {
        assert!(from.len() == to.len() && to.as_ptr().addr().is_multiple_of(CACHE_LINE));
        let blocks = from.chunks_exact(PAGES * PAGE).zip(to.chunks_exact_mut(PAGES * PAGE));
        let count = blocks.len();
        for (from, to) in blocks {
            let (from, to) = (from.as_ptr(), to.as_mut_ptr());
            for line in (0..PAGE).step_by(CACHE_LINE) {
                for page in 0..PAGES {
                    let at = line + page * PAGE;
                    // SAFETY: a cache line inside both blocks, aligned in `to`; a prefetch never faults.
                    unsafe {
                        _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(at + PAGES * PAGE).cast());
                        _mm512_stream_si512(to.add(at).cast(), _mm512_loadu_si512(from.add(at).cast()));
                    }
                }
            }
        }
        count * PAGES * PAGE
    }
}

/// Prefetches a slice into L1.
#[inline(always)]
pub(super) fn prefetch_read<T>(values: &[T]) {
    #[cfg(target_arch = "x86_64")]
    #[allow(unsafe_code, reason = "the intrinsic is unsafe")]
    for at in (0..size_of_val(values)).step_by(CACHE_LINE) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch never faults, and the address is inside the slice.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(values.as_ptr().cast::<i8>().add(at)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = values;
}

/// Prefetches what a loop over `values` reads one page after the `count` elements at `at`: the hardware prefetcher stops at
/// page boundaries.
#[inline(always)]
pub(super) fn prefetch_next_page<T>(values: &[T], at: usize, count: usize) {
    let first = at + PAGE / size_of::<T>();
    if let Some(values) = values.get(first..first + count) {
        prefetch_read(values);
    }
}

/// Orders all earlier non-temporal stores before any later store.
#[inline(always)]
pub(super) fn fence() {
    #[cfg(target_arch = "x86_64")]
    #[allow(unsafe_code, reason = "the intrinsic is unsafe")]
    // SAFETY: SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_exact_for_every_isa_alignment_and_length() {
        let from: Vec<u16> = (0..40_000_u32).map(|i| (i * 7) as u16).collect();
        for isa in Isa::available() {
            for (start, source) in [(0, 0), (1, 3), (31, 0), (32, 5)] {
                for length in [0, 1, 31, 32, 33, 500, 8191, 8192, 8193, 17_000, 33_000] {
                    let mut to = vec![9; 40_000];
                    copy(*isa, &from[source..source + length], &mut to[start..start + length]);
                    fence();
                    assert!(
                        to[start..start + length] == from[source..source + length],
                        "{isa}: {length} from {source} to {start}"
                    );
                    assert!(to[..start].iter().chain(&to[start + length..]).all(|v| *v == 9));
                }
            }
        }
    }

    #[test]
    fn non_temporal_results_are_the_same_for_every_alignment_and_length() {
        for first in [0, 1, 7, 15, 16, 31] {
            for count in [0, 1, 15, 16, 255, 256, 257, 1000] {
                let (mut non_temporal, mut plain) = (vec![7u16; 1100], vec![7u16; 1100]);
                let compute = |at: usize, to: &mut [u16]| {
                    to.iter_mut().enumerate().for_each(|(i, to)| *to = (3 * (at + i)) as u16);
                };
                staged(&mut non_temporal[first..first + count], true, compute);
                staged(&mut plain[first..first + count], false, compute);
                assert!(non_temporal == plain, "{count} elements from {first} on");
                assert!(
                    non_temporal[first..first + count].iter().enumerate().all(|(i, v)| *v == 3 * i as u16)
                );
                assert!(non_temporal[first + count..].iter().chain(&non_temporal[..first]).all(|v| *v == 7));
            }
        }
    }
}
