//! The data of a run: the order of its samples, those held out for evaluation, and a rank's micro-batches. Every position
//! is a number of samples since the start of the run, so ranks agree on it without communication.

mod batch;
mod permutation;
mod sample_order;
mod split;

pub(crate) use batch::largest_of;
pub use batch::{Batches, TokenBatch};
pub use sample_order::{EpochSample, RunLength, RunLengthError, SampleOrder};
pub use split::{SplitError, share_of, split_dataset};
