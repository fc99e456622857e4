//! Assembles a step's micro-batches on demand: only one is in memory at a time.

use std::time::{Duration, Instant};

use zeroth_engine::{Feed, MicroBatches, StreamBatch};

use super::error::TrainError;
use crate::data::{Batches, TokenBatch};
use crate::distill::TeacherRecords;

/// A rank's micro-batches of one step.
pub(crate) struct StepBatches<'a> {
    batches: Batches<'a>,
    step: u64,
    rank: u64,
    /// Index of the next one.
    micro: u64,
    buffer: &'a mut TokenBatch,
    teacher: &'a mut TeacherRecords,
    time: Duration,
    lengths: Option<&'a mut [Vec<u64>; 2]>,
}

impl<'a> StepBatches<'a> {
    /// The micro-batches of a step, counted from 0; each overwrites the previous one in `buffer`, and what a cache has of the
    /// teacher in `teacher`.
    pub(crate) fn new(
        batches: Batches<'a>,
        step: u64,
        rank: u64,
        buffer: &'a mut TokenBatch,
        teacher: &'a mut TeacherRecords,
    ) -> Self {
        Self { batches, step, rank, micro: 0, buffer, teacher, time: Duration::ZERO, lengths: None }
    }

    /// Records the lengths of all sequences of each stream in `lengths`, replacing its contents.
    pub(crate) fn keep_lengths(&mut self, lengths: &'a mut [Vec<u64>; 2]) {
        lengths.iter_mut().for_each(Vec::clear);
        self.lengths = Some(lengths);
    }

    /// Time spent assembling them.
    pub(crate) fn time(&self) -> Duration {
        self.time
    }
}

impl MicroBatches for StepBatches<'_> {
    type Error = TrainError;

    fn next(&mut self, feed: Feed<'_>) -> Result<(), TrainError> {
        let begun = Instant::now();
        self.batches.fill(self.step, self.micro, self.rank, self.buffer)?;
        self.batches.fill_teacher(self.step, self.micro, self.rank, self.teacher)?;
        self.micro += 1;
        let inputs = self.teacher.inputs();
        let inputs = if self.batches.has_cache() { &inputs[..] } else { &[] };
        self.buffer.view_streams(|streams| {
            if let Some(lengths) = &mut self.lengths {
                for (stream, lengths) in streams.iter().zip(lengths.iter_mut()) {
                    lengths.extend(stream.starts.windows(2).map(|ends| u64::from(ends[1] - ends[0])));
                }
            }
            self.time += begun.elapsed();
            Ok(feed(&StreamBatch { streams, inputs })?)
        })
    }
}
