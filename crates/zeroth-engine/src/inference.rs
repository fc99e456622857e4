//! Inference: next-token logits of whole sequences, and of one new token per sequence with cached keys and values.

use zeroth_kernel::{CacheRange, Queue};
use zeroth_program::{BufferId, vocabulary};

use super::engine::Engine;
use super::{MicroBatch, RunError};

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

impl Engine<'_> {
    /// Next-token logits `[sequences, vocab]` of a micro-batch, by an inference program. Nothing is cached.
    pub fn logits(&mut self, batch: &MicroBatch<'_>) -> Result<Vec<f32>, RunError> {
        let Some((section, _)) = self.compiled.program.logits() else { return Err(RunError::NoLogits) };
        self.next_logits(section, batch, &[])
    }

    /// As [`Self::logits`], and stores the keys and values of every token in the cache: those of sequence i from row
    /// `first_rows[i]` on. The caller keeps sequences apart.
    pub fn prefill(&mut self, batch: &MicroBatch<'_>, first_rows: &[u32]) -> Result<Vec<f32>, RunError> {
        let Some((section, _)) = self.compiled.program.logits() else { return Err(RunError::NoLogits) };
        let sequences = batch.starts.len().saturating_sub(1);
        if first_rows.len() != sequences {
            let (what, found) = ("first cache rows of sequences", first_rows.len());
            return Err(RunError::Batch { what, found, expected: sequences });
        }
        let lengths = batch.starts.windows(2).map(|pair| pair[1].saturating_sub(pair[0]));
        let ranges = first_rows.iter().zip(lengths).flat_map(|(first, length)| {
            (1..=length).map(|tokens| CacheRange { first: *first, end: first.saturating_add(tokens) })
        });
        let ranges: Vec<CacheRange> = ranges.collect();
        self.check_cache(&ranges)?;
        self.next_logits(section, batch, &ranges)
    }

    /// Next-token logits `[tokens, vocab]` of one new token per sequence. Their keys and values are stored, and each
    /// token attends to the cached prefix of its sequence.
    pub fn decode(&mut self, tokens: &[NewToken]) -> Result<Vec<f32>, RunError> {
        let Some(section) = self.compiled.program.decode() else { return Err(RunError::NoCache) };
        let range = |token: &NewToken| CacheRange {
            first: token.first_row,
            end: token.first_row.saturating_add(token.position).saturating_add(1),
        };
        let ranges: Vec<CacheRange> = tokens.iter().map(range).collect();
        self.check_cache(&ranges)?;
        // Cached keys are rotated. Dynamic scaling changes the frequencies of all keys of a longer sequence.
        for scaling in self.compiled.graph.rotaries.iter().filter_map(|rotary| rotary.dynamic) {
            let max_positions = scaling.max_positions;
            if let Some(token) = tokens.iter().find(|token| u64::from(token.position) >= max_positions) {
                return Err(RunError::Rescaled { position: token.position, max_positions });
            }
        }
        let ids: Vec<i32> = tokens.iter().map(|token| token.id).collect();
        let positions: Vec<i32> = tokens.iter().map(|token| token.position as i32).collect();
        let starts: Vec<u32> = (0..=tokens.len() as u32).collect();
        // Nothing is trained.
        let labels = vec![-100; ids.len()];
        let batch =
            MicroBatch { ids: &ids, labels: &labels, positions: &positions, starts: &starts, keys: &[] };
        self.next_logits(section, &batch, &ranges)
    }

    /// The most probable next tokens at every token of a micro-batch, by a program that was compiled for them: ids and
    /// log-probabilities [tokens, k], the most probable first. Where parameters are sharded all ranks call it together, each with
    /// a micro-batch of its own, which may be empty.
    pub fn top_log_probs(
        &mut self,
        batch: &MicroBatch<'_>,
        ids: &mut Vec<i32>,
        log_probs: &mut Vec<f32>,
    ) -> Result<(), RunError> {
        let Some((section, k)) = self.compiled.program.top_log_probs() else {
            return Err(RunError::NoTopLogProbs);
        };
        let size = self.feed_section(section, batch, &[])?;
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

    fn check_cache(&self, ranges: &[CacheRange]) -> Result<(), RunError> {
        let rows = self.compiled.program.cached_tokens;
        if rows == 0 {
            return Err(RunError::NoCache);
        }
        match ranges.iter().find(|range| u64::from(range.end) > rows || range.end == u32::MAX) {
            Some(range) => Err(RunError::CacheRows { row: u64::from(range.end) - 1, rows }),
            None => Ok(()),
        }
    }

    fn next_logits(
        &mut self,
        section: usize,
        batch: &MicroBatch<'_>,
        ranges: &[CacheRange],
    ) -> Result<Vec<f32>, RunError> {
        let most = self.compiled.program.logits().map_or(0, |(_, sequences)| sequences);
        let found = batch.starts.len().saturating_sub(1);
        if found as u64 > most {
            return Err(RunError::Sequences { found, most });
        }
        let size = self.feed_section(section, batch, ranges)?;
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
