//! Copies with non-temporal stores where the destination exceeds the caches.
//!
//! An ordinary store first reads the cache line it writes. A non-temporal store does not, and leaves the caches to the
//! shared-memory regions, which are reused.
#![allow(unsafe_code, reason = "copies between memory that other processes map and slices of ours")]

/// The destination size from which non-temporal stores are used: twice a typical L2 cache.
const LARGE: usize = 4 << 20;

/// Whether a destination of this size is written with non-temporal stores.
pub(crate) const fn past_caches(bytes: usize) -> bool {
    cfg!(target_arch = "x86_64") && bytes >= LARGE
}

/// to = from.
pub(crate) fn copy(from: &[u8], to: &mut [u8], past: bool) {
    assert!(from.len() == to.len(), "{} bytes do not fill {}", from.len(), to.len());
    // SAFETY: both are slices of this length, and one that is written overlaps no other.
    unsafe { copy_from(from.as_ptr(), to, past) }
}

/// Fills `to` with the bytes at `from`.
///
/// # Safety
///
/// `from` is valid for reads of `to.len()` bytes, does not overlap `to`, and is not written concurrently.
pub(crate) unsafe fn copy_from(from: *const u8, to: &mut [u8], past: bool) {
    #[cfg(target_arch = "x86_64")]
    if past {
        // SAFETY: the caller's promise.
        unsafe { lines(from, to) };
        return;
    }
    let _ = past;
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) }
}

/// # Safety
/// As [`copy_from`].
#[cfg(target_arch = "x86_64")]
unsafe fn lines(from: *const u8, to: &mut [u8]) {
    use std::arch::x86_64::{
        __m128i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm_stream_si128,
    };
    const LINE: usize = 64;
    /// A page: the hardware prefetcher stops at page boundaries.
    const AHEAD: usize = 4096;
    let head = to.as_ptr().align_offset(LINE).min(to.len());
    let whole = (to.len() - head) / LINE * LINE;
    let tail = head + whole;
    // SAFETY: all places are below `to.len()`, by the sums above; what is stored past the caches is aligned, because
    // `head` reaches to a line. The instructions are part of every x86-64 processor. The fence makes the stores seen
    // before any later one, so before a counter that tells another rank.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), head);
        for line in (head..tail).step_by(LINE) {
            // A prefetch beyond the end has no effect.
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(line + AHEAD).cast());
            for at in (line..line + LINE).step_by(size_of::<__m128i>()) {
                _mm_stream_si128(to.as_mut_ptr().add(at).cast(), _mm_loadu_si128(from.add(at).cast()));
            }
        }
        std::ptr::copy_nonoverlapping(from.add(tail), to.as_mut_ptr().add(tail), to.len() - tail);
        _mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_the_same_past_the_caches_for_every_place_and_length() {
        let from: Vec<u8> = (0..1000_u32).map(|i| (i * 7 % 251) as u8).collect();
        for (start, source) in [(0, 0), (1, 3), (63, 0), (64, 5)] {
            for length in [0, 1, 63, 64, 65, 500] {
                let (mut past, mut plain) = (vec![9; 700], vec![9; 700]);
                copy(&from[source..source + length], &mut past[start..start + length], true);
                copy(&from[source..source + length], &mut plain[start..start + length], false);
                assert!(past == plain, "{length} bytes from {source} to {start}");
                assert!(past[start..start + length] == from[source..source + length]);
            }
        }
    }
}
