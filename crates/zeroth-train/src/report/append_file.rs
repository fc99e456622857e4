//! Files that a run appends lines to and does not depend on: metrics and events. What cannot be written, on a full disk, is kept
//! in memory and tried again with every line; beyond a limit it is dropped.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// Bytes that are kept for a file that takes none.
const MOST_PENDING: usize = 1 << 20;

/// A file open to append.
#[derive(Debug)]
pub(crate) struct AppendFile {
    path: PathBuf,
    file: File,
    /// What is not written yet; it may begin in the middle of a line.
    pending: Vec<u8>,
    /// The first error, until it was taken.
    problem: Option<io::Error>,
    has_failed: bool,
}

impl AppendFile {
    /// A file that was opened to append to it.
    pub(crate) fn new(path: &Path, file: File) -> Self {
        Self { path: path.to_owned(), file, pending: Vec::new(), problem: None, has_failed: false }
    }

    /// Appends a line, or another record that must not be torn, in one write where that is possible.
    pub(crate) fn append(&mut self, record: &[u8]) {
        if self.pending.len() + record.len() <= MOST_PENDING {
            self.pending.extend_from_slice(record);
        }
        while !self.pending.is_empty() {
            match self.file.write(&self.pending) {
                Ok(0) => return self.failed(io::ErrorKind::WriteZero.into()),
                Ok(written) => drop(self.pending.drain(..written)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return self.failed(error),
            }
        }
    }

    /// Waits until what is written is on disk.
    pub(crate) fn sync(&mut self) {
        self.append(&[]);
        if let Err(error) = self.file.sync_data() {
            self.failed(error);
        }
    }

    /// What to tell about the first line that could not be written; once.
    pub(crate) fn take_problem(&mut self) -> Option<String> {
        let problem = self.problem.take()?;
        Some(format!(
            "{} cannot be written: {problem}; training goes on, and what is missing is written once that is possible",
            self.path.display()
        ))
    }

    /// Where it is.
    #[cfg(test)]
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn failed(&mut self, error: io::Error) {
        if !std::mem::replace(&mut self.has_failed, true) {
            self.problem = Some(error);
        }
    }
}

impl Drop for AppendFile {
    fn drop(&mut self) {
        // The last chance of a line that could not be written.
        self.append(&[]);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::io::Read;
    use std::os::unix::fs::OpenOptionsExt;
    use std::process::Command;

    use rustix::fs::OFlags;

    use super::*;

    /// A file that takes little at a time: a FIFO that nobody empties.
    fn fifo(folder: &Path) -> (PathBuf, File) {
        let path = folder.join("fifo");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let flags = OFlags::NONBLOCK.bits() as i32;
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path).unwrap();
        (path, file)
    }

    #[test]
    fn what_is_not_written_is_written_later_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let (path, mut reader) = fifo(folder.path());
        let mut file = AppendFile::new(&path, reader.try_clone().unwrap());
        let line = |number: u32| format!("{number:0>999}\n");
        // A pipe takes 64 KiB.
        for number in 0..100 {
            file.append(line(number).as_bytes());
        }
        let said = file.take_problem().unwrap();
        assert!(said.contains("fifo cannot be written: ") && said.contains("training goes on"), "{said}");
        assert_eq!(file.take_problem(), None);
        let (mut text, mut bytes) = (Vec::new(), vec![0; 1 << 16]);
        while let Ok(read) = reader.read(&mut bytes) {
            text.extend_from_slice(&bytes[..read]);
            file.append(&[]);
        }
        assert_eq!(String::from_utf8(text).unwrap(), (0..100).map(line).collect::<String>());
        assert_eq!(file.take_problem(), None, "one note a run");
    }

    #[test]
    fn memory_is_bounded_and_records_are_dropped_as_a_whole() {
        let folder = tempfile::tempdir().unwrap();
        let (path, reader) = fifo(folder.path());
        let mut file = AppendFile::new(&path, reader);
        let record = vec![b'x'; MOST_PENDING / 4];
        for _ in 0..9 {
            file.append(&record);
        }
        assert!(file.pending.len() <= MOST_PENDING && file.pending.len() > MOST_PENDING / 2);
        assert!(fs::metadata(path).is_ok());
    }
}
