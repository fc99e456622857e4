//! What was read, counted, and what of it a user should hear.

use zeroth_base::counted;

use super::IGNORED;

/// What was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    /// Samples kept: sequences, whether they are packed or not.
    pub samples: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Tokens that have a label, after the shift by one: the first label of a sample has no token before it.
    pub trained_tokens: u64,
    /// Tokens of the longest sample.
    pub longest: u64,
    /// Rows left out because they are longer than --max-length.
    pub too_long: u64,
    /// Samples kept that were cut to --max-length.
    pub truncated: u64,
    /// Samples kept that train nothing: all their labels are -100, or they have one token.
    pub untrained: u64,
    /// Packs that the samples were joined into; 0 where they were not.
    pub packs: u64,
    /// Tokens of the longest pack.
    pub longest_pack: u64,
    /// Samples of the pack that has most of them.
    pub most_in_pack: u64,
}

impl Totals {
    /// Rows that were read to get there.
    pub fn rows(&self) -> u64 {
        self.samples + self.too_long
    }

    /// How full packs are, from 0 to 1, where there are packs and each may have `max_length` tokens.
    pub fn fullness(&self, max_length: u64) -> Option<f64> {
        (self.packs > 0).then(|| self.tokens as f64 / (self.packs as f64 * max_length as f64))
    }

    /// What of it a user should hear, a sentence each.
    pub fn notes(&self, max_length: u64) -> Vec<String> {
        let rows = |count: u64, one: &str, many: &str| {
            format!("{} {}", counted(count, "row"), if count == 1 { one } else { many })
        };
        let limit = counted(max_length, "token");
        let mut notes = Vec::new();
        if self.too_long > 0 {
            let left_out = rows(self.too_long, "was left out", "were left out");
            notes.push(format!("{left_out}: more than {limit} (--max-length)"));
        }
        if self.truncated > 0 {
            let cut = rows(self.truncated, "was cut", "were cut");
            notes.push(format!("{cut} to {limit} (--max-length)"));
        }
        if self.untrained > 0 {
            let trains = rows(self.untrained, "trains nothing", "train nothing");
            notes.push(format!("{trains}: every label after the first is {IGNORED}"));
        }
        if let Some(fullness) = self.fullness(max_length) {
            notes.push(format!(
                "{} {} joined into {} of up to {limit}, {:.1} % full",
                counted(self.samples, "sample"),
                if self.samples == 1 { "was" } else { "were" },
                counted(self.packs, "pack"),
                fullness * 100.0
            ));
        }
        notes
    }
}
