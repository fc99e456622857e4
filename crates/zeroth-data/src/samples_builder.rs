//! Builds samples in memory.

use super::index_builder::IndexBuilder;
use super::pairs::PairLimits;
use super::{DataError, Samples, Truncation};

/// Collects samples in memory.
#[derive(Debug)]
pub struct SamplesBuilder {
    index_builder: IndexBuilder,
    tokens: Vec<i32>,
    packing: bool,
    is_paired: bool,
}

impl SamplesBuilder {
    /// Drops samples longer than `max_length`.
    pub fn new(max_length: u64) -> Self {
        Self::with(max_length, Truncation::Drop, false)
    }

    /// Drops or truncates samples longer than `max_length`, and optionally packs them to that length.
    pub fn with(max_length: u64, truncation: Truncation, packing: bool) -> Self {
        let index_builder = IndexBuilder::new(max_length, truncation);
        Self { index_builder, tokens: Vec::new(), packing, is_paired: false }
    }

    /// Collects pairs within these limits, and optionally packs them.
    pub fn of_pairs(limits: PairLimits, packing: bool) -> Self {
        let index_builder = IndexBuilder::of_pairs(limits);
        Self { index_builder, tokens: Vec::new(), packing, is_paired: true }
    }

    /// Adds a sample. Tokens and labels have the same length, at least one; those of pairs are within their limits.
    ///
    /// # Panics
    /// If they are not: readers reject such rows.
    pub fn push(&mut self, ids: &[i32], labels: &[i32]) {
        if self.is_paired {
            self.index_builder.take_pair(ids, labels, [0; 2]);
            self.tokens.extend_from_slice(ids);
            self.tokens.extend_from_slice(labels);
        } else if let Some((ids, labels)) = self.index_builder.take(ids, labels) {
            self.tokens.extend_from_slice(ids);
            self.tokens.extend_from_slice(labels);
        }
    }

    /// Samples kept so far.
    pub fn kept(&self) -> u64 {
        self.index_builder.kept()
    }

    /// Completes the samples; an error if none was kept.
    pub fn finish(self) -> Result<Samples, DataError> {
        let index = self.index_builder.finish(self.packing)?;
        let mut tokens = self.tokens;
        tokens.shrink_to_fit();
        Ok(Samples::in_memory(tokens, index))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{LengthLimits, Totals};
    use super::*;

    fn built(rows: &[(&[i32], &[i32])], max_length: u64) -> Result<Samples, DataError> {
        let mut builder = SamplesBuilder::new(max_length);
        for (ids, labels) in rows {
            builder.push(ids, labels);
        }
        builder.finish()
    }

    #[test]
    fn totals_count_kept_and_dropped_rows() {
        let rows: &[(&[i32], &[i32])] = &[
            (&[5, 6, 7], &[5, -100, 7]), // the first label has no token before it
            (&[1, 2, 3, 4, 5], &[1, 2, 3, 4, 5]),
            (&[8], &[8]),
            (&[9, 9], &[9, -100]),
        ];
        let samples = built(rows, 4).unwrap();
        let expected = Totals {
            samples: 3,
            tokens: 6,
            trained_tokens: 1,
            longest: 3,
            too_long: 1,
            untrained: 2,
            ..Totals::default()
        };
        assert_eq!(samples.totals(), expected);
        assert_eq!(
            samples.totals().notes(LengthLimits::Rows(4)),
            [
                "1 row was dropped: more than 4 tokens (--max-length)",
                "2 rows train nothing: every label after the first is -100"
            ]
        );
        assert!(built(&rows[..1], 4).unwrap().totals().notes(LengthLimits::Rows(4)).is_empty());
        assert_eq!((samples.ids(2).unwrap(), samples.labels(2).unwrap()), (vec![9, 9], vec![9, -100]));
        assert_eq!([0, 1, 2].map(|sample| samples.length(sample)), [3, 1, 2]);
        assert_eq!([0, 1, 2].map(|sample| samples.trained(sample)), [1, 0, 0]);
    }

    #[test]
    fn data_with_only_too_long_rows_is_refused() {
        let error = built(&[(&[1, 2], &[1, 2]), (&[1, 2, 3], &[1, 2, 3])], 1).unwrap_err();
        assert_eq!(
            error.to_string(),
            "no samples left: all 2 rows have more than 1 token; raise --max-length, or truncate rows with --truncation-strategy"
        );
    }

    #[test]
    fn the_hash_covers_tokens_labels_boundaries_and_order() {
        let hash = |rows: &[(&[i32], &[i32])]| built(rows, 9).unwrap().hash();
        let hashes = [
            hash(&[(&[1, 2], &[1, 2]), (&[3], &[3])]),
            hash(&[(&[1], &[1]), (&[2, 3], &[2, 3])]),
            hash(&[(&[3], &[3]), (&[1, 2], &[1, 2])]),
            hash(&[(&[1, 2], &[1, -100]), (&[3], &[3])]),
            hash(&[(&[1, 4], &[1, 2]), (&[3], &[3])]),
            hash(&[(&[1, 2], &[1, 2])]),
        ];
        for (index, one) in hashes.iter().enumerate() {
            assert!(!hashes[..index].contains(one), "{index}");
        }
        assert_eq!(hashes[0], hash(&[(&[1, 2], &[1, 2]), (&[3], &[3]), (&[0; 10], &[0; 10])]));
    }
}
