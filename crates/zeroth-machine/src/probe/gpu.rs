//! NVIDIA GPUs: names, compute capability and memory, without creating a context.

mod driver;
mod nvml;

use std::ffi::OsStr;
use std::fmt::{self, Write};

use serde::Serialize;

use super::notes::Notes;
use driver::{CallFailed, GpuAttribute, GpuDriver, NO_DEVICE, NotOpened};
use nvml::Nvml;

/// The GPUs of this machine, or why there are none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum Gpus {
    /// The driver library is missing.
    NoDriver { why: String },
    /// The driver reports no device to this process.
    NoDevice { why: String },
    /// The driver does not work.
    Failed {
        /// What failed.
        why: String,
    },
    /// The driver works.
    Found {
        /// The newest CUDA version the driver supports.
        driver_version: String,
        /// The devices in the driver's order, `CUDA_VISIBLE_DEVICES` applied.
        devices: Vec<Gpu>,
    },
}

/// A GPU, or a MIG instance of one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct Gpu {
    /// Its number for this process.
    pub index: u32,
    /// The driver's name for it.
    pub name: String,
    /// Its name in NVIDIA's tools: `GPU-…`, `MIG-…`.
    pub uuid: Option<String>,
    pub compute_capability: ComputeCapability,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of memory.
    pub total: u64,
    /// Free bytes. `None` where NVML is missing.
    pub free: Option<u64>,
}

/// The version of a GPU's instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct ComputeCapability {
    /// Architecture: 7 Volta and Turing, 8 Ampere and Ada, 9 Hopper, 10 and 12 Blackwell.
    pub major: u32,
    /// Variant.
    pub minor: u32,
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl Gpu {
    /// Whether tensor cores support bf16: from Ampere (8.0) on.
    pub fn supports_bf16(&self) -> bool {
        self.compute_capability >= ComputeCapability { major: 8, minor: 0 }
    }
}

/// Probes the GPUs.
pub(super) fn probe(notes: &mut Notes) -> Gpus {
    find(OsStr::new("libcuda.so.1"), OsStr::new("libnvidia-ml.so.1"), notes)
}

fn find(driver: &OsStr, management: &OsStr, notes: &mut Notes) -> Gpus {
    let driver = match GpuDriver::open(driver) {
        Ok(driver) => driver,
        Err(NotOpened::Library(why)) => return Gpus::NoDriver { why },
        Err(NotOpened::Function(why)) => return Gpus::Failed { why },
    };
    match devices(&driver, notes) {
        Ok((_, devices)) if devices.is_empty() => Gpus::NoDevice { why: "the driver counts none".to_owned() },
        Ok((version, mut devices)) => {
            add_free_memory(&mut devices, management, notes);
            Gpus::Found { driver_version: format!("{}.{}", version / 1000, version % 1000 / 10), devices }
        }
        Err(failed) if failed.code == NO_DEVICE => {
            // The usual reason on a machine that has GPUs.
            let hidden = std::env::var("CUDA_VISIBLE_DEVICES")
                .map(|list| format!("; CUDA_VISIBLE_DEVICES is `{list}`"));
            Gpus::NoDevice { why: format!("{failed}{}", hidden.unwrap_or_default()) }
        }
        Err(failed) => Gpus::Failed { why: failed.to_string() },
    }
}

/// The driver's version and the devices that respond.
fn devices(driver: &GpuDriver, notes: &mut Notes) -> Result<(i32, Vec<Gpu>), CallFailed> {
    driver.init()?;
    let version = driver.version()?;
    let mut devices = Vec::new();
    for index in 0..driver.count()? {
        devices.extend(
            notes.or_note(
                "gpus.devices",
                describe(driver, index).map_err(|why| format!("GPU {index}: {why}")),
            ),
        );
    }
    Ok((version, devices))
}

fn describe(driver: &GpuDriver, index: i32) -> Result<Gpu, CallFailed> {
    let device = driver.device(index)?;
    Ok(Gpu {
        index: index.unsigned_abs(),
        name: driver.name(device)?,
        uuid: driver.uuid(device).map(|bytes| uuid_text("GPU", &bytes)),
        compute_capability: ComputeCapability {
            major: driver.attribute(device, GpuAttribute::CapabilityMajor)?,
            minor: driver.attribute(device, GpuAttribute::CapabilityMinor)?,
        },
        multiprocessors: driver.attribute(device, GpuAttribute::Multiprocessors)?,
        total: driver.total(device)?,
        free: None,
    })
}

/// Reads the memory in use on GPUs, again and again, without a context.
pub struct GpuMemory {
    nvml: Nvml,
    uuids: Vec<Option<String>>,
}

impl GpuMemory {
    /// The memory of these GPUs; `None` without NVIDIA's management library.
    pub fn open(gpus: &[Gpu]) -> Option<Self> {
        Self::open_library(gpus, OsStr::new("libnvidia-ml.so.1"))
    }

    fn open_library(gpus: &[Gpu], management: &OsStr) -> Option<Self> {
        let nvml = Nvml::open(management).ok()?;
        Some(Self { nvml, uuids: gpus.iter().map(|gpu| gpu.uuid.clone()).collect() })
    }

    /// Bytes in use on the n-th of them by all processes.
    pub fn used(&self, gpu: usize) -> Option<u64> {
        self.nvml.used(self.uuids.get(gpu)?.as_deref()?).ok()
    }
}

fn add_free_memory(devices: &mut [Gpu], management: &OsStr, notes: &mut Notes) {
    let Some(nvml) = notes.or_note("gpus.devices.free", Nvml::open(management)) else { return };
    for gpu in devices {
        let Some(uuid) = gpu.uuid.clone() else {
            notes.add("gpus.devices.free", format!("GPU {}: the driver gives it no UUID", gpu.index));
            continue;
        };
        // The driver does not tell whether the UUID is that of a whole GPU or of a MIG instance.
        let part = uuid.replacen("GPU", "MIG", 1);
        let free = nvml.free(&uuid).or_else(|why| match nvml.free(&part) {
            Ok(free) => {
                gpu.uuid = Some(part);
                Ok(free)
            }
            Err(_) => Err(format!("GPU {}: {why}", gpu.index)),
        });
        gpu.free = notes.or_note("gpus.devices.free", free).map(|free| free.min(gpu.total));
    }
}

/// `GPU-01234567-89ab-cdef-0123-456789abcdef`.
fn uuid_text(kind: &str, bytes: &[u8; 16]) -> String {
    let mut text = kind.to_owned();
    for (at, byte) in bytes.iter().enumerate() {
        let dash = if matches!(at, 0 | 4 | 6 | 8 | 10) { "-" } else { "" };
        write!(text, "{dash}{byte:02x}").expect("writing to a String does not fail");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::test_library::compile;
    use super::*;

    // Driver and NVML in one library, as of a machine with two GPUs.
    const LIBRARIES: &str = r#"
        #include <stddef.h>
        #include <string.h>
        int cuInit(unsigned flags) { return flags ? 1 : INIT; }
        int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
        int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
        int cuDeviceGet(int *device, int index) { *device = index + 40; return index < 2 ? 0 : 101; }
        int cuDeviceGetName(char *name, int length, int device) {
            strncpy(name, device == 40 ? "NVIDIA H200" : "Tesla V100-SXM2-16GB", length);
            return 0;
        }
        int cuDeviceTotalMem_v2(size_t *bytes, int device) {
            *bytes = device == 40 ? 150110011392 : 16935682048;
            return 0;
        }
        int cuDeviceGetAttribute(int *value, int attribute, int device) {
            int hopper = device == 40;
            switch (attribute) {
                case 16: *value = hopper ? 132 : 80; return 0;
                case 75: *value = hopper ? 9 : 7; return 0;
                case 76: *value = 0; return 0;
            }
            return 1;
        }
        int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
            for (int i = 0; i < 16; i++) uuid[i] = i * 16 + (device - 40);
            return 0;
        }
        #ifndef OLD
        int cuGetErrorString(int code, const char **text) {
            *text = code == 100 ? "no CUDA-capable device is detected"
                  : code == 101 ? "invalid device ordinal"
                  : code == 803 ? "system has unsupported display driver / cuda driver combination" : 0;
            return *text ? 0 : 1;
        }
        #endif
        struct memory { unsigned long long total, free, used; };
        int nvmlInit_v2(void) { return NVML; }
        int nvmlShutdown(void) { return 0; }
        const char *nvmlErrorString(int code) {
            return code == 6 ? "Not Found" : code == 18 ? "Driver/library version mismatch" : "Unknown Error";
        }
        int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
            if (!strcmp(uuid, KIND "-00102030-4050-6070-8090-a0b0c0d0e0f0")) { *device = (void *)1; return 0; }
            if (!strcmp(uuid, "GPU-01112131-4151-6171-8191-a1b1c1d1e1f1")) { *device = (void *)2; return 0; }
            return 6;
        }
        int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
            memory->total = 150754820096;
            memory->free = device == (void *)1 ? 149000000000 : 99000000000;
            memory->used = memory->total - memory->free;
            return 0;
        }
    "#;

    fn found(defines: &[&str]) -> (Gpus, Notes) {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("libnvidia.so");
        // What is given first counts.
        let source = format!(
            "{}{LIBRARIES}",
            [("INIT", "0"), ("COUNT", "2"), ("NVML", "0"), ("KIND", "\"GPU\"")]
                .map(|(name, value)| format!("#ifndef {name}\n#define {name} {value}\n#endif\n"))
                .concat()
        );
        compile(&source, &library, defines);
        let mut notes = Notes::default();
        let gpus = find(library.as_os_str(), library.as_os_str(), &mut notes);
        (gpus, notes)
    }

    fn devices_of(gpus: Gpus) -> Vec<Gpu> {
        match gpus {
            Gpus::Found { devices, .. } => devices,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn devices_are_described_with_their_free_memory() {
        let (gpus, notes) = found(&[]);
        assert!(matches!(&gpus, Gpus::Found { driver_version, .. } if driver_version == "12.8"), "{gpus:?}");
        let devices = devices_of(gpus);
        let hopper = Gpu {
            index: 0,
            name: "NVIDIA H200".to_owned(),
            uuid: Some("GPU-00102030-4050-6070-8090-a0b0c0d0e0f0".to_owned()),
            compute_capability: ComputeCapability { major: 9, minor: 0 },
            multiprocessors: 132,
            total: 150_110_011_392,
            free: Some(149_000_000_000),
        };
        assert_eq!(devices[0], hopper);
        assert_eq!(devices[1].free, Some(devices[1].total), "free memory is never more than there is");
        assert!(
            devices[0].supports_bf16() && !devices[1].supports_bf16(),
            "bf16 begins with 8.0, Volta is 7.0"
        );
        assert!(notes.0.is_empty(), "{notes:?}");
    }

    #[test]
    fn used_memory_is_read_by_the_uuids_of_the_probe() {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("libnvidia.so");
        let defines = "#define INIT 0\n#define COUNT 2\n#define NVML 0\n#define KIND \"GPU\"\n";
        compile(&format!("{defines}{LIBRARIES}"), &library, &[]);
        let gpus = devices_of(find(library.as_os_str(), library.as_os_str(), &mut Notes::default()));
        let memory = GpuMemory::open_library(&gpus, library.as_os_str()).unwrap();
        assert_eq!(memory.used(0), Some(150_754_820_096 - 149_000_000_000));
        assert_eq!(memory.used(1), Some(150_754_820_096 - 99_000_000_000));
        assert_eq!(memory.used(2), None);
        assert!(GpuMemory::open_library(&gpus, OsStr::new("libzeroth-absent.so.1")).is_none());
    }

    #[test]
    fn a_mig_instance_is_found_by_its_uuid() {
        let devices = devices_of(found(&["KIND=\"MIG\""]).0);
        assert_eq!(devices[0].uuid.as_deref(), Some("MIG-00102030-4050-6070-8090-a0b0c0d0e0f0"));
        assert_eq!(devices[0].free, Some(149_000_000_000));
    }

    #[test]
    fn without_nvml_free_memory_is_unknown_and_noted() {
        let (gpus, notes) = found(&["NVML=18"]);
        assert_eq!(devices_of(gpus)[0].free, None);
        assert_eq!(notes.0[0].what, "gpus.devices.free");
        assert!(notes.0[0].why.contains("error 18: Driver/library version mismatch"), "{notes:?}");
    }

    #[test]
    fn a_failing_device_is_left_out_and_noted() {
        let (gpus, notes) = found(&["COUNT=3"]);
        assert_eq!(devices_of(gpus).len(), 2);
        assert_eq!(notes.0[0].why, "GPU 2: cuDeviceGet failed with error 101: invalid device ordinal");
    }

    #[test]
    fn missing_driver_no_device_and_failing_driver_are_distinct() {
        let absent = OsStr::new("libzeroth-absent.so.1");
        let gpus = find(absent, absent, &mut Notes::default());
        assert!(matches!(&gpus, Gpus::NoDriver { why } if why.contains("libzeroth-absent.so.1")), "{gpus:?}");
        let (gpus, _) = found(&["INIT=100"]);
        assert!(
            matches!(&gpus, Gpus::NoDevice { why } if why.contains("no CUDA-capable device")),
            "{gpus:?}"
        );
        assert!(matches!(found(&["COUNT=0"]).0, Gpus::NoDevice { .. }));
        let (gpus, _) = found(&["INIT=803"]);
        assert!(
            matches!(&gpus, Gpus::Failed { why } if why.starts_with("cuInit failed with error 803: system has"))
        );
        let (gpus, _) = found(&["OLD"]);
        assert!(matches!(&gpus, Gpus::Failed { why } if why.contains("cuGetErrorString")), "{gpus:?}");
    }
}
