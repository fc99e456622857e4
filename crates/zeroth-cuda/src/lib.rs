//! NVIDIA's cards: the same kernels as CUDA C++, compiled by NVRTC for the card found.
//!
//! The driver, NVRTC, cuBLASLt and, where it is there, cuDNN are opened at run time. Kernels are in `kernels/`; each is the function of the same
//! name in [`zeroth_cpu`], with the same rounding. Matrix products are cuBLASLt's, and attention forward over long sequences of one
//! length cuDNN's; a sum that is cut along its length is added
//! in one order. There are no atomics: a kernel gives the same bits at every run.
#![allow(clippy::similar_names, reason = "names of the formulas: dx and dw; cos and sin")]

mod attention;
mod choice;
mod compiler;
mod cublaslt;
mod cudnn;
mod device;
mod driver;
mod flash;
mod folders;
mod graphs;
mod head;
mod ipc;
mod library;
mod line;
mod nccl;
mod norm_rope;
mod opened;
mod peers;
mod processors;
mod products;
mod programs;
mod rows;
mod run;
mod scratch;

pub use device::CudaDevice;
pub use folders::{FOLDERS, Folders};
pub use opened::Opened;
pub use programs::compile_kernels;
pub use scratch::scratch_bytes;
