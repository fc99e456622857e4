//! The kernel on AMX tiles: 32 by 32 sums in four tiles, 32 terms a step. The instructions are written in assembly,
//! because the compiler has no stable names for them.
#![allow(unsafe_code, reason = "tile instructions are assembly and take pointers")]

use std::arch::asm;
use std::marker::PhantomData;

use zeroth_base::DType;

use super::View;
use super::amx_driver;
use super::amx_pack::{Side, pack};
use super::blocking::{self, Sizes};
use super::driver::{BEAT, Between, Job, Kernel, Nothing, Place, finish_lines};
use super::epilogue::Store;
use crate::work_partition::Tile;
use zeroth_kernel::Element;

/// Whether the processor has bf16 tiles and the operating system lets this process use them. Linux wants to be asked.
pub(crate) fn permitted() -> bool {
    /// `arch_prctl` and its request for a part of the extended state, which tiles' data is.
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XFEATURE_XTILEDATA: i64 = 18;
    if !cfg!(target_os = "linux") || !crate::InstructionSets::detect().amx_bf16 {
        return false;
    }
    let result: i64;
    // SAFETY: a system call that changes no memory of ours; the kernel refuses what it does not know.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

/// What `ldtilecfg` reads: palette 1, and rows and bytes a row of each tile.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Rows of a tile, and f32 or pairs of bf16 in a row.
const SIDE: usize = 16;
const FULL: [usize; 2] = [2 * SIDE, 2 * SIDE];
/// Elements of a panel's step: two tiles.
const STEP: usize = 2 * SIDE * 2 * SIDE;

/// Steps of a beat.
const PAIR: usize = BEAT / (2 * SIDE);

/// Steps of packed rows that the first-level cache has room for: the next panel of b wants them again. All else is loaded
/// past it, because what is not there again in time only drives out what is.
pub(super) const NEAR: usize = 16;
/// The same of the lower half of rows as they stand: twice the steps of a half are as many lines.
const HALF_NEAR: usize = 32;

/// The upper and the lower half of a step of packed panels.
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

/// Tiles 0 to 3 hold sums (0 and 1 the upper half), 4 and 5 rows of a, 6 and 7 columns of b.
pub(crate) struct Tiles {
    /// The rows and columns that the tiles are configured for.
    live: [usize; 2],
}

/// Rows of a as tiles read them: where they stand, or packed.
#[derive(Clone, Copy)]
pub(super) struct Lines<'a> {
    start: *const u16,
    /// Elements from one row to the next, and from one step to the next.
    row: usize,
    step: usize,
    steps: usize,
    /// Elements from one panel to the next.
    panel: usize,
    matrix: PhantomData<&'a u16>,
}

impl Lines<'_> {
    /// Steps that are loaded into the first-level cache, both halves of them and the lower one.
    const fn near(self) -> [usize; 2] {
        if self.step == STEP || self.steps <= NEAR { [NEAR, NEAR] } else { [0, HALF_NEAR] }
    }
}

impl Tiles {
    /// Makes the calling thread's tiles ready.
    pub(crate) fn ready() -> Self {
        let mut tiles = Self { live: FULL };
        tiles.configure(FULL);
        tiles
    }

    /// Writes the product of a packed panel of a and one of b to `c` [32, 32], or adds it to what is there.
    #[inline(always)]
    pub(crate) fn whole(
        &mut self,
        a: &[u16],
        b: &[u16],
        c: &mut [f32],
        add: bool,
        between: &mut impl Between,
    ) {
        let steps = a.len() / STEP;
        assert!(a.len() == b.len() && a.len() == steps * STEP && c.len() >= FULL[0] * FULL[1]);
        if self.live[0] != FULL[0] || self.live[1] != FULL[1] {
            self.configure(FULL);
        }
        let a = Lines {
            start: a.as_ptr(),
            row: 2 * SIDE,
            step: STEP,
            steps,
            panel: steps * STEP,
            matrix: PhantomData,
        };
        // SAFETY: the panels hold the same number of steps, all tiles are configured in full, and c has room for them.
        unsafe { run::<true, true>(a, b.as_ptr(), c.as_mut_ptr(), 2 * SIDE, add, between) }
    }

    /// As [`Tiles::whole`], written, with two beats a step: work for vectors that comes in small pieces is done beside the
    /// products, in larger ones the next loads wait behind it. The first-level cache keeps steps of a, or those of b if `COLUMNS`:
    /// whichever comes again next.
    #[inline(always)]
    pub(crate) fn woven<const COLUMNS: bool>(
        &mut self,
        a: &[u16],
        b: &[u16],
        c: &mut [f32],
        between: &mut impl Between,
    ) {
        assert!(a.len() == b.len() && a.len().is_multiple_of(STEP) && c.len() >= FULL[0] * FULL[1]);
        if self.live[0] != FULL[0] || self.live[1] != FULL[1] {
            self.configure(FULL);
        }
        // SAFETY: the panels hold the same number of steps, all tiles are configured in full, and c has room for them.
        unsafe {
            asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem));
            let (mut at, mut bt) = (a.as_ptr(), b.as_ptr());
            for step in 0..a.len() / STEP {
                if COLUMNS && step < NEAR {
                    asm!(
                        upper_half!("tileloaddt1", "tileloadd"),
                        a = in(reg) at, b = in(reg) bt, line = in(reg) 64usize, options(nostack, readonly),
                    );
                } else if step < NEAR {
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
                between.beat();
                if !COLUMNS && step < NEAR {
                    asm!(lower_half!("tileloadd"), a = in(reg) at, line = in(reg) 64usize, options(nostack, readonly));
                } else {
                    asm!(lower_half!("tileloaddt1"), a = in(reg) at, line = in(reg) 64usize, options(nostack, readonly));
                }
                between.beat();
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

    /// As [`Kernel::multiply`], with what there is to do between beats, and before the sums are written.
    ///
    /// # Safety
    /// `c` has the live rows and columns, `stride` apart, and nobody has a reference to them but `between` until its end.
    #[inline(always)]
    pub(super) unsafe fn multiply_to(
        &mut self,
        a: Lines<'_>,
        b: &[u16],
        c: *mut f32,
        stride: usize,
        live: [usize; 2],
        add: bool,
        between: &mut impl Between,
    ) {
        let [rows, columns] = live;
        assert!(a.steps * STEP == b.len());
        // One by one: an array is compared in a vector register, which waits for both halves to reach the cache.
        if self.live[0] != rows || self.live[1] != columns {
            self.configure(live);
        }
        // SAFETY: the panels hold the same number of steps, and the tiles are configured to the rows and columns that c has.
        unsafe {
            match (rows > SIDE, columns > SIDE) {
                (true, true) => run::<true, true>(a, b.as_ptr(), c, stride, add, between),
                (true, false) => run::<true, false>(a, b.as_ptr(), c, stride, add, between),
                (false, true) => run::<false, true>(a, b.as_ptr(), c, stride, add, between),
                (false, false) => run::<false, false>(a, b.as_ptr(), c, stride, add, between),
            }
        }
    }

    fn configure(&mut self, live: [usize; 2]) {
        self.live = live;
        let mut config =
            Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        let halves = |live: usize| [live.min(SIDE), live.saturating_sub(SIDE)];
        let (rows, columns) = (halves(live[0]), halves(live[1]));
        let mut set = |tile: usize, rows: usize, columns: usize| {
            // A tile without rows or columns must have neither.
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
        // SAFETY: `Isa::available` has asked for the tiles, and the configuration is within their sizes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // The thread's state is small again for whoever switches it.
        // SAFETY: as in `configure`.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }
}

impl Kernel for Tiles {
    type Packed = u16;
    const SIZES: Sizes = blocking::TILES;

    fn start() -> Self {
        Self::ready()
    }

    type Rows<'a> = Lines<'a>;

    fn pack_rows<'a, T: Element>(
        &self,
        source: View<'a, T>,
        rows: usize,
        depth: usize,
        out: &'a mut [u16],
    ) -> Lines<'a> {
        let steps = depth.div_ceil(2 * SIDE);
        let start = source.checked(rows, depth).cast::<u16>();
        // Rows that lie as a tile wants them, each term's step on a cache line, need no copy.
        let straight = T::DTYPE == DType::Bf16 && source.column == 1 && depth.is_multiple_of(2 * SIDE);
        if straight && source.row.is_multiple_of(2 * SIDE) && (start as usize).is_multiple_of(64) {
            let (row, panel) = (source.row, 2 * SIDE * source.row);
            return Lines { start, row, step: 2 * SIDE, steps, panel, matrix: PhantomData };
        }
        pack(Side::Rows, source, rows, depth, out);
        let panel = steps * STEP;
        Lines { start: out.as_ptr(), row: 2 * SIDE, step: STEP, steps, panel, matrix: PhantomData }
    }

    fn panel(rows: Self::Rows<'_>, index: usize) -> Self::Rows<'_> {
        Lines { start: rows.start.wrapping_add(index * rows.panel), ..rows }
    }

    fn pack_columns<T: Element>(&self, source: View<T>, columns: usize, depth: usize, out: &mut [u16]) {
        pack(Side::Columns, source, columns, depth, out);
    }

    fn multiply(
        &mut self,
        a: Lines<'_>,
        b: &[u16],
        c: &mut [f32],
        stride: usize,
        live: [usize; 2],
        add: bool,
    ) {
        assert!((live[0] - 1) * stride + live[1] <= c.len());
        // SAFETY: c has the live rows and columns, and nobody else has it.
        unsafe { self.multiply_to(a, b, c.as_mut_ptr(), stride, live, add, &mut Nothing) }
    }

    #[inline(always)]
    fn finish<O, S: Store<O>>(sums: &[f32], at: Place, out: &mut Tile<O>, store: &S) {
        finish_lines(sums, at, out, store);
    }

    fn run_task<A: Element, B: Element, O>(
        job: Job<'_, A, B>,
        out: Tile<O>,
        scratch: &mut [f32],
        store: &impl Store<O>,
    ) {
        amx_driver::run_task(job, out, scratch, store);
    }
}

/// The instructions of one step of 2 by 2 tiles, `$a` and `$b` bytes further.
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

/// c = or += a · b over the steps of panels; `TALL` with the lower tiles of a, `WIDE` with the right ones of b.
///
/// # Safety
/// Panels have as many steps, c has the configured rows and columns, and tiles are configured accordingly.
#[inline(always)]
unsafe fn run<const TALL: bool, const WIDE: bool>(
    a: Lines<'_>,
    mut b: *const u16,
    c: *mut f32,
    stride: usize,
    add: bool,
    between: &mut impl Between,
) {
    let below = c.wrapping_add(SIDE * stride);
    let [near, lower_near] = a.near();
    let (mut upper, mut lower, row) = (a.start, a.start.wrapping_add(SIDE * a.row), 2 * a.row);
    // The compiler has no use for tiles, so what one block of assembly leaves in them the next one finds.
    // SAFETY: the caller's promise.
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
        // A loop for each way of loading, so that none has to look: numbers that do not fit the registers are loaded, too.
        macro_rules! beats {
            ($count:expr, $upper:literal, $lower:literal, $second:literal, $on:expr) => {
                for _ in 0..$count {
                    asm!(
                        step!($upper, $lower, "0", "0", "1024"), step!($upper, $lower, $second, "2048", "3072"),
                        upper = in(reg) upper, lower = in(reg) lower, row = in(reg) row,
                        b = in(reg) b, line = in(reg) 64usize, options(nostack, readonly),
                    );
                    between.beat();
                    (upper, lower, b) = (upper.wrapping_add($on), lower.wrapping_add($on), b.wrapping_add(2 * STEP));
                }
            };
        }
        let whole = if TALL && WIDE { a.steps / PAIR } else { 0 };
        let (near, lower_near) = (whole.min(near / PAIR), whole.min(lower_near / PAIR));
        if a.step == STEP {
            beats!(near, "tileloadd", "tileloadd", "2048", 2 * STEP);
            beats!(whole - near, "tileloaddt1", "tileloaddt1", "2048", 2 * STEP);
        } else {
            beats!(near, "tileloadd", "tileloadd", "64", 4 * SIDE);
            beats!(lower_near - near, "tileloaddt1", "tileloadd", "64", 4 * SIDE);
            beats!(whole - lower_near, "tileloaddt1", "tileloaddt1", "64", 4 * SIDE);
        }
        for at in PAIR * whole..a.steps {
            edge::<TALL, WIDE>(upper, lower, row, b);
            (upper, lower, b) =
                (upper.wrapping_add(a.step), lower.wrapping_add(a.step), b.wrapping_add(STEP));
            if at % PAIR == 1 || at + 1 == a.steps {
                between.beat();
            }
        }
        between.end();
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

/// One step of tiles that may have rows or columns missing.
///
/// # Safety
/// As for [`run`]; each address has a step of its panel.
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
