//! NVRTC, NVIDIA's runtime compiler: CUDA C++ to machine code for one architecture.
#![allow(unsafe_code, reason = "calls into NVRTC; signatures are those of nvrtc.h")]

use std::ffi::{CString, c_char, c_int};
use std::ptr::null;

use super::bindings::bindings;
use super::library::{Library, text};
use zeroth_kernel::DeviceError;

/// An `nvrtcProgram`.
type Program = usize;

bindings! {
    Functions: nvrtc {
        nvrtcVersion(*mut c_int, *mut c_int);
        nvrtcCreateProgram(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        );
        nvrtcDestroyProgram(*mut Program);
        nvrtcCompileProgram(Program, c_int, *const *const c_char);
        nvrtcGetCUBINSize(Program, *mut usize);
        nvrtcGetCUBIN(Program, *mut c_char);
        nvrtcGetPTXSize(Program, *mut usize);
        nvrtcGetPTX(Program, *mut c_char);
        nvrtcGetProgramLogSize(Program, *mut usize);
        nvrtcGetProgramLog(Program, *mut c_char);
        nvrtcGetErrorString(c_int) -> *const c_char;
    }
}

/// The compiler. Several threads may compile at the same time.
pub(super) struct Compiler {
    version: [c_int; 2],
    functions: Functions,
}

impl Compiler {
    pub(super) fn open() -> Result<Self, DeviceError> {
        let library = Library::open(
            &["libnvrtc.so.13", "libnvrtc.so.12"],
            "Install the CUDA toolkit 12 or 13, or `pip install nvidia-cuda-nvrtc`",
        )?;
        let mut compiler = Self { version: [0; 2], functions: Functions::load(&library)? };
        let [major, minor] = &mut compiler.version;
        // SAFETY: writes two ints.
        let code = unsafe { (compiler.functions.nvrtcVersion)(major, minor) };
        compiler.check("nvrtcVersion", code)?;
        Ok(compiler)
    }

    /// The version, such as 13.0.
    pub(super) fn version(&self) -> String {
        format!("{}.{}", self.version[0], self.version[1])
    }

    /// Compiles `source` to a cubin, or to PTX that ends with a NUL. `name` appears in diagnostics.
    pub(super) fn compile(
        &self,
        name: &str,
        source: &str,
        options: &[&str],
        to_ptx: bool,
    ) -> Result<Vec<u8>, DeviceError> {
        let c_string = |text: &str| CString::new(text).expect("sources and options contain no NUL");
        let (file, source) = (c_string(name), c_string(source));
        let options: Vec<CString> = options.iter().map(|option| c_string(option)).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = 0;
        // SAFETY: writes one handle; the strings are NUL-terminated, and there are no headers.
        let code = unsafe {
            (self.functions.nvrtcCreateProgram)(
                &raw mut program,
                source.as_ptr(),
                file.as_ptr(),
                0,
                null(),
                null(),
            )
        };
        self.check("nvrtcCreateProgram", code)?;
        // SAFETY: the count is that of the options, each NUL-terminated.
        let code = unsafe {
            (self.functions.nvrtcCompileProgram)(program, pointers.len() as c_int, pointers.as_ptr())
        };
        let Functions { nvrtcGetCUBINSize, nvrtcGetCUBIN, nvrtcGetPTXSize, nvrtcGetPTX, .. } = self.functions;
        let result = self.check("nvrtcCompileProgram", code).and_then(|()| {
            if to_ptx {
                self.read(program, nvrtcGetPTXSize, nvrtcGetPTX)
            } else {
                self.read(program, nvrtcGetCUBINSize, nvrtcGetCUBIN)
            }
        });
        let result = result.map_err(|error| {
            let log = self
                .read(program, self.functions.nvrtcGetProgramLogSize, self.functions.nvrtcGetProgramLog)
                .unwrap_or_default();
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
            DeviceError::Call {
                device: "cuda".to_owned(),
                call: format!("compiling {name} with NVRTC {}", self.version()),
                reason: format!("{error}\n{log}"),
            }
        });
        // SAFETY: created above, destroyed once.
        unsafe { (self.functions.nvrtcDestroyProgram)(&raw mut program) };
        result
    }

    fn read(
        &self,
        program: Program,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        bytes: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, DeviceError> {
        let mut length = 0;
        // SAFETY: writes one size.
        self.check("reading the size of NVRTC's output", unsafe { size(program, &raw mut length) })?;
        let mut result = vec![0u8; length];
        // SAFETY: writes as many bytes as the size call has returned.
        self.check("reading NVRTC's output", unsafe { bytes(program, result.as_mut_ptr().cast()) })?;
        Ok(result)
    }

    fn check(&self, call: &str, code: c_int) -> Result<(), DeviceError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: returns a static string.
        let reason = text(unsafe { (self.functions.nvrtcGetErrorString)(code) });
        Err(DeviceError::Call { device: "cuda".to_owned(), call: call.to_owned(), reason })
    }
}
