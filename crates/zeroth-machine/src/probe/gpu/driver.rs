//! The few functions of NVIDIA's driver library (libcuda) that describe devices. None of them makes a context.
#![allow(unsafe_code, reason = "calls into the driver; signatures are those of cuda.h")]

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint};

use zeroth_cuda::SharedLibrary;

/// A device that the driver counts: what its other functions take.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeviceHandle(c_int);

/// What a device can be asked for, by its number in cuda.h.
#[derive(Debug, Clone, Copy)]
pub(super) enum GpuAttribute {
    Multiprocessors = 16,
    CapabilityMajor = 75,
    CapabilityMinor = 76,
}

/// A call that the driver refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed with error {code}: {message}")]
pub(super) struct CallFailed {
    pub(super) call: &'static str,
    pub(super) code: i32,
    pub(super) message: String,
}

/// `CUDA_ERROR_NO_DEVICE`.
pub(super) const NO_DEVICE: i32 = 100;

/// The driver library with the functions in use.
pub(super) struct GpuDriver {
    init: unsafe extern "C" fn(c_uint) -> c_int,
    version: unsafe extern "C" fn(*mut c_int) -> c_int,
    count: unsafe extern "C" fn(*mut c_int) -> c_int,
    device: unsafe extern "C" fn(*mut c_int, c_int) -> c_int,
    name: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int,
    total: unsafe extern "C" fn(*mut usize, c_int) -> c_int,
    attribute: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int,
    /// Since CUDA 11.4; the older one names the whole GPU where a part of it (MIG) is the device.
    uuid: Option<unsafe extern "C" fn(*mut [u8; 16], c_int) -> c_int>,
    error_string: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
}

/// Why there is no driver to ask.
pub(super) enum NotOpened {
    /// The library is not there, or the loader refuses it.
    Library(String),
    /// The library lacks a function.
    Function(String),
}

impl GpuDriver {
    pub(super) fn open(library: &OsStr) -> Result<Self, NotOpened> {
        let library = SharedLibrary::open(library).map_err(NotOpened::Library)?;
        // SAFETY: each field has the type that cuda.h declares for the function named.
        let driver = unsafe {
            (|| {
                Ok(Self {
                    init: library.function("cuInit")?,
                    version: library.function("cuDriverGetVersion")?,
                    count: library.function("cuDeviceGetCount")?,
                    device: library.function("cuDeviceGet")?,
                    name: library.function("cuDeviceGetName")?,
                    total: library.function("cuDeviceTotalMem_v2")?,
                    attribute: library.function("cuDeviceGetAttribute")?,
                    uuid: library.function("cuDeviceGetUuid_v2").ok(),
                    error_string: library.function("cuGetErrorString")?,
                })
            })()
        };
        driver.map_err(NotOpened::Function)
    }

    /// Must come before all but `version`.
    pub(super) fn init(&self) -> Result<(), CallFailed> {
        // SAFETY: the flags must be 0.
        self.check("cuInit", unsafe { (self.init)(0) })
    }

    /// The newest CUDA that the driver runs: 1000 × major + 10 × minor.
    pub(super) fn version(&self) -> Result<i32, CallFailed> {
        let mut version = 0;
        // SAFETY: writes one int.
        self.check("cuDriverGetVersion", unsafe { (self.version)(&raw mut version) })?;
        Ok(version)
    }

    /// Devices that this process may use; `CUDA_VISIBLE_DEVICES` has been applied.
    pub(super) fn count(&self) -> Result<i32, CallFailed> {
        let mut count = 0;
        // SAFETY: writes one int.
        self.check("cuDeviceGetCount", unsafe { (self.count)(&raw mut count) })?;
        Ok(count)
    }

    pub(super) fn device(&self, index: i32) -> Result<DeviceHandle, CallFailed> {
        let mut device = 0;
        // SAFETY: writes one int; an index out of range is an error code.
        self.check("cuDeviceGet", unsafe { (self.device)(&raw mut device, index) })?;
        Ok(DeviceHandle(device))
    }

    pub(super) fn name(&self, device: DeviceHandle) -> Result<String, CallFailed> {
        let mut name = [0u8; 256];
        // SAFETY: writes at most the length given, the closing zero included.
        let code = unsafe { (self.name)(name.as_mut_ptr().cast(), name.len() as c_int, device.0) };
        self.check("cuDeviceGetName", code)?;
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        Ok(String::from_utf8_lossy(&name[..end]).into_owned())
    }

    pub(super) fn total(&self, device: DeviceHandle) -> Result<u64, CallFailed> {
        let mut bytes = 0usize;
        // SAFETY: writes one size_t.
        self.check("cuDeviceTotalMem", unsafe { (self.total)(&raw mut bytes, device.0) })?;
        Ok(bytes as u64)
    }

    pub(super) fn attribute(&self, device: DeviceHandle, attribute: GpuAttribute) -> Result<u32, CallFailed> {
        let mut value = 0;
        // SAFETY: writes one int; an attribute that the driver does not know is an error code.
        let code = unsafe { (self.attribute)(&raw mut value, attribute as c_int, device.0) };
        self.check("cuDeviceGetAttribute", code)?;
        Ok(value.unsigned_abs())
    }

    /// The number that names the device in all of NVIDIA's tools; `None` from a driver older than CUDA 11.4.
    pub(super) fn uuid(&self, device: DeviceHandle) -> Option<[u8; 16]> {
        let mut uuid = [0; 16];
        // SAFETY: writes 16 bytes.
        let code = unsafe { self.uuid?(&raw mut uuid, device.0) };
        (code == 0).then_some(uuid)
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), CallFailed> {
        if code == 0 {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: sets the pointer to a constant of the library, or to null for a code it does not know.
        unsafe { (self.error_string)(code, &raw mut text) };
        let message = if text.is_null() {
            "the driver has no text for it".to_owned()
        } else {
            // SAFETY: a text that ends with zero and lives as long as the library, which is never unloaded.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Err(CallFailed { call, code, message })
    }
}
