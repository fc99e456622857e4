//! Opening a library at run time, and its functions by name.
#![allow(unsafe_code, reason = "what a library's functions take is known from its header only")]

use std::error::Error;
use std::ffi::OsStr;
use std::mem::ManuallyDrop;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};

/// An open library. It stays open for the life of the process: drivers and their libraries start threads and
/// register exit handlers, and do not survive being unloaded.
pub struct Opened(ManuallyDrop<Library>);

impl Opened {
    /// Opens by a bare name, which the loader searches for, or by a path. The error is the loader's.
    pub fn open(name: &OsStr) -> Result<Self, String> {
        Self::open_as(name, RTLD_LOCAL)
    }

    /// As [`Opened::open`], and siblings of the same package find what they need of this one.
    pub fn open_for_siblings(name: &OsStr) -> Result<Self, String> {
        Self::open_as(name, RTLD_GLOBAL)
    }

    fn open_as(name: &OsStr, scope: std::ffi::c_int) -> Result<Self, String> {
        // SAFETY: opening runs the library's own start-up code. Only libraries made for being opened so are named.
        match unsafe { Library::open(Some(name), RTLD_NOW | scope) } {
            Ok(library) => Ok(Self(ManuallyDrop::new(library))),
            Err(error) => Err(message(&error)),
        }
    }

    /// A function by its name.
    ///
    /// # Safety
    /// `F` must be the function's type as its header declares it, and a pointer to a function.
    pub unsafe fn function<F: Copy>(&self, name: &'static str) -> Result<F, String> {
        // SAFETY: the caller vouches for the type; the library is never unloaded, so a copy stays valid.
        match unsafe { self.0.get::<F>(name.as_bytes()) } {
            Ok(function) => Ok(*function),
            Err(error) => Err(message(&error)),
        }
    }
}

/// The loader's own sentence, which names the file and the reason, where there is one.
fn message(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}
