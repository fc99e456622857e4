//! The trait that turns a row into tokens. It hides row formats, tokenizers and templates from files, caches and
//! packing.

use serde_json::{Map, Value};

use super::{Columns, RowProblem};

/// An encoded row: tokens and labels of equal length.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Encoded {
    /// The tokens.
    pub ids: Vec<i32>,
    /// A label per token, aligned as in Hugging Face; [`IGNORED`](super::IGNORED) is not trained.
    pub labels: Vec<i32>,
}

/// Encodes rows as tokens, from many threads.
pub trait Encode: Sync {
    /// Encodes a row into `into`, whose buffers are reused across rows.
    fn encode(&self, row: &Map<String, Value>, into: &mut Encoded) -> Result<(), RowProblem>;

    /// The columns that tables may have: a header without those of a row format is refused, and cells of lists and
    /// objects are parsed as JSON. `None` accepts any columns, whose cells are texts.
    fn columns(&self) -> Option<&Columns> {
        None
    }

    /// Describes what this row's format trains, for the error about rows that train nothing.
    fn trained_part(&self, _row: &Map<String, Value>) -> &'static str {
        "labels other than -100 are trained, from the second on"
    }

    /// A hash of everything that affects the encoding; part of the cache key.
    fn fingerprint(&self) -> [u8; 32];
}
