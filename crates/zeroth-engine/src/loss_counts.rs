//! What the parts of a loss are means over.

use zeroth_kernel::LOSSES;

/// What each part of the loss is a mean over in a step: its count over all micro-batches and ranks, such as trained tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LossCounts([u64; LOSSES]);

impl LossCounts {
    /// A count for each part of the loss, in their order.
    pub fn of_parts(counts: &[u64]) -> Self {
        Self(std::array::from_fn(|part| counts.get(part).copied().unwrap_or(0)))
    }

    /// The factor that makes a mean of the sum of a part. Of nothing all sums are 0, whatever they are divided by.
    pub(crate) fn mean(self, part: usize) -> f64 {
        1.0 / self.0[part].max(1) as f64
    }
}

/// All parts are means over as many trained tokens.
impl From<u64> for LossCounts {
    fn from(trained: u64) -> Self {
        Self([trained; LOSSES])
    }
}
