//! The kind of device a program is compiled for.

use zeroth_base::DType;
use zeroth_kernel::Kernel;

/// A kind of device, for compilation without one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The CPU.
    Cpu {
        /// Threads per rank.
        threads: usize,
    },
    /// An NVIDIA GPU.
    Cuda,
}

impl Target {
    /// Bytes of scratch that a kernel needs on this device.
    pub fn scratch(self, kernel: &Kernel, dtype: DType) -> u64 {
        match self {
            Self::Cpu { threads } => zeroth_cpu::scratch_bytes(kernel, threads),
            Self::Cuda => zeroth_cuda::scratch_bytes(kernel, dtype),
        }
    }

    /// The row stride of activations, in elements.
    pub fn row_stride(self, width: u64, dtype: DType) -> u64 {
        match self {
            Self::Cpu { .. } => zeroth_cpu::row_stride(width as usize, dtype) as u64,
            Self::Cuda => width,
        }
    }
}
