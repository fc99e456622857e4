//! What a kernel of a GPU is to the device: its scratch, and its launch.

use zeroth_base::DType;
use zeroth_kernel::{DeviceError, Kernel, with_operands};

use super::cudnn::FusedAttention;
use super::launch_context::{ALIGNMENT, LaunchContext};
use super::matmuls::Matmuls;

/// A kernel that needs no scratch.
pub(super) const NO_SCRATCH: [u64; 3] = [0; 3];

/// The libraries that some kernels run by.
pub(super) struct Libraries<'a> {
    pub(super) matmuls: &'a mut Matmuls,
    pub(super) fused: &'a mut FusedAttention,
}

/// A kernel of a GPU, implemented by the struct of its operands.
pub(super) trait CudaKernel {
    /// Bytes of its scratch, in up to three parts.
    fn scratch(&self, dtype: DType) -> [u64; 3];

    /// Enqueues it.
    fn enqueue(self, cx: &mut LaunchContext, libraries: &mut Libraries<'_>) -> Result<(), DeviceError>;
}

/// A kernel of a GPU: `Kernel { operands }`, the parts of its scratch for a dtype, and its launch.
macro_rules! cuda_kernel {
    ($Kernel:ident { $($field:ident),* }, |$dtype:pat_param| $scratch:expr, |$cx:ident| $run:expr) => {
        $crate::gpu_kernel::cuda_kernel!(
            $Kernel { $($field),* }, |$dtype| $scratch, |$cx, _libraries| $run
        );
    };
    (
        $Kernel:ident { $($field:ident),* }, |$dtype:pat_param| $scratch:expr,
        |$cx:ident, $libraries:ident| $run:expr
    ) => {
        impl $crate::gpu_kernel::CudaKernel for zeroth_kernel::operands::$Kernel {
            #[allow(unused_variables, reason = "scratch depends on a few")]
            fn scratch(&self, $dtype: zeroth_base::DType) -> [u64; 3] {
                let Self { $($field,)* .. } = *self;
                $scratch
            }

            fn enqueue(
                self,
                $cx: &mut $crate::launch_context::LaunchContext,
                $libraries: &mut $crate::gpu_kernel::Libraries<'_>,
            ) -> Result<(), zeroth_kernel::DeviceError> {
                let Self { $($field,)* .. } = self;
                $run
            }
        }
    };
}
pub(super) use cuda_kernel;

/// Bytes of scratch that a kernel needs on a GPU.
pub fn scratch_bytes(kernel: &Kernel, dtype: DType) -> u64 {
    let parts = with_operands!(*kernel, operands => operands.scratch(dtype));
    let total: u64 = parts.iter().map(|bytes| bytes.next_multiple_of(ALIGNMENT)).sum();
    // A span may start at any address.
    if total == 0 { 0 } else { total + ALIGNMENT }
}

/// The refusal of a gradient that is rounded as it is stored.
pub(super) fn stored_in_f32(cx: &LaunchContext) -> DeviceError {
    cx.invalid("on a GPU the gradient of the LM head is stored in f32 and rounded later".to_owned())
}

/// Enqueues a kernel.
pub(super) fn enqueue(
    cx: &mut LaunchContext,
    libraries: &mut Libraries<'_>,
    kernel: &Kernel,
) -> Result<(), DeviceError> {
    if kernel.has_padded_rows() {
        return Err(cx.invalid(
            "its dimensions have padded rows; kernels of the GPU read rows without padding".to_owned(),
        ));
    }
    with_operands!(*kernel, operands => operands.enqueue(cx, libraries))
}
