//! The lines of several files, read one after the other; never more than one of them in memory.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use super::DataError;
use super::file_format::foreign;

/// Says what is wrong with any of the paths before the first file is read.
pub(super) fn check(files: &[PathBuf]) -> Result<(), DataError> {
    if files.is_empty() {
        return Err(DataError::NoFiles);
    }
    for path in files {
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => return Err(DataError::Folder { path: path.clone() }),
            Ok(found) if !found.is_file() => return Err(DataError::NotAFile { path: path.clone() }),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(DataError::NotFound { path: path.clone() });
            }
            Err(source) => return Err(DataError::Read { path: path.clone(), line: 1, source }),
        }
    }
    Ok(())
}

/// The lines of one file that are not blank.
pub(super) struct Lines<'a> {
    path: &'a Path,
    reader: BufReader<File>,
    buffer: Vec<u8>,
    number: u64,
    read: u64,
}

impl<'a> Lines<'a> {
    pub(super) fn open(path: &'a Path) -> Result<Self, DataError> {
        let failed = |source| DataError::Read { path: path.to_owned(), line: 1, source };
        let mut reader = BufReader::with_capacity(1 << 20, File::open(path).map_err(failed)?);
        let beginning = reader.fill_buf().map_err(failed)?;
        if let Some((what, remedy)) = foreign(path, beginning) {
            return Err(DataError::Format { path: path.to_owned(), what, remedy });
        }
        // A byte order mark: some editors write it, and no JSON parser takes it.
        if beginning.starts_with(b"\xEF\xBB\xBF") {
            reader.consume(3);
        }
        Ok(Self { path, reader, buffer: Vec::new(), number: 0, read: 0 })
    }

    /// Bytes of the file that were read.
    pub(super) fn read(&self) -> u64 {
        self.read
    }

    /// The next line and its number, counted from 1.
    pub(super) fn next(&mut self) -> Result<Option<(u64, &[u8])>, DataError> {
        loop {
            self.buffer.clear();
            self.number += 1;
            let read = self.reader.read_until(b'\n', &mut self.buffer).map_err(|source| DataError::Read {
                path: self.path.to_owned(),
                line: self.number,
                source,
            })?;
            if read == 0 {
                return Ok(None);
            }
            self.read += read as u64;
            if !self.buffer.trim_ascii().is_empty() {
                return Ok(Some((self.number, self.buffer.trim_ascii())));
            }
        }
    }
}
