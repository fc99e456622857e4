//! Software prefetches issued between the k-steps of an AMX micro-kernel call.
//!
//! A GEMM that runs out of L2 leaves the memory bus idle; without prefetches the next rows of A and the next C tile would
//! stall it. A prefetch never faults, so addresses need no bounds check.

use super::micro_kernel::K_STEP;

/// Bytes of a cache line.
pub(super) const CACHE_LINE: usize = 64;

/// Addresses to prefetch during one micro-kernel call: four rows of A per k-step into L2 and, with `FETCHES_C`, two rows
/// of the C tile for writing.
///
/// Fields are few and `k_step` has almost no branches on purpose: AMX tile loads compete for the load buffer, so each
/// field that spills to the stack costs as much as a cache line.
pub(super) struct Prefetch<A, const FETCHES_C: bool> {
    /// Next address in the first of four rows of A, and elements between rows.
    a: *const A,
    a_stride: usize,
    /// Next row of the C tile; bytes to its last byte and to the next row.
    c: *const u8,
    c_last: usize,
    c_stride: usize,
}

impl<A, const FETCHES_C: bool> Prefetch<A, FETCHES_C> {
    /// Prefetches only `cached`, an address that is in the cache already.
    pub(super) const fn none(cached: *const u8) -> Self {
        Self { a: cached.cast(), a_stride: 0, c: cached, c_last: 0, c_stride: 0 }
    }

    /// Sets the four rows of A, `stride` elements apart.
    #[inline(always)]
    pub(super) fn set_a(&mut self, start: *const A, stride: usize) {
        (self.a, self.a_stride) = (start, stride);
    }

    /// Sets the rows of C, `width` elements each and `stride` elements apart.
    #[inline(always)]
    pub(super) fn set_c<T>(&mut self, start: *const T, width: usize, stride: usize) {
        self.c = start.cast();
        (self.c_last, self.c_stride) = ((width * size_of::<T>()).saturating_sub(1), stride * size_of::<T>());
    }

    /// Issues the prefetches of one k-step.
    #[inline(always)]
    pub(super) fn k_step(&mut self) {
        for row in [self.a, self.a.wrapping_add(self.a_stride)] {
            let (row, below) = (row.cast::<u8>(), row.wrapping_add(2 * self.a_stride).cast::<u8>());
            for line in [row, row.wrapping_add(CACHE_LINE), below, below.wrapping_add(CACHE_LINE)] {
                prefetch_read_l2(line);
            }
        }
        self.a = self.a.wrapping_add(K_STEP);
        self.c_step();
    }

    /// Issues the prefetches of C of one k-step.
    #[inline(always)]
    pub(super) fn c_step(&mut self) {
        if FETCHES_C {
            for row in [self.c, self.c.wrapping_add(self.c_stride)] {
                prefetch_write(row);
                prefetch_write(row.wrapping_add(self.c_last));
            }
            self.c = self.c.wrapping_add(2 * self.c_stride);
        }
    }
}

/// Rows of A to prefetch into L2 during one micro-kernel call, one behind the other: the hardware prefetcher follows them.
#[derive(Clone, Copy)]
pub(super) struct RowPrefetch {
    /// Next address; where its row began, and bytes to the next one.
    at: *const u8,
    row: *const u8,
    row_stride: usize,
    /// Pairs of cache lines per k-step, k-steps that take a row, and those left of them.
    pairs: usize,
    row_steps: usize,
    left: usize,
}

impl RowPrefetch {
    /// `rows` rows of `k_steps` k-steps, in as many k-steps.
    #[inline(always)]
    pub(super) fn new<A>(start: *const A, row_stride: usize, rows: usize, k_steps: usize) -> Self {
        let (at, row_steps) = (start.cast(), k_steps.div_ceil(rows.max(1)));
        Self { at, row: at, row_stride: row_stride * size_of::<A>(), pairs: rows, row_steps, left: row_steps }
    }

    /// Issues the prefetches of one k-step.
    #[inline(always)]
    pub(super) fn k_step(&mut self) {
        for _ in 0..self.pairs {
            // L2 fetches lines in pairs.
            prefetch_read_l2(self.at);
            self.at = self.at.wrapping_add(2 * CACHE_LINE);
        }
        self.left -= 1;
        if self.left == 0 {
            self.row = self.row.wrapping_add(self.row_stride);
            (self.at, self.left) = (self.row, self.row_steps);
        }
    }
}

/// Prefetches a cache line into L2.
#[allow(unsafe_code, reason = "the prefetch intrinsic takes a pointer")]
#[inline(always)]
pub(super) fn prefetch_read_l2(line: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
    // SAFETY: a prefetch never faults.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(line.cast()) }
}

/// Prefetches a cache line into L1.
#[allow(unsafe_code, reason = "the prefetch intrinsic takes a pointer")]
#[inline(always)]
pub(crate) fn prefetch_read(line: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a prefetch never faults.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) }
}

/// Prefetches a cache line into L1 in exclusive state.
#[allow(unsafe_code, reason = "the prefetch intrinsic takes a pointer")]
#[inline(always)]
pub(crate) fn prefetch_write(line: *const u8) {
    use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
    // SAFETY: a prefetch never faults.
    unsafe { _mm_prefetch::<_MM_HINT_ET0>(line.cast()) }
}
