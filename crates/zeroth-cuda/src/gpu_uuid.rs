//! The UUIDs by which ranks tell GPUs apart.
#![allow(unsafe_code, reason = "asks the driver for the GPU's UUID")]

use std::ffi::c_int;

use super::bindings::bindings;
use super::driver::Driver;
use zeroth_kernel::DeviceError;

/// The UUID of a GPU, the same in all processes.
pub(super) type GpuUuid = [u8; 16];

bindings! {
    /// Functions that only ranks on several GPUs need.
    Functions: driver {
        cuDeviceGetUuid_v2(*mut GpuUuid, c_int);
    }
}

/// The UUID of a device.
pub(super) fn gpu_uuid(driver: &Driver, device: c_int) -> Result<GpuUuid, DeviceError> {
    let functions = Functions::load(&Driver::library()?)?;
    let mut uuid = GpuUuid::default();
    // SAFETY: writes 16 bytes.
    driver.check("cuDeviceGetUuid", unsafe { (functions.cuDeviceGetUuid_v2)(&raw mut uuid, device) })?;
    Ok(uuid)
}

/// The first two ranks that use the same GPU, if any.
pub(super) fn ranks_on_one_gpu(gpus: &[GpuUuid]) -> Option<(usize, usize)> {
    let before = |at: usize| gpus[..at].iter().position(|gpu| *gpu == gpus[at]);
    (0..gpus.len()).find_map(|at| before(at).map(|first| (first, at)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_share_a_gpu_are_found() {
        let gpu = |number: u8| [number; 16];
        assert_eq!(ranks_on_one_gpu(&[gpu(1), gpu(2), gpu(3)]), None);
        assert_eq!(ranks_on_one_gpu(&[gpu(1), gpu(2), gpu(1)]), Some((0, 2)));
        assert_eq!(ranks_on_one_gpu(&[]), None);
    }
}
