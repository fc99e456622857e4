//! Inference: next-token logits of whole sequences, and of new tokens with cached keys and values.
//!
//! An encoder-decoder with a cache runs its encoder first ([`Engine::encode`]), which leaves the keys and values of cross attention in
//! cache rows of their own. Its decoder then has no prefill: [`Engine::decode_sequences`] takes the first tokens as it takes later
//! ones.

use zeroth_kernel::{CacheRange, Queue};
use zeroth_program::{BufferId, vocabulary};

use super::engine::Engine;
use super::feed::SectionFeed;
use super::{RunError, StreamBatch, StreamRows};

/// The next token of a sequence whose earlier tokens are in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewToken {
    /// The token id.
    pub id: i32,
    /// Its position in the sequence.
    pub position: u32,
    /// The cache row of the sequence's first token.
    pub first_row: u32,
}

impl NewToken {
    /// It alone, in a model without an encoder.
    fn alone(&self) -> NewTokens<'_> {
        let &Self { ref id, position, first_row } = self;
        NewTokens { ids: std::slice::from_ref(id), position, first_row, source: CacheRange::default() }
    }
}

/// The next tokens of a sequence whose earlier ones are in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewTokens<'a> {
    /// Their ids.
    pub ids: &'a [i32],
    /// The position of the first in the sequence.
    pub position: u32,
    /// The cache row of the sequence's first token.
    pub first_row: u32,
    /// The rows that [`Engine::encode`] has filled with its source, among those for sources; empty in a model without an encoder.
    pub source: CacheRange,
}

impl Engine<'_> {
    /// Next-token logits `[sequences, vocab]` of a micro-batch, by an inference program. Nothing is cached.
    pub fn logits(&mut self, batch: &StreamRows<'_>) -> Result<Vec<f32>, RunError> {
        self.logits_streams(&StreamBatch { streams: &[*batch], inputs: &[] })
    }

    /// As [`Self::logits`], for an encoder-decoder: the logits of the target's sequences.
    pub fn logits_streams(&mut self, batch: &StreamBatch<'_>) -> Result<Vec<f32>, RunError> {
        let Some((section, _)) = self.compiled.program.logits() else { return Err(RunError::NoLogits) };
        let feed = SectionFeed { streams: batch.streams, ..SectionFeed::default() };
        self.next_logits(section, &feed)
    }

    /// As [`Self::logits`], and stores the keys and values of every token in the cache: those of sequence i from row
    /// `first_rows[i]` on. The caller keeps sequences apart.
    pub fn prefill(&mut self, batch: &StreamRows<'_>, first_rows: &[u32]) -> Result<Vec<f32>, RunError> {
        let Some((section, _)) = self.compiled.program.logits() else { return Err(RunError::NoLogits) };
        let ranges = ranges_of(batch, first_rows)?;
        check_rows(&ranges, self.compiled.program.cached_tokens)?;
        self.next_logits(section, &SectionFeed { streams: &[*batch], ranges: &ranges, source_ranges: &[] })
    }

    /// Runs the encoder of an encoder-decoder over these sources, and stores the keys and values of its cross attention: those of
    /// source i from row `first_rows[i]` on, among the rows for sources. The caller keeps sources apart.
    pub fn encode(&mut self, sources: &StreamRows<'_>, first_rows: &[u32]) -> Result<(), RunError> {
        let (Some(section), Some([_, encoder])) = (self.compiled.program.encode(), self.feed.cross) else {
            return Err(RunError::NoEncoder);
        };
        let ranges = ranges_of(sources, first_rows)?;
        check_rows(&ranges, self.compiled.program.cached_source_tokens)?;
        let mut streams = vec![StreamRows::EMPTY; self.compiled.graph.streams.len()];
        streams[encoder] = *sources;
        let feed = SectionFeed { streams: &streams, ranges: &ranges, source_ranges: &[] };
        let size = self.feed_section(section, &feed)?;
        self.run_section(section, size)?;
        self.join(section)
    }

    /// Next-token logits `[tokens, vocab]` of one new token per sequence. Their keys and values are stored, and each
    /// token attends to the cached prefix of its sequence.
    pub fn decode(&mut self, tokens: &[NewToken]) -> Result<Vec<f32>, RunError> {
        let sequences: Vec<NewTokens<'_>> = tokens.iter().map(NewToken::alone).collect();
        self.decode_sequences(&sequences)
    }

    /// Next-token logits `[sequences, vocab]` after the last of the new tokens of each sequence. Keys and values of all of them are
    /// stored, and each attends to what is cached of its sequence, and to those before it. Rows of later positions are no more valid:
    /// a sequence may be continued from any of its positions.
    pub fn decode_sequences(&mut self, sequences: &[NewTokens<'_>]) -> Result<Vec<f32>, RunError> {
        let program = &self.compiled.program;
        let Some(section) = program.decode() else { return Err(RunError::NoCache) };
        let (mut ids, mut positions, mut starts) = (Vec::new(), Vec::new(), vec![0]);
        let (mut ranges, mut source_ranges) = (Vec::new(), Vec::new());
        for sequence in sequences {
            ids.extend_from_slice(sequence.ids);
            let end = sequence.position.saturating_add(sequence.ids.len() as u32);
            for position in sequence.position..end {
                positions.push(position as i32);
                let end = sequence.first_row.saturating_add(position).saturating_add(1);
                ranges.push(CacheRange { first: sequence.first_row, end });
                source_ranges.push(sequence.source);
            }
            starts.push(ids.len() as u32);
        }
        check_rows(&ranges, program.cached_tokens)?;
        if program.encode().is_some() {
            check_rows(&source_ranges, program.cached_source_tokens)?;
            if source_ranges.iter().any(|source| source.first >= source.end) {
                return Err(RunError::NoSource);
            }
        }
        // Cached keys are rotated. Dynamic scaling changes the frequencies of all keys of a longer sequence.
        for scaling in self.compiled.graph.rotaries.iter().filter_map(|rotary| rotary.dynamic) {
            let max_positions = scaling.max_positions;
            if let Some(position) = positions.iter().find(|position| **position as u64 >= max_positions) {
                return Err(RunError::Rescaled { position: *position as u32, max_positions });
            }
        }
        // Nothing is trained.
        let labels = vec![-100; ids.len()];
        let batch =
            StreamRows { ids: &ids, labels: &labels, positions: &positions, starts: &starts, keys: &[] };
        let mut streams = vec![StreamRows::EMPTY; self.compiled.graph.streams.len()];
        streams[self.feed.cross.map_or(0, |[decoder, _]| decoder)] = batch;
        let feed = SectionFeed { streams: &streams, ranges: &ranges, source_ranges: &source_ranges };
        self.next_logits(section, &feed)
    }

    /// The most probable next tokens at every token of a micro-batch, by a program that was compiled for them: ids and
    /// log-probabilities [tokens, k], the most probable first. Where parameters are sharded all ranks call it together, each with
    /// a micro-batch of its own, which may be empty.
    pub fn top_log_probs(
        &mut self,
        batch: &StreamRows<'_>,
        ids: &mut Vec<i32>,
        log_probs: &mut Vec<f32>,
    ) -> Result<(), RunError> {
        let Some((section, k)) = self.compiled.program.top_log_probs() else {
            return Err(RunError::NoTopLogProbs);
        };
        let feed = SectionFeed { streams: &[*batch], ..SectionFeed::default() };
        let size = self.feed_section(section, &feed)?;
        self.run_section(section, size)?;
        self.join(section)?;
        self.await_readers("end of a micro-batch")?;
        let count = batch.ids.len() * k as usize;
        ids.resize(count, 0);
        log_probs.resize(count, 0.0);
        let step = self.step;
        let found: [(BufferId, &mut [u8]); 2] = [
            (BufferId::TopIds, bytemuck::cast_slice_mut(ids)),
            (BufferId::TopLogProbs, bytemuck::cast_slice_mut(log_probs)),
        ];
        for (id, bytes) in found.into_iter().filter(|_| count > 0) {
            let from = self.compiled.span(section, id).part(0, count as u64, 4);
            let downloaded = self.device.download(Queue::Compute, from, bytes);
            self.collectives.checked(step, "download of the most probable tokens", downloaded)?;
        }
        Ok(())
    }

    fn next_logits(&mut self, section: usize, feed: &SectionFeed<'_>) -> Result<Vec<f32>, RunError> {
        let most = self.compiled.program.sequences().unwrap_or(0);
        // Those of the target, where there is a source.
        let decoded = self.feed.cross.map_or(0, |[decoder, _]| decoder);
        let found = feed.streams.get(decoded).map_or(0, |batch| batch.starts.len().saturating_sub(1));
        if found as u64 > most {
            return Err(RunError::Sequences { found, most });
        }
        let size = self.feed_section(section, feed)?;
        self.run_section(section, size)?;
        self.join(section)?;
        let all = self.compiled.span(section, BufferId::Logits);
        let mut logits = vec![0.0f32; found * vocabulary(&self.compiled.graph) as usize];
        let from = all.part(0, logits.len() as u64, 4);
        let step = self.step;
        let downloaded = self.device.download(Queue::Compute, from, bytemuck::cast_slice_mut(&mut logits));
        self.collectives.checked(step, "download of logits", downloaded)?;
        Ok(logits)
    }
}

/// The cache rows of every token of a micro-batch: those of sequence i from row `first_rows[i]` on.
fn ranges_of(batch: &StreamRows<'_>, first_rows: &[u32]) -> Result<Vec<CacheRange>, RunError> {
    let sequences = batch.starts.len().saturating_sub(1);
    if first_rows.len() != sequences {
        let (what, found) = ("first cache rows of sequences", first_rows.len());
        return Err(RunError::Batch { what, found, expected: sequences });
    }
    let lengths = batch.starts.windows(2).map(|pair| pair[1].saturating_sub(pair[0]));
    let ranges = first_rows.iter().zip(lengths).flat_map(|(first, length)| {
        (1..=length).map(|tokens| CacheRange { first: *first, end: first.saturating_add(tokens) })
    });
    Ok(ranges.collect())
}

/// Refuses rows that a cache does not have.
fn check_rows(ranges: &[CacheRange], rows: u64) -> Result<(), RunError> {
    if rows == 0 {
        return Err(RunError::NoCache);
    }
    match ranges.iter().find(|range| u64::from(range.end) > rows || range.end == u32::MAX) {
        Some(range) => Err(RunError::CacheRows { row: u64::from(range.end) - 1, rows }),
        None => Ok(()),
    }
}
