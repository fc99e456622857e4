//! Products of packed panels, 32 rows by 32 columns: at once, or woven into the vector instructions of another tile. The
//! processor multiplies tiles and computes powers at the same time, if both are near each other in the program.
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

/// 32 rows of a times 32 columns of b.
#[derive(Clone, Copy)]
pub(super) struct Product {
    pub(super) a: Steps,
    pub(super) b: Steps,
    /// Steps of 32 terms; 1 at least.
    pub(super) steps: usize,
    pub(super) c: *mut f32,
    /// Elements from one row of c to the next.
    pub(super) stride: usize,
}

impl Product {
    /// Writes it to c or, with `add`, adds it.
    ///
    /// # Safety
    /// Tiles are configured and not in use, both panels have the steps, and c has 32 rows of 32 elements that are the
    /// caller's to write.
    pub(super) unsafe fn run(self, add: bool) {
        let (mut a, mut b) = (self.a.start, self.b.start);
        // SAFETY: the caller's promise. The compiler has no use for tiles, so what one block of assembly leaves in them the
        // next one finds.
        unsafe {
            if add {
                load(self.c, self.stride);
            } else {
                clear();
            }
            for _ in 0..self.steps {
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
                (a, b) = (a.wrapping_byte_add(self.a.apart), b.wrapping_byte_add(self.b.apart));
            }
            store(self.c, self.stride);
        }
    }
}

/// Products that are written piece by piece, in a number of beats. Pieces are one or two instructions: behind larger ones
/// vector instructions wait, and the other way round.
pub(super) struct Woven<const COUNT: usize> {
    products: [Product; COUNT],
    /// The product at hand, its steps that are done, and which piece comes next.
    at: usize,
    done: usize,
    piece: Piece,
    /// Pieces in all, times beats that were; less the beats of pieces that were done.
    due: usize,
    pieces: usize,
}

/// What is done at a time.
#[derive(Clone, Copy)]
enum Piece {
    Begin,
    /// Of a step, and loads what is needed next.
    Multiply(u8),
    Store(u8),
}

/// Beats in which all pieces are done.
const BEATS: usize = 14;

macro_rules! load_tile {
    ($tile:literal, $from:expr) => {
        asm!(
            concat!("tileloadd ", $tile, ", [{from} + {line}*1]"),
            from = in(reg) $from, line = in(reg) 64usize, options(nostack, readonly),
        )
    };
}

macro_rules! store_tile {
    ($tile:literal, $to:expr, $stride:expr) => {
        asm!(
            concat!("tilestored [{to} + {row}*1], ", $tile),
            to = in(reg) $to, row = in(reg) 4 * $stride, options(nostack),
        )
    };
}

impl<const COUNT: usize> Woven<COUNT> {
    /// # Safety
    /// Until it is finished: tiles are configured and used by nobody else, and what [`Product::run`] asks for holds.
    pub(super) unsafe fn new(products: [Product; COUNT]) -> Self {
        let pieces = products.iter().map(|product| 4 * product.steps + 5).sum();
        Self { products, at: 0, done: 0, piece: Piece::Begin, due: 0, pieces }
    }

    /// Does what is due in one of [`BEATS`].
    #[inline(always)]
    pub(super) fn beat(&mut self) {
        self.due += self.pieces;
        while self.due >= BEATS && self.at < COUNT {
            self.due -= BEATS;
            self.next();
        }
    }

    /// Does all that is left.
    #[inline(always)]
    pub(super) fn finish(&mut self) {
        while self.at < COUNT {
            self.next();
        }
    }

    #[inline(always)]
    fn next(&mut self) {
        let Product { a, b, steps, c, stride } = self.products[self.at];
        let (a_at, b_at) =
            (a.start.wrapping_byte_add(self.done * a.apart), b.start.wrapping_byte_add(self.done * b.apart));
        let more = self.done + 1 < steps;
        // SAFETY: the promise to `new`.
        unsafe {
            self.piece = match self.piece {
                Piece::Begin => {
                    clear();
                    load_tile!("tmm4", a_at);
                    load_tile!("tmm6", b_at);
                    Piece::Multiply(0)
                }
                Piece::Multiply(0) => {
                    asm!("tdpbf16ps tmm0, tmm4, tmm6", options(nostack, nomem));
                    load_tile!("tmm7", b_at.wrapping_byte_add(STEP / 2));
                    Piece::Multiply(1)
                }
                Piece::Multiply(1) => {
                    asm!("tdpbf16ps tmm1, tmm4, tmm7", options(nostack, nomem));
                    load_tile!("tmm5", a_at.wrapping_byte_add(STEP / 2));
                    Piece::Multiply(2)
                }
                Piece::Multiply(2) => {
                    asm!("tdpbf16ps tmm2, tmm5, tmm6", options(nostack, nomem));
                    if more {
                        load_tile!("tmm4", a_at.wrapping_byte_add(a.apart));
                    }
                    Piece::Multiply(3)
                }
                Piece::Multiply(_) => {
                    asm!("tdpbf16ps tmm3, tmm5, tmm7", options(nostack, nomem));
                    self.done += 1;
                    if more {
                        load_tile!("tmm6", b_at.wrapping_byte_add(b.apart));
                        Piece::Multiply(0)
                    } else {
                        Piece::Store(0)
                    }
                }
                Piece::Store(0) => {
                    store_tile!("tmm0", c, stride);
                    Piece::Store(1)
                }
                Piece::Store(1) => {
                    store_tile!("tmm1", c.add(16), stride);
                    Piece::Store(2)
                }
                Piece::Store(2) => {
                    store_tile!("tmm2", c.add(16 * stride), stride);
                    Piece::Store(3)
                }
                Piece::Store(_) => {
                    store_tile!("tmm3", c.add(16 * stride + 16), stride);
                    (self.at, self.done) = (self.at + 1, 0);
                    Piece::Begin
                }
            };
        }
    }
}

/// Brings zeros into tiles 0 to 3.
#[inline(always)]
unsafe fn clear() {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem));
    }
}

/// Brings c into tiles 0 to 3.
#[inline(always)]
unsafe fn load(c: *const f32, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tileloadd tmm0, [{c} + {row}*1]",
            "tileloadd tmm1, [{c} + {row}*1 + 64]",
            "tileloadd tmm2, [{below} + {row}*1]",
            "tileloadd tmm3, [{below} + {row}*1 + 64]",
            c = in(reg) c, below = in(reg) c.wrapping_add(16 * stride), row = in(reg) 4 * stride,
            options(nostack, readonly),
        );
    }
}

/// Writes tiles 0 to 3 to c.
#[inline(always)]
unsafe fn store(c: *mut f32, stride: usize) {
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
