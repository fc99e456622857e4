//! NVIDIA GPUs as a [`Target`].

use zeroth_base::DType;
use zeroth_kernel::{ByTier, Device, DeviceError, Kernel, Target};

use super::device::CudaDevice;
use super::gpu_kernel::scratch_bytes;

/// One GPU for each rank.
#[derive(Debug)]
pub struct CudaTarget;

impl Target for CudaTarget {
    fn threads(&self) -> usize {
        1
    }

    fn scratch_bytes(&self, kernel: &Kernel, dtype: DType) -> u64 {
        scratch_bytes(kernel, dtype)
    }

    fn row_stride(&self, width: u64, _: DType) -> u64 {
        width
    }

    fn tile_rows(&self) -> u64 {
        16
    }

    fn is_host(&self) -> bool {
        false
    }

    fn maps_peers(&self) -> bool {
        false
    }

    fn rounds_head_gradient(&self) -> bool {
        false
    }

    fn process_bytes(&self) -> u64 {
        // The driver and its libraries.
        400_000_000
    }

    fn open(&self, ordinal: usize, arenas: ByTier<u64>) -> Result<Box<dyn Device>, DeviceError> {
        Ok(Box::new(CudaDevice::open(ordinal, arenas)?))
    }
}
