//! The functions of NVIDIA's driver library (libcuda) that a device needs, each with its error as a sentence.
//!
//! Handles are addresses that only the driver looks into. They are kept as numbers, so that what owns them can move to
//! another thread; every function but the first few needs the context to be current in the calling thread.
#![allow(unsafe_code, reason = "calls into the driver; signatures are those of cuda.h")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::library::{Library, text};
use zeroth_kernel::DeviceError;

/// An address in the device's memory, or in pinned memory of the host: both are in one address space.
pub(super) type Address = u64;
/// A context, stream, event, module or function of the driver.
pub(super) type Handle = usize;

/// Attributes by their number in cuda.h.
#[derive(Debug, Clone, Copy)]
pub(super) enum Attribute {
    CapabilityMajor = 75,
    CapabilityMinor = 76,
}

const STREAM_NON_BLOCKING: c_uint = 1;
const EVENT_WITH_TIMING: c_uint = 0;
const EVENT_DISABLE_TIMING: c_uint = 2;
const HOST_PORTABLE: c_uint = 1;
/// An attribute of functions: the most bytes of shared memory that a launch may ask for.
const FUNCTION_SHARED: c_int = 8;

type One = unsafe extern "C" fn(Handle) -> c_int;

/// The driver library with the functions in use.
pub(super) struct Driver {
    device: String,
    error_string: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
    get: unsafe extern "C" fn(*mut c_int, c_int) -> c_int,
    count: unsafe extern "C" fn(*mut c_int) -> c_int,
    name: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int,
    attribute: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int,
    retain: unsafe extern "C" fn(*mut Handle, c_int) -> c_int,
    release: unsafe extern "C" fn(c_int) -> c_int,
    set_current: One,
    allocate: unsafe extern "C" fn(*mut Address, usize) -> c_int,
    free: unsafe extern "C" fn(Address) -> c_int,
    allocate_host: unsafe extern "C" fn(*mut *mut c_void, usize, c_uint) -> c_int,
    free_host: unsafe extern "C" fn(*mut c_void) -> c_int,
    register_host: unsafe extern "C" fn(*mut c_void, usize, c_uint) -> c_int,
    unregister_host: unsafe extern "C" fn(*mut c_void) -> c_int,
    copy: unsafe extern "C" fn(Address, Address, usize, Handle) -> c_int,
    copy_to_host: unsafe extern "C" fn(*mut c_void, Address, usize, Handle) -> c_int,
    set_bytes: unsafe extern "C" fn(Address, u8, usize, Handle) -> c_int,
    stream_create: unsafe extern "C" fn(*mut Handle, c_uint) -> c_int,
    stream_destroy: One,
    stream_synchronise: One,
    stream_wait: unsafe extern "C" fn(Handle, Handle, c_uint) -> c_int,
    event_create: unsafe extern "C" fn(*mut Handle, c_uint) -> c_int,
    event_destroy: One,
    event_record: unsafe extern "C" fn(Handle, Handle) -> c_int,
    event_synchronise: One,
    event_elapsed: unsafe extern "C" fn(*mut f32, Handle, Handle) -> c_int,
    module_load: unsafe extern "C" fn(*mut Handle, *const c_void) -> c_int,
    module_unload: One,
    module_function: unsafe extern "C" fn(*mut Handle, Handle, *const c_char) -> c_int,
    function_set: unsafe extern "C" fn(Handle, c_int, c_int) -> c_int,
    launch: Launch,
    call: unsafe extern "C" fn(Handle, Callback, *mut c_void) -> c_int,
}

/// A function of the host's that a stream comes to. It may not call the driver.
type Callback = unsafe extern "C" fn(*mut c_void);

type Launch = unsafe extern "C" fn(
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
) -> c_int;

impl Driver {
    /// Opens the library and initialises the driver. `ordinal` is the device that messages name.
    pub(super) fn open(ordinal: usize) -> Result<Self, DeviceError> {
        let library = Library::open(&["libcuda.so.1"], "Install NVIDIA's driver")?;
        // SAFETY: cuInit takes flags, which must be 0; each field has the type that cuda.h declares for its function.
        unsafe {
            let init: unsafe extern "C" fn(c_uint) -> c_int = library.function("cuInit")?;
            let driver = Self {
                device: format!("cuda:{ordinal}"),
                error_string: library.function("cuGetErrorString")?,
                get: library.function("cuDeviceGet")?,
                count: library.function("cuDeviceGetCount")?,
                name: library.function("cuDeviceGetName")?,
                attribute: library.function("cuDeviceGetAttribute")?,
                retain: library.function("cuDevicePrimaryCtxRetain")?,
                release: library.function("cuDevicePrimaryCtxRelease_v2")?,
                set_current: library.function("cuCtxSetCurrent")?,
                allocate: library.function("cuMemAlloc_v2")?,
                free: library.function("cuMemFree_v2")?,
                allocate_host: library.function("cuMemHostAlloc")?,
                free_host: library.function("cuMemFreeHost")?,
                register_host: library.function("cuMemHostRegister_v2")?,
                unregister_host: library.function("cuMemHostUnregister")?,
                copy: library.function("cuMemcpyAsync")?,
                copy_to_host: library.function("cuMemcpyDtoHAsync_v2")?,
                set_bytes: library.function("cuMemsetD8Async")?,
                stream_create: library.function("cuStreamCreate")?,
                stream_destroy: library.function("cuStreamDestroy_v2")?,
                stream_synchronise: library.function("cuStreamSynchronize")?,
                stream_wait: library.function("cuStreamWaitEvent")?,
                event_create: library.function("cuEventCreate")?,
                event_destroy: library.function("cuEventDestroy_v2")?,
                event_record: library.function("cuEventRecord")?,
                event_synchronise: library.function("cuEventSynchronize")?,
                event_elapsed: library.function("cuEventElapsedTime")?,
                module_load: library.function("cuModuleLoadData")?,
                module_unload: library.function("cuModuleUnload")?,
                module_function: library.function("cuModuleGetFunction")?,
                function_set: library.function("cuFuncSetAttribute")?,
                launch: library.function("cuLaunchKernel")?,
                call: library.function("cuLaunchHostFunc")?,
            };
            driver.check("cuInit", init(0))?;
            Ok(driver)
        }
    }

    /// The driver's handle of a device, which must be one of those that this process may use.
    pub(super) fn get(&self, ordinal: usize) -> Result<c_int, DeviceError> {
        let (mut count, mut device) = (0, 0);
        // SAFETY: writes one int.
        self.check("cuDeviceGetCount", unsafe { (self.count)(&raw mut count) })?;
        if ordinal >= count as usize {
            return Err(self.failed("choosing a GPU", format!("{count} are visible, counted from 0")));
        }
        // SAFETY: writes one int.
        self.check("cuDeviceGet", unsafe { (self.get)(&raw mut device, ordinal as c_int) })?;
        Ok(device)
    }

    pub(super) fn name(&self, device: c_int) -> Result<String, DeviceError> {
        let mut name = [0u8; 256];
        // SAFETY: writes at most the length given, the closing zero included.
        let code = unsafe { (self.name)(name.as_mut_ptr().cast(), name.len() as c_int, device) };
        self.check("cuDeviceGetName", code)?;
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        Ok(String::from_utf8_lossy(&name[..end]).into_owned())
    }

    pub(super) fn attribute(&self, device: c_int, attribute: Attribute) -> Result<u32, DeviceError> {
        let mut value = 0;
        // SAFETY: writes one int.
        let code = unsafe { (self.attribute)(&raw mut value, attribute as c_int, device) };
        self.check("cuDeviceGetAttribute", code)?;
        Ok(value.unsigned_abs())
    }

    /// Holds the device's primary context and makes it current.
    pub(super) fn retain(&self, device: c_int) -> Result<Handle, DeviceError> {
        let mut context = 0;
        // SAFETY: writes one handle.
        self.check("cuDevicePrimaryCtxRetain", unsafe { (self.retain)(&raw mut context, device) })?;
        self.set_current(context)?;
        Ok(context)
    }

    pub(super) fn release(&self, device: c_int) {
        // SAFETY: undoes one `retain`. What the driver says at the end of a device changes nothing.
        unsafe { (self.release)(device) };
    }

    pub(super) fn set_current(&self, context: Handle) -> Result<(), DeviceError> {
        // SAFETY: a context that is held.
        self.check("cuCtxSetCurrent", unsafe { (self.set_current)(context) })
    }

    pub(super) fn allocate(&self, bytes: u64) -> Result<Address, DeviceError> {
        let mut address = 0;
        // SAFETY: writes one address.
        let code = unsafe { (self.allocate)(&raw mut address, bytes as usize) };
        self.memory("device", bytes, code)?;
        Ok(address)
    }

    pub(super) fn free(&self, address: Address) {
        // SAFETY: what `allocate` gave, given back once.
        unsafe { (self.free)(address) };
    }

    /// Pinned memory of the host, which the device reads and writes at the same address.
    pub(super) fn allocate_host(&self, bytes: u64) -> Result<Address, DeviceError> {
        let mut address = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        let code = unsafe { (self.allocate_host)(&raw mut address, bytes as usize, HOST_PORTABLE) };
        self.memory("pinned host", bytes, code)?;
        Ok(address as Address)
    }

    /// Pins memory of this process, which the device then reads and writes at the same address.
    ///
    /// # Safety
    /// The memory stays mapped until `unregister_host`.
    pub(super) unsafe fn register_host(&self, address: usize, bytes: usize) -> Result<(), DeviceError> {
        let place = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: the caller's promise.
        let code = unsafe { (self.register_host)(place, bytes, HOST_PORTABLE) };
        self.memory("pinned host", bytes as u64, code)
    }

    pub(super) fn unregister_host(&self, address: usize) {
        // SAFETY: what `register_host` pinned, let go once.
        unsafe { (self.unregister_host)(std::ptr::with_exposed_provenance_mut(address)) };
    }

    pub(super) fn free_host(&self, address: Address) {
        // SAFETY: what `allocate_host` gave, given back once.
        unsafe { (self.free_host)(address as *mut c_void) };
    }

    /// Enqueues a copy between any two addresses that the driver knows.
    ///
    /// # Safety
    /// Both places must be `bytes` long and stay so until the stream has come past the copy.
    pub(super) unsafe fn copy(
        &self,
        to: Address,
        from: Address,
        bytes: u64,
        stream: Handle,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        self.check("cuMemcpyAsync", unsafe { (self.copy)(to, from, bytes as usize, stream) })
    }

    /// Copies to plain host memory and waits for the stream.
    pub(super) fn copy_to_host(
        &self,
        to: &mut [u8],
        from: Address,
        stream: Handle,
    ) -> Result<(), DeviceError> {
        // SAFETY: `to` is as long as is said, callers give as many bytes within an arena, and the copy has ended before
        // this returns.
        let code = unsafe { (self.copy_to_host)(to.as_mut_ptr().cast(), from, to.len(), stream) };
        self.check("cuMemcpyDtoHAsync", code)?;
        self.synchronise(stream)
    }

    /// Enqueues the filling of a place within an arena.
    pub(super) fn set_bytes(
        &self,
        to: Address,
        value: u8,
        bytes: u64,
        stream: Handle,
    ) -> Result<(), DeviceError> {
        // SAFETY: an arena lives as long as the device; callers give places within.
        self.check("cuMemsetD8Async", unsafe { (self.set_bytes)(to, value, bytes as usize, stream) })
    }

    pub(super) fn stream(&self) -> Result<Handle, DeviceError> {
        let mut stream = 0;
        // SAFETY: writes one handle.
        let code = unsafe { (self.stream_create)(&raw mut stream, STREAM_NON_BLOCKING) };
        self.check("cuStreamCreate", code)?;
        Ok(stream)
    }

    /// Enqueues a call of a function of the host's.
    ///
    /// # Safety
    /// The function may be called with the pointer, once, on any thread, and does not call the driver.
    pub(super) unsafe fn call(
        &self,
        stream: Handle,
        function: Callback,
        data: *mut c_void,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        self.check("cuLaunchHostFunc", unsafe { (self.call)(stream, function, data) })
    }

    pub(super) fn destroy_stream(&self, stream: Handle) {
        // SAFETY: what `stream` gave, given back once.
        unsafe { (self.stream_destroy)(stream) };
    }

    pub(super) fn synchronise(&self, stream: Handle) -> Result<(), DeviceError> {
        // SAFETY: a living stream.
        self.check("cuStreamSynchronize", unsafe { (self.stream_synchronise)(stream) })
    }

    pub(super) fn wait(&self, stream: Handle, event: Handle) -> Result<(), DeviceError> {
        // SAFETY: both live; the flags must be 0.
        self.check("cuStreamWaitEvent", unsafe { (self.stream_wait)(stream, event, 0) })
    }

    pub(super) fn event(&self) -> Result<Handle, DeviceError> {
        self.new_event(EVENT_DISABLE_TIMING)
    }

    /// An event that notes the time.
    pub(super) fn timed_event(&self) -> Result<Handle, DeviceError> {
        self.new_event(EVENT_WITH_TIMING)
    }

    fn new_event(&self, flags: c_uint) -> Result<Handle, DeviceError> {
        let mut event = 0;
        // SAFETY: writes one handle.
        let code = unsafe { (self.event_create)(&raw mut event, flags) };
        self.check("cuEventCreate", code)?;
        Ok(event)
    }

    /// Milliseconds between two timed events that are past.
    pub(super) fn elapsed(&self, from: Handle, to: Handle) -> Result<f32, DeviceError> {
        let mut elapsed = 0.0;
        // SAFETY: writes one number; both live.
        let code = unsafe { (self.event_elapsed)(&raw mut elapsed, from, to) };
        self.check("cuEventElapsedTime", code)?;
        Ok(elapsed)
    }

    pub(super) fn destroy_event(&self, event: Handle) {
        // SAFETY: what `event` gave, given back once.
        unsafe { (self.event_destroy)(event) };
    }

    pub(super) fn record(&self, event: Handle, stream: Handle) -> Result<(), DeviceError> {
        // SAFETY: both live.
        self.check("cuEventRecord", unsafe { (self.event_record)(event, stream) })
    }

    /// Waits until what was before the event's newest record is done; at once for one that was never recorded.
    pub(super) fn wait_for(&self, event: Handle) -> Result<(), DeviceError> {
        // SAFETY: a living event.
        self.check("cuEventSynchronize", unsafe { (self.event_synchronise)(event) })
    }

    /// Loads compiled kernels. The driver looks at the whole image, which says itself where it ends.
    pub(super) fn module(&self, image: &[u8]) -> Result<Handle, DeviceError> {
        let mut module = 0;
        // SAFETY: writes one handle; the image is complete, as the compiler wrote it.
        let code = unsafe { (self.module_load)(&raw mut module, image.as_ptr().cast()) };
        self.check("cuModuleLoadData", code)?;
        Ok(module)
    }

    pub(super) fn unload(&self, module: Handle) {
        // SAFETY: what `module` gave, given back once.
        unsafe { (self.module_unload)(module) };
    }

    pub(super) fn function(&self, module: Handle, name: &CStr) -> Result<Handle, DeviceError> {
        let mut function = 0;
        // SAFETY: writes one handle; the name ends with zero.
        let code = unsafe { (self.module_function)(&raw mut function, module, name.as_ptr()) };
        self.check("cuModuleGetFunction", code).map_err(|error| match error {
            DeviceError::Call { device, call, reason } => {
                DeviceError::Call { device, call: format!("{call}({})", name.to_string_lossy()), reason }
            }
            other => other,
        })?;
        Ok(function)
    }

    /// Lets launches of a function ask for so many bytes of shared memory. An error where the card has less.
    pub(super) fn allow_shared(&self, function: Handle, bytes: u32) -> Result<(), DeviceError> {
        // SAFETY: a function of this context, and a number.
        let code = unsafe { (self.function_set)(function, FUNCTION_SHARED, bytes as c_int) };
        self.check("cuFuncSetAttribute", code)
    }

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// `arguments` are those that the function declares, in order, each in the low bytes of a word, and what they point
    /// to is long enough for what the kernel does with it.
    pub(super) unsafe fn launch(
        &self,
        function: Handle,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        arguments: &[u64],
        stream: Handle,
    ) -> Result<(), DeviceError> {
        const MOST: usize = 20;
        assert!(arguments.len() <= MOST, "no kernel of ours has so many arguments");
        let mut pointers = [std::ptr::null_mut::<c_void>(); MOST];
        for (pointer, argument) in pointers.iter_mut().zip(arguments) {
            *pointer = std::ptr::from_ref(argument).cast_mut().cast();
        }
        let ([x, y, z], none) = (grid, std::ptr::null_mut());
        // SAFETY: the driver copies each argument, of the length that the function declares, before it returns.
        let code = unsafe {
            (self.launch)(function, x, y, z, threads, 1, 1, shared, stream, pointers.as_mut_ptr(), none)
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
        // SAFETY: sets the pointer to a constant of the library, or to null for a code it does not know.
        unsafe { (self.error_string)(code, &raw mut found) };
        format!("error {code}: {}", text(found))
    }
}
