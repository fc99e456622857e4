//! The kind of device a program is compiled for.

use zeroth_base::DType;
use zeroth_kernel::Kernel;

/// A kind of device, for questions that need none at hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Kernels of the processor with a pool of so many threads.
    Cpu {
        /// Threads of a rank.
        threads: usize,
    },
    /// NVIDIA's cards.
    Cuda,
}

impl Target {
    /// Bytes of scratch that a kernel needs on such a device.
    pub fn scratch(self, kernel: &Kernel, dtype: DType) -> u64 {
        match self {
            Self::Cpu { threads } => zeroth_cpu::scratch_bytes(kernel, threads),
            Self::Cuda => zeroth_cuda::scratch_bytes(kernel, dtype),
        }
    }

    /// Elements from one row of activations to the next.
    pub fn row_stride(self, width: u64, dtype: DType) -> u64 {
        match self {
            Self::Cpu { .. } => zeroth_cpu::row_stride(width as usize, dtype) as u64,
            Self::Cuda => width,
        }
    }
}
