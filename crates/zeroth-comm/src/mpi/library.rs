//! The MPI library of this machine: which one, where, and how it is opened.

use std::env;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use zeroth_base::SharedLibrary;

use super::calls::{self, Abi, Calls};
use super::error::MpiError;
use super::launched_by::LaunchedBy;

/// The environment variable with the library to open: a path, or a name for the loader. No other is tried.
pub const LIBRARY_VARIABLE: &str = "ZEROTH_MPI_LIBRARY";

/// File names of Open MPI 4 and 5, and of what developers install.
const OPEN_MPI: &[&str] = &["libmpi.so.40", "libmpi.so"];

/// File names of MPICH: Debian's, and that of all libraries with its binary interface.
const MPICH: &[&str] = &["libmpich.so.12", "libmpi.so.12", "libmpich.so", "libmpi.so"];

/// An open MPI library.
pub(super) struct MpiLibrary {
    pub(super) calls: Box<dyn Calls>,
    /// Its version and where it was found, for messages.
    pub(super) name: String,
}

impl MpiLibrary {
    /// Opens the library of the launcher that started this process, else the first that is found.
    pub(super) fn open(launcher: Option<&LaunchedBy>, folders: &[PathBuf]) -> Result<Self, MpiError> {
        let mut tried = Vec::new();
        for at in candidates(env::var_os(LIBRARY_VARIABLE), launcher, folders) {
            match open_at(&at, launcher) {
                Ok(library) => return Ok(library),
                Err(reason) => tried.push(reason),
            }
        }
        Err(MpiError::NotFound { launcher: launcher.map(|launcher| launcher.name), tried: tried.join("; ") })
    }
}

/// Names and paths for the loader, in order.
fn candidates(given: Option<OsString>, launcher: Option<&LaunchedBy>, folders: &[PathBuf]) -> Vec<OsString> {
    if let Some(given) = given.filter(|given| !given.is_empty()) {
        return vec![given];
    }
    let [first, second] = match launcher.and_then(|launcher| launcher.abi) {
        Some(Abi::Mpich) => [MPICH, OPEN_MPI],
        Some(Abi::OpenMpi) | None => [OPEN_MPI, MPICH],
    };
    let mut found: Vec<OsString> = Vec::new();
    let mut add = |name: OsString| {
        if !found.contains(&name) {
            found.push(name);
        }
    };
    for names in [first, second] {
        let beside = folders.iter().flat_map(|folder| names.iter().map(move |name| folder.join(name)));
        beside.filter(|path| path.is_file()).for_each(|path| add(path.into_os_string()));
        for name in names {
            add(OsString::from(name));
        }
    }
    found
}

fn open_at(at: &OsStr, launcher: Option<&LaunchedBy>) -> Result<MpiLibrary, String> {
    let name = at.to_string_lossy();
    // Until its interface is known its symbols stay its own: two libraries would mix theirs.
    let library = SharedLibrary::open(at)?;
    let abi = calls::abi_of(&library).map_err(|reason| format!("{name}: {reason}"))?;
    let version = calls::version(&library).map_err(|reason| format!("{name}: {reason}"))?;
    if let Some(launcher) = launcher
        && launcher.only
        && launcher.abi.is_some_and(|needed| needed != abi)
    {
        return Err(format!("{name} is another library ({version})"));
    }
    // Plug-ins of Open MPI resolve against it.
    let library = SharedLibrary::open_global(at)?;
    let calls = calls::load(&library, abi).map_err(|reason| format!("{name}: {reason}"))?;
    Ok(MpiLibrary { calls, name: format!("{version} ({name})") })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(given: Option<&str>, abi: Option<Abi>, folders: &[PathBuf]) -> Vec<String> {
        let launcher = LaunchedBy { name: "a test", abi, only: true, world: None };
        let found = candidates(given.map(OsString::from), Some(&launcher), folders);
        found.into_iter().map(|name| name.into_string().unwrap()).collect()
    }

    #[test]
    fn the_launcher_s_library_comes_first_and_a_given_one_alone() {
        assert_eq!(names(None, Some(Abi::Mpich), &[])[0], "libmpich.so.12");
        assert_eq!(names(None, Some(Abi::OpenMpi), &[])[0], "libmpi.so.40");
        assert_eq!(names(Some("/opt/libmpi.so"), Some(Abi::Mpich), &[]), ["/opt/libmpi.so"]);
        let folder = tempfile::tempdir().unwrap();
        let beside = folder.path().join("libmpi.so.12");
        std::fs::write(&beside, "").unwrap();
        let found = names(None, Some(Abi::Mpich), &[folder.path().to_owned()]);
        assert_eq!(found[0], beside.to_str().unwrap());
    }

    #[test]
    fn what_is_no_mpi_library_is_refused_with_the_reason() {
        let reason = open_at(OsStr::new("libzeroth-absent.so.40"), None).err().unwrap();
        assert!(reason.contains("libzeroth-absent.so.40"), "{reason}");
        // It opens, and has none of MPI's functions.
        let reason = open_at(OsStr::new("libc.so.6"), None).err().unwrap();
        assert!(reason.contains("MPI_Get_library_version"), "{reason}");
    }
}
