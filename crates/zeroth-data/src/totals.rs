//! Counts of a dataset, and notes about them.

use zeroth_base::{counted, grouped, was};

use super::IGNORED;
use super::pairs::PairLimits;

/// Counts of a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    /// Samples kept, packed or not.
    pub samples: u64,
    /// Their tokens; of pairs, those of sources and targets.
    pub tokens: u64,
    /// Tokens with a label after the shift by one; the first label of a sample is not used. Of pairs, all labels count.
    pub trained_tokens: u64,
    /// Tokens of the longest sample; of pairs, of the longest source.
    pub longest: u64,
    /// Rows dropped because they exceed --max-length.
    pub too_long: u64,
    /// Samples truncated to the maximum length.
    pub truncated: u64,
    /// Samples without trained tokens: all labels are -100, or they have one token.
    pub untrained: u64,
    /// Packs; 0 without packing.
    pub packs: u64,
    /// Tokens of the longest pack; of pairs, of the sources of one.
    pub longest_pack: u64,
    /// The largest number of samples in a pack.
    pub most_in_pack: u64,
    /// The targets of pairs.
    pub targets: Option<TargetTotals>,
}

/// Counts of the targets of pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TargetTotals {
    /// Tokens of all targets.
    pub tokens: u64,
    /// Tokens of the longest target.
    pub longest: u64,
    /// Tokens of the targets of the pack with the most.
    pub longest_pack: u64,
}

/// Maximum lengths of samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LengthLimits {
    /// Of rows (`--max-length`).
    Rows(u64),
    /// Of pairs.
    Pairs(PairLimits),
}

impl Totals {
    /// Rows read.
    pub fn rows(&self) -> u64 {
        self.samples + self.too_long
    }

    /// Tokens of sources; all tokens without pairs.
    pub fn source_tokens(&self) -> u64 {
        self.tokens - self.targets.map_or(0, |targets| targets.tokens)
    }

    /// Fill ratios of the packs, 0 to 1, of each stream; `None` without packing.
    pub fn fullness(&self, limits: LengthLimits) -> Option<Vec<f64>> {
        let full = |tokens: u64, limit: u64| tokens as f64 / (self.packs as f64 * limit as f64);
        (self.packs > 0).then(|| match limits {
            LengthLimits::Rows(limit) => vec![full(self.tokens, limit)],
            LengthLimits::Pairs(limits) => {
                let targets = self.tokens - self.source_tokens();
                vec![full(self.source_tokens(), limits.source), full(targets, limits.target)]
            }
        })
    }

    /// Notes for the user, one sentence each.
    pub fn notes(&self, limits: LengthLimits) -> Vec<String> {
        let (limit, flags) = limits.shown();
        let mut notes = Vec::new();
        if self.too_long > 0 {
            let (rows, were) = (counted(self.too_long, "row"), was(self.too_long));
            notes.push(format!("{rows} {were} dropped: more than {limit} ({flags})"));
        }
        if self.truncated > 0 {
            let (rows, were) = (counted(self.truncated, "row"), was(self.truncated));
            notes.push(format!("{rows} {were} truncated to {limit} ({flags})"));
        }
        if self.untrained > 0 {
            let train = if self.untrained == 1 { "trains" } else { "train" };
            let rows = counted(self.untrained, "row");
            let labels = if self.targets.is_some() { "label" } else { "label after the first" };
            notes.push(format!("{rows} {train} nothing: every {labels} is {IGNORED}"));
        }
        if let Some(fullness) = self.fullness(limits) {
            let full: Vec<String> = fullness.iter().map(|share| format!("{:.1}", share * 100.0)).collect();
            notes.push(format!(
                "{} {} packed into {} of up to {limit}, {} % full",
                counted(self.samples, "sample"),
                was(self.samples),
                counted(self.packs, "pack"),
                full.join(" and ")
            ));
        }
        notes
    }
}

impl LengthLimits {
    /// The limits in words, and the flags that set them.
    fn shown(self) -> (String, &'static str) {
        match self {
            Self::Rows(limit) => (counted(limit, "token"), "--max-length"),
            Self::Pairs(PairLimits { source, target }) => (
                format!("{} source and {} target tokens", grouped(source), grouped(target)),
                "--max-source-length, --max-target-length",
            ),
        }
    }
}
