//! The UUIDs by which ranks tell GPUs apart.
#![allow(unsafe_code, reason = "asks the driver for the GPU's UUID")]

use std::ffi::c_int;

use super::bindings::bindings;
use super::driver::Driver;
use zeroth_kernel::DeviceError;

/// The UUID of a GPU, the same in all processes.
pub(super) type GpuUuid = [u8; 16];

/// A GPU of a host. Virtual machines may give equal UUIDs to GPUs of different hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GpuOfHost {
    pub(super) host: u64,
    pub(super) gpu: GpuUuid,
}

impl GpuOfHost {
    const BYTES: usize = 8 + size_of::<GpuUuid>();

    /// A GPU of this host.
    pub(super) fn here(gpu: GpuUuid) -> Self {
        let kernel =
            |name: &str| std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).unwrap_or_default();
        let name = std::env::var("NCCL_HOSTID");
        Self { host: host(name.ok().as_deref(), &kernel("hostname"), &kernel("random/boot_id")), gpu }
    }

    pub(super) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.host.to_le_bytes());
        bytes[8..].copy_from_slice(&self.gpu);
        bytes
    }

    pub(super) fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let (host, gpu) = bytes.split_first_chunk().expect("8 of 24 bytes");
        Self { host: u64::from_le_bytes(*host), gpu: gpu.try_into().expect("the other 16") }
    }
}

/// What NCCL takes for a host: its `NCCL_HOSTID`, else its name and boot. FNV-1a.
fn host(id: Option<&str>, name: &str, boot: &str) -> u64 {
    let (id, name, boot) = id.filter(|id| !id.is_empty()).map_or(("", name, boot), |id| (id, "", ""));
    let bytes = [id, name, boot].into_iter().flat_map(|text| text.trim().bytes().chain([0]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

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
pub(super) fn ranks_on_one_gpu(gpus: &[GpuOfHost]) -> Option<(usize, usize)> {
    let before = |at: usize| gpus[..at].iter().position(|gpu| *gpu == gpus[at]);
    (0..gpus.len()).find_map(|at| before(at).map(|first| (first, at)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_share_a_gpu_are_found() {
        let gpu = |number: u8| GpuOfHost { host: 7, gpu: [number; 16] };
        assert_eq!(ranks_on_one_gpu(&[gpu(1), gpu(2), gpu(3)]), None);
        assert_eq!(ranks_on_one_gpu(&[gpu(1), gpu(2), gpu(1)]), Some((0, 2)));
        assert_eq!(ranks_on_one_gpu(&[gpu(1), GpuOfHost { host: 8, gpu: [1; 16] }]), None);
        assert_eq!(ranks_on_one_gpu(&[]), None);
        assert_eq!(GpuOfHost::from_bytes(gpu(3).to_bytes()), gpu(3));
    }

    #[test]
    fn hosts_differ_by_name_by_boot_and_by_the_id_that_nccl_uses() {
        let all =
            [host(None, "a", "1"), host(None, "b", "1"), host(None, "a", "2"), host(Some("a1"), "a", "1")];
        assert!((0..4).all(|at| !all[..at].contains(&all[at])));
        assert_eq!(host(Some(""), "a\n", "1"), all[0]);
        assert_eq!(host(Some("a1"), "c", "3"), all[3]);
    }
}
