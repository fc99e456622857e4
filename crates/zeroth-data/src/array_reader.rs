//! Reads the elements of a JSON array, one at a time: only the element being read is in memory.

use std::io::BufRead;
use std::path::Path;

use super::row_limits::MAX_ROW_BYTES;
use super::source::{DataSource, line_ends};
use super::{DataError, RowNumber};

/// The elements of a file's top-level array, as unparsed text.
pub(super) struct ArrayElements<'a> {
    path: &'a Path,
    source: DataSource,
    place: Place,
    element: Vec<u8>,
    /// Elements read so far.
    row: u64,
    /// The current line, from 1.
    line: u64,
    read: u64,
}

/// What comes next in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// The opening bracket.
    Begin,
    /// The first element, or the end of an empty array.
    First,
    /// An element after a comma.
    Element,
    /// Nothing but whitespace.
    End,
}

impl<'a> ArrayElements<'a> {
    pub(super) fn new(path: &'a Path, source: DataSource) -> Self {
        Self { path, source, place: Place::Begin, element: Vec::new(), row: 0, line: 1, read: 0 }
    }

    /// Bytes of the file read so far.
    pub(super) fn read(&self) -> u64 {
        self.source.compressed_bytes().unwrap_or(self.read)
    }

    /// The next element and its position.
    pub(super) fn next(&mut self) -> Result<Option<(RowNumber, &[u8])>, DataError> {
        if self.place == Place::Begin && self.skip_blanks()?.is_some() {
            self.consume(1);
            self.place = Place::First;
        }
        let byte = self.skip_blanks()?;
        let is_end = self.place == Place::First && byte == Some(b']');
        if is_end {
            self.consume(1);
            self.place = Place::End;
        }
        if self.place == Place::End {
            return match self.skip_blanks()? {
                None => Ok(None),
                Some(_) => Err(DataError::AfterArray { path: self.path.to_owned(), line: self.line }),
            };
        }
        self.row += 1;
        let at = RowNumber::RowAtLine { row: self.row, line: self.line };
        self.place = self.read_element(at)?;
        Ok(Some((at, self.element.trim_ascii())))
    }

    /// Reads up to the comma or bracket that ends the element, and says what follows.
    fn read_element(&mut self, at: RowNumber) -> Result<Place, DataError> {
        self.element.clear();
        let (mut depth, mut in_string, mut is_escaped) = (0_u64, false, false);
        loop {
            let available = self.source.fill_buf().map_err(|source| DataError::Read {
                path: self.path.to_owned(),
                line: self.line,
                source,
            })?;
            if available.is_empty() {
                return Err(DataError::CutArray { path: self.path.to_owned(), at });
            }
            let end = available.iter().position(|byte| {
                if in_string {
                    in_string = is_escaped || *byte != b'"';
                    is_escaped = !is_escaped && *byte == b'\\';
                    return false;
                }
                match byte {
                    b'"' => in_string = true,
                    b'{' | b'[' => depth += 1,
                    b',' | b']' if depth == 0 => return true,
                    b'}' | b']' => depth = depth.saturating_sub(1),
                    _ => {}
                }
                false
            });
            let text = &available[..end.unwrap_or(available.len())];
            self.line += line_ends(text);
            self.element.extend_from_slice(text);
            let ended_by = end.map(|end| available[end]);
            let count = text.len() + usize::from(end.is_some());
            self.consume(count);
            if self.element.len() as u64 > MAX_ROW_BYTES {
                return Err(DataError::RowTooLong { path: self.path.to_owned(), at });
            }
            match ended_by {
                Some(b',') => return Ok(Place::Element),
                Some(_) => return Ok(Place::End),
                None => {}
            }
        }
    }

    /// The next byte that is not whitespace; it is not consumed.
    fn skip_blanks(&mut self) -> Result<Option<u8>, DataError> {
        loop {
            let available = self.source.fill_buf().map_err(|source| DataError::Read {
                path: self.path.to_owned(),
                line: self.line,
                source,
            })?;
            let count = available.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
            let (next, is_end) = (available.get(count).copied(), available.is_empty());
            self.line += line_ends(&available[..count]);
            self.consume(count);
            if next.is_some() || is_end {
                return Ok(next);
            }
        }
    }

    fn consume(&mut self, count: usize) {
        self.source.consume(count);
        self.read += count as u64;
    }
}
