//! Finding and opening NVIDIA's libraries at run time, so that one binary runs with and without them.
//!
//! Order: the folders of `ZEROTH_CUDA_LIBRARIES`, the loader's own search, the toolkit's folder, packages of Python.
#![allow(unsafe_code, reason = "what a library's functions take is known from its header only")]

use std::error::Error;
use std::ffi::{CStr, OsStr, OsString, c_char};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library as Loaded, RTLD_GLOBAL, RTLD_NOW};

use crate::DeviceError;

/// Folders that are searched before all others, with `:` between them.
pub(super) const FOLDERS: &str = "ZEROTH_CUDA_LIBRARIES";

/// An open library. It stays open for the life of the process: these libraries start threads and register exit
/// handlers, and do not survive being unloaded.
pub(super) struct Library {
    loaded: ManuallyDrop<Loaded>,
    /// What the loader was asked for: a bare name or a path.
    at: OsString,
}

impl Library {
    /// The first of `files` (newest first) that opens anywhere.
    pub(super) fn open(files: &[&str], how_to_get: &str) -> Result<Self, DeviceError> {
        let variable = |name: &str| std::env::var_os(name);
        let (given, later) = (given_folders(&variable), later_folders(&variable));
        let mut reasons = Vec::new();
        let mut attempt = |at: OsString| {
            // RTLD_GLOBAL: siblings of the same package find what they need of this one.
            // SAFETY: opening runs the library's own start-up code. Only libraries made for being opened so are named.
            match unsafe { Loaded::open(Some(&at), RTLD_NOW | RTLD_GLOBAL) } {
                Ok(loaded) => Some(Self { loaded: ManuallyDrop::new(loaded), at }),
                Err(error) => {
                    reasons.push(message(&error));
                    None
                }
            }
        };
        let files_in = |folders: &[PathBuf]| -> Vec<OsString> {
            let paths = folders.iter().flat_map(|folder| files.iter().map(move |file| folder.join(file)));
            paths.filter(|path| path.is_file()).map(PathBuf::into_os_string).collect()
        };
        let bare = files.iter().map(OsString::from);
        let places = files_in(&given).into_iter().chain(bare).chain(files_in(&later));
        for place in places {
            if let Some(library) = attempt(place) {
                return Ok(library);
            }
        }
        let searched: Vec<String> =
            given.iter().chain(&later).map(|folder| folder.display().to_string()).collect();
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
        // SAFETY: the caller vouches for the type; the library is never unloaded, so a copy stays valid.
        match unsafe { self.loaded.get::<F>(name.as_bytes()) } {
            Ok(function) => Ok(*function),
            Err(error) => Err(DeviceError::Call {
                device: "cuda".to_owned(),
                call: format!("looking up {name} in {}", Path::new(&self.at).display()),
                reason: format!("{}; a newer version of the library is needed", message(&error)),
            }),
        }
    }
}

/// The loader's own sentence, which names the file and the reason, where there is one.
fn message(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// A constant text of a library; empty for a null pointer.
pub(super) fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: a text that ends with zero and lives as long as the library, which is never unloaded.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

fn given_folders(variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let given = variable(FOLDERS).unwrap_or_default();
    std::env::split_paths(&given).filter(|folder| !folder.as_os_str().is_empty()).collect()
}

/// The toolkit, then packages of Python. No Python is started: where its packages lie follows from where it lies.
fn later_folders(variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let given = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let mut folders: Vec<PathBuf> = given("CUDA_HOME").into_iter().map(|home| home.join("lib64")).collect();
    folders.push(PathBuf::from("/usr/local/cuda/lib64"));
    let path = variable("PATH").unwrap_or_default();
    let beside_python = std::env::split_paths(&path)
        .filter(|folder| folder.join("python3").is_file())
        .filter_map(|folder| folder.parent().map(Path::to_owned));
    for prefix in given("VIRTUAL_ENV").into_iter().chain(given("CONDA_PREFIX")).chain(beside_python) {
        for python in entries(&prefix.join("lib"), "python3") {
            for packages in ["site-packages", "dist-packages"] {
                let wheels = entries(&python.join(packages).join("nvidia"), "");
                folders.extend(wheels.into_iter().map(|wheel| wheel.join("lib")));
            }
        }
    }
    let mut seen = std::collections::BTreeSet::new();
    folders.retain(|folder| folder.is_dir() && seen.insert(folder.clone()));
    folders
}

/// What lies in a folder and begins so, in order of name. A folder that is not there has nothing in it.
fn entries(folder: &Path, beginning: &str) -> Vec<PathBuf> {
    let Ok(found) = std::fs::read_dir(folder) else { return Vec::new() };
    let begins = |path: &PathBuf| {
        path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with(beginning))
    };
    let mut entries: Vec<PathBuf> =
        found.filter_map(|entry| Some(entry.ok()?.path())).filter(begins).collect();
    entries.sort();
    entries
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

    #[test]
    fn folders_given_come_first_and_wheels_are_found_beside_the_python_in_use() {
        let root = tempfile::tempdir().unwrap();
        let wheel = root.path().join("env/lib/python3.12/site-packages/nvidia/cu13/lib");
        let toolkit = root.path().join("cuda/lib64");
        for folder in [&wheel, &toolkit, &root.path().join("env/bin")] {
            std::fs::create_dir_all(folder).unwrap();
        }
        std::fs::write(root.path().join("env/bin/python3"), "").unwrap();
        let variable = |name: &str| {
            let value = match name {
                FOLDERS => return Some("/a:/b".into()),
                "CUDA_HOME" => "cuda",
                "PATH" => "env/bin",
                _ => return None,
            };
            Some(root.path().join(value).into_os_string())
        };
        assert_eq!(given_folders(&variable), [Path::new("/a"), Path::new("/b")]);
        let found = later_folders(&variable);
        let ours: Vec<&PathBuf> = found.iter().filter(|folder| folder.starts_with(root.path())).collect();
        assert_eq!(ours, [&toolkit, &wheel]);
    }
}
