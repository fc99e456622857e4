//! Reads the lines of a text, one at a time.

use std::io::{BufRead, Read};
use std::path::Path;

use super::row_limits::MAX_ROW_BYTES;
use super::source::DataSource;
use super::{DataError, RowNumber};

/// The non-blank lines of a file.
pub(super) struct LineReader<'a> {
    path: &'a Path,
    source: DataSource,
    buffer: Vec<u8>,
    number: u64,
    read: u64,
}

impl<'a> LineReader<'a> {
    pub(super) fn new(path: &'a Path, source: DataSource) -> Self {
        Self { path, source, buffer: Vec::new(), number: 0, read: 0 }
    }

    /// Bytes of the file read so far.
    pub(super) fn read(&self) -> u64 {
        self.source.compressed_bytes().unwrap_or(self.read)
    }

    /// The next line and its number, from 1.
    pub(super) fn next(&mut self) -> Result<Option<(u64, &[u8])>, DataError> {
        loop {
            self.buffer.clear();
            self.number += 1;
            let line = (&mut self.source).take(MAX_ROW_BYTES + 1);
            let read = { line }.read_until(b'\n', &mut self.buffer).map_err(|source| DataError::Read {
                path: self.path.to_owned(),
                line: self.number,
                source,
            })?;
            if read == 0 {
                return Ok(None);
            }
            if read as u64 > MAX_ROW_BYTES {
                return Err(DataError::RowTooLong {
                    path: self.path.to_owned(),
                    at: RowNumber::Line(self.number),
                });
            }
            self.read += read as u64;
            if !self.buffer.trim_ascii().is_empty() {
                return Ok(Some((self.number, self.buffer.trim_ascii())));
            }
        }
    }
}
