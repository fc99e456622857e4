//! Matmuls of packed panels into 32 × 32 C tiles: at once, or software-pipelined with the vector work of another tile. The CPU
//! executes AMX and vector instructions in parallel if they are close in the instruction stream.
//!
//! The summation order does not depend on the schedule. `gemm::amx` documents the tile registers.

use std::arch::asm;

use super::STEP;

/// A packed operand: its first tile step, and bytes between tile steps.
#[derive(Clone, Copy)]
pub(super) struct PackedSteps {
    start: *const u16,
    step_bytes: usize,
}

impl PackedSteps {
    /// Consecutive tile steps.
    pub(super) fn contiguous(start: *const u16) -> Self {
        Self { start, step_bytes: STEP }
    }

    /// Tile steps `step_bytes` bytes apart.
    pub(super) fn strided(start: *const u16, step_bytes: usize) -> Self {
        Self { start, step_bytes }
    }
}

/// c = a · b for 32 rows of A and 32 columns of B.
#[derive(Clone, Copy)]
pub(super) struct TileMatmul {
    pub(super) a: PackedSteps,
    pub(super) b: PackedSteps,
    /// Tile steps of 32 terms, at least 1.
    pub(super) steps: usize,
    pub(super) c: *mut f32,
    /// Elements between rows of `c`.
    pub(super) stride: usize,
}

impl TileMatmul {
    /// Computes the matmul; with `add` accumulates into `c`.
    ///
    /// # Safety
    /// The tile registers are configured and free, both operands have the tile steps, and `c` is valid for 32 rows of 32
    /// elements.
    pub(super) unsafe fn run(self, add: bool) {
        let (mut a, mut b) = (self.a.start, self.b.start);
        // SAFETY: the caller's promise. `gemm::amx` says why tile registers survive between `asm!` blocks.
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
                (a, b) = (a.wrapping_byte_add(self.a.step_bytes), b.wrapping_byte_add(self.b.step_bytes));
            }
            store(self.c, self.stride);
        }
    }
}

/// Matmuls in flight, executed in stages while vector code runs. A stage is one or two instructions: larger ones delay the vector
/// instructions behind them, and vice versa.
pub(super) struct PipelinedMatmuls<const COUNT: usize> {
    matmuls: [TileMatmul; COUNT],
    /// Current matmul, its tile steps done, and its next stage.
    current: usize,
    done: usize,
    stage: Stage,
    /// Stages due, in units of 1 / [`ADVANCES`].
    due: usize,
    stages: usize,
}

/// A stage of a matmul.
#[derive(Clone, Copy)]
enum Stage {
    Init,
    /// Multiplies one of four tile pairs, and loads the operand needed next.
    Multiply(u8),
    Store(u8),
}

/// Calls of [`PipelinedMatmuls::advance`] in which all stages are done.
const ADVANCES: usize = 14;

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

impl<const COUNT: usize> PipelinedMatmuls<COUNT> {
    /// # Safety
    /// Until `finish` returns, the tile registers are configured and not used otherwise, and the requirements of
    /// [`TileMatmul::run`] hold.
    pub(super) unsafe fn new(matmuls: [TileMatmul; COUNT]) -> Self {
        let stages = matmuls.iter().map(|matmul| 4 * matmul.steps + 5).sum();
        Self { matmuls, current: 0, done: 0, stage: Stage::Init, due: 0, stages }
    }

    /// Executes the stages that are due.
    #[inline(always)]
    pub(super) fn advance(&mut self) {
        self.due += self.stages;
        while self.due >= ADVANCES && self.current < COUNT {
            self.due -= ADVANCES;
            self.next();
        }
    }

    /// Executes all remaining stages.
    #[inline(always)]
    pub(super) fn finish(&mut self) {
        while self.current < COUNT {
            self.next();
        }
    }

    #[inline(always)]
    fn next(&mut self) {
        let TileMatmul { a, b, steps, c, stride } = self.matmuls[self.current];
        let (a_at, b_at) = (
            a.start.wrapping_byte_add(self.done * a.step_bytes),
            b.start.wrapping_byte_add(self.done * b.step_bytes),
        );
        let more = self.done + 1 < steps;
        // SAFETY: the promise to `new`.
        unsafe {
            self.stage = match self.stage {
                Stage::Init => {
                    clear();
                    load_tile!("tmm4", a_at);
                    load_tile!("tmm6", b_at);
                    Stage::Multiply(0)
                }
                Stage::Multiply(0) => {
                    asm!("tdpbf16ps tmm0, tmm4, tmm6", options(nostack, nomem));
                    load_tile!("tmm7", b_at.wrapping_byte_add(STEP / 2));
                    Stage::Multiply(1)
                }
                Stage::Multiply(1) => {
                    asm!("tdpbf16ps tmm1, tmm4, tmm7", options(nostack, nomem));
                    load_tile!("tmm5", a_at.wrapping_byte_add(STEP / 2));
                    Stage::Multiply(2)
                }
                Stage::Multiply(2) => {
                    asm!("tdpbf16ps tmm2, tmm5, tmm6", options(nostack, nomem));
                    if more {
                        load_tile!("tmm4", a_at.wrapping_byte_add(a.step_bytes));
                    }
                    Stage::Multiply(3)
                }
                Stage::Multiply(_) => {
                    asm!("tdpbf16ps tmm3, tmm5, tmm7", options(nostack, nomem));
                    self.done += 1;
                    if more {
                        load_tile!("tmm6", b_at.wrapping_byte_add(b.step_bytes));
                        Stage::Multiply(0)
                    } else {
                        Stage::Store(0)
                    }
                }
                Stage::Store(0) => {
                    store_tile!("tmm0", c, stride);
                    Stage::Store(1)
                }
                Stage::Store(1) => {
                    store_tile!("tmm1", c.add(16), stride);
                    Stage::Store(2)
                }
                Stage::Store(2) => {
                    store_tile!("tmm2", c.add(16 * stride), stride);
                    Stage::Store(3)
                }
                Stage::Store(_) => {
                    store_tile!("tmm3", c.add(16 * stride + 16), stride);
                    (self.current, self.done) = (self.current + 1, 0);
                    Stage::Init
                }
            };
        }
    }
}

/// Zeroes the C tile, tmm0 to tmm3.
#[inline(always)]
unsafe fn clear() {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem));
    }
}

/// Loads the C tile into tmm0 to tmm3.
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

/// Stores tmm0 to tmm3 to the C tile.
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
