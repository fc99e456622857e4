//! What the processor can do at most: tile products out of registers and out of the second-level cache, and f32
//! multiply-adds out of registers. Random numbers everywhere: zeros cost less power and run faster than any work does.
#![allow(unsafe_code, reason = "tile instructions are assembly, and vectors are intrinsics")]

use std::arch::asm;
use std::arch::x86_64::{_mm512_fmadd_ps, _mm512_reduce_add_ps, _mm512_set1_ps};
use std::hint::black_box;

use half::bf16;
use zeroth_device::cpu::{Pool, normal};

#[repr(C, align(64))]
struct Config {
    palette: [u8; 16],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Two operands that fill 512 KiB of the second-level cache.
pub(crate) struct Limits {
    panels: Vec<bf16>,
}

/// Elements of one operand.
const PANEL: usize = 128 * 1024;
/// Elements of a step: two tiles.
const STEP: usize = 1024;
/// Operations of a step: four products of 16 by 16 by 32.
const STEP_FLOP: f64 = 4.0 * 2.0 * 16.0 * 16.0 * 32.0;

impl Limits {
    pub(crate) fn new() -> Self {
        let mut panels = vec![bf16::ZERO; 2 * PANEL + 32];
        normal(&Pool::new(1), 1, 1, 0, 1.0, &mut panels);
        Self { panels }
    }

    fn start(&self) -> *const bf16 {
        let skip = self.panels.as_ptr().align_offset(64);
        self.panels[skip..].as_ptr()
    }

    /// Multiplies what is in registers; returns the operations done.
    pub(crate) fn tiles_in_registers(&self) -> f64 {
        let steps = 20_000usize;
        configure();
        let a = self.start();
        // SAFETY: tiles are configured to 1 KiB each, and the operands have 4 KiB.
        unsafe {
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "tileloadd tmm4, [{a} + {row}*1]", "tileloadd tmm5, [{a} + {row}*1 + 1024]",
                "tileloadd tmm6, [{a} + {row}*1 + 2048]", "tileloadd tmm7, [{a} + {row}*1 + 3072]",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6", "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6", "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {n}", "jnz 2b", "tilerelease",
                a = in(reg) a, row = in(reg) 64usize, n = inout(reg) steps => _, options(nostack, readonly),
            );
        }
        steps as f64 * STEP_FLOP
    }

    /// Multiplies tiles that are loaded from two operands of 256 KiB; returns the operations done.
    pub(crate) fn tiles_from_second_cache(&self) -> f64 {
        let rounds = 100;
        configure();
        let a = self.start();
        for _ in 0..rounds {
            // SAFETY: both operands have PANEL elements.
            unsafe {
                asm!(
                    "2:",
                    "tileloadd tmm4, [{a} + {row}*1]",
                    "tileloadd tmm6, [{b} + {row}*1]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{b} + {row}*1 + 1024]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tileloadd tmm5, [{a} + {row}*1 + 1024]",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "add {a}, 2048", "add {b}, 2048",
                    "dec {n}", "jnz 2b",
                    a = inout(reg) a => _, b = inout(reg) a.wrapping_add(PANEL) => _, row = in(reg) 64usize,
                    n = inout(reg) PANEL / STEP => _, options(nostack, readonly),
                );
            }
        }
        // SAFETY: gives the tiles back.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
        (rounds * PANEL / STEP) as f64 * STEP_FLOP
    }

    /// Multiplies and adds f32 in registers; returns the operations done.
    pub(crate) fn f32_in_registers() -> f64 {
        #[target_feature(enable = "avx512f")]
        fn run(steps: usize) -> f32 {
            let (x, y) = (_mm512_set1_ps(black_box(0.999_9)), _mm512_set1_ps(black_box(1e-3)));
            let mut sums = [y; 12];
            for _ in 0..steps {
                for sum in &mut sums {
                    *sum = _mm512_fmadd_ps(*sum, x, y);
                }
            }
            sums.into_iter().map(|sum| _mm512_reduce_add_ps(sum)).sum()
        }
        let steps = 200_000;
        // SAFETY: a machine with tiles has AVX-512.
        black_box(unsafe { run(steps) });
        steps as f64 * 12.0 * 32.0
    }
}

fn configure() {
    let mut config = Config { palette: [0; 16], row_bytes: [0; 16], rows: [0; 16] };
    config.palette[0] = 1;
    config.row_bytes[..8].fill(64);
    config.rows[..8].fill(16);
    // SAFETY: the caller runs only where `Path::available` has asked for tiles; all sizes are within theirs.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) }
}
