//! Where NVIDIA's libraries lie beside the loader's own search: folders that the user gives, the toolkit, packages of Python
//! and conda. What `doctor` looks through is what a run looks through.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Folders that are searched before all others, with `:` between them.
pub const FOLDERS: &str = "ZEROTH_CUDA_LIBRARIES";

/// Folders to search.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Folders {
    /// The user's own: before the loader's search.
    pub given: Vec<PathBuf>,
    /// The others: after it.
    pub later: Vec<PathBuf>,
}

impl Folders {
    /// As this process's environment says.
    pub fn of_environment() -> Self {
        Self::find(&|name| std::env::var_os(name))
    }

    /// As an environment says. No Python is started: where its packages lie follows from where it lies.
    pub fn find(variable: &dyn Fn(&str) -> Option<OsString>) -> Self {
        let given = variable(FOLDERS).unwrap_or_default();
        let given = std::env::split_paths(&given).filter(|folder| !folder.as_os_str().is_empty()).collect();
        Self { given, later: later(variable) }
    }

    /// All of them, in order.
    pub fn all(&self) -> impl Iterator<Item = &PathBuf> {
        self.given.iter().chain(&self.later)
    }

    /// What the loader is asked for, one after the other: the first of `files` (newest first) that opens is taken.
    pub fn places(&self, files: &[&str]) -> impl Iterator<Item = OsString> {
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
        // Debian's own Python looks for what pip installed one level down.
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

/// What lies in a folder and begins so, in order of name. A folder that is not there has nothing in it.
fn entries(folder: &Path, beginning: &str) -> Vec<PathBuf> {
    let Ok(found) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut entries: Vec<PathBuf> = found
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(beginning)))
        .collect();
    entries.sort();
    entries
}
