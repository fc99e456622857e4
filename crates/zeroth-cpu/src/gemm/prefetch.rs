//! Memory asked for before it is needed, a few cache lines at every beat of a product.
//!
//! A product out of the second-level cache leaves the memory idle, and what comes next would be waited for. Asking for a
//! line changes no result and cannot fail, so places need no check.

use super::driver::BEAT;

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

/// What to ask for during one product of two panels. It has few numbers and little to decide: the loads of tiles are limited
/// by the buffer that all loads share, so a number that the loop had to load from the stack would cost as much as a line.
/// `ADDS` where something will be added to.
pub(super) struct Ahead<A, const ADDS: bool> {
    /// The first of four rows that will be read, where the next beat asks, and elements from one to the next.
    line: *const A,
    pitch: usize,
    /// The row that will be added to, and bytes from it to its end and to the next one.
    sums: *const u8,
    right: usize,
    stride: usize,
}

impl<A, const ADDS: bool> Ahead<A, ADDS> {
    /// Nothing but a line that is there already.
    pub(super) const fn nothing(here: *const u8) -> Self {
        Self { line: here.cast(), pitch: 0, sums: here, right: 0, stride: 0 }
    }

    /// Reads four rows, `pitch` elements from one to the next.
    #[inline(always)]
    pub(super) fn read(&mut self, start: *const A, pitch: usize) {
        (self.line, self.pitch) = (start, pitch);
    }

    /// Adds to rows of `width` elements, `stride` elements apart, two of them a beat.
    #[inline(always)]
    pub(super) fn add<T>(&mut self, start: *const T, width: usize, stride: usize) {
        self.sums = start.cast();
        (self.right, self.stride) = ((width * size_of::<T>()).saturating_sub(1), stride * size_of::<T>());
    }

    /// Asks for the lines of one beat, those that will be read no further than in the second-level cache.
    #[inline(always)]
    pub(super) fn step(&mut self) {
        for row in [self.line, self.line.wrapping_add(self.pitch)] {
            let (row, below) = (row.cast::<u8>(), row.wrapping_add(2 * self.pitch).cast::<u8>());
            for line in [row, row.wrapping_add(LINE), below, below.wrapping_add(LINE)] {
                ask_to_read_later(line);
            }
        }
        self.line = self.line.wrapping_add(BEAT);
        if ADDS {
            for row in [self.sums, self.sums.wrapping_add(self.stride)] {
                ask_to_write(row);
                ask_to_write(row.wrapping_add(self.right));
            }
            self.sums = self.sums.wrapping_add(2 * self.stride);
        }
    }
}

#[allow(unsafe_code, reason = "a hint to the processor, which takes a pointer")]
#[inline(always)]
pub(super) fn ask_to_read_later(line: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
    // SAFETY: a hint, whatever the address is.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(line.cast()) }
}

#[allow(unsafe_code, reason = "a hint to the processor, which takes a pointer")]
#[inline(always)]
pub(crate) fn ask_to_write(line: *const u8) {
    use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
    // SAFETY: a hint, whatever the address is.
    unsafe { _mm_prefetch::<_MM_HINT_ET0>(line.cast()) }
}
