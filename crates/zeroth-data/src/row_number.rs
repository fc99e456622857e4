//! The position of a row in its file.

use std::fmt;

/// A row's position in its file, from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowNumber {
    /// A line of a text file.
    Line(u64),
    /// A row of a Parquet file.
    Row(u64),
    /// A row of a JSON array or a table.
    RowAtLine {
        /// Rows count from 1.
        row: u64,
        /// The line on which it begins.
        line: u64,
    },
}

impl fmt::Display for RowNumber {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(number) => write!(formatter, "line {number}"),
            Self::Row(number) => write!(formatter, "row {number}"),
            Self::RowAtLine { row, line } => write!(formatter, "row {row} (line {line})"),
        }
    }
}
