//! Peak loops of the CPU: AMX tile products from registers and from L2, and f32 FMAs from registers.
#![allow(unsafe_code, reason = "tile instructions are assembly, and vectors are intrinsics")]

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use zeroth_base::DType;

use super::{Benchmark, RateUnit};
use zeroth_cpu::{Isa, Pool};
use zeroth_kernel::DeviceError;

/// AMX tile products from registers: the bf16 peak.
pub const TILES: &str = "tiles in registers";
/// AMX tile products from L2: the limit of bf16 matmuls.
pub const TILES_FROM_L2: &str = "tiles from L2";
/// f32 FMAs from registers: the limit of f32 matmuls, and of bf16 without AMX.
pub const F32: &str = "f32 in registers";

/// The limit of matmuls of a dtype on an ISA.
pub const fn matmul_limit(isa: Isa, dtype: DType) -> &'static str {
    match (isa, dtype) {
        (Isa::Amx, DType::Bf16) => TILES_FROM_L2,
        _ => F32,
    }
}

/// Runs one burst of a peak loop on the calling thread, a few milliseconds at most; returns its floating-point operations.
///
/// # Panics
/// For AMX loops on a machine without AMX.
pub fn run_peak_loop(isa: Isa, limit: &str) -> f64 {
    match limit {
        #[cfg(target_arch = "x86_64")]
        TILES | TILES_FROM_L2 => {
            assert!(Isa::available().contains(&Isa::Amx), "{limit} on a machine without AMX");
            if limit == TILES { tiles::in_registers() } else { tiles::from_second_cache() }
        }
        _ => f32_in_registers(isa),
    }
}

/// The peak loops of the ISA that kernels use, on `threads` threads at the same time.
pub fn cpu_peak_benchmarks(threads: usize) -> Result<Vec<Benchmark>, DeviceError> {
    let isa = Isa::chosen()?;
    let names: &[&'static str] = if isa == Isa::Amx { &[TILES, TILES_FROM_L2, F32] } else { &[F32] };
    let line = |name: &'static str| {
        let (pool, barrier) = (Pool::start(threads)?, Barrier::new(threads));
        Ok(Benchmark::new(name, threads, RateUnit::Gflops, move || {
            let (start, done) = (Instant::now(), AtomicU64::new(0));
            pool.run(threads, |_, _| {
                // So that every thread runs one burst.
                barrier.wait();
                done.fetch_add(run_peak_loop(isa, name) as u64, Ordering::Relaxed);
            });
            Ok(done.into_inner() as f64 / start.elapsed().as_secs_f64() / 1e9)
        }))
    };
    names.iter().copied().map(line).collect()
}

/// Independent FMA chains.
const CHAINS: usize = 12;

fn f32_in_registers(isa: Isa) -> f64 {
    let steps = 100_000;
    let width = match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => {
            // SAFETY: the ISA is available.
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

/// Multiply-adds of four elements in baseline instructions.
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
            // SAFETY: the array is 256 bits.
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
    fn every_isa_of_this_machine_has_a_peak_loop() {
        for &isa in Isa::available() {
            for dtype in [DType::Bf16, DType::F32] {
                let limit = matmul_limit(isa, dtype);
                assert!(run_peak_loop(isa, limit) > 1e6, "{isa}: {limit}");
            }
        }
        if Isa::available().contains(&Isa::Amx) {
            assert!(run_peak_loop(Isa::Amx, TILES) > 1e6);
        }
    }
}
