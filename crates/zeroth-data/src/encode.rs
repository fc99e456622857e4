//! The trait that turns a row into tokens. It hides row formats, tokenizers and templates from files, caches and
//! packing.

use serde_json::{Map, Value};

use super::pairs::Pairs;
use super::{Columns, RowProblem};

/// An encoded row: tokens and labels, of equal length except for pairs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Encoded {
    /// The tokens; of a pair, those of the source.
    pub ids: Vec<i32>,
    /// A label per token, aligned as in Hugging Face; [`IGNORED`](super::IGNORED) is not trained. Of a pair, the targets of
    /// the decoder.
    pub labels: Vec<i32>,
    /// Tokens and labels that an encoder of pairs has truncated.
    pub cut: [usize; 2],
    /// Rows that are not tokenised; set by who asks.
    pub skips: Option<SkipRule>,
    /// Set if the row was not tokenised: it has at least this number of tokens.
    pub skipped: Option<u64>,
}

/// Rows that are too long whatever their tokens are, so that tokenising them would be pointless.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SkipRule {
    /// Rows of certainly more tokens are skipped,
    pub tokens: u64,
    /// if their text has more bytes than this.
    pub bytes: usize,
}

impl Encoded {
    /// Empties it and keeps its allocations.
    pub(super) fn clear(&mut self) {
        self.ids.clear();
        self.labels.clear();
        self.cut = [0; 2];
        self.skipped = None;
    }

    /// Skips a text of at least this number of tokens if the rule says so; returns whether it did.
    pub(super) fn skip(&mut self, text: &str, least_tokens: impl FnOnce() -> Option<u64>) -> bool {
        let rule = self.skips.filter(|rule| text.len() > rule.bytes);
        // A text has no more tokens than bytes, but for a few special ones.
        let rule = rule.filter(|rule| text.len() as u64 > rule.tokens);
        self.skipped = rule.and_then(|rule| least_tokens().filter(|least| *least > rule.tokens));
        self.skipped.is_some()
    }
}

/// Encodes rows as tokens, from many threads.
pub trait Encode: Sync {
    /// Encodes a row into `into`, whose buffers are reused across rows.
    fn encode(&self, row: &Map<String, Value>, into: &mut Encoded) -> Result<(), RowProblem>;

    /// Set if rows are pairs of an encoder-decoder model; the encoder truncates them itself.
    fn pairs(&self) -> Option<Pairs> {
        None
    }

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
