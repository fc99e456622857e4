//! A rank's micro-batch: its samples end to end, with labels already shifted.
//!
//! Where samples are packed, what is ordered and counted here is a pack: its samples come end to end, each a sequence of
//! its own.
//!
//! Positions run step by step, then micro-batch, then rank, then place in the micro-batch, so that the samples of a
//! step are the same on any number of ranks. What a step trains is counted from the samples, not asked of other ranks.

use zeroth_kernel::RowKey;

use crate::order::{Order, Place};
use zeroth_data::{DataError, IGNORED, Samples};

/// How a step is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchShape {
    /// Samples of one micro-batch.
    pub micro_batch: u64,
    /// Micro-batches a rank computes before the update.
    pub accumulation: u64,
    /// Ranks.
    pub ranks: u64,
}

impl BatchShape {
    /// Samples of a step.
    pub fn train_batch(&self) -> u64 {
        self.micro_batch * self.accumulation * self.ranks
    }

    /// The position of a micro-batch's first sample. Steps count from 0 here.
    pub fn position(&self, step: u64, micro: u64, rank: u64) -> u64 {
        ((step * self.accumulation + micro) * self.ranks + rank) * self.micro_batch
    }
}

/// What one rank computes at a time. Its buffers are used again from step to step.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MicroBatch {
    /// The tokens, samples end to end.
    pub ids: Vec<i32>,
    /// What each token is to predict: the label of the next one. -100 at the end of a sample and where nothing is
    /// trained.
    pub labels: Vec<i32>,
    /// Each token's place in its sample.
    pub positions: Vec<i32>,
    /// Where each sample begins and, last, where the last one ends.
    pub starts: Vec<u32>,
    /// The keys of the rows.
    pub keys: Vec<RowKey>,
}

impl MicroBatch {
    /// Buffers for up to `rows` rows and `samples` samples: filling them allocates nothing.
    pub fn with_capacity(rows: usize, samples: usize) -> Self {
        Self {
            ids: Vec::with_capacity(rows),
            labels: Vec::with_capacity(rows),
            positions: Vec::with_capacity(rows),
            starts: Vec::with_capacity(samples + 1),
            keys: Vec::with_capacity(rows),
        }
    }

    /// Tokens in it.
    pub fn tokens(&self) -> usize {
        self.ids.len()
    }

    /// Empties it; its buffers stay.
    pub fn clear(&mut self) {
        self.ids.clear();
        self.labels.clear();
        self.positions.clear();
        self.starts.clear();
        self.keys.clear();
    }

    /// Adds a sample: labels are aligned with the tokens, and the shift by one happens here.
    pub fn push(&mut self, ids: &[i32], labels: &[i32], place: Place) {
        self.ids.extend_from_slice(ids);
        self.labels.extend_from_slice(labels.get(1..).unwrap_or(&[]));
        self.end_sequence(ids.len(), place);
    }

    /// Adds a sample of a run's data, read straight into the buffers.
    fn read(&mut self, samples: &Samples, place: Place) -> Result<(), DataError> {
        samples.append_ids(place.sample, &mut self.ids)?;
        samples.append_labels(place.sample, 1, &mut self.labels)?;
        self.end_sequence(samples.sample_length(place.sample) as usize, place);
        Ok(())
    }

    /// All that follows from the length of the sequence whose tokens and labels were just added.
    fn end_sequence(&mut self, length: usize, place: Place) {
        if self.starts.is_empty() {
            self.starts.push(0);
        }
        self.labels.resize(self.ids.len(), IGNORED);
        self.positions.extend(0..length as i32);
        let key = |position| RowKey { sample: place.sample, position, epoch: place.epoch };
        self.keys.extend((0..length as u32).map(key));
        self.starts.push(self.ids.len() as u32);
    }
}

/// The micro-batches of a run.
#[derive(Debug, Clone, Copy)]
pub struct Batches<'a> {
    samples: &'a Samples,
    order: Order,
    shape: BatchShape,
}

impl<'a> Batches<'a> {
    /// Samples in an order, cut to a shape.
    pub fn new(samples: &'a Samples, order: Order, shape: BatchShape) -> Self {
        Self { samples, order, shape }
    }

    /// How a step is cut.
    pub fn shape(&self) -> BatchShape {
        self.shape
    }

    /// The samples of a micro-batch. Steps count from 0 here.
    pub fn places(&self, step: u64, micro: u64, rank: u64) -> impl Iterator<Item = Place> + use<> {
        self.order.from(self.shape.position(step, micro, rank)).take(self.shape.micro_batch as usize)
    }

    /// Tokens of a micro-batch.
    pub fn micro_batch_tokens(&self, step: u64, micro: u64, rank: u64) -> u64 {
        self.places(step, micro, rank).map(|place| self.samples.length(place.sample)).sum()
    }

    /// Fills `into` with a micro-batch.
    pub fn fill(&self, step: u64, micro: u64, rank: u64, into: &mut MicroBatch) -> Result<(), DataError> {
        self.fill_some(self.shape.position(step, micro, rank), self.shape.micro_batch, into)
    }

    /// Fills `into` with so many samples from a position on; with none it is empty.
    pub fn fill_some(&self, position: u64, samples: u64, into: &mut MicroBatch) -> Result<(), DataError> {
        into.clear();
        for place in self.order.from(position).take(samples as usize) {
            for sample in self.samples.members(place.sample) {
                into.read(self.samples, Place { sample, ..place })?;
            }
        }
        if samples == 0 {
            into.starts.push(0);
        }
        Ok(())
    }

    /// The most sequences that a micro-batch can have.
    pub fn most_sequences(&self) -> u64 {
        self.shape.micro_batch * self.samples.most_in_unit()
    }

    /// Tokens of a step, over all ranks and micro-batches.
    pub fn tokens(&self, step: u64) -> u64 {
        self.step(step).map(|place| self.samples.length(place.sample)).sum()
    }

    /// Tokens that a step trains, over all ranks and micro-batches: its loss is the mean over them.
    pub fn trained_tokens(&self, step: u64) -> u64 {
        self.step(step).map(|place| self.samples.trained(place.sample)).sum()
    }

    fn step(&self, step: u64) -> impl Iterator<Item = Place> + use<> {
        self.order.from(self.shape.position(step, 0, 0)).take(self.shape.train_batch() as usize)
    }

    /// Tokens of the largest micro-batch of steps `first` to `first + steps`.
    ///
    /// Exact up to 20 million samples, which take less than two seconds to walk through; beyond that, or where one sample is
    /// a micro-batch and an epoch is complete, it follows from the longest sample.
    pub fn largest_micro_batch(&self, first: u64, steps: u64) -> u64 {
        const WALKED: u64 = 20_000_000;
        let (size, longest) = (self.shape.micro_batch, self.samples.longest());
        let taken = steps.saturating_mul(self.shape.train_batch());
        let whole_epochs = taken / self.samples.count();
        // Any stretch of twice the samples less one holds a whole epoch, wherever it begins.
        if taken > WALKED || (size == 1 && whole_epochs >= 2) {
            return size * longest;
        }
        let mut lengths =
            self.order.from(self.shape.position(first, 0, 0)).map(|place| self.samples.length(place.sample));
        let micro_batches = taken / size;
        (0..micro_batches).map(|_| lengths.by_ref().take(size as usize).sum()).max().unwrap_or(0)
    }
}
