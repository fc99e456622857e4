//! Libraries that zeroth opens at run time: which are there, where, and in which version.
#![allow(unsafe_code, reason = "asks each library for its version; signatures are those of its header")]

use std::ffi::{OsStr, c_char, c_int};
use std::path::{Path, PathBuf};

use serde::Serialize;

use zeroth_cuda::LibraryFolders;
use zeroth_cuda::SharedLibrary;

/// A library and what became of looking for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Library {
    /// Its name without `lib` and version.
    pub name: &'static str,
    /// Whether it can be used.
    #[serde(flatten)]
    pub state: LibraryState,
}

/// What became of looking for a library.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum LibraryState {
    /// It opens.
    Opened {
        /// The name that the loader found it by, or its path.
        at: String,
        /// Its version, where it tells.
        version: Option<String>,
    },
    /// It is not there, or what is there does not open.
    Missing {
        /// Each place and what was wrong with it.
        tried: Vec<Attempt>,
    },
    /// It was not looked for.
    Skipped {
        /// Why it would be of no use.
        why: &'static str,
    },
}

/// A place where a library was looked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Attempt {
    /// A name for the loader, a file, or folders with `:` between them.
    pub at: String,
    /// What was wrong.
    pub why: String,
}

/// A library to look for.
struct Wanted {
    name: &'static str,
    /// File names, the newest version first. Another number is another binary interface.
    files: &'static [&'static str],
    version: VersionCall,
    /// Of no use without the GPU driver. Together such libraries take a tenth of a second to open, or more.
    needs_driver: bool,
}

/// How a library tells its version.
#[derive(Clone, Copy)]
enum VersionCall {
    /// `int f(int *version)`.
    Number(&'static str, fn(u64) -> String),
    /// `size_t f(void)`.
    Returned(&'static str, fn(u64) -> String),
    /// `int f(int *major, int *minor)`.
    MajorMinor(&'static str),
    /// `int f(char *text, int *length)`, as MPI has it.
    Text(&'static str),
}

const WANTED: &[Wanted] = &[
    Wanted {
        name: "cuda",
        files: &["libcuda.so.1"],
        version: VersionCall::Number("cuDriverGetVersion", |v| format!("{}.{}", v / 1000, v % 1000 / 10)),
        needs_driver: false,
    },
    Wanted {
        name: "nvrtc",
        files: &["libnvrtc.so.13", "libnvrtc.so.12"],
        version: VersionCall::MajorMinor("nvrtcVersion"),
        needs_driver: true,
    },
    Wanted {
        name: "cublasLt",
        files: &["libcublasLt.so.13", "libcublasLt.so.12"],
        version: VersionCall::Returned("cublasLtGetVersion", three_parts),
        needs_driver: true,
    },
    Wanted {
        name: "cudnn",
        files: &["libcudnn.so.9", "libcudnn.so.8"],
        version: VersionCall::Returned("cudnnGetVersion", three_parts),
        needs_driver: true,
    },
    Wanted {
        name: "nccl",
        files: &["libnccl.so.2"],
        version: VersionCall::Number("ncclGetVersion", three_parts),
        needs_driver: true,
    },
    Wanted {
        name: "mpi",
        // Open MPI 4 and 5; MPICH and those with its binary interface; whatever is installed for developers.
        files: &["libmpi.so.40", "libmpi.so.12", "libmpi.so"],
        version: VersionCall::Text("MPI_Get_library_version"),
        needs_driver: false,
    },
];

/// `92600` is 9.26.0. Below 10,000 it is the older form of cuDNN up to 8 and NCCL up to 2.8: `8907` is 8.9.7.
fn three_parts(version: u64) -> String {
    let major = if version < 10_000 { 1_000 } else { 10_000 };
    format!("{}.{}.{}", version / major, version % major / 100, version % 100)
}

/// Looks for all libraries.
pub(super) fn probe(no_driver: bool) -> Vec<Library> {
    let folders = LibraryFolders::from_environment();
    let look = |wanted: &Wanted| {
        let state = if no_driver && wanted.needs_driver {
            LibraryState::Skipped { why: "it is of no use without the GPU driver" }
        } else {
            find(wanted, &folders)
        };
        Library { name: wanted.name, state }
    };
    WANTED.iter().map(look).collect()
}

/// The user's folders, then the loader's own search, then the other folders.
fn find(wanted: &Wanted, folders: &LibraryFolders) -> LibraryState {
    let mut tried = Vec::new();
    let mut open = |at: &OsStr| match SharedLibrary::open(at) {
        Ok(library) => {
            let version = wanted.version.ask(&library);
            Some(LibraryState::Opened { at: at.to_string_lossy().into_owned(), version })
        }
        Err(why) => {
            tried.push(Attempt { at: at.to_string_lossy().into_owned(), why });
            None
        }
    };
    if let Some(opened) = folders.candidates(wanted.files).find_map(|at| open(&at)) {
        return opened;
    }
    let without = |folder: &&PathBuf| !tried.iter().any(|attempt| Path::new(&attempt.at).starts_with(folder));
    let without: Vec<String> =
        folders.all().filter(without).map(|folder| folder.display().to_string()).collect();
    if !without.is_empty() {
        let why = format!("holds none of {}", wanted.files.join(", "));
        tried.push(Attempt { at: without.join(":"), why });
    }
    LibraryState::Missing { tried }
}

impl VersionCall {
    /// Asks; `None` where the library has no such function or it fails.
    fn ask(self, library: &SharedLibrary) -> Option<String> {
        match self {
            Self::Number(name, write) => {
                // SAFETY: the type is the one declared for the functions of this kind in `WANTED`.
                let call: unsafe extern "C" fn(*mut c_int) -> c_int =
                    unsafe { library.function(name) }.ok()?;
                let mut version = 0;
                // SAFETY: writes one int, and needs no initialisation of the library.
                let code = unsafe { call(&raw mut version) };
                (code == 0).then(|| write(u64::from(version.unsigned_abs())))
            }
            Self::Returned(name, write) => {
                // SAFETY: as above.
                let call: unsafe extern "C" fn() -> usize = unsafe { library.function(name) }.ok()?;
                // SAFETY: takes nothing, and needs no initialisation of the library.
                Some(write(unsafe { call() } as u64))
            }
            Self::MajorMinor(name) => {
                // SAFETY: as above.
                let call: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int =
                    unsafe { library.function(name) }.ok()?;
                let (mut major, mut minor) = (0, 0);
                // SAFETY: writes two ints, and needs no initialisation of the library.
                let code = unsafe { call(&raw mut major, &raw mut minor) };
                (code == 0).then(|| format!("{major}.{minor}"))
            }
            Self::Text(name) => {
                // SAFETY: as above.
                let call: unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int =
                    unsafe { library.function(name) }.ok()?;
                // Open MPI asks for 256 bytes, MPICH for 8,192.
                let mut text = vec![0u8; 1 << 15];
                let mut length = 0;
                // SAFETY: writes less than the room given; the MPI standard allows the call before MPI_Init.
                let code = unsafe { call(text.as_mut_ptr().cast(), &raw mut length) };
                let end = text.iter().position(|byte| matches!(byte, 0 | b'\n')).unwrap_or(text.len());
                let line = String::from_utf8_lossy(&text[..end]).trim().to_owned();
                (code == 0 && !line.is_empty()).then_some(line)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_library::compile;
    use super::*;
    use zeroth_cuda::LIBRARIES_VARIABLE;

    // No loader finds these by name.
    const COMPILER: Wanted = Wanted {
        name: "nvrtc",
        files: &["libzeroth-nvrtc.so.13", "libzeroth-nvrtc.so.12"],
        version: VersionCall::MajorMinor("nvrtcVersion"),
        needs_driver: true,
    };
    const NVRTC: &str = "int nvrtcVersion(int *major, int *minor) { *major = MAJOR; *minor = 9; return 0; }";

    /// Folders as one environment gives them, those of the machine at hand left out.
    fn folders_in(root: &Path, variables: &[(&str, &str)]) -> LibraryFolders {
        let variable = |name: &str| {
            let (_, value) = variables.iter().find(|(key, _)| *key == name)?;
            Some(root.join(value).into_os_string())
        };
        let mut folders = LibraryFolders::find(&variable);
        folders.later.retain(|folder| folder.starts_with(root));
        folders
    }

    #[test]
    fn wheels_are_found_beside_the_python_in_use() {
        let root = tempfile::tempdir().unwrap();
        let wheel = root.path().join("env/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib");
        compile(NVRTC, &wheel.join("libzeroth-nvrtc.so.12"), &["MAJOR=12"]);
        std::fs::create_dir_all(root.path().join("env/bin")).unwrap();
        std::fs::write(root.path().join("env/bin/python3"), "").unwrap();
        for variables in [[("VIRTUAL_ENV", "env")], [("CONDA_PREFIX", "env")], [("PATH", "env/bin")]] {
            let state = find(&COMPILER, &folders_in(root.path(), &variables));
            let at = wheel.join("libzeroth-nvrtc.so.12").display().to_string();
            assert_eq!(state, LibraryState::Opened { at, version: Some("12.9".to_owned()) }, "{variables:?}");
        }
    }

    #[test]
    fn the_toolkit_comes_before_wheels_and_a_broken_file_does_not_stop_the_search() {
        let root = tempfile::tempdir().unwrap();
        let wheel = root.path().join("env/lib/python3.12/site-packages/nvidia/cu13/lib");
        compile(NVRTC, &wheel.join("libzeroth-nvrtc.so.13"), &["MAJOR=13"]);
        let toolkit = root.path().join("cuda/lib64");
        std::fs::create_dir_all(&toolkit).unwrap();
        std::fs::write(toolkit.join("libzeroth-nvrtc.so.13"), "not a library").unwrap();
        let folders = folders_in(root.path(), &[("CUDA_HOME", "cuda"), ("VIRTUAL_ENV", "env")]);
        assert_eq!(folders.later, [toolkit.clone(), wheel.clone()]);
        assert!(
            matches!(find(&COMPILER, &folders), LibraryState::Opened { at, .. } if Path::new(&at).starts_with(&wheel))
        );

        let in_toolkit = format!("{}/", toolkit.display());
        let LibraryState::Missing { tried } = find(
            &COMPILER,
            &LibraryFolders {
                given: Vec::new(),
                later: vec![toolkit, "/absent/a".into(), "/absent/b".into()],
            },
        ) else {
            panic!("the only file is broken");
        };
        let at: Vec<&str> = tried.iter().map(|attempt| attempt.at.trim_start_matches(&in_toolkit)).collect();
        assert_eq!(
            at,
            [
                "libzeroth-nvrtc.so.13",
                "libzeroth-nvrtc.so.12",
                "libzeroth-nvrtc.so.13",
                "/absent/a:/absent/b"
            ]
        );
        assert!(tried[2].why.contains("file too short") || tried[2].why.contains("ELF"), "{tried:?}");
    }

    #[test]
    fn folders_given_come_before_all_others() {
        let root = tempfile::tempdir().unwrap();
        let [own, toolkit] = ["own", "cuda/lib64"].map(|folder| root.path().join(folder));
        compile(NVRTC, &own.join("libzeroth-nvrtc.so.12"), &["MAJOR=12"]);
        compile(NVRTC, &toolkit.join("libzeroth-nvrtc.so.13"), &["MAJOR=13"]);
        let folders = folders_in(root.path(), &[("CUDA_HOME", "cuda"), (LIBRARIES_VARIABLE, "own")]);
        assert_eq!(folders, LibraryFolders { given: vec![own.clone()], later: vec![toolkit] });
        let at = own.join("libzeroth-nvrtc.so.12").display().to_string();
        assert_eq!(find(&COMPILER, &folders), LibraryState::Opened { at, version: Some("12.9".to_owned()) });
    }

    #[test]
    fn every_kind_of_version_call_is_understood() {
        const SOURCE: &str = r#"
            #include <stddef.h>
            #include <string.h>
            int ncclGetVersion(int *version) { *version = 23007; return 0; }
            size_t cudnnGetVersion(void) { return 92600; }
            int failing(int *version) { *version = 1; return 3; }
            int MPI_Get_library_version(char *text, int *length) {
                strcpy(text, "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4\nmore");
                *length = strlen(text);
                return 0;
            }
        "#;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libversions.so");
        compile(SOURCE, &path, &[]);
        let library = SharedLibrary::open(path.as_os_str()).unwrap();
        let ask = |call: VersionCall| call.ask(&library);
        assert_eq!(ask(VersionCall::Number("ncclGetVersion", three_parts)).as_deref(), Some("2.30.7"));
        assert_eq!(ask(VersionCall::Returned("cudnnGetVersion", three_parts)).as_deref(), Some("9.26.0"));
        assert_eq!(
            ask(VersionCall::Text("MPI_Get_library_version")).as_deref(),
            Some("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4")
        );
        assert_eq!(ask(VersionCall::Number("failing", three_parts)), None);
        assert_eq!(ask(VersionCall::MajorMinor("absent")), None);
    }

    #[test]
    fn version_numbers_are_split_as_their_headers_join_them() {
        // NCCL_VERSION_CODE, CUDNN_VERSION and CUBLAS_VERSION of these releases.
        for (number, text) in [(23_007, "2.30.7"), (2_804, "2.8.4"), (8_907, "8.9.7"), (130_401, "13.4.1")] {
            assert_eq!(three_parts(number), text);
        }
    }

    #[test]
    fn without_a_driver_the_libraries_that_need_it_are_not_opened() {
        let skipped: Vec<&str> = probe(true)
            .into_iter()
            .filter(|library| matches!(library.state, LibraryState::Skipped { .. }))
            .map(|library| library.name)
            .collect();
        assert_eq!(skipped, ["nvrtc", "cublasLt", "cudnn", "nccl"]);
    }
}
