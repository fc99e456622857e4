//! Memory asked for before it is needed, a few cache lines at every beat of a product.
//!
//! A product out of the second-level cache leaves the memory idle, and what comes next would be waited for. Asking for a
//! line changes no result and cannot fail, so places need no check.

use super::blocks::BEAT;

/// Bytes of a cache line.
const LINE: usize = 64;
/// Lines asked for at a beat.
const LINES: usize = 4;

/// What to ask for during one product of two panels: straight code, which costs nothing beside the product.
pub(super) struct Ahead {
    /// Whether rows are asked for no further than the second-level cache.
    second: bool,
    /// Lines of rows that will be read.
    reads: [Option<Lines>; 2],
    /// Lines of what will be added to, both ends of two rows.
    adds: Option<Lines>,
}

/// The lines of a beat, and bytes from each to the one of the next beat.
type Lines = ([*const u8; LINES], usize);

impl Ahead {
    pub(super) const fn nothing(second: bool) -> Self {
        Self { second, reads: [None, None], adds: None }
    }

    /// Reads `rows` rows, `row` elements from one to the next: up to four of them, or every other cache line of up to eight,
    /// whose neighbours the processor brings by itself.
    #[inline(always)]
    pub(super) fn read<T>(&mut self, start: *const T, row: usize, rows: usize) {
        let line = |at: usize| start.wrapping_add(at.min(rows.saturating_sub(1)) * row).cast::<u8>();
        let both = |at: usize| {
            [line(at), line(at).wrapping_add(LINE), line(at + 1), line(at + 1).wrapping_add(LINE)]
        };
        let fours = match rows {
            0 => return,
            1 | 2 => [Some(both(0)), None],
            3 | 4 => [Some(both(0)), Some(both(2))],
            _ => [0, 4].map(|at| Some([line(at), line(at + 1), line(at + 2), line(at + 3)])),
        };
        self.reads = fours.map(|lines| lines.map(|lines| (lines, BEAT * size_of::<T>())));
    }

    /// Adds to rows of `width` elements, `stride` elements apart, two of them a beat.
    #[inline(always)]
    pub(super) fn add<T>(&mut self, start: *const T, width: usize, stride: usize) {
        let (row, right) = (start.cast::<u8>(), (width * size_of::<T>()).saturating_sub(1));
        let next = row.wrapping_add(stride * size_of::<T>());
        let lines = [row, row.wrapping_add(right), next, next.wrapping_add(right)];
        self.adds = Some((lines, 2 * stride * size_of::<T>()));
    }

    /// Asks for the lines of one beat.
    #[inline(always)]
    pub(super) fn step(&mut self) {
        for (lines, on) in self.reads.iter_mut().flatten() {
            for line in lines {
                if self.second {
                    ask_to_read_later(*line);
                } else {
                    ask_to_read(*line);
                }
                *line = line.wrapping_add(*on);
            }
        }
        if let Some((lines, on)) = &mut self.adds {
            for line in lines {
                ask_to_write(*line);
                *line = line.wrapping_add(*on);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "a hint to the processor, which takes a pointer")]
#[inline(always)]
fn ask_to_read(line: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a hint, whatever the address is.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn ask_to_read(_: *const u8) {}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "a hint to the processor, which takes a pointer")]
#[inline(always)]
pub(super) fn ask_to_read_later(line: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
    // SAFETY: a hint, whatever the address is.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(line.cast()) }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
pub(super) fn ask_to_read_later(_: *const u8) {}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "a hint to the processor, which takes a pointer")]
#[inline(always)]
fn ask_to_write(line: *const u8) {
    use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
    // SAFETY: a hint, whatever the address is.
    unsafe { _mm_prefetch::<_MM_HINT_ET0>(line.cast()) }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn ask_to_write(_: *const u8) {}
