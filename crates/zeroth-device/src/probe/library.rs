//! Opening a library at run time, and its functions by name.
#![allow(unsafe_code, reason = "what a library's functions take is known from its header only")]

use std::error::Error;
use std::ffi::OsStr;
use std::mem::ManuallyDrop;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};

/// An open library. It stays open for the life of the process: drivers and their libraries start threads and
/// register exit handlers, and do not survive being unloaded.
pub(crate) struct Opened(ManuallyDrop<Library>);

impl Opened {
    /// Opens by a bare name, which the loader searches for, or by a path. The error is the loader's.
    pub(crate) fn open(name: &OsStr) -> Result<Self, String> {
        Self::open_as(name, RTLD_LOCAL)
    }

    /// As [`Opened::open`], and siblings of the same package find what they need of this one.
    pub(crate) fn open_for_siblings(name: &OsStr) -> Result<Self, String> {
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
    pub(crate) unsafe fn function<F: Copy>(&self, name: &'static str) -> Result<F, String> {
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

/// Compiles C to a shared library: what a vendor's library looks like from outside.
#[cfg(test)]
pub(super) fn compile(source: &str, library: &std::path::Path, defines: &[&str]) {
    let folder = library.parent().unwrap();
    std::fs::create_dir_all(folder).unwrap();
    let file = library.with_extension("c");
    std::fs::write(&file, source).unwrap();
    let output = std::process::Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(library)
        .args(defines.iter().map(|define| format!("-D{define}")))
        .arg(&file)
        .output()
        .expect("Rust itself links with cc");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::remove_file(file).unwrap();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loader_says_what_is_missing() {
        let error = Opened::open(OsStr::new("libzeroth-absent.so.1")).err().unwrap();
        assert!(error.contains("libzeroth-absent.so.1"), "{error}");

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libsmall.so");
        compile("int seven(void) { return 7; }", &path, &[]);
        let library = Opened::open(path.as_os_str()).unwrap();
        // SAFETY: the type is that of the source above.
        let seven = unsafe { library.function::<extern "C" fn() -> i32>("seven") };
        assert_eq!(seven.unwrap()(), 7);
        // SAFETY: as above, and nothing of that name is there to be called.
        let eight = unsafe { library.function::<extern "C" fn() -> i32>("eight") };
        assert!(eight.unwrap_err().contains("eight"));
    }
}
