//! Kernels, streams and collectives of NVIDIA GPUs.
//!
//! The driver, NVRTC, cuBLASLt and, if present, cuDNN and NCCL are opened at run time. Kernels are CUDA C++ in `kernels/`, compiled by
//! NVRTC for the GPU at hand. Each corresponds to the function of the same name in [`zeroth_cpu`] and rounds like it. Matmuls use
//! cuBLASLt; attention forward over long sequences of equal length uses cuDNN. Results are deterministic: there are no atomics, and
//! every sum has a fixed order.
#![allow(clippy::similar_names, reason = "names of the formulas: dx and dw; cos and sin")]

mod arch;
mod arenas;
mod attention;
mod autotune;
mod bindings;
mod cached_attention;
mod compiler;
mod cpu_optimizer;
mod cubin;
mod cublaslt;
mod cudnn;
mod device;
mod distill;
mod driver;
mod entry_points;
mod expert_rows;
mod flash;
mod gpu_kernel;
mod gpu_uuid;
mod graphs;
mod grouped;
mod grouped_functions;
mod ipc;
mod kernels;
mod launch;
mod launch_context;
mod library;
mod library_folders;
mod lm_head;
mod loss;
mod matmuls;
mod module_cache;
mod modules;
mod nccl;
mod norm_rope;
mod peers;
mod position_bias;
mod route;
mod rowwise;
mod scratch;
mod target;
mod tensor_map;

pub use device::CudaDevice;
pub use gpu_kernel::scratch_bytes;
pub use library_folders::{LIBRARIES_VARIABLE, LibraryFolders};
pub use modules::{CompiledKernels, compile_kernels};
pub use target::CudaTarget;
pub use zeroth_base::SharedLibrary;
