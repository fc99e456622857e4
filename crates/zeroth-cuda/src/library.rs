//! NVIDIA's libraries, opened at run time, so that one binary runs with and without them. [`LibraryFolders`] lists where they are
//! searched.
#![allow(unsafe_code, reason = "the signatures of a library's functions are known only from its header")]

use std::ffi::{CStr, OsString, c_char};
use std::path::Path;

use crate::{LIBRARIES_VARIABLE, LibraryFolders, SharedLibrary};
use zeroth_kernel::DeviceError;

/// An open library.
pub(super) struct Library {
    opened: SharedLibrary,
    /// The bare name or path that was passed to the loader.
    at: OsString,
}

impl Library {
    /// Opens the first of `files` (newest first) that is found in any folder.
    pub(super) fn open(files: &[&str], how_to_get: &str) -> Result<Self, DeviceError> {
        let folders = LibraryFolders::from_environment();
        let mut reasons = Vec::new();
        for at in folders.candidates(files) {
            match SharedLibrary::open_global(&at) {
                Ok(opened) => return Ok(Self { opened, at }),
                Err(reason) => reasons.push(reason),
            }
        }
        let searched: Vec<String> = folders.all().map(|folder| folder.display().to_string()).collect();
        let searched = if searched.is_empty() { "no other folder".to_owned() } else { searched.join(", ") };
        Err(DeviceError::Call {
            device: "cuda".to_owned(),
            call: format!("opening {}", files.join(" or ")),
            reason: format!(
                "{}; beside the loader's search: {searched}. {how_to_get}, or set {LIBRARIES_VARIABLE} to the folder that holds it",
                reasons.join("; ")
            ),
        })
    }

    /// Looks up a function by name.
    ///
    /// # Safety
    /// `F` must be the function pointer type that the header declares for the function.
    pub(super) unsafe fn function<F: Copy>(&self, name: &'static str) -> Result<F, DeviceError> {
        // SAFETY: upheld by the caller.
        unsafe { self.opened.function(name) }.map_err(|reason| DeviceError::Call {
            device: "cuda".to_owned(),
            call: format!("looking up {name} in {}", Path::new(&self.at).display()),
            reason: format!("{reason}; a newer version of the library is needed"),
        })
    }
}

/// Copies a static C string of a library; empty for a null pointer.
pub(super) fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: NUL-terminated, and valid as long as the library, which is never unloaded.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_with_a_remedy() {
        let error = Library::open(&["libzeroth-absent.so.13"], "Install it").err().unwrap().to_string();
        assert!(error.contains("libzeroth-absent.so.13"), "{error}");
        assert!(error.contains("Install it, or set ZEROTH_CUDA_LIBRARIES"), "{error}");
    }
}
