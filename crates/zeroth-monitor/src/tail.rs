//! Follows a file that grows by lines. Survives a rename over it, truncation, torn and overlong lines.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// The longest line that is passed on.
pub(crate) const LONGEST_LINE: usize = 1 << 20;
/// Bytes read at once.
const CHUNK: usize = 1 << 20;
/// Bytes before the position that are compared with the file: a rewritten file that is as long differs there.
const GUARD: usize = 64;

/// Receives the lines of a file.
pub(crate) trait Lines {
    /// The file was replaced or truncated: its lines follow from the first.
    fn reset(&mut self);
    /// A complete line, without its end.
    fn line(&mut self, line: &[u8]);
    /// A line that is longer than [`LONGEST_LINE`].
    fn overlong(&mut self);
}

/// What identifies the state of a file.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Seen {
    device: u64,
    inode: u64,
    length: u64,
    modified: (i64, i64),
}

/// A position in a file that grows.
pub(crate) struct Tail {
    path: PathBuf,
    file: Option<File>,
    seen: Option<Seen>,
    offset: u64,
    /// The last bytes before `offset`.
    guard: Vec<u8>,
    /// The beginning of a line whose end is not there yet.
    torn: Vec<u8>,
    /// Whether the rest of an overlong line is skipped.
    skips: bool,
    chunk: Vec<u8>,
}

impl Tail {
    pub(crate) fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            file: None,
            seen: None,
            offset: 0,
            guard: Vec::new(),
            torn: Vec::new(),
            skips: false,
            chunk: Vec::new(),
        }
    }

    /// Passes on the lines that are new. A missing file has none.
    pub(crate) fn poll(&mut self, lines: &mut dyn Lines) -> io::Result<()> {
        let found = match fs::metadata(&self.path) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        if !found.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
        }
        let seen = Seen {
            device: found.dev(),
            inode: found.ino(),
            length: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
        };
        if self.seen == Some(seen) {
            return Ok(());
        }
        let is_other = self.seen.is_none_or(|old| (old.device, old.inode) != (seen.device, seen.inode));
        if is_other || self.file.is_none() {
            // Not blocking: a FIFO may have taken the name since.
            let flags = (OFlags::NONBLOCK | OFlags::CLOEXEC).bits() as i32;
            self.file = Some(OpenOptions::new().read(true).custom_flags(flags).open(&self.path)?);
        }
        if self.offset > 0 && (is_other || seen.length < self.offset || !self.continues()?) {
            (self.offset, self.skips) = (0, false);
            self.torn.clear();
            self.guard.clear();
            lines.reset();
        }
        self.read(lines)?;
        self.seen = Some(seen);
        Ok(())
    }

    /// Whether the bytes before the position are those that were read.
    fn continues(&self) -> io::Result<bool> {
        let Some(file) = &self.file else { return Ok(false) };
        let mut there = [0; GUARD];
        let there = &mut there[..self.guard.len()];
        match file.read_exact_at(there, self.offset - self.guard.len() as u64) {
            Ok(()) => Ok(*there == *self.guard),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn read(&mut self, lines: &mut dyn Lines) -> io::Result<()> {
        let mut chunk = std::mem::take(&mut self.chunk);
        chunk.resize(CHUNK, 0);
        let mut read_all = || loop {
            let Some(file) = &self.file else { return Ok(()) };
            let count = match file.read_at(&mut chunk, self.offset) {
                Ok(0) => return Ok(()),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            self.offset += count as u64;
            let kept = GUARD.saturating_sub(count).min(self.guard.len());
            self.guard.drain(..self.guard.len() - kept);
            self.guard.extend_from_slice(&chunk[count.saturating_sub(GUARD)..count]);
            self.split(&chunk[..count], lines);
        };
        let read = read_all();
        // A run that is followed adds little at once.
        chunk.truncate(1 << 14);
        chunk.shrink_to_fit();
        self.chunk = chunk;
        read
    }

    fn split(&mut self, mut bytes: &[u8], lines: &mut dyn Lines) {
        while let Some(end) = memchr::memchr(b'\n', bytes) {
            let (line, rest) = (&bytes[..end], &bytes[end + 1..]);
            bytes = rest;
            if std::mem::take(&mut self.skips) {
                continue;
            }
            if self.torn.is_empty() {
                lines.line(line);
            } else {
                self.torn.extend_from_slice(line);
                lines.line(&self.torn);
                self.torn.clear();
            }
        }
        if self.skips {
            return;
        }
        if self.torn.len() + bytes.len() > LONGEST_LINE {
            (self.torn, self.skips) = (Vec::new(), true);
            lines.overlong();
        } else {
            self.torn.extend_from_slice(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[derive(Default)]
    struct Heard(Vec<String>);

    impl Lines for Heard {
        fn reset(&mut self) {
            self.0.push("RESET".to_owned());
        }
        fn line(&mut self, line: &[u8]) {
            self.0.push(String::from_utf8_lossy(line).into_owned());
        }
        fn overlong(&mut self) {
            self.0.push("OVERLONG".to_owned());
        }
    }

    fn heard(tail: &mut Tail) -> Vec<String> {
        let mut heard = Heard::default();
        tail.poll(&mut heard).unwrap();
        heard.0
    }

    fn append(path: &Path, text: &str) {
        OpenOptions::new().append(true).create(true).open(path).unwrap().write_all(text.as_bytes()).unwrap();
    }

    #[test]
    fn lines_arrive_once_and_torn_ones_when_they_are_complete() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut tail = Tail::new(&path);
        assert!(heard(&mut tail).is_empty(), "a missing file has no lines");
        append(&path, "one\ntw");
        assert_eq!(heard(&mut tail), ["one"]);
        append(&path, "o\nthree\n");
        assert_eq!(heard(&mut tail), ["two", "three"]);
        assert!(heard(&mut tail).is_empty());
    }

    #[test]
    fn truncation_replacement_and_rewriting_start_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut tail = Tail::new(&path);
        append(&path, "1\n2\n3\n");
        assert_eq!(heard(&mut tail), ["1", "2", "3"]);
        File::options().write(true).open(&path).unwrap().set_len(2).unwrap();
        append(&path, "b\n");
        assert_eq!(heard(&mut tail), ["RESET", "1", "b"], "shorter");
        fs::write(folder.path().join("new"), "x\n").unwrap();
        fs::rename(folder.path().join("new"), &path).unwrap();
        assert_eq!(heard(&mut tail), ["RESET", "x"], "another file");
        File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
        append(&path, "yy\nzz\n");
        assert_eq!(heard(&mut tail), ["RESET", "yy", "zz"], "longer, and not a continuation");
    }

    #[test]
    fn endless_lines_are_counted_and_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut tail = Tail::new(&path);
        append(&path, &"x".repeat(3 << 20));
        assert_eq!(heard(&mut tail), ["OVERLONG"]);
        append(&path, "y\nnext\n");
        assert_eq!(heard(&mut tail), ["next"]);
    }

    #[test]
    fn folders_and_fifos_are_errors_that_do_not_block() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Tail::new(folder.path()).poll(&mut Heard::default()).is_err());
        let fifo = folder.path().join("fifo");
        let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
        assert!(made.success());
        assert!(Tail::new(&fifo).poll(&mut Heard::default()).is_err());
    }
}
