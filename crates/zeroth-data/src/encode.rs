//! What turns a row into tokens. Formats of rows, tokenizers and templates are behind this trait; files, caches and
//! packs know nothing else of them.

use serde_json::{Map, Value};

use super::RowProblem;

/// What a row becomes: tokens and labels, equally many.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Encoded {
    /// The tokens.
    pub ids: Vec<i32>,
    /// A label for each token, aligned with it as in Hugging Face; [`IGNORED`](super::IGNORED) is not trained.
    pub labels: Vec<i32>,
}

/// Turns rows into tokens, on many threads at once.
pub trait Encode: Sync {
    /// Puts the row's tokens and labels into `into`, whose buffers are used again from row to row.
    fn encode(&self, row: &Map<String, Value>, into: &mut Encoded) -> Result<(), RowProblem>;

    /// What a row of this format trains, for a message about rows that train nothing.
    fn trained_part(&self, _row: &Map<String, Value>) -> &'static str {
        "the labels of a row are trained that are not -100, from the second on"
    }

    /// Changes with anything that changes what rows become: the token cache knows the encoder by it.
    fn fingerprint(&self) -> [u8; 32];
}
