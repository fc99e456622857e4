//! What every format of rows is turned into, and by what.

use serde_json::{Map, Value};

use super::RowProblem;

/// What a row becomes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Encoded {
    /// Tokens.
    pub ids: Vec<i32>,
    /// As many labels, aligned with the tokens as in Hugging Face; [`IGNORED`](super::IGNORED) is not trained.
    pub labels: Vec<i32>,
}

/// Turns rows into tokens and labels; many threads share one.
pub trait Encode: Sync {
    /// Puts the row's tokens and labels into the two buffers, whatever they held before.
    fn encode(&self, row: &Map<String, Value>, into: &mut Encoded) -> Result<(), RowProblem>;

    /// Changes with anything that could change what a row becomes.
    fn fingerprint(&self) -> [u8; 32];
}
