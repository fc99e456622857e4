//! Memory asked for before it is needed, a few cache lines at every step of a product.
//!
//! A product out of the second-level cache leaves the memory idle, and what comes next would be waited for. Asking for a
//! line changes no result and cannot fail, so places need no check.

/// Bytes of a cache line.
const LINE: usize = 64;

/// A part of a matrix, line after line.
#[derive(Clone, Copy)]
pub(super) struct Region {
    row: *const u8,
    stride: usize,
    lines: usize,
    rows: usize,
    line: usize,
}

impl Region {
    pub(super) const NONE: Self = Self { row: std::ptr::null(), stride: 0, lines: 0, rows: 0, line: 0 };

    /// `rows` rows of `width` elements, `stride` elements apart.
    pub(super) fn new<T>(start: *const T, rows: usize, width: usize, stride: usize) -> Self {
        let row = start.cast::<u8>();
        let lines = (row as usize % LINE + width * size_of::<T>()).div_ceil(LINE);
        Self { row, stride: stride * size_of::<T>(), lines, rows: if width == 0 { 0 } else { rows }, line: 0 }
    }

    /// Lines that are left.
    fn left(&self) -> usize {
        (self.rows * self.lines).saturating_sub(self.line)
    }

    #[inline(always)]
    fn next(&mut self) -> Option<*const u8> {
        if self.rows == 0 {
            return None;
        }
        let at = self.row.wrapping_add(self.line * LINE);
        self.line += 1;
        if self.line == self.lines {
            (self.row, self.line) = (self.row.wrapping_add(self.stride), 0);
            self.rows -= 1;
        }
        Some(at)
    }
}

/// What to ask for during one product of two panels.
pub(super) struct Ahead {
    /// Where the product will be written.
    out: (Region, usize),
    /// What will be read later.
    read: [(Region, usize); 2],
}

impl Ahead {
    /// Spreads all of `out`, and of each region to read its part in so many products, over `steps` steps.
    pub(super) fn new(out: Region, read: [(Region, usize); 2], steps: usize) -> Self {
        let pace = |region: Region, products: usize| (region, region.left().div_ceil(products * steps));
        Self { out: pace(out, 1), read: read.map(|(region, products)| pace(region, products)) }
    }

    /// What is left to read.
    pub(super) fn rest(self) -> [Region; 2] {
        self.read.map(|(region, _)| region)
    }

    /// Asks for the lines of one step.
    #[inline(always)]
    pub(super) fn step(&mut self) {
        for _ in 0..self.out.1 {
            if let Some(line) = self.out.0.next() {
                ask_to_write(line);
            }
        }
        for (region, pace) in &mut self.read {
            for _ in 0..*pace {
                if let Some(line) = region.next() {
                    ask_to_read(line);
                }
            }
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
