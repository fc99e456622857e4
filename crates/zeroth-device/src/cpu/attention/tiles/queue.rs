//! Products that wait for their turn, done step by step between the vector instructions of another tile: the processor
//! multiplies tiles and computes powers at the same time, if both are near each other in the program.
//!
//! What a product sums and in which order does not depend on when it is done.

use std::arch::asm;

use super::STEP;

/// A packed factor: where its first step is, and bytes from one step to the next.
#[derive(Clone, Copy)]
pub(super) struct Steps {
    start: *const u16,
    apart: usize,
}

impl Steps {
    /// Steps one after the other.
    pub(super) fn close(start: *const u16) -> Self {
        Self { start, apart: STEP }
    }

    /// Steps that begin `apart` bytes from each other.
    pub(super) fn apart(start: *const u16, apart: usize) -> Self {
        Self { start, apart }
    }
}

/// 32 rows of a times 32 columns of b, written to c or added to it.
#[derive(Clone, Copy)]
pub(super) struct Product {
    pub(super) a: Steps,
    pub(super) b: Steps,
    /// Steps of 32 terms; 1 at least.
    pub(super) steps: usize,
    pub(super) c: *mut f32,
    /// Elements from one row of c to the next.
    pub(super) stride: usize,
    pub(super) add: bool,
}

/// Products that may wait.
const ROOM: usize = 64;

/// Products in the order in which they are done.
pub(super) struct Queue {
    products: [Option<Product>; ROOM],
    first: usize,
    count: usize,
    /// Steps of the first product that are done.
    done: usize,
    /// Steps of all products that are not.
    left: usize,
}

impl Queue {
    pub(super) const fn new() -> Self {
        Self { products: [None; ROOM], first: 0, count: 0, done: 0, left: 0 }
    }

    /// Adds a product behind the others; where there is no room, they are done first.
    ///
    /// # Safety
    /// Until it is done: tiles are configured and used by this queue alone while one of its products is begun, both panels
    /// have the steps, c has 32 rows of 32 elements, and nobody else reads or writes what it writes or writes what it
    /// reads.
    pub(super) unsafe fn push(&mut self, product: Product) {
        assert!(product.steps > 0, "a product without terms");
        if self.count == ROOM {
            self.finish();
        }
        self.products[(self.first + self.count) % ROOM] = Some(product);
        self.count += 1;
        self.left += product.steps;
    }

    /// Steps that are left.
    pub(super) fn left(&self) -> usize {
        self.left
    }

    /// Does `count` steps, or all that are left.
    #[inline]
    pub(super) fn advance(&mut self, count: usize) {
        for _ in 0..count.min(self.left) {
            self.step();
        }
    }

    /// Does all steps that are left.
    pub(super) fn finish(&mut self) {
        self.advance(self.left);
    }

    #[inline]
    fn step(&mut self) {
        let Some(Product { a, b, steps, c, stride, add }) = self.products[self.first] else { return };
        // SAFETY: the promise of who pushed it. The compiler has no use for tiles, so what one block of assembly leaves in
        // them the next one finds.
        unsafe {
            if self.done == 0 {
                begin(c, stride, add);
            }
            multiply(a.start.byte_add(self.done * a.apart), b.start.byte_add(self.done * b.apart));
            self.done += 1;
            if self.done == steps {
                end(c, stride);
                self.done = 0;
                self.first = (self.first + 1) % ROOM;
                self.count -= 1;
            }
        }
        self.left -= 1;
    }
}

/// Brings c, or zeros, into tiles 0 to 3.
#[inline(always)]
unsafe fn begin(c: *mut f32, stride: usize, add: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        if add {
            asm!(
                "tileloadd tmm0, [{c} + {row}*1]",
                "tileloadd tmm1, [{c} + {row}*1 + 64]",
                "tileloadd tmm2, [{below} + {row}*1]",
                "tileloadd tmm3, [{below} + {row}*1 + 64]",
                c = in(reg) c, below = in(reg) c.wrapping_add(16 * stride), row = in(reg) 4 * stride,
                options(nostack, readonly),
            );
        } else {
            asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem));
        }
    }
}

/// Adds one step.
#[inline(always)]
unsafe fn multiply(a: *const u16, b: *const u16) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tileloadd tmm4, [{a} + {line}*1]",
            "tileloadd tmm6, [{b} + {line}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {line}*1 + 1024]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a} + {line}*1 + 1024]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            a = in(reg) a, b = in(reg) b, line = in(reg) 64usize, options(nostack, readonly),
        );
    }
}

/// Writes tiles 0 to 3 to c.
#[inline(always)]
unsafe fn end(c: *mut f32, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tilestored [{c} + {row}*1], tmm0",
            "tilestored [{c} + {row}*1 + 64], tmm1",
            "tilestored [{below} + {row}*1], tmm2",
            "tilestored [{below} + {row}*1 + 64], tmm3",
            c = in(reg) c, below = in(reg) c.wrapping_add(16 * stride), row = in(reg) 4 * stride,
            options(nostack),
        );
    }
}
