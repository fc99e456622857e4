//! Folders searched for NVIDIA's libraries in addition to the loader's search: those set by the user, the CUDA toolkit, and Python
//! and conda packages. `doctor` and training runs search the same folders.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The environment variable with folders to search first, separated by `:`.
pub const LIBRARIES_VARIABLE: &str = "ZEROTH_CUDA_LIBRARIES";

/// Folders to search for NVIDIA's libraries.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LibraryFolders {
    /// Set by the user; searched before the loader's own search.
    pub given: Vec<PathBuf>,
    /// All others; searched after it.
    pub later: Vec<PathBuf>,
}

impl LibraryFolders {
    /// The folders for this process's environment.
    pub fn from_environment() -> Self {
        Self::find(&|name| std::env::var_os(name))
    }

    /// The folders for an environment. Python is not started: the location of its packages follows from that of its executable.
    pub fn find(variable: &dyn Fn(&str) -> Option<OsString>) -> Self {
        let given = variable(LIBRARIES_VARIABLE).unwrap_or_default();
        let given = std::env::split_paths(&given).filter(|folder| !folder.as_os_str().is_empty()).collect();
        Self { given, later: later(variable) }
    }

    /// All folders, in search order.
    pub fn all(&self) -> impl Iterator<Item = &PathBuf> {
        self.given.iter().chain(&self.later)
    }

    /// The names and paths to pass to the loader, in order, for `files` (newest first).
    pub fn candidates(&self, files: &[&str]) -> impl Iterator<Item = OsString> {
        let in_folders = |folders: &[PathBuf]| -> Vec<OsString> {
            let paths = folders.iter().flat_map(|folder| files.iter().map(move |file| folder.join(file)));
            paths.filter(|path| path.is_file()).map(PathBuf::into_os_string).collect()
        };
        let bare: Vec<OsString> = files.iter().map(OsString::from).collect();
        in_folders(&self.given).into_iter().chain(bare).chain(in_folders(&self.later))
    }
}

fn later(variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let given = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let mut folders: Vec<PathBuf> = given("CUDA_HOME").into_iter().map(|home| home.join("lib64")).collect();
    folders.push(PathBuf::from("/usr/local/cuda/lib64"));
    let mut prefixes: Vec<PathBuf> = given("VIRTUAL_ENV").into_iter().collect();
    if let Some(conda) = given("CONDA_PREFIX") {
        folders.push(conda.join("lib"));
        prefixes.push(conda);
    }
    let path = variable("PATH").unwrap_or_default();
    let python = std::env::split_paths(&path).find(|folder| folder.join("python3").is_file());
    if let Some(prefix) = python.as_deref().and_then(Path::parent) {
        prefixes.push(prefix.to_owned());
        // Debian's Python finds packages installed by pip in /usr/local.
        if prefix == Path::new("/usr") {
            prefixes.push(prefix.join("local"));
        }
    }
    for prefix in prefixes {
        for python in entries(&prefix.join("lib"), "python3") {
            for packages in ["site-packages", "dist-packages"] {
                let wheels = entries(&python.join(packages).join("nvidia"), "");
                folders.extend(wheels.into_iter().map(|wheel| wheel.join("lib")));
            }
        }
    }
    folders.retain(|folder| folder.is_dir());
    let mut seen = std::collections::BTreeSet::new();
    folders.retain(|folder| seen.insert(folder.clone()));
    folders
}

/// Entries of a folder with a name prefix, sorted; empty if the folder does not exist.
fn entries(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(found) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut entries: Vec<PathBuf> = found
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix)))
        .collect();
    entries.sort();
    entries
}
