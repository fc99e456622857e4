//! Counts of a dataset, and notes about them.

use zeroth_base::counted;

use super::IGNORED;

/// Counts of a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    /// Samples kept, packed or not.
    pub samples: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Tokens with a label after the shift by one; the first label of a sample is not used.
    pub trained_tokens: u64,
    /// Tokens of the longest sample.
    pub longest: u64,
    /// Rows dropped because they exceed --max-length.
    pub too_long: u64,
    /// Samples truncated to --max-length.
    pub truncated: u64,
    /// Samples without trained tokens: all labels are -100, or they have one token.
    pub untrained: u64,
    /// Packs; 0 without packing.
    pub packs: u64,
    /// Tokens of the longest pack.
    pub longest_pack: u64,
    /// The largest number of samples in a pack.
    pub most_in_pack: u64,
}

impl Totals {
    /// Rows read.
    pub fn rows(&self) -> u64 {
        self.samples + self.too_long
    }

    /// Fill ratio of the packs, 0 to 1; `None` without packing.
    pub fn fullness(&self, max_length: u64) -> Option<f64> {
        (self.packs > 0).then(|| self.tokens as f64 / (self.packs as f64 * max_length as f64))
    }

    /// Notes for the user, one sentence each.
    pub fn notes(&self, max_length: u64) -> Vec<String> {
        let rows = |count: u64, one: &str, many: &str| {
            format!("{} {}", counted(count, "row"), if count == 1 { one } else { many })
        };
        let limit = counted(max_length, "token");
        let mut notes = Vec::new();
        if self.too_long > 0 {
            let omitted_range = rows(self.too_long, "was dropped", "were dropped");
            notes.push(format!("{omitted_range}: more than {limit} (--max-length)"));
        }
        if self.truncated > 0 {
            let cut = rows(self.truncated, "was truncated", "were truncated");
            notes.push(format!("{cut} to {limit} (--max-length)"));
        }
        if self.untrained > 0 {
            let trains = rows(self.untrained, "trains nothing", "train nothing");
            notes.push(format!("{trains}: every label after the first is {IGNORED}"));
        }
        if let Some(fullness) = self.fullness(max_length) {
            notes.push(format!(
                "{} {} packed into {} of up to {limit}, {:.1} % full",
                counted(self.samples, "sample"),
                if self.samples == 1 { "was" } else { "were" },
                counted(self.packs, "pack"),
                fullness * 100.0
            ));
        }
        notes
    }
}
