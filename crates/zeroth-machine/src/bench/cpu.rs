//! What the processor can compute at most: tile products out of registers and out of the second-level cache, and f32
//! multiply-adds out of registers.
#![allow(unsafe_code, reason = "tile instructions are assembly, and vectors are intrinsics")]

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use zeroth_base::DType;

use super::{Benchmark, Unit};
use zeroth_cpu::{Isa, Pool};
use zeroth_kernel::DeviceError;

/// The line of tile products in registers: the peak of bf16.
pub const TILES: &str = "tiles in registers";
/// The line of tile products fed from the second-level cache: the limit of matrix products in bf16.
pub const TILES_FROM_L2: &str = "tiles from L2";
/// The line of f32 multiply-adds in registers: the limit of products in f32, and of bf16 without tiles.
pub const F32: &str = "f32 in registers";

/// The line that limits matrix products of a type on a path.
pub const fn matmul_limit(path: Isa, dtype: DType) -> &'static str {
    match (path, dtype) {
        (Isa::Amx, DType::Bf16) => TILES_FROM_L2,
        _ => F32,
    }
}

/// One burst of a limit's loop on the calling thread, of a few milliseconds at most; gives the operations done.
///
/// # Panics
/// For a line of tiles on a machine without them.
pub fn run_peak_loop(path: Isa, limit: &str) -> f64 {
    match limit {
        #[cfg(target_arch = "x86_64")]
        TILES | TILES_FROM_L2 => {
            assert!(Isa::available().contains(&Isa::Amx), "{limit} on a machine without tiles");
            if limit == TILES { tiles::in_registers() } else { tiles::from_second_cache() }
        }
        _ => f32_in_registers(path),
    }
}

/// The limits of the path that kernels take, by as many threads at the same time.
pub fn cpu_peak_benchmarks(threads: usize) -> Result<Vec<Benchmark>, DeviceError> {
    let path = Isa::chosen()?;
    let names: &[&'static str] = if path == Isa::Amx { &[TILES, TILES_FROM_L2, F32] } else { &[F32] };
    let line = |name: &'static str| {
        let (pool, barrier) = (Pool::start(threads)?, Barrier::new(threads));
        Ok(Benchmark::new(name, threads, Unit::Gflops, move || {
            let (start, done) = (Instant::now(), AtomicU64::new(0));
            pool.run(threads, |_, _| {
                // So that no thread takes two of the parts.
                barrier.wait();
                done.fetch_add(run_peak_loop(path, name) as u64, Ordering::Relaxed);
            });
            Ok(done.into_inner() as f64 / start.elapsed().as_secs_f64() / 1e9)
        }))
    };
    names.iter().copied().map(line).collect()
}

/// Chains of multiply-adds that do not wait for each other.
const CHAINS: usize = 12;

fn f32_in_registers(path: Isa) -> f64 {
    let steps = 100_000;
    let width = match path {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => {
            // SAFETY: the path was found on this machine.
            black_box(unsafe { vectors::avx512(steps) });
            16
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => {
            // SAFETY: as above.
            black_box(unsafe { vectors::avx2(steps) });
            8
        }
        _ => {
            black_box(plain(steps));
            4
        }
    };
    (steps * CHAINS * width * 2) as f64
}

/// Multiply-adds of four numbers each, in the instructions that every machine of this kind has.
fn plain(steps: usize) -> f32 {
    let (x, y) = (black_box([0.999_9f32; 4]), black_box([1e-3f32; 4]));
    let mut sums = [y; CHAINS];
    for _ in 0..steps {
        for sum in &mut sums {
            for lane in 0..4 {
                sum[lane] = sum[lane] * x[lane] + y[lane];
            }
        }
    }
    sums.into_iter().flatten().sum()
}

#[cfg(target_arch = "x86_64")]
mod vectors {
    use std::arch::x86_64::{
        _mm256_fmadd_ps, _mm256_set1_ps, _mm256_storeu_ps, _mm512_fmadd_ps, _mm512_reduce_add_ps,
        _mm512_set1_ps,
    };
    use std::hint::black_box;

    use super::CHAINS;

    #[target_feature(enable = "avx512f")]
    pub(super) fn avx512(steps: usize) -> f32 {
        let (x, y) = (_mm512_set1_ps(black_box(0.999_9)), _mm512_set1_ps(black_box(1e-3)));
        let mut sums = [y; CHAINS];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, x, y);
            }
        }
        sums.into_iter().map(|sum| _mm512_reduce_add_ps(sum)).sum()
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn avx2(steps: usize) -> f32 {
        let (x, y) = (_mm256_set1_ps(black_box(0.999_9)), _mm256_set1_ps(black_box(1e-3)));
        let mut sums = [y; CHAINS];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, x, y);
            }
        }
        let mut total = [0.0f32; 8];
        let mut lanes = [0.0f32; 8];
        for sum in sums {
            // SAFETY: eight numbers have room for eight.
            unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), sum) };
            total.iter_mut().zip(lanes).for_each(|(total, lane)| *total += lane);
        }
        total.iter().sum()
    }
}

#[cfg(target_arch = "x86_64")]
mod tiles {
    use std::arch::asm;
    use std::sync::OnceLock;

    use half::bf16;

    use zeroth_cpu::{Pool, normal};

    #[repr(C, align(64))]
    struct Config {
        palette: [u8; 16],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    /// Elements of one operand: both fill 512 KiB of the second-level cache.
    const PANEL: usize = 128 * 1024;
    /// Elements of a step: two tiles.
    const STEP: usize = 1024;
    /// Operations of a step: four products of 16 by 16 by 32.
    const STEP_FLOP: f64 = 4.0 * 2.0 * 16.0 * 16.0 * 32.0;

    /// Two operands of PANEL elements from a cache line on. Threads share them: what is only read is in the caches of each.
    fn panels() -> *const bf16 {
        static PANELS: OnceLock<Vec<bf16>> = OnceLock::new();
        let panels = PANELS.get_or_init(|| {
            let mut panels = vec![bf16::ZERO; 2 * PANEL + 32];
            normal(&Pool::new(1), 1, 1, 0, 1.0, &mut panels);
            panels
        });
        panels[panels.as_ptr().align_offset(64)..].as_ptr()
    }

    /// Multiplies what is in registers; gives the operations done.
    pub(super) fn in_registers() -> f64 {
        let steps = 20_000usize;
        let a = panels();
        configure();
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

    /// Multiplies tiles that are loaded from two operands of 256 KiB; gives the operations done.
    pub(super) fn from_second_cache() -> f64 {
        let rounds = 100;
        let a = panels();
        configure();
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

    fn configure() {
        let mut config = Config { palette: [0; 16], row_bytes: [0; 16], rows: [0; 16] };
        config.palette[0] = 1;
        config.row_bytes[..8].fill(64);
        config.rows[..8].fill(16);
        // SAFETY: the caller has asked `Isa::available` for tiles; all sizes are within theirs.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_of_this_machine_has_a_limit_that_runs() {
        for &path in Isa::available() {
            for dtype in [DType::Bf16, DType::F32] {
                let limit = matmul_limit(path, dtype);
                assert!(run_peak_loop(path, limit) > 1e6, "{path}: {limit}");
            }
        }
        if Isa::available().contains(&Isa::Amx) {
            assert!(run_peak_loop(Isa::Amx, TILES) > 1e6);
        }
    }
}
