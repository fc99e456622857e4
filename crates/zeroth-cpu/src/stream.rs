//! Stores that go past the caches, for results too large to be found there when they are read again.
//!
//! An ordinary store first reads the line that it writes to; one past the caches does not, which is a third of a copy's
//! traffic and half of a fill's. It pays where a result is larger than the cache and was not just read itself: moments
//! updated in place lie in the nearest cache already, and storing them past it halves the speed.

use bytemuck::Pod;

use super::isa::Isa;

/// Elements that are computed in the nearest cache before they leave for memory.
pub(super) const STAGE: usize = 256;
/// Bytes of a result from which on its stores go past the caches: twice the second-level cache of the processors meant.
const LARGE: usize = 4 << 20;
/// Bytes of a cache line.
pub(super) const LINE: usize = 64;
/// Bytes of a small page.
pub(super) const PAGE: usize = 4096;

/// Whether a result of this many bytes is stored past the caches.
pub(super) const fn worth(bytes: usize) -> bool {
    cfg!(target_arch = "x86_64") && bytes >= LARGE
}

/// A piece of a result on its own cache lines.
#[repr(C, align(64))]
struct Stage<T>([T; STAGE]);

/// Fills `to` piece by piece with `compute(first element, piece)`, past the caches where `past` says so.
///
/// `compute` must write every element and finds arbitrary ones.
#[inline(always)]
pub(super) fn staged<T: Pod>(to: &mut [T], past: bool, compute: impl FnMut(usize, &mut [T])) {
    staged_open(to, past, compute);
    if past {
        fence();
    }
}

/// As [`staged`], for one of many small results: [`fence`] comes after the last one. A fence waits until all that was stored
/// has left.
#[inline(always)]
pub(super) fn staged_open<T: Pod>(to: &mut [T], past: bool, mut compute: impl FnMut(usize, &mut [T])) {
    if !past {
        compute(0, to);
        return;
    }
    // What stands before the first whole line is stored as usual, so that all pieces after it begin on one.
    let head = to.as_ptr().align_offset(LINE).min(to.len());
    let (before, rest) = to.split_at_mut(head);
    compute(0, before);
    let mut stage = Stage([T::zeroed(); STAGE]);
    for (piece, to) in rest.chunks_mut(STAGE).enumerate() {
        let from = &mut stage.0[..to.len()];
        compute(head + piece * STAGE, from);
        store(from, to);
    }
}

/// to = from, past the caches where `to` covers whole lines.
///
/// [`fence`] comes after the last one and before another thread is told.
#[inline(always)]
pub(super) fn store<T: Pod>(from: &[T], to: &mut [T]) {
    assert!(from.len() == to.len(), "{} elements do not fill {}", from.len(), to.len());
    #[cfg(target_arch = "x86_64")]
    if to.as_ptr().addr().is_multiple_of(LINE) {
        lines(bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to));
        return;
    }
    to.copy_from_slice(from);
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "stores past the caches take pointers")]
#[inline(always)]
fn lines(from: &[u8], to: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    let whole = from.len() / LINE * LINE;
    for at in (0..whole).step_by(size_of::<__m128i>()) {
        // SAFETY: both are at least `whole` bytes long, and `to` begins on a line, so that each place is aligned. The
        // instructions are part of every x86-64 processor.
        unsafe {
            let value = _mm_loadu_si128(from.as_ptr().add(at).cast());
            _mm_stream_si128(to.as_mut_ptr().add(at).cast(), value);
        }
    }
    to[whole..].copy_from_slice(&from[whole..]);
}

/// to = from, past the caches.
///
/// [`fence`] comes after the last one and before another thread is told.
pub(super) fn copy<T: Pod>(path: Isa, from: &[T], to: &mut [T]) {
    assert!(from.len() == to.len(), "{} elements do not fill {}", from.len(), to.len());
    let (from, to): (&[u8], &mut [u8]) = (bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to));
    // What stands before the first whole line is stored as usual.
    let head = to.as_ptr().align_offset(LINE).min(to.len());
    let ((from_head, from), (to_head, to)) = (from.split_at(head), to.split_at_mut(head));
    to_head.copy_from_slice(from_head);
    let done = match path {
        #[cfg(target_arch = "x86_64")]
        #[allow(unsafe_code, reason = "the compiler cannot know what was detected")]
        // SAFETY: these paths are taken where AVX-512 was found.
        Isa::Avx512 | Isa::Amx if !to.is_empty() => unsafe { pages::copy(from, to) },
        _ => 0,
    };
    let mut from = &from[done..];
    for to in to[done..].chunks_mut(STAGE) {
        ask_ahead(from, 0, to.len());
        let (piece, rest) = from.split_at(to.len());
        store(piece, to);
        from = rest;
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "vector instructions take pointers")]
mod pages {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch, _mm512_loadu_si512, _mm512_stream_si512};

    use super::{LINE, PAGE};

    /// Pages that are copied side by side, a line of each in turn. The processor asks ahead for each page that it sees lines
    /// of, a few lines at a time: of one alone that is less than memory could give.
    const TOGETHER: usize = 4;

    /// Copies as many bytes as fill such pages and gives their number. `to` begins on a line.
    #[target_feature(enable = "avx512f")]
    pub(super) fn copy(from: &[u8], to: &mut [u8]) -> usize {
        assert!(from.len() == to.len() && to.as_ptr().addr().is_multiple_of(LINE));
        let blocks = from.chunks_exact(TOGETHER * PAGE).zip(to.chunks_exact_mut(TOGETHER * PAGE));
        let count = blocks.len();
        for (from, to) in blocks {
            let (from, to) = (from.as_ptr(), to.as_mut_ptr());
            for line in (0..PAGE).step_by(LINE) {
                for page in 0..TOGETHER {
                    let at = line + page * PAGE;
                    // SAFETY: a line inside both blocks, on a line of `to`; a hint, wherever it is for.
                    unsafe {
                        _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(at + TOGETHER * PAGE).cast());
                        _mm512_stream_si512(to.add(at).cast(), _mm512_loadu_si512(from.add(at).cast()));
                    }
                }
            }
        }
        count * TOGETHER * PAGE
    }
}

/// Asks for the lines of a slice, so that they are there when they are read. Nothing else comes of it.
#[inline(always)]
pub(super) fn ask_for<T>(values: &[T]) {
    #[cfg(target_arch = "x86_64")]
    #[allow(unsafe_code, reason = "an instruction of the processor")]
    for at in (0..size_of_val(values)).step_by(LINE) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: part of every x86-64 processor; the place is inside the slice.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(values.as_ptr().cast::<i8>().add(at)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = values;
}

/// Asks for what a loop over `values` will read a page after the `count` elements at `at`: the processor's own asking
/// ahead ends with a page.
#[inline(always)]
pub(super) fn ask_ahead<T>(values: &[T], at: usize, count: usize) {
    let first = at + PAGE / size_of::<T>();
    if let Some(values) = values.get(first..first + count) {
        ask_for(values);
    }
}

/// Everything stored past the caches so far is seen before anything stored later.
#[inline(always)]
pub(super) fn fence() {
    #[cfg(target_arch = "x86_64")]
    #[allow(unsafe_code, reason = "an instruction of the processor")]
    // SAFETY: part of every x86-64 processor.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_the_same_on_every_path_for_every_place_and_length() {
        let from: Vec<u16> = (0..40_000_u32).map(|i| (i * 7) as u16).collect();
        for path in Isa::available() {
            for (start, source) in [(0, 0), (1, 3), (31, 0), (32, 5)] {
                for length in [0, 1, 31, 32, 33, 500, 8191, 8192, 8193, 17_000, 33_000] {
                    let mut to = vec![9; 40_000];
                    copy(*path, &from[source..source + length], &mut to[start..start + length]);
                    fence();
                    assert!(
                        to[start..start + length] == from[source..source + length],
                        "{path}: {length} from {source} to {start}"
                    );
                    assert!(to[..start].iter().chain(&to[start + length..]).all(|v| *v == 9));
                }
            }
        }
    }

    #[test]
    fn a_result_is_the_same_past_the_caches_for_every_place_and_length() {
        for first in [0, 1, 7, 15, 16, 31] {
            for count in [0, 1, 15, 16, 255, 256, 257, 1000] {
                let (mut past, mut plain) = (vec![7u16; 1100], vec![7u16; 1100]);
                let compute = |at: usize, to: &mut [u16]| {
                    to.iter_mut().enumerate().for_each(|(i, to)| *to = (3 * (at + i)) as u16);
                };
                staged(&mut past[first..first + count], true, compute);
                staged(&mut plain[first..first + count], false, compute);
                assert!(past == plain, "{count} elements from {first} on");
                assert!(past[first..first + count].iter().enumerate().all(|(i, v)| *v == 3 * i as u16));
                assert!(past[first + count..].iter().chain(&past[..first]).all(|v| *v == 7));
            }
        }
    }
}
