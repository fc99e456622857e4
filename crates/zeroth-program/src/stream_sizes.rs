//! Row counts that micro-batches are padded to.

/// The sizes that micro-batches are padded to, in ascending order, each with the rows of every stream. A program is lowered
/// once for each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamSizes(Vec<Vec<u64>>);

impl StreamSizes {
    /// Sizes with the rows of every stream.
    pub const fn of_streams(sizes: Vec<Vec<u64>>) -> Self {
        Self(sizes)
    }

    /// The sizes, each with the rows of every stream.
    pub fn iter(&self) -> impl Iterator<Item = &[u64]> {
        self.0.iter().map(Vec::as_slice)
    }

    /// The number of sizes.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The rows of the first stream in the largest size.
    pub fn last(&self) -> Option<&u64> {
        self.0.last().and_then(|rows| rows.first())
    }

    /// The smallest size with room for these rows of each stream: its index and its rows.
    pub fn fit(&self, rows: &(impl Iterator<Item = usize> + Clone)) -> Option<(usize, &[u64])> {
        let fits = |size: &[u64]| rows.clone().zip(size).all(|(rows, most)| rows as u64 <= *most);
        self.iter().enumerate().find(|(_, size)| fits(size))
    }

    /// Whether sizes rise in every stream and end with these rows.
    pub(crate) fn end_with(&self, rows: &[u64]) -> bool {
        let rises = |pair: &[Vec<u64>]| pair[0].iter().zip(&pair[1]).all(|(less, more)| less <= more);
        let alike = self.0.iter().all(|size| size.len() == rows.len());
        alike && self.0.windows(2).all(rises) && self.0.last().is_some_and(|last| last == rows)
    }
}

/// Sizes of a single stream.
impl From<Vec<u64>> for StreamSizes {
    fn from(rows: Vec<u64>) -> Self {
        Self(rows.into_iter().map(|rows| vec![rows]).collect())
    }
}
