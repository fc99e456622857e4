//! Memory asked for before it is needed, a few cache lines at every step of a product.
//!
//! A product out of the second-level cache leaves the memory idle, and what comes next would be waited for. Asking for a
//! line changes no result and cannot fail, so places need no check.

/// Bytes of a cache line.
const LINE: usize = 64;
/// Terms of a step.
const STEP: usize = 32;

/// Lines asked for at every step, at most: of what will be read, and of what will be written.
const READS: usize = 4;
const WRITES: usize = 2;

/// A line asked for at each step, and bytes from there to the next one.
type Stream = (*const u8, usize);

/// What to ask for during one product of two panels. Plain enough to cost nothing beside the product.
pub(super) struct Ahead {
    reads: [Stream; READS],
    reading: usize,
    writes: [Stream; WRITES],
    writing: usize,
}

impl Ahead {
    pub(super) const NOTHING: Self = Self {
        reads: [(std::ptr::null(), 0); READS],
        reading: 0,
        writes: [(std::ptr::null(), 0); WRITES],
        writing: 0,
    };

    /// Reads part `part` of `parts` of the `lines` lines of a matrix, each `terms` elements long and `row` elements from
    /// the next, or with `row` 1 side by side and their terms `column` elements apart.
    pub(super) fn read<T>(
        &mut self,
        start: *const T,
        [row, column]: [usize; 2],
        [lines, terms]: [usize; 2],
        [part, parts]: [usize; 2],
    ) {
        let (first, last) = if column == 1 {
            (lines * part / parts, lines * (part + 1) / parts)
        } else {
            (0, terms.div_ceil(parts * STEP).min(READS))
        };
        self.reading = (last - first).min(READS);
        for (at, stream) in self.reads.iter_mut().enumerate().take(self.reading) {
            *stream = if column == 1 {
                (start.wrapping_add((first + at) * row).cast(), LINE)
            } else {
                let each = terms * part / parts + at;
                (start.wrapping_add(each * column).cast(), self.reading * column * size_of::<T>())
            };
        }
    }

    /// Writes rows of `width` elements, `stride` elements apart, one row a step.
    pub(super) fn write<T>(&mut self, start: *const T, width: usize, stride: usize) {
        self.writing = (width * size_of::<T>()).div_ceil(LINE).min(WRITES);
        for (at, stream) in self.writes.iter_mut().enumerate().take(self.writing) {
            *stream = (start.cast::<u8>().wrapping_add(at * LINE), stride * size_of::<T>());
        }
    }

    /// Asks for the lines of one step.
    #[inline(always)]
    pub(super) fn step(&mut self) {
        for (line, next) in &mut self.reads[..self.reading] {
            ask_to_read(*line);
            *line = line.wrapping_add(*next);
        }
        for (line, next) in &mut self.writes[..self.writing] {
            ask_to_write(*line);
            *line = line.wrapping_add(*next);
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "a hint to the processor, which takes a pointer")]
#[inline(always)]
fn ask_to_read(line: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
    // SAFETY: a hint, whatever the address is.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(line.cast()) }
}

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
fn ask_to_read(_: *const u8) {}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn ask_to_write(_: *const u8) {}
