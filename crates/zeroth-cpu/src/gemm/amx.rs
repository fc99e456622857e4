//! The AMX bf16 micro-kernel: a 32 × 32 C tile in four tile registers, 32 terms of k per tile step. It is inline assembly
//! because the AMX intrinsics are unstable.
//!
//! # Tile registers
//!
//! Tile registers carry values from one `asm!` block to the next:
//!
//! | register   | holds                               | written by                            | read by                      |
//! |------------|-------------------------------------|---------------------------------------|------------------------------|
//! | tmm0, tmm1 | C rows 0 to 15, left and right half | `tilezero` or a load of C, then every | `tilestored`, at the end of  |
//! | tmm2, tmm3 | C rows 16 to 31, the same           | `tdpbf16ps` of the k loop             | the call                     |
//! | tmm4, tmm5 | A rows 0 to 15 and 16 to 31         | the loads of each tile step           | `tdpbf16ps` of the same step |
//! | tmm6, tmm7 | B columns 0 to 15 and 16 to 31      | the loads of each tile step           | `tdpbf16ps` of the same step |
//!
//! tmm0 to tmm3 are live from the start to the end of one micro-kernel call, across the interleaved work. tmm4 to tmm7 are
//! live inside one `asm!` block, with two exceptions: in [`AmxKernel::matmul_panels_pipelined`] tmm6 and tmm7 are live from
//! the upper to the lower half of a tile step, and in attention's `PipelinedMatmuls` all eight are live between calls of
//! `advance`.
//!
//! [`AmxKernel`] owns the registers of its thread. It loads TILECFG (palette 1) in [`AmxKernel::configured`] and whenever
//! the C tile has another extent, and executes `tilerelease` when it is dropped. A thread has one at a time: interleaved
//! work uses vector registers only.
//!
//! `asm!` blocks without the option `pure` are neither removed nor reordered among each other, so the order of the tile
//! instructions is the order of the source. Compiler-generated code cannot clobber the registers. No Rust type lives in them, LLVM emits AMX instructions only for
//! its own intrinsics with the target feature `amx-tile`, which no function enables, and the standard library and libc
//! contain none. The operating system saves them across context switches and signals. `asm!` knows `tmm_reg` as a clobber
//! only, not as an operand, so values that flow through tile registers cannot be declared.
#![allow(unsafe_code, reason = "AMX instructions are inline assembly and take pointers")]

use std::arch::asm;
use std::marker::PhantomData;

use zeroth_base::DType;

use super::MatrixView;
use super::amx_pack::{Operand, pack};
use super::micro_kernel::{Interleaved, K_STEP};
use zeroth_kernel::Element;

/// The memory operand of `ldtilecfg`: palette 1, with rows and bytes per row of each tile register.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Rows of a tile register, and f32 or bf16 pairs per row.
const SIDE: usize = 16;
const FULL: [usize; 2] = [2 * SIDE, 2 * SIDE];
/// bf16 elements of one tile step of a panel: two tiles.
const STEP: usize = 2 * SIDE * 2 * SIDE;

/// Tile steps of a k-step.
const STEPS: usize = K_STEP / (2 * SIDE);

/// Tile steps of a packed A panel that are loaded into L1, because the next B panel reads them again. The rest is loaded
/// with `tileloaddt1`, past L1: a line that is evicted before its reuse only evicts others.
pub(super) const L1_STEPS: usize = 16;
/// The same for the lower half of an A panel that is read in place: half of a step is half of the lines.
const L1_HALF_STEPS: usize = 32;

/// The upper (A rows 0 to 15) and the lower half of a tile step of packed panels.
macro_rules! upper_half {
    ($load:literal, $right:literal) => {
        concat!(
            $load,
            " tmm4, [{a} + {line}*1]\n",
            $right,
            " tmm6, [{b} + {line}*1]\n",
            "tdpbf16ps tmm0, tmm4, tmm6\n",
            $right,
            " tmm7, [{b} + {line}*1 + 1024]\n",
            "tdpbf16ps tmm1, tmm4, tmm7\n",
        )
    };
}
macro_rules! lower_half {
    ($load:literal) => {
        concat!(
            $load,
            " tmm5, [{a} + {line}*1 + 1024]\n",
            "tdpbf16ps tmm2, tmm5, tmm6\n",
            "tdpbf16ps tmm3, tmm5, tmm7\n",
        )
    };
}

/// The micro-kernel, and owner of the calling thread's tile registers until it is dropped.
pub(crate) struct AmxKernel {
    /// Rows and columns of the C tile that TILECFG is loaded for.
    extent: [usize; 2],
}

/// Panels of A as tile loads read them: packed, or in place.
#[derive(Clone, Copy)]
pub(super) struct AOperand<'a> {
    start: *const u16,
    /// Elements between rows, and between tile steps.
    row_stride: usize,
    step_stride: usize,
    steps: usize,
    /// Elements between panels.
    panel_stride: usize,
    matrix: PhantomData<&'a u16>,
}

impl<'a> AOperand<'a> {
    /// Packed panels of `steps` tile steps.
    #[inline(always)]
    fn packed(panels: &'a [u16], steps: usize) -> Self {
        Self {
            start: panels.as_ptr(),
            row_stride: 2 * SIDE,
            step_stride: STEP,
            steps,
            panel_stride: steps * STEP,
            matrix: PhantomData,
        }
    }

    /// Panel `index`.
    pub(super) fn panel(self, index: usize) -> Self {
        Self { start: self.start.wrapping_add(index * self.panel_stride), ..self }
    }

    /// Tile steps to load into L1: of the whole panel, and of its lower half.
    const fn l1_steps(self) -> [usize; 2] {
        if self.step_stride == STEP || self.steps <= L1_STEPS {
            [L1_STEPS, L1_STEPS]
        } else {
            [0, L1_HALF_STEPS]
        }
    }
}

impl AmxKernel {
    /// Configures the calling thread's tile registers for full tiles.
    pub(crate) fn configured() -> Self {
        let mut kernel = Self { extent: FULL };
        kernel.configure(FULL);
        kernel
    }

    /// Packs panels of A, or borrows the rows where they can be read in place.
    pub(super) fn packed_or_in_place<'a, T: Element>(
        source: MatrixView<'a, T>,
        rows: usize,
        kc: usize,
        out: &'a mut [u16],
    ) -> AOperand<'a> {
        let steps = kc.div_ceil(2 * SIDE);
        let start = source.checked_ptr(rows, kc).cast::<u16>();
        if Self::reads_in_place(source, kc) {
            let row_stride = source.row_stride;
            let (step_stride, panel_stride) = (2 * SIDE, 2 * SIDE * row_stride);
            return AOperand { start, row_stride, step_stride, steps, panel_stride, matrix: PhantomData };
        }
        pack(Operand::A, source, rows, kc, out);
        AOperand::packed(out, steps)
    }

    /// Whether rows of A are read in place: row-major bf16 whose tile steps are whole cache lines.
    fn reads_in_place<T: Element>(source: MatrixView<T>, kc: usize) -> bool {
        let in_place = T::DTYPE == DType::Bf16 && !source.is_transposed() && kc.is_multiple_of(2 * SIDE);
        let aligned = source.data.as_ptr().addr().is_multiple_of(64);
        in_place && source.row_stride.is_multiple_of(2 * SIDE) && aligned
    }

    /// Multiplies a packed panel of A by one of B into `c` [32, 32]; with `add` accumulates.
    #[inline(always)]
    pub(crate) fn matmul_panels(
        &mut self,
        a: &[u16],
        b: &[u16],
        c: &mut [f32],
        add: bool,
        interleave: &mut impl Interleaved,
    ) {
        let steps = a.len() / STEP;
        assert!(a.len() == b.len() && a.len() == steps * STEP && c.len() >= FULL[0] * FULL[1]);
        if self.extent[0] != FULL[0] || self.extent[1] != FULL[1] {
            self.configure(FULL);
        }
        let a = AOperand::packed(a, steps);
        // SAFETY: the panels have equally many tile steps, TILECFG is loaded for full tiles, and `c` holds a full tile.
        unsafe { run::<true, true>(a, b.as_ptr(), c.as_mut_ptr(), 2 * SIDE, add, interleave) }
    }

    /// [`AmxKernel::matmul_panels`] without `add`, with two `k_step` calls per tile step: small pieces of vector work overlap
    /// with the tile multiplications, larger ones delay the next tile loads. L1 keeps the tile steps of A or, with
    /// `REUSE_B`, of B, whichever the next call reads again.
    #[inline(always)]
    pub(crate) fn matmul_panels_pipelined<const REUSE_B: bool>(
        &mut self,
        a: &[u16],
        b: &[u16],
        c: &mut [f32],
        interleave: &mut impl Interleaved,
    ) {
        assert!(a.len() == b.len() && a.len().is_multiple_of(STEP) && c.len() >= FULL[0] * FULL[1]);
        if self.extent[0] != FULL[0] || self.extent[1] != FULL[1] {
            self.configure(FULL);
        }
        // SAFETY: the panels have equally many tile steps, TILECFG is loaded for full tiles, and `c` holds a full tile.
        unsafe {
            asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem));
            let (mut at, mut bt) = (a.as_ptr(), b.as_ptr());
            for step in 0..a.len() / STEP {
                if REUSE_B && step < L1_STEPS {
                    asm!(
                        upper_half!("tileloaddt1", "tileloadd"),
                        a = in(reg) at, b = in(reg) bt, line = in(reg) 64usize, options(nostack, readonly),
                    );
                } else if step < L1_STEPS {
                    asm!(
                        upper_half!("tileloadd", "tileloaddt1"),
                        a = in(reg) at, b = in(reg) bt, line = in(reg) 64usize, options(nostack, readonly),
                    );
                } else {
                    asm!(
                        upper_half!("tileloaddt1", "tileloaddt1"),
                        a = in(reg) at, b = in(reg) bt, line = in(reg) 64usize, options(nostack, readonly),
                    );
                }
                interleave.k_step();
                if !REUSE_B && step < L1_STEPS {
                    asm!(lower_half!("tileloadd"), a = in(reg) at, line = in(reg) 64usize, options(nostack, readonly));
                } else {
                    asm!(lower_half!("tileloaddt1"), a = in(reg) at, line = in(reg) 64usize, options(nostack, readonly));
                }
                interleave.k_step();
                (at, bt) = (at.wrapping_add(STEP), bt.wrapping_add(STEP));
            }
            let (c, below) = (c.as_mut_ptr(), c.as_mut_ptr().wrapping_add(SIDE * 2 * SIDE));
            asm!(
                "tilestored [{c} + {row}*1], tmm0",
                "tilestored [{c} + {row}*1 + 64], tmm1",
                "tilestored [{below} + {row}*1], tmm2",
                "tilestored [{below} + {row}*1 + 64], tmm3",
                c = in(reg) c, below = in(reg) below, row = in(reg) 8 * SIDE, options(nostack),
            );
        }
    }

    /// [`MicroKernel::multiply`](super::micro_kernel::MicroKernel::multiply) with interleaved work.
    ///
    /// # Safety
    /// `c` has the rows and columns of `extent`, `stride` apart, and until `drain` returns nothing but `interleave` refers
    /// to them.
    #[inline(always)]
    pub(super) unsafe fn multiply_interleaved(
        &mut self,
        a: AOperand<'_>,
        b: &[u16],
        c: *mut f32,
        stride: usize,
        extent: [usize; 2],
        add: bool,
        interleave: &mut impl Interleaved,
    ) {
        let [rows, columns] = extent;
        assert!(a.steps * STEP == b.len());
        // One by one: an array comparison becomes a vector load, which stalls on store forwarding.
        if self.extent[0] != rows || self.extent[1] != columns {
            self.configure(extent);
        }
        // SAFETY: the panels have equally many tile steps, and TILECFG is loaded for the extent of `c`.
        unsafe {
            match (rows > SIDE, columns > SIDE) {
                (true, true) => run::<true, true>(a, b.as_ptr(), c, stride, add, interleave),
                (true, false) => run::<true, false>(a, b.as_ptr(), c, stride, add, interleave),
                (false, true) => run::<false, true>(a, b.as_ptr(), c, stride, add, interleave),
                (false, false) => run::<false, false>(a, b.as_ptr(), c, stride, add, interleave),
            }
        }
    }

    fn configure(&mut self, extent: [usize; 2]) {
        self.extent = extent;
        let mut config =
            TileConfig { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        let halves = |extent: usize| [extent.min(SIDE), extent.saturating_sub(SIDE)];
        let (rows, columns) = (halves(extent[0]), halves(extent[1]));
        let mut set = |tile: usize, rows: usize, columns: usize| {
            // A tile without rows or columns must have both set to 0.
            if rows > 0 && columns > 0 {
                (config.rows[tile], config.row_bytes[tile]) = (rows as u8, 4 * columns as u16);
            }
        };
        for half in 0..2 {
            set(half, rows[0], columns[half]);
            set(2 + half, rows[1], columns[half]);
            set(4 + half, rows[half], SIDE);
            set(6 + half, SIDE, columns[half]);
        }
        // SAFETY: `Isa::available` has obtained permission, and the configuration is within palette 1.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) }
    }
}

impl Drop for AmxKernel {
    fn drop(&mut self) {
        // Context switches do not save tile data in its initial state.
        // SAFETY: as in `configure`.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }
}

/// One tile step of 2 × 2 tiles, at byte offsets `$a` of A, `$b` and `$right` of B.
macro_rules! step {
    ($load:literal, $lower:literal, $a:literal, $b:literal, $right:literal) => {
        concat!(
            $load,
            " tmm4, [{upper} + {row}*1 + ",
            $a,
            "]\n",
            "tileloaddt1 tmm6, [{b} + {line}*1 + ",
            $b,
            "]\n",
            "tdpbf16ps tmm0, tmm4, tmm6\n",
            "tileloaddt1 tmm7, [{b} + {line}*1 + ",
            $right,
            "]\n",
            "tdpbf16ps tmm1, tmm4, tmm7\n",
            $lower,
            " tmm5, [{lower} + {row}*1 + ",
            $a,
            "]\n",
            "tdpbf16ps tmm2, tmm5, tmm6\n",
            "tdpbf16ps tmm3, tmm5, tmm7\n",
        )
    };
}

/// Runs the k loop over two panels: `TALL` with the lower tiles of A, `WIDE` with the right tiles of B.
///
/// # Safety
/// The panels have equally many tile steps, and TILECFG is loaded for the extent of `c`.
#[inline(always)]
unsafe fn run<const TALL: bool, const WIDE: bool>(
    a: AOperand<'_>,
    mut b: *const u16,
    c: *mut f32,
    stride: usize,
    add: bool,
    interleave: &mut impl Interleaved,
) {
    let below = c.wrapping_add(SIDE * stride);
    let [near, lower_near] = a.l1_steps();
    let (mut upper, mut lower, row) = (a.start, a.start.wrapping_add(SIDE * a.row_stride), 2 * a.row_stride);
    // SAFETY: the caller's promise. The module documentation says why tile registers survive between `asm!` blocks.
    unsafe {
        if add {
            asm!("tileloadd tmm0, [{} + {}*1]", in(reg) c, in(reg) 4 * stride, options(nostack, readonly));
            if WIDE {
                asm!("tileloadd tmm1, [{} + {}*1 + 64]", in(reg) c, in(reg) 4 * stride, options(nostack, readonly));
            }
            if TALL {
                asm!("tileloadd tmm2, [{} + {}*1]", in(reg) below, in(reg) 4 * stride, options(nostack, readonly));
            }
            if TALL && WIDE {
                asm!("tileloadd tmm3, [{} + {}*1 + 64]", in(reg) below, in(reg) 4 * stride, options(nostack, readonly));
            }
        } else {
            asm!("tilezero tmm0", options(nostack, nomem));
            if WIDE {
                asm!("tilezero tmm1", options(nostack, nomem));
            }
            if TALL {
                asm!("tilezero tmm2", options(nostack, nomem));
            }
            if TALL && WIDE {
                asm!("tilezero tmm3", options(nostack, nomem));
            }
        }
        // One loop for each kind of load: a branch or a spilled operand in the loop would take a load slot from the tiles.
        macro_rules! k_loop {
            ($count:expr, $upper:literal, $lower:literal, $second:literal, $advance:expr) => {
                for _ in 0..$count {
                    asm!(
                        step!($upper, $lower, "0", "0", "1024"), step!($upper, $lower, $second, "2048", "3072"),
                        upper = in(reg) upper, lower = in(reg) lower, row = in(reg) row,
                        b = in(reg) b, line = in(reg) 64usize, options(nostack, readonly),
                    );
                    interleave.k_step();
                    (upper, lower, b) = (upper.wrapping_add($advance), lower.wrapping_add($advance), b.wrapping_add(2 * STEP));
                }
            };
        }
        let whole = if TALL && WIDE { a.steps / STEPS } else { 0 };
        let (near, lower_near) = (whole.min(near / STEPS), whole.min(lower_near / STEPS));
        if a.step_stride == STEP {
            k_loop!(near, "tileloadd", "tileloadd", "2048", 2 * STEP);
            k_loop!(whole - near, "tileloaddt1", "tileloaddt1", "2048", 2 * STEP);
        } else {
            k_loop!(near, "tileloadd", "tileloadd", "64", 4 * SIDE);
            k_loop!(lower_near - near, "tileloaddt1", "tileloadd", "64", 4 * SIDE);
            k_loop!(whole - lower_near, "tileloaddt1", "tileloaddt1", "64", 4 * SIDE);
        }
        for at in STEPS * whole..a.steps {
            edge::<TALL, WIDE>(upper, lower, row, b);
            (upper, lower, b) =
                (upper.wrapping_add(a.step_stride), lower.wrapping_add(a.step_stride), b.wrapping_add(STEP));
            if at % STEPS == 1 || at + 1 == a.steps {
                interleave.k_step();
            }
        }
        interleave.drain();
        asm!("tilestored [{} + {}*1], tmm0", in(reg) c, in(reg) 4 * stride, options(nostack));
        if WIDE {
            asm!("tilestored [{} + {}*1 + 64], tmm1", in(reg) c, in(reg) 4 * stride, options(nostack));
        }
        if TALL {
            asm!("tilestored [{} + {}*1], tmm2", in(reg) below, in(reg) 4 * stride, options(nostack));
        }
        if TALL && WIDE {
            asm!("tilestored [{} + {}*1 + 64], tmm3", in(reg) below, in(reg) 4 * stride, options(nostack));
        }
    }
}

/// One tile step of a C tile with fewer than 32 rows or columns.
///
/// # Safety
/// As for [`run`]; each address has one tile step of its panel.
#[inline(always)]
unsafe fn edge<const TALL: bool, const WIDE: bool>(
    upper: *const u16,
    lower: *const u16,
    row: usize,
    b: *const u16,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if TALL && WIDE {
            asm!(
                step!("tileloaddt1", "tileloaddt1", "0", "0", "1024"),
                upper = in(reg) upper, lower = in(reg) lower, row = in(reg) row,
                b = in(reg) b, line = in(reg) 64usize, options(nostack, readonly),
            );
        } else if TALL {
            asm!(
                "tileloaddt1 tmm4, [{upper} + {row}*1]",
                "tileloaddt1 tmm6, [{b} + {line}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloaddt1 tmm5, [{lower} + {row}*1]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                upper = in(reg) upper, lower = in(reg) lower, row = in(reg) row,
                b = in(reg) b, line = in(reg) 64usize, options(nostack, readonly),
            );
        } else if WIDE {
            asm!(
                "tileloaddt1 tmm4, [{upper} + {row}*1]",
                "tileloaddt1 tmm6, [{b} + {line}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloaddt1 tmm7, [{b} + {line}*1 + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                upper = in(reg) upper, row = in(reg) row,
                b = in(reg) b, line = in(reg) 64usize, options(nostack, readonly),
            );
        } else {
            asm!(
                "tileloaddt1 tmm4, [{upper} + {row}*1]",
                "tileloaddt1 tmm6, [{b} + {line}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                upper = in(reg) upper, row = in(reg) row,
                b = in(reg) b, line = in(reg) 64usize, options(nostack, readonly),
            );
        }
    }
}
