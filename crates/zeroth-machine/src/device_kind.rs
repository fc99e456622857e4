//! The kinds of device that there are.

use zeroth_cpu::CpuTarget;
use zeroth_cuda::CudaTarget;
use zeroth_kernel::Target;

/// The devices that run kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// CPUs.
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
}

impl DeviceKind {
    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }

    /// What programs are compiled for; `threads` are those of a rank, where kernels run on CPUs.
    pub fn target(self, threads: usize) -> &'static dyn Target {
        match self {
            Self::Cpu => CpuTarget::of(threads),
            Self::Cuda => &CudaTarget,
        }
    }
}
