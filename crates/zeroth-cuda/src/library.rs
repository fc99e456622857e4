//! Opening NVIDIA's libraries at run time, so that one binary runs with and without them. Where they are searched for:
//! [`Folders`].
#![allow(unsafe_code, reason = "what a library's functions take is known from its header only")]

use std::ffi::{CStr, OsString, c_char};
use std::path::Path;

use crate::{FOLDERS, Folders, Opened};
use zeroth_kernel::DeviceError;

/// An open library.
pub(super) struct Library {
    opened: Opened,
    /// What the loader was asked for: a bare name or a path.
    at: OsString,
}

impl Library {
    /// The first of `files` (newest first) that opens anywhere.
    pub(super) fn open(files: &[&str], how_to_get: &str) -> Result<Self, DeviceError> {
        let folders = Folders::of_environment();
        let mut reasons = Vec::new();
        for at in folders.places(files) {
            match Opened::open_for_siblings(&at) {
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
                "{}; beside the loader's search: {searched}. {how_to_get}, or set {FOLDERS} to the folder that holds it",
                reasons.join("; ")
            ),
        })
    }

    /// A function by its name.
    ///
    /// # Safety
    /// `F` must be the function's type as its header declares it, and a pointer to a function.
    pub(super) unsafe fn function<F: Copy>(&self, name: &'static str) -> Result<F, DeviceError> {
        // SAFETY: the caller vouches for the type.
        unsafe { self.opened.function(name) }.map_err(|reason| DeviceError::Call {
            device: "cuda".to_owned(),
            call: format!("looking up {name} in {}", Path::new(&self.at).display()),
            reason: format!("{reason}; a newer version of the library is needed"),
        })
    }
}

/// A constant text of a library; empty for a null pointer.
pub(super) fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: a text that ends with zero and lives as long as the library, which is never unloaded.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_says_how_to_get_it() {
        let error = Library::open(&["libzeroth-absent.so.13"], "Install it").err().unwrap().to_string();
        assert!(error.contains("libzeroth-absent.so.13"), "{error}");
        assert!(error.contains("Install it, or set ZEROTH_CUDA_LIBRARIES"), "{error}");
    }
}
