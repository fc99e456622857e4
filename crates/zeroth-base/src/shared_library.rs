//! Shared libraries opened at run time.
#![allow(unsafe_code, reason = "the signatures of a library's functions are known only from its header")]

use std::error::Error;
use std::ffi::OsStr;
use std::mem::ManuallyDrop;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};

/// A shared library. It stays loaded for the life of the process: drivers and their libraries start threads and register exit
/// handlers, and do not survive being unloaded.
pub struct SharedLibrary(ManuallyDrop<Library>);

impl SharedLibrary {
    /// Opens a library by bare name, which the loader searches for, or by path. The error is the loader's message.
    pub fn open(name: &OsStr) -> Result<Self, String> {
        Self::open_as(name, RTLD_LOCAL)
    }

    /// Opens a library like [`Self::open`] with global symbol visibility, so that sibling libraries can resolve against it.
    pub fn open_global(name: &OsStr) -> Result<Self, String> {
        Self::open_as(name, RTLD_GLOBAL)
    }

    fn open_as(name: &OsStr, scope: std::ffi::c_int) -> Result<Self, String> {
        // SAFETY: opening runs the library's initializers. Callers name only libraries meant to be loaded this way.
        match unsafe { Library::open(Some(name), RTLD_NOW | scope) } {
            Ok(library) => Ok(Self(ManuallyDrop::new(library))),
            Err(error) => Err(message(&error)),
        }
    }

    /// Looks up a function by name.
    ///
    /// # Safety
    /// `F` must be the function pointer type that the header declares for the function.
    pub unsafe fn function<F: Copy>(&self, name: &'static str) -> Result<F, String> {
        // SAFETY: the caller guarantees the type; the library is never unloaded, so the copy stays valid.
        match unsafe { self.0.get::<F>(name.as_bytes()) } {
            Ok(function) => Ok(*function),
            Err(error) => Err(message(&error)),
        }
    }
}

/// The loader's message, which names the file and the reason, if there is one.
fn message(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}
