//! Assembles a rank's micro-batches: samples concatenated end to end, with labels already shifted by one.
//!
//! Of an encoder-decoder a micro-batch has two streams: sources, and targets. The decoder's inputs are the labels shifted
//! right, so labels stay where they are.
//!
//! With packing, a "sample" of the order is a pack: its samples are concatenated, each its own attention sequence.
//!
//! Positions run by step, then micro-batch, then rank, then index in the micro-batch, so a step contains the same
//! samples on any number of ranks. Every rank computes a step's trained-token count from the sample index, without
//! communication.

use zeroth_engine::StreamRows;
use zeroth_kernel::RowKey;

use super::sample_order::{EpochSample, SampleOrder};
use crate::BatchShape;
use crate::distill::{TeacherCache, TeacherCacheError, TeacherRecords};
use zeroth_data::{DataError, DecoderStart, IGNORED, Samples};

/// One rank's input for one forward and backward pass. Its buffers are reused across steps.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenBatch {
    /// Token ids of all samples, concatenated.
    pub ids: Vec<i32>,
    /// Target of each token: the label of the next one. -100 on the last token of a sample and on untrained tokens.
    pub labels: Vec<i32>,
    /// Position of each token in its sample.
    pub positions: Vec<i32>,
    /// Start offset of each sample, followed by the end of the last one (`cu_seqlens`).
    pub starts: Vec<u32>,
    /// Random-number key of each row.
    pub keys: Vec<RowKey>,
    /// The targets of an encoder-decoder, whose own tokens are sources: target i belongs to source i.
    pub targets: Option<Box<Self>>,
}

impl TokenBatch {
    /// Allocates buffers for up to `rows` rows and `samples` samples, so filling never allocates.
    pub fn with_capacity(rows: usize, samples: usize) -> Self {
        Self {
            ids: Vec::with_capacity(rows),
            labels: Vec::with_capacity(rows),
            positions: Vec::with_capacity(rows),
            starts: Vec::with_capacity(samples + 1),
            keys: Vec::with_capacity(rows),
            targets: None,
        }
    }

    /// As [`Self::with_capacity`], with room for these rows of each stream; the second is 0 for models with one.
    pub fn with_streams([rows, targets]: [usize; 2], samples: usize) -> Self {
        let second = (targets > 0).then(|| Box::new(Self::with_capacity(targets, samples)));
        Self { targets: second, ..Self::with_capacity(rows, samples) }
    }

    /// Number of tokens; of an encoder-decoder, of both streams.
    pub fn tokens(&self) -> usize {
        self.ids.len() + self.targets.as_ref().map_or(0, |targets| targets.ids.len())
    }

    /// The engine's view of the first stream.
    pub fn view(&self) -> StreamRows<'_> {
        let Self { ids, labels, positions, starts, keys, .. } = self;
        StreamRows { ids, labels, positions, starts, keys }
    }

    /// Calls `body` with the engine's view of all streams.
    pub(crate) fn view_streams<R>(&self, body: impl FnOnce(&[StreamRows<'_>]) -> R) -> R {
        match &self.targets {
            None => body(&[self.view()]),
            Some(targets) => body(&[self.view(), targets.view()]),
        }
    }

    /// Empties the batch and keeps its allocations.
    pub fn clear(&mut self) {
        self.ids.clear();
        self.labels.clear();
        self.positions.clear();
        self.starts.clear();
        self.keys.clear();
        if let Some(targets) = &mut self.targets {
            targets.clear();
        }
    }

    /// Appends a sample. `labels` are aligned with `ids`; the shift by one happens here.
    pub fn push(&mut self, ids: &[i32], labels: &[i32], place: EpochSample) {
        self.ids.extend_from_slice(ids);
        self.labels.extend_from_slice(labels.get(1..).unwrap_or(&[]));
        self.end_sequence(ids.len(), place);
    }

    /// Appends a sample of the dataset, read directly into the buffers.
    fn read(
        &mut self,
        samples: &Samples,
        start: Option<DecoderStart>,
        place: EpochSample,
    ) -> Result<(), DataError> {
        samples.append_ids(place.sample, &mut self.ids)?;
        match start {
            None => samples.append_labels(place.sample, 1, &mut self.labels)?,
            Some(start) => {
                let targets = self.targets.get_or_insert_default();
                let before = targets.labels.len();
                samples.append_labels(place.sample, 0, &mut targets.labels)?;
                start.append_inputs(&targets.labels[before..], &mut targets.ids);
                targets.end_sequence(targets.labels.len() - before, place);
            }
        }
        self.end_sequence(samples.sample_length(place.sample) as usize, place);
        Ok(())
    }

    /// Makes it a micro-batch without sequences.
    fn start_empty(&mut self, is_paired: bool) {
        self.starts.push(0);
        if is_paired {
            self.targets.get_or_insert_default().starts.push(0);
        }
    }

    /// Completes labels, positions, keys and offsets of the sequence whose tokens were just appended.
    fn end_sequence(&mut self, length: usize, place: EpochSample) {
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

/// All micro-batches of a run.
#[derive(Debug, Clone, Copy)]
pub struct Batches<'a> {
    samples: &'a Samples,
    order: SampleOrder,
    shape: BatchShape,
    /// Set if samples are pairs.
    start: Option<DecoderStart>,
    cache: Option<&'a TeacherCache>,
}

impl<'a> Batches<'a> {
    /// Combines samples, their order and the batch decomposition.
    pub fn new(samples: &'a Samples, order: SampleOrder, shape: BatchShape) -> Self {
        Self { samples, order, shape, start: None, cache: None }
    }

    /// The same of pairs, whose decoder inputs start with these tokens.
    #[must_use]
    pub fn with_decoder_start(self, start: Option<DecoderStart>) -> Self {
        Self { start: start.filter(|_| self.samples.is_paired()), ..self }
    }

    /// The same with what a cache has of the teacher.
    #[must_use]
    pub fn with_cache(self, cache: Option<&'a TeacherCache>) -> Self {
        Self { cache, ..self }
    }

    /// The batch decomposition.
    pub fn shape(&self) -> BatchShape {
        self.shape
    }

    /// The samples of a micro-batch. Steps count from 0.
    pub fn places(&self, step: u64, micro: u64, rank: u64) -> impl Iterator<Item = EpochSample> + use<> {
        self.order.from(self.shape.position(step, micro, rank)).take(self.shape.micro_batch as usize)
    }

    /// Tokens in a micro-batch, of all streams.
    pub fn micro_batch_tokens(&self, step: u64, micro: u64, rank: u64) -> u64 {
        self.places(step, micro, rank).map(|place| self.tokens_of(place)).sum()
    }

    fn tokens_of(&self, place: EpochSample) -> u64 {
        self.samples.stream_lengths(place.sample).iter().sum()
    }

    /// Fills `into` with a micro-batch.
    pub fn fill(&self, step: u64, micro: u64, rank: u64, into: &mut TokenBatch) -> Result<(), DataError> {
        self.fill_some(self.shape.position(step, micro, rank), self.shape.micro_batch, into)
    }

    /// Fills `into` with `samples` samples starting at `position`; with 0 samples it is an empty batch.
    pub fn fill_some(&self, position: u64, samples: u64, into: &mut TokenBatch) -> Result<(), DataError> {
        into.clear();
        for place in self.order.from(position).take(samples as usize) {
            for sample in self.samples.members(place.sample) {
                into.read(self.samples, self.start, EpochSample { sample, ..place })?;
            }
        }
        if samples == 0 {
            into.start_empty(self.start.is_some());
        }
        Ok(())
    }

    /// Fills `into` with what the cache has of the teacher for the tokens of a micro-batch.
    pub(crate) fn fill_teacher(
        &self,
        step: u64,
        micro: u64,
        rank: u64,
        into: &mut TeacherRecords,
    ) -> Result<(), TeacherCacheError> {
        let Some(cache) = self.cache else { return Ok(()) };
        into.clear();
        for place in self.places(step, micro, rank) {
            for sample in self.samples.members(place.sample) {
                let (first, length) = (self.samples.token_offset(sample), self.samples.sample_length(sample));
                cache.append(first, length, into)?;
            }
        }
        Ok(())
    }

    /// Whether it has a cache of the teacher.
    pub(crate) fn has_cache(&self) -> bool {
        self.cache.is_some()
    }

    /// The largest number of sequences in a micro-batch.
    pub fn most_sequences(&self) -> u64 {
        self.shape.micro_batch * self.samples.most_in_item()
    }

    /// Tokens of a step over all ranks and micro-batches, of all streams.
    pub fn tokens(&self, step: u64) -> u64 {
        self.step(step).map(|place| self.tokens_of(place)).sum()
    }

    /// Trained tokens of a step over all ranks and micro-batches; the loss is the mean over them.
    pub fn trained_tokens(&self, step: u64) -> u64 {
        self.step(step).map(|place| self.samples.trained(place.sample)).sum()
    }

    fn step(&self, step: u64) -> impl Iterator<Item = EpochSample> + use<> {
        self.order.from(self.shape.position(step, 0, 0)).take(self.shape.train_batch() as usize)
    }

    /// The largest number of tokens in any micro-batch of steps `first` to `first + steps`, of each stream; the second is 0
    /// without pairs.
    ///
    /// Exact up to 20 million samples, which take under two seconds to scan. Beyond that, and where a micro-batch is
    /// one sample and the run covers a full epoch, it is bounded by the longest sample.
    pub fn largest_micro_batch(&self, first: u64, steps: u64) -> [u64; 2] {
        const WALKED: u64 = 20_000_000;
        let (size, longest) = (self.shape.micro_batch, self.samples.longest_streams());
        let taken = steps.saturating_mul(self.shape.train_batch());
        let whole_epochs = taken / self.samples.count();
        // Any run of 2n - 1 consecutive samples contains a full epoch of n, wherever it starts.
        if taken > WALKED || (size == 1 && whole_epochs >= 2) {
            return longest.map(|longest| size * longest);
        }
        let items = self.order.from(self.shape.position(first, 0, 0)).map(|place| place.sample);
        largest_of(self.samples, items, size, taken / size)
    }
}

/// The most tokens of each stream in any of the micro-batches of `size` items.
pub(crate) fn largest_of(
    samples: &Samples,
    mut items: impl Iterator<Item = u64>,
    size: u64,
    micro_batches: u64,
) -> [u64; 2] {
    let mut largest = [0; 2];
    for _ in 0..micro_batches {
        let mut tokens = [0; 2];
        for item in items.by_ref().take(size as usize) {
            let lengths = samples.stream_lengths(item);
            tokens = [tokens[0] + lengths[0], tokens[1] + lengths[1]];
        }
        largest = [largest[0].max(tokens[0]), largest[1].max(tokens[1])];
    }
    largest
}
