//! How large the rows of a Parquet column are, from the repetition levels of its pages, before values are decoded: runs of
//! equal levels and values take a few bytes, whatever their number.

use parquet::basic::{Encoding, Type};
use parquet::column::page::Page;
use parquet::schema::types::ColumnDescriptor;

use super::row_limits::MAX_ROW_VALUES;

/// The most bytes of one row in a column, counting a repeated dictionary entry each time.
const MAX_COLUMN_ROW_BYTES: u64 = 512 << 20;

/// A row that is too large.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum LargeRow {
    #[error("row {row} has too many values")]
    Values { row: u64 },
    #[error("row {row} has too many bytes")]
    Bytes { row: u64 },
}

/// Counts the values and bytes of each row, page by page.
pub(super) struct ParquetRowSizes {
    max_repetition: i16,
    /// Whether values have their own lengths.
    is_text: bool,
    /// Bytes of the longest entry of the dictionary.
    longest_entry: u64,
    /// Rows begun, of the whole file.
    rows: u64,
    /// Values of the row that is being counted, on all pages and on the current one.
    values: u64,
    values_here: u64,
    /// The most values of a row on the current page.
    most_here: u64,
    /// Bytes that the row being counted may have.
    bytes: u64,
}

impl ParquetRowSizes {
    /// Of a column, after this number of rows of the file.
    pub(super) fn new(column: &ColumnDescriptor, rows_before: u64) -> Self {
        let is_text = matches!(column.physical_type(), Type::BYTE_ARRAY | Type::FIXED_LEN_BYTE_ARRAY);
        Self {
            max_repetition: column.max_rep_level(),
            is_text,
            longest_entry: 0,
            rows: rows_before,
            values: 0,
            values_here: 0,
            most_here: 0,
            bytes: 0,
        }
    }

    /// Counts a page; an error if a row is too large.
    pub(super) fn count(&mut self, page: &Page, physical_type: Type) -> Result<(), LargeRow> {
        if let Page::DictionaryPage { buf, .. } = page {
            self.longest_entry = match physical_type {
                Type::BYTE_ARRAY => longest_entry(buf),
                _ => buf.len() as u64,
            };
            return Ok(());
        }
        let values = u64::from(page.num_values());
        let rows_before = self.rows;
        (self.values_here, self.most_here) = (0, 0);
        if self.max_repetition == 0 {
            self.starts(values);
        } else {
            match levels_of(page) {
                Some(levels) => self.levels(levels, values)?,
                // Encoded as nobody does any more, or cut.
                None => self.continues(values)?,
            }
        }
        if !self.is_text {
            return Ok(());
        }
        let length = page.buffer().len() as u64;
        let bytes = match page.encoding() {
            Encoding::PLAIN_DICTIONARY | Encoding::RLE_DICTIONARY => {
                self.most_here.saturating_mul(self.longest_entry)
            }
            // Each value may repeat the beginning of the one before it.
            Encoding::DELTA_BYTE_ARRAY => self.most_here.saturating_mul(length),
            _ => length,
        };
        self.bytes = if self.rows > rows_before { bytes } else { self.bytes.saturating_add(bytes) };
        if self.bytes > MAX_COLUMN_ROW_BYTES { Err(LargeRow::Bytes { row: self.rows }) } else { Ok(()) }
    }

    /// Counts levels: runs of one, and groups of eight with their bits packed.
    fn levels(&mut self, mut data: &[u8], mut left: u64) -> Result<(), LargeRow> {
        let width = (i16::BITS - self.max_repetition.leading_zeros()) as usize;
        while left > 0 {
            // Pages that end early are reported when they are decoded.
            let Some(header) = take_varint(&mut data) else { return Ok(()) };
            if header & 1 == 0 {
                let count = (header >> 1).min(left);
                let Some((value, rest)) = data.split_at_checked(width.div_ceil(8)) else { return Ok(()) };
                if value.iter().all(|byte| *byte == 0) {
                    self.starts(count);
                } else {
                    self.continues(count)?;
                }
                (data, left) = (rest, left - count);
            } else {
                let count = (header >> 1).saturating_mul(8).min(left);
                let bits = |at: u64| {
                    let bits = at * width as u64..(at + 1) * width as u64;
                    let bit = |bit: u64| Some(data.get((bit / 8) as usize)? >> (bit % 8) & 1 == 1);
                    bits.map(bit).try_fold(false, |any, bit| Some(any || bit?))
                };
                for at in 0..count {
                    match bits(at) {
                        None => return Ok(()),
                        Some(true) => self.continues(1)?,
                        Some(false) => self.starts(1),
                    }
                }
                let bytes = usize::try_from((header >> 1).saturating_mul(width as u64)).unwrap_or(usize::MAX);
                (data, left) = (data.get(bytes..).unwrap_or_default(), left - count);
            }
        }
        Ok(())
    }

    /// Rows begin.
    fn starts(&mut self, rows: u64) {
        if rows > 0 {
            self.rows += rows;
            (self.values, self.values_here) = (1, 1);
            self.most_here = self.most_here.max(1);
        }
    }

    /// The last row has more values.
    fn continues(&mut self, values: u64) -> Result<(), LargeRow> {
        self.values += values;
        self.values_here += values;
        self.most_here = self.most_here.max(self.values_here);
        if self.values > MAX_ROW_VALUES { Err(LargeRow::Values { row: self.rows.max(1) }) } else { Ok(()) }
    }
}

/// The repetition levels of a data page, without their length.
fn levels_of(page: &Page) -> Option<&[u8]> {
    match page {
        Page::DataPage { buf, rep_level_encoding: Encoding::RLE, .. } => {
            let (length, rest) = buf.split_at_checked(4)?;
            let length = u32::from_le_bytes(length.try_into().ok()?) as usize;
            Some(rest.get(..length).unwrap_or(rest))
        }
        Page::DataPageV2 { buf, rep_levels_byte_len, .. } => buf.get(..*rep_levels_byte_len as usize),
        _ => None,
    }
}

/// The longest entry of a dictionary of texts: each has its length before it.
fn longest_entry(mut entries: &[u8]) -> u64 {
    let mut longest = 0;
    while let Some((length, rest)) = entries.split_at_checked(4) {
        let length = u32::from_le_bytes(length.try_into().unwrap_or_default()) as usize;
        longest = longest.max(length.min(rest.len()));
        entries = rest.get(length..).unwrap_or_default();
    }
    longest as u64
}

/// Reads a number of seven bits a byte, low ones first.
pub(super) fn take_varint(data: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = data.split_first()?;
        *data = rest;
        number |= u64::from(byte & 0x7F) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(max_repetition: i16) -> ParquetRowSizes {
        ParquetRowSizes {
            max_repetition,
            is_text: true,
            longest_entry: 0,
            rows: 0,
            values: 0,
            values_here: 0,
            most_here: 0,
            bytes: 0,
        }
    }

    #[test]
    fn levels_are_runs_and_packed_groups() {
        // Eight packed levels of one bit, 0 1 1 0 0 1 0 1, and a run of five ones.
        let mut found = sizes(1);
        found.levels(&[3, 0b1010_0110, 10, 1], 13).unwrap();
        assert_eq!((found.rows, found.values, found.most_here), (4, 7, 7));
        // Two bits each, 0 2 1 0 of a group of eight.
        let mut found = sizes(2);
        found.levels(&[3, 0b0001_1000, 0], 4).unwrap();
        assert_eq!((found.rows, found.values, found.most_here), (2, 1, 3));
        // Cut.
        found.levels(&[3], 4).unwrap();
        found.levels(&[0x80], 4).unwrap();
        assert_eq!(found.rows, 2);
    }

    #[test]
    fn rows_are_counted_over_pages() {
        let mut found = sizes(1);
        let half = MAX_ROW_VALUES / 2;
        let mut run = vec![];
        let mut header = half << 1;
        while header >= 0x80 {
            run.push(header as u8 | 0x80);
            header >>= 7;
        }
        run.push(header as u8);
        run.push(1);
        found.starts(7);
        found.levels(&run, half).unwrap();
        assert_eq!(found.levels(&run, half), Err(LargeRow::Values { row: 7 }));
    }

    #[test]
    fn dictionaries_have_their_longest_entry() {
        assert_eq!(
            longest_entry(&[2, 0, 0, 0, b'a', b'b', 3, 0, 0, 0, b'c', b'd', b'e', 1, 0, 0, 0, b'f']),
            3
        );
        assert_eq!(longest_entry(&[255, 255, 255, 255, b'a']), 1);
        assert_eq!(longest_entry(&[]), 0);
    }
}
