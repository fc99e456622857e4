//! Benchmarks of kernels, optimizer and disk against the hardware's limits in the same run, and the profile that stores them.
//!
//! Clocks and memory bandwidth of a shared machine change within milliseconds. So all [`Benchmark`]s of a list run in turns, one
//! short burst each, and best and median are compared with the best and median of their limit. Data is random: zeros take less
//! power and run faster than real work.

mod benchmark;
mod cpu;
mod disk;
mod gpu;
mod grouped;
mod matmuls;
mod memory;
mod memory_bound;
mod operands;
mod profile;

pub use benchmark::{BenchError, BenchResult, Benchmark, LimitRate, Rate, RateUnit, measure};
pub use cpu::{F32, TILES, TILES_FROM_L2, cpu_peak_benchmarks, matmul_limit, run_peak_loop};
pub use disk::disk_benchmarks;
pub use gpu::gpu_benchmarks;
pub use grouped::{RowSplit, grouped_benchmarks};
pub use matmuls::{
    MatmulBench, MatmulKind, adapter_benchmarks, attention_benchmarks, head_loss_benchmarks,
    matmul_benchmarks,
};
pub use memory::{COPY, TRIAD, copy};
pub use memory_bound::{MemoryBoundSizes, memory_bound_benchmarks, optimizer_benchmarks};
pub use operands::fill_random;
pub use profile::{BenchPart, Identity, Profile, ProfileError, ProfilePart};
