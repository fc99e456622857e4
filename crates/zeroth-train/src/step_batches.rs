//! The micro-batches of one step, put together as the engine asks for them: one is in memory at a time, however many a step
//! has.

use std::time::{Duration, Instant};

use zeroth_engine::{MicroBatch as View, MicroBatches};

use crate::{Batches, MicroBatch, TrainError};

/// A rank's micro-batches of a step.
pub(crate) struct StepBatches<'a> {
    batches: Batches<'a>,
    step: u64,
    rank: u64,
    /// The next of them.
    micro: u64,
    buffer: &'a mut MicroBatch,
    time: Duration,
    lengths: Option<&'a mut Vec<u64>>,
}

impl<'a> StepBatches<'a> {
    /// Those of a step, counted from 0; each takes the place of the one before it in `buffer`.
    pub(crate) fn new(batches: Batches<'a>, step: u64, rank: u64, buffer: &'a mut MicroBatch) -> Self {
        Self { batches, step, rank, micro: 0, buffer, time: Duration::ZERO, lengths: None }
    }

    /// Puts the lengths of all sequences into `lengths`, and nothing else.
    pub(crate) fn keep_lengths(&mut self, lengths: &'a mut Vec<u64>) {
        lengths.clear();
        self.lengths = Some(lengths);
    }

    /// How long it took to put them together.
    pub(crate) fn time(&self) -> Duration {
        self.time
    }
}

impl MicroBatches for StepBatches<'_> {
    type Error = TrainError;

    fn next(&mut self) -> Result<View<'_>, TrainError> {
        let begun = Instant::now();
        self.batches.fill(self.step, self.micro, self.rank, self.buffer)?;
        self.micro += 1;
        if let Some(lengths) = &mut self.lengths {
            let ends = self.buffer.starts.windows(2);
            lengths.extend(ends.map(|ends| u64::from(ends[1] - ends[0])));
        }
        self.time += begun.elapsed();
        Ok(self.buffer.view())
    }
}

impl MicroBatch {
    /// What an engine takes.
    pub fn view(&self) -> View<'_> {
        let Self { ids, labels, positions, starts, keys } = self;
        View { ids, labels, positions, starts, keys }
    }
}
