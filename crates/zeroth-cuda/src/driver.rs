//! NVIDIA's driver library (libcuda): the functions that a device needs, with its errors as text.
//!
//! Handles are opaque pointers. They are stored as integers, so that their owners are `Send`. All functions except the first few
//! require the context to be current in the calling thread.
#![allow(unsafe_code, reason = "calls into the driver; signatures are those of cuda.h")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::bindings::bindings;
use super::library::{Library, text};
use super::tensor_map::TensorMap;
use zeroth_kernel::DeviceError;

/// An address in device memory or in pinned host memory, which share one address space.
pub(super) type Address = u64;
/// A context, stream, event, module or function of the driver.
pub(super) type Handle = usize;

/// Device attributes, numbered as in cuda.h.
#[derive(Debug, Clone, Copy)]
pub(super) enum DeviceAttribute {
    MultiprocessorCount = 16,
    ComputeCapabilityMajor = 75,
    ComputeCapabilityMinor = 76,
}

pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
pub(super) const EVENT_DEFAULT: c_uint = 0;
pub(super) const EVENT_DISABLE_TIMING: c_uint = 2;
/// `CUDA_ERROR_NOT_READY`.
pub(super) const NOT_READY: c_int = 600;
pub(super) const MEMHOSTALLOC_PORTABLE: c_uint = 1;
/// Function attribute: the largest dynamic shared memory of a launch.
pub(super) const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;

/// A host function called in stream order. It must not call the driver.
type HostFunction = unsafe extern "C" fn(*mut c_void);

bindings! {
    Functions: driver {
        cuInit(c_uint);
        cuGetErrorString(c_int, *mut *const c_char);
        cuDeviceGet(*mut c_int, c_int);
        cuDeviceGetCount(*mut c_int);
        cuDeviceGetName(*mut c_char, c_int, c_int);
        cuDeviceGetAttribute(*mut c_int, c_int, c_int);
        cuDevicePrimaryCtxRetain(*mut Handle, c_int);
        cuDevicePrimaryCtxRelease_v2(c_int);
        cuCtxSetCurrent(Handle);
        cuMemAlloc_v2(*mut Address, usize);
        cuMemFree_v2(Address);
        cuMemGetInfo_v2(*mut usize, *mut usize);
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        cuMemFreeHost(*mut c_void);
        cuMemHostRegister_v2(*mut c_void, usize, c_uint);
        cuMemHostUnregister(*mut c_void);
        cuMemcpyAsync(Address, Address, usize, Handle);
        cuMemcpyDtoHAsync_v2(*mut c_void, Address, usize, Handle);
        cuMemsetD8Async(Address, u8, usize, Handle);
        cuStreamCreate(*mut Handle, c_uint);
        cuStreamDestroy_v2(Handle);
        cuStreamSynchronize(Handle);
        cuStreamQuery(Handle);
        cuStreamWaitEvent(Handle, Handle, c_uint);
        cuEventCreate(*mut Handle, c_uint);
        cuEventDestroy_v2(Handle);
        cuEventRecord(Handle, Handle);
        cuEventSynchronize(Handle);
        cuEventElapsedTime(*mut f32, Handle, Handle);
        cuModuleLoadData(*mut Handle, *const c_void);
        cuModuleUnload(Handle);
        cuModuleGetFunction(*mut Handle, Handle, *const c_char);
        cuFuncSetAttribute(Handle, c_int, c_int);
        cuLaunchKernel(
            Handle,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            Handle,
            *mut *mut c_void,
            *mut *mut c_void,
        );
        cuLaunchHostFunc(Handle, HostFunction, *mut c_void);
    }
}

/// The initialized driver.
#[derive(Clone)]
pub(super) struct Driver {
    device: String,
    functions: Functions,
}

impl Driver {
    /// Opens the library and initializes the driver. `ordinal` is the device named in error messages.
    pub(super) fn open(ordinal: usize) -> Result<Self, DeviceError> {
        let functions = Functions::load(&Self::library()?)?;
        let driver = Self { device: format!("cuda:{ordinal}"), functions };
        // SAFETY: the flags must be 0.
        driver.check("cuInit", unsafe { (functions.cuInit)(0) })?;
        Ok(driver)
    }

    /// The driver library.
    pub(super) fn library() -> Result<Library, DeviceError> {
        Library::open(&["libcuda.so.1"], "Install NVIDIA's driver")
    }

    /// The handle of a device, which must be visible to this process.
    pub(super) fn get(&self, ordinal: usize) -> Result<c_int, DeviceError> {
        let (mut count, mut device) = (0, 0);
        // SAFETY: writes one int.
        self.check("cuDeviceGetCount", unsafe { (self.functions.cuDeviceGetCount)(&raw mut count) })?;
        if ordinal >= count as usize {
            return Err(self.failed("choosing a GPU", format!("{count} are visible, counted from 0")));
        }
        // SAFETY: writes one int.
        self.check("cuDeviceGet", unsafe {
            (self.functions.cuDeviceGet)(&raw mut device, ordinal as c_int)
        })?;
        Ok(device)
    }

    pub(super) fn name(&self, device: c_int) -> Result<String, DeviceError> {
        let mut name = [0u8; 256];
        // SAFETY: writes at most the given length, including the terminating NUL.
        let code = unsafe {
            (self.functions.cuDeviceGetName)(name.as_mut_ptr().cast(), name.len() as c_int, device)
        };
        self.check("cuDeviceGetName", code)?;
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        Ok(String::from_utf8_lossy(&name[..end]).into_owned())
    }

    pub(super) fn attribute(&self, device: c_int, attribute: DeviceAttribute) -> Result<u32, DeviceError> {
        let mut value = 0;
        // SAFETY: writes one int.
        let code =
            unsafe { (self.functions.cuDeviceGetAttribute)(&raw mut value, attribute as c_int, device) };
        self.check("cuDeviceGetAttribute", code)?;
        Ok(value.unsigned_abs())
    }

    /// Retains the device's primary context and makes it current.
    pub(super) fn retain(&self, device: c_int) -> Result<Handle, DeviceError> {
        let mut context = 0;
        // SAFETY: writes one handle.
        self.check("cuDevicePrimaryCtxRetain", unsafe {
            (self.functions.cuDevicePrimaryCtxRetain)(&raw mut context, device)
        })?;
        self.set_current(context)?;
        Ok(context)
    }

    pub(super) fn release(&self, device: c_int) {
        // SAFETY: undoes one `retain`. Nothing depends on the status at shutdown.
        unsafe { (self.functions.cuDevicePrimaryCtxRelease_v2)(device) };
    }

    pub(super) fn set_current(&self, context: Handle) -> Result<(), DeviceError> {
        // SAFETY: a retained context.
        self.check("cuCtxSetCurrent", unsafe { (self.functions.cuCtxSetCurrent)(context) })
    }

    pub(super) fn allocate(&self, bytes: u64) -> Result<Address, DeviceError> {
        let mut address = 0;
        // SAFETY: writes one address.
        let code = unsafe { (self.functions.cuMemAlloc_v2)(&raw mut address, bytes as usize) };
        self.memory("device", bytes, code)?;
        Ok(address)
    }

    pub(super) fn free(&self, address: Address) {
        // SAFETY: allocated by `allocate`, freed once.
        unsafe { (self.functions.cuMemFree_v2)(address) };
    }

    /// Free bytes of the current context's device.
    pub(super) fn free_bytes(&self) -> Result<u64, DeviceError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two sizes.
        let code = unsafe { (self.functions.cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
        self.check("cuMemGetInfo", code)?;
        Ok(free as u64)
    }

    /// Allocates pinned host memory, which the device accesses at the same address.
    pub(super) fn allocate_host(&self, bytes: u64) -> Result<Address, DeviceError> {
        let mut address = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        let code = unsafe {
            (self.functions.cuMemHostAlloc)(&raw mut address, bytes as usize, MEMHOSTALLOC_PORTABLE)
        };
        self.memory("pinned host", bytes, code)?;
        Ok(address as Address)
    }

    /// Pins memory of this process, which the device then accesses at the same address.
    ///
    /// # Safety
    /// The memory must stay mapped until `unregister_host`.
    pub(super) unsafe fn register_host(&self, address: usize, bytes: usize) -> Result<(), DeviceError> {
        let pointer = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: upheld by the caller.
        let code = unsafe { (self.functions.cuMemHostRegister_v2)(pointer, bytes, MEMHOSTALLOC_PORTABLE) };
        self.memory("pinned host", bytes as u64, code)
    }

    pub(super) fn unregister_host(&self, address: usize) {
        // SAFETY: pinned by `register_host`, unpinned once.
        unsafe { (self.functions.cuMemHostUnregister)(std::ptr::with_exposed_provenance_mut(address)) };
    }

    pub(super) fn free_host(&self, address: Address) {
        // SAFETY: allocated by `allocate_host`, freed once.
        unsafe { (self.functions.cuMemFreeHost)(address as *mut c_void) };
    }

    /// Enqueues a copy between any two addresses known to the driver.
    ///
    /// # Safety
    /// Both ranges must be `bytes` long and stay allocated until the copy has completed.
    pub(super) unsafe fn copy(
        &self,
        to: Address,
        from: Address,
        bytes: u64,
        stream: Handle,
    ) -> Result<(), DeviceError> {
        // SAFETY: upheld by the caller.
        self.check("cuMemcpyAsync", unsafe {
            (self.functions.cuMemcpyAsync)(to, from, bytes as usize, stream)
        })
    }

    /// Copies to pageable host memory and synchronizes the stream.
    pub(super) fn copy_to_host(
        &self,
        to: &mut [u8],
        from: Address,
        stream: Handle,
    ) -> Result<(), DeviceError> {
        // SAFETY: the length is that of `to`; callers pass a range within an arena; the copy completes before this returns.
        let code =
            unsafe { (self.functions.cuMemcpyDtoHAsync_v2)(to.as_mut_ptr().cast(), from, to.len(), stream) };
        self.check("cuMemcpyDtoHAsync", code)?;
        self.synchronise(stream)
    }

    /// Enqueues a memset of a range within an arena.
    pub(super) fn set_bytes(
        &self,
        to: Address,
        value: u8,
        bytes: u64,
        stream: Handle,
    ) -> Result<(), DeviceError> {
        // SAFETY: an arena lives as long as the device; callers pass a range within it.
        self.check("cuMemsetD8Async", unsafe {
            (self.functions.cuMemsetD8Async)(to, value, bytes as usize, stream)
        })
    }

    pub(super) fn stream(&self) -> Result<Handle, DeviceError> {
        let mut stream = 0;
        // SAFETY: writes one handle.
        let code = unsafe { (self.functions.cuStreamCreate)(&raw mut stream, STREAM_NON_BLOCKING) };
        self.check("cuStreamCreate", code)?;
        Ok(stream)
    }

    /// Enqueues a call of a host function.
    ///
    /// # Safety
    /// The function must be safe to call once with `data`, on any thread, and must not call the driver.
    pub(super) unsafe fn launch_host_function(
        &self,
        stream: Handle,
        function: HostFunction,
        data: *mut c_void,
    ) -> Result<(), DeviceError> {
        // SAFETY: upheld by the caller.
        self.check("cuLaunchHostFunc", unsafe { (self.functions.cuLaunchHostFunc)(stream, function, data) })
    }

    pub(super) fn destroy_stream(&self, stream: Handle) {
        // SAFETY: created by `stream`, destroyed once.
        unsafe { (self.functions.cuStreamDestroy_v2)(stream) };
    }

    pub(super) fn synchronise(&self, stream: Handle) -> Result<(), DeviceError> {
        // SAFETY: a live stream.
        self.check("cuStreamSynchronize", unsafe { (self.functions.cuStreamSynchronize)(stream) })
    }

    /// Whether all work of a stream has completed.
    pub(super) fn is_idle(&self, stream: Handle) -> Result<bool, DeviceError> {
        // SAFETY: a live stream.
        match unsafe { (self.functions.cuStreamQuery)(stream) } {
            NOT_READY => Ok(false),
            code => self.check("cuStreamQuery", code).map(|()| true),
        }
    }

    pub(super) fn wait_event(&self, stream: Handle, event: Handle) -> Result<(), DeviceError> {
        // SAFETY: both are live; the flags must be 0.
        self.check("cuStreamWaitEvent", unsafe { (self.functions.cuStreamWaitEvent)(stream, event, 0) })
    }

    pub(super) fn event(&self) -> Result<Handle, DeviceError> {
        self.new_event(EVENT_DISABLE_TIMING)
    }

    /// An event that records a timestamp.
    pub(super) fn timed_event(&self) -> Result<Handle, DeviceError> {
        self.new_event(EVENT_DEFAULT)
    }

    fn new_event(&self, flags: c_uint) -> Result<Handle, DeviceError> {
        let mut event = 0;
        // SAFETY: writes one handle.
        let code = unsafe { (self.functions.cuEventCreate)(&raw mut event, flags) };
        self.check("cuEventCreate", code)?;
        Ok(event)
    }

    /// Milliseconds between two completed timed events.
    pub(super) fn elapsed(&self, from: Handle, to: Handle) -> Result<f32, DeviceError> {
        let mut elapsed = 0.0;
        // SAFETY: writes one float; both events are live.
        let code = unsafe { (self.functions.cuEventElapsedTime)(&raw mut elapsed, from, to) };
        self.check("cuEventElapsedTime", code)?;
        Ok(elapsed)
    }

    pub(super) fn destroy_event(&self, event: Handle) {
        // SAFETY: created by `new_event`, destroyed once.
        unsafe { (self.functions.cuEventDestroy_v2)(event) };
    }

    pub(super) fn record_event(&self, event: Handle, stream: Handle) -> Result<(), DeviceError> {
        // SAFETY: both are live.
        self.check("cuEventRecord", unsafe { (self.functions.cuEventRecord)(event, stream) })
    }

    /// Blocks until the work before the event's latest record has completed; returns at once for an event never recorded.
    pub(super) fn synchronise_event(&self, event: Handle) -> Result<(), DeviceError> {
        // SAFETY: a live event.
        self.check("cuEventSynchronize", unsafe { (self.functions.cuEventSynchronize)(event) })
    }

    /// Loads a compiled module (cubin), which encodes its own length.
    pub(super) fn module(&self, image: &[u8]) -> Result<Handle, DeviceError> {
        let mut module = 0;
        // SAFETY: writes one handle; the image is a complete ELF file as written by NVRTC.
        let code = unsafe { (self.functions.cuModuleLoadData)(&raw mut module, image.as_ptr().cast()) };
        self.check("cuModuleLoadData", code)?;
        Ok(module)
    }

    pub(super) fn unload(&self, module: Handle) {
        // SAFETY: loaded by `module`, unloaded once.
        unsafe { (self.functions.cuModuleUnload)(module) };
    }

    pub(super) fn function(&self, module: Handle, name: &CStr) -> Result<Handle, DeviceError> {
        let mut function = 0;
        // SAFETY: writes one handle; the name is NUL-terminated.
        let code = unsafe { (self.functions.cuModuleGetFunction)(&raw mut function, module, name.as_ptr()) };
        self.check("cuModuleGetFunction", code).map_err(|error| match error {
            DeviceError::Call { device, call, reason } => {
                DeviceError::Call { device, call: format!("{call}({})", name.to_string_lossy()), reason }
            }
            other => other,
        })?;
        Ok(function)
    }

    /// Raises the dynamic shared memory limit of a function. Fails if the GPU has less.
    pub(super) fn allow_shared_memory(&self, function: Handle, bytes: u32) -> Result<(), DeviceError> {
        // SAFETY: a function of this context and an integer attribute.
        let code = unsafe {
            (self.functions.cuFuncSetAttribute)(function, MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes as c_int)
        };
        self.check("cuFuncSetAttribute", code)
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// `maps` and then `arguments` must be the parameters that the kernel declares, in order, each argument in the low bytes of a
    /// word, and the buffers they point to must be large enough for the kernel's accesses.
    pub(super) unsafe fn launch(
        &self,
        function: Handle,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        (maps, arguments): (&[TensorMap], &[u64]),
        stream: Handle,
    ) -> Result<(), DeviceError> {
        const MAX_ARGUMENTS: usize = 28;
        let count = maps.len() + arguments.len();
        assert!(count <= MAX_ARGUMENTS, "no kernel has more than {MAX_ARGUMENTS} arguments");
        let mut pointers = [std::ptr::null_mut::<c_void>(); MAX_ARGUMENTS];
        let maps = maps.iter().map(|map| std::ptr::from_ref(map).cast_mut().cast());
        let arguments = arguments.iter().map(|argument| std::ptr::from_ref(argument).cast_mut().cast());
        for (pointer, argument) in pointers.iter_mut().zip(maps.chain(arguments)) {
            *pointer = argument;
        }
        let ([x, y, z], none) = (grid, std::ptr::null_mut());
        // SAFETY: the driver copies each argument, with the size that the kernel declares, before it returns.
        let code = unsafe {
            (self.functions.cuLaunchKernel)(
                function,
                x,
                y,
                z,
                threads,
                1,
                1,
                shared,
                stream,
                pointers.as_mut_ptr(),
                none,
            )
        };
        self.check("cuLaunchKernel", code)
    }

    fn memory(&self, tier: &'static str, bytes: u64, code: c_int) -> Result<(), DeviceError> {
        if code == 0 {
            return Ok(());
        }
        Err(DeviceError::Memory { device: self.device.clone(), tier, bytes, reason: self.reason(code) })
    }

    pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<(), DeviceError> {
        if code == 0 { Ok(()) } else { Err(self.failed(call, self.reason(code))) }
    }

    pub(super) fn failed(&self, call: &str, reason: String) -> DeviceError {
        DeviceError::Call { device: self.device.clone(), call: call.to_owned(), reason }
    }

    fn reason(&self, code: c_int) -> String {
        let mut found = std::ptr::null();
        // SAFETY: sets the pointer to a static string, or to null for an unknown code.
        unsafe { (self.functions.cuGetErrorString)(code, &raw mut found) };
        format!("error {code}: {}", text(found))
    }
}
