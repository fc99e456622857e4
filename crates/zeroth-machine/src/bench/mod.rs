//! How near the machine at hand comes to its limits: kernels, optimizer and disk, each beside what the hardware gives at
//! most in the same run, and the profile that keeps it.
//!
//! Clocks and memory of a shared machine change within milliseconds. So all [`Benchmark`]s of a list are measured in turns, one
//! short burst each, and the best and the median of a line are set beside the best and the median of its limit. Data is
//! random: zeros cost less power and run faster than any work does.

mod gpu;
mod disk;
mod benchmark;
mod memory;
mod memory_bound;
mod cpu;
mod matmuls;
mod profile;
mod operands;

pub use gpu::gpu_benchmarks;
pub use disk::disk_benchmarks;
pub use benchmark::{LimitRate, BenchError, Benchmark, BenchResult, Rate, Unit, measure};
pub use memory::{COPY, TRIAD, copy};
pub use memory_bound::{MemoryBoundSizes, memory_bound_benchmarks, optimizer_benchmarks};
pub use cpu::{F32, TILES, TILES_FROM_L2, matmul_limit, run_peak_loop, cpu_peak_benchmarks};
pub use matmuls::{MatmulKind, MatmulBench, attention_benchmarks, head_loss_benchmarks, matmul_benchmarks};
pub use profile::{Identity, Part, Profile, ProfileError, ProfilePart};
pub use operands::fill_random;
