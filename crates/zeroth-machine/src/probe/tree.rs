//! The system's files, under a root: `/` when probing, a folder with recorded files in tests.

use std::io;
use std::path::{Path, PathBuf};

/// The root that the system's files are read under.
pub(super) struct Tree {
    root: PathBuf,
}

/// A file of the system that could not be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {}: {source}", path.display())]
pub(super) struct Unreadable {
    path: PathBuf,
    source: io::Error,
}

impl Tree {
    pub(super) fn system() -> Self {
        Self { root: PathBuf::from("/") }
    }

    /// Where `path`, absolute on the probed system, lies for us.
    pub(super) fn locate(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The text of a file. Bytes that are no UTF-8 (a mount point may have any name) are replaced.
    pub(super) fn read(&self, path: impl AsRef<Path>) -> Result<String, Unreadable> {
        let path = path.as_ref();
        match std::fs::read(self.locate(path)) {
            Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Err(source) => Err(Unreadable { path: path.to_owned(), source }),
        }
    }
}

/// A folder of recorded files that stands for a system.
#[cfg(test)]
pub(super) struct Recorded {
    folder: tempfile::TempDir,
    pub(super) tree: Tree,
}

#[cfg(test)]
impl Recorded {
    pub(super) fn new<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let recorded = Self { tree: Tree { root: folder.path().to_owned() }, folder };
        for (path, text) in files {
            recorded.write(path, text);
        }
        recorded
    }

    pub(super) fn write(&self, path: &str, text: &str) {
        let path = self.folder.path().join(path.trim_start_matches('/'));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_file_is_named_as_the_system_names_it() {
        let recorded = Recorded::new([("/proc/meminfo", "MemTotal: 1 kB\n")]);
        assert_eq!(recorded.tree.read("/proc/meminfo").unwrap(), "MemTotal: 1 kB\n");
        let error = recorded.tree.read("/proc/cpuinfo").unwrap_err().to_string();
        assert!(error.starts_with("cannot read /proc/cpuinfo: "), "{error}");
    }
}
