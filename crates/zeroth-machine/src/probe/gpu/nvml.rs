//! Free device memory from NVIDIA's management library (libnvidia-ml).
//!
//! The driver library tells it to a context only, and a context costs about half a gigabyte and a second.
#![allow(unsafe_code, reason = "calls into the library; signatures are those of nvml.h")]

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};

use zeroth_cuda::SharedLibrary;

/// `nvmlMemory_t`, in bytes.
#[repr(C)]
#[derive(Default)]
struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

/// The management library, initialised; shut down when dropped.
pub(super) struct Nvml {
    shutdown: unsafe extern "C" fn() -> c_int,
    by_uuid: unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int,
    memory: unsafe extern "C" fn(*mut c_void, *mut MemoryInfo) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
}

impl Nvml {
    pub(super) fn open(library: &OsStr) -> Result<Self, String> {
        let library = SharedLibrary::open(library)?;
        // SAFETY: each function has the type that nvml.h declares for it.
        let (init, nvml) = unsafe {
            let init: unsafe extern "C" fn() -> c_int = library.function("nvmlInit_v2")?;
            let nvml = Self {
                shutdown: library.function("nvmlShutdown")?,
                by_uuid: library.function("nvmlDeviceGetHandleByUUID")?,
                memory: library.function("nvmlDeviceGetMemoryInfo")?,
                error_string: library.function("nvmlErrorString")?,
            };
            (init, nvml)
        };
        // SAFETY: takes nothing, and may be called any number of times.
        let code = unsafe { init() };
        match nvml.check("nvmlInit", code) {
            Ok(()) => Ok(nvml),
            Err(why) => {
                // What was not initialised must not be shut down.
                std::mem::forget(nvml);
                Err(why)
            }
        }
    }

    /// Free bytes of a device, by the name that NVIDIA's tools give it: `GPU-…`, or `MIG-…` for a part of one.
    pub(super) fn free(&self, uuid: &str) -> Result<u64, String> {
        Ok(self.memory(uuid)?.free)
    }

    /// Bytes in use by all processes, by the same name.
    pub(super) fn used(&self, uuid: &str) -> Result<u64, String> {
        Ok(self.memory(uuid)?.used)
    }

    fn memory(&self, uuid: &str) -> Result<MemoryInfo, String> {
        let uuid = CString::new(uuid).map_err(|error| error.to_string())?;
        let mut device = std::ptr::null_mut();
        // SAFETY: reads a text that ends with zero, writes one handle.
        let code = unsafe { (self.by_uuid)(uuid.as_ptr(), &raw mut device) };
        self.check("nvmlDeviceGetHandleByUUID", code)?;
        let mut info = MemoryInfo::default();
        // SAFETY: the handle is the one just given; writes one structure of this layout.
        let code = unsafe { (self.memory)(device, &raw mut info) };
        self.check("nvmlDeviceGetMemoryInfo", code)?;
        Ok(info)
    }

    fn check(&self, call: &str, code: c_int) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: returns a constant of the library for any code.
        let text = unsafe { (self.error_string)(code) };
        let text = if text.is_null() {
            "no text for it".into()
        } else {
            // SAFETY: a text that ends with zero and lives as long as the library, which is never unloaded.
            unsafe { CStr::from_ptr(text) }.to_string_lossy()
        };
        Err(format!("{call} failed with error {code}: {text}"))
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: a value exists only after a successful initialisation, and each is shut down once.
        unsafe { (self.shutdown)() };
    }
}
