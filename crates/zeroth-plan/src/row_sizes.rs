//! The few row counts that micro-batches are padded to, so that a program is lowered for a few sizes only.

use zeroth_program::StreamSizes;

/// Rows per kernel tile; other sizes cost as much as the next multiple.
const TILE: u64 = 16;
/// Maximum number of sizes; the program is lowered for each.
const MOST: u64 = 8;

/// At most 8 row counts, ascending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowSizes {
    sizes: Vec<usize>,
    largest: usize,
}

impl RowSizes {
    /// Eighths of the largest micro-batch, rounded up to tiles of 16 rows.
    pub fn new(largest: u64) -> Self {
        let size = |eighths: u64| (largest.max(1) * eighths).div_ceil(MOST).next_multiple_of(TILE) as usize;
        let mut sizes: Vec<usize> = (1..=MOST).map(size).collect();
        sizes.dedup();
        Self { sizes, largest: size(MOST) }
    }

    /// Sizes for the largest micro-batch of each stream; the second is 0 for models with one. Those of two streams rise
    /// together.
    pub fn of_streams([first, second]: [u64; 2]) -> StreamSizes {
        let rows = |largest: u64| {
            (1..=MOST).map(move |eighths| (largest.max(1) * eighths).div_ceil(MOST).next_multiple_of(TILE))
        };
        let mut sizes: Vec<Vec<u64>> = match second {
            0 => rows(first).map(|rows| vec![rows]).collect(),
            _ => rows(first).zip(rows(second)).map(|(first, second)| vec![first, second]).collect(),
        };
        sizes.dedup();
        StreamSizes::of_streams(sizes)
    }

    /// All sizes.
    pub fn all(&self) -> &[usize] {
        &self.sizes
    }

    /// The largest size, for which memory is planned.
    pub fn largest(&self) -> usize {
        self.largest
    }

    /// The smallest size that holds `tokens` tokens; `None` beyond the largest.
    pub fn size_for(&self, tokens: usize) -> Option<usize> {
        self.sizes.iter().copied().find(|&size| size >= tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_eighths_in_whole_tiles() {
        assert_eq!(RowSizes::new(2048).all(), [256, 512, 768, 1024, 1280, 1536, 1792, 2048]);
        assert_eq!(RowSizes::new(1000).all(), [128, 256, 384, 512, 640, 752, 880, 1008]);
        assert_eq!(RowSizes::new(40).all(), [16, 32, 48]);
        assert_eq!(RowSizes::new(0).all(), [16]);
    }

    #[test]
    fn sizes_of_two_streams_rise_together() {
        let pairs = |largest| RowSizes::of_streams(largest).iter().map(<[u64]>::to_vec).collect::<Vec<_>>();
        assert_eq!(
            pairs([1024, 40]),
            [[128, 16], [256, 16], [384, 16], [512, 32], [640, 32], [768, 32], [896, 48], [1024, 48]]
        );
        assert_eq!(pairs([20, 16]), [[16, 16], [32, 16]]);
        assert_eq!(pairs([40, 0]), [[16], [32], [48]]);
    }

    #[test]
    fn size_for_picks_the_smallest_fitting_size() {
        let sizes = RowSizes::new(1000);
        assert_eq!(
            [0, 1, 128, 129, 1000, 1008].map(|tokens| sizes.size_for(tokens)),
            [Some(128), Some(128), Some(128), Some(256), Some(1008), Some(1008)]
        );
        assert_eq!(sizes.size_for(1009), None);
        assert_eq!(sizes.largest(), 1008);
    }
}
