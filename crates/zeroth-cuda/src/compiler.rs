//! NVRTC, NVIDIA's compiler as a library: CUDA C++ to machine code of one card.
#![allow(unsafe_code, reason = "calls into the compiler; signatures are those of nvrtc.h")]

use std::ffi::{CString, c_char, c_int};
use std::ptr::null;

use super::library::{Library, text};
use zeroth_kernel::DeviceError;

type Program = usize;

/// The compiler library with the functions in use. Several threads may compile at the same time.
pub(super) struct Compiler {
    version: [c_int; 2],
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    image_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    image: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
}

impl Compiler {
    pub(super) fn open() -> Result<Self, DeviceError> {
        let library = Library::open(
            &["libnvrtc.so.13", "libnvrtc.so.12"],
            "Install the CUDA toolkit 12 or 13, or `pip install nvidia-cuda-nvrtc`",
        )?;
        // SAFETY: each field has the type that nvrtc.h declares for the function named.
        let (mut compiler, version) = unsafe {
            let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int =
                library.function("nvrtcVersion")?;
            let compiler = Self {
                version: [0; 2],
                create: library.function("nvrtcCreateProgram")?,
                destroy: library.function("nvrtcDestroyProgram")?,
                compile: library.function("nvrtcCompileProgram")?,
                image_size: library.function("nvrtcGetCUBINSize")?,
                image: library.function("nvrtcGetCUBIN")?,
                log_size: library.function("nvrtcGetProgramLogSize")?,
                log: library.function("nvrtcGetProgramLog")?,
                error_string: library.function("nvrtcGetErrorString")?,
            };
            (compiler, version)
        };
        let [major, minor] = &mut compiler.version;
        // SAFETY: writes two ints.
        let code = unsafe { version(major, minor) };
        compiler.check("nvrtcVersion", code)?;
        Ok(compiler)
    }

    /// As its makers write it: 13.0.
    pub(super) fn version(&self) -> String {
        format!("{}.{}", self.version[0], self.version[1])
    }

    /// Machine code of `source` for a card such as `sm_90a`. `name` stands in messages.
    pub(super) fn compile(&self, name: &str, source: &str, options: &[&str]) -> Result<Vec<u8>, DeviceError> {
        let c_string = |text: &str| CString::new(text).expect("sources and options hold no zero byte");
        let (file, source) = (c_string(name), c_string(source));
        let options: Vec<CString> = options.iter().map(|option| c_string(option)).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = 0;
        // SAFETY: writes one handle; the texts end with zero, and there are no headers.
        let code =
            unsafe { (self.create)(&raw mut program, source.as_ptr(), file.as_ptr(), 0, null(), null()) };
        self.check("nvrtcCreateProgram", code)?;
        // SAFETY: as many options as are said, each ending with zero.
        let code = unsafe { (self.compile)(program, pointers.len() as c_int, pointers.as_ptr()) };
        let result = self
            .check("nvrtcCompileProgram", code)
            .and_then(|()| self.read(program, self.image_size, self.image));
        let result = result.map_err(|error| {
            let log = self.read(program, self.log_size, self.log).unwrap_or_default();
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
            DeviceError::Call {
                device: "cuda".to_owned(),
                call: format!("compiling {name} with NVRTC {}", self.version()),
                reason: format!("{error}\n{log}"),
            }
        });
        // SAFETY: the program made above, given back once.
        unsafe { (self.destroy)(&raw mut program) };
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
        self.check("asking NVRTC for a result's size", unsafe { size(program, &raw mut length) })?;
        let mut result = vec![0u8; length];
        // SAFETY: writes as many bytes as it has just said.
        self.check("asking NVRTC for a result", unsafe { bytes(program, result.as_mut_ptr().cast()) })?;
        Ok(result)
    }

    fn check(&self, call: &str, code: c_int) -> Result<(), DeviceError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: gives a constant of the library.
        let reason = text(unsafe { (self.error_string)(code) });
        Err(DeviceError::Call { device: "cuda".to_owned(), call: call.to_owned(), reason })
    }
}
