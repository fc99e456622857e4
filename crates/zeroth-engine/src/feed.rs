//! Uploads of micro-batches.

use bytemuck::cast_slice;
use zeroth_kernel::{CacheRange, Queue};
use zeroth_program::{BufferId, SectionKind, StreamSizes};

use super::{Engine, RunError, StreamBatch, StreamRows};

/// What a section of an inference program is fed.
#[derive(Default)]
pub(super) struct SectionFeed<'a> {
    /// The micro-batch of each stream.
    pub(super) streams: &'a [StreamRows<'a>],
    /// The cache rows of the sequence of every token whose keys and values are stored; none where nothing is cached.
    pub(super) ranges: &'a [CacheRange],
    /// The cache rows of the source of every token that is decoded.
    pub(super) source_ranges: &'a [CacheRange],
}

impl Engine<'_> {
    /// Uploads a micro-batch and returns the index of its row size. An evaluation has no teacher.
    pub(super) fn feed(&mut self, batch: &StreamBatch<'_>, reads_teacher: bool) -> Result<usize, RunError> {
        let sizes = &self.compiled.row_sizes;
        let (size, rows) = self.stage(sizes, batch.streams)?;
        self.feed.fill_inputs(batch.inputs, rows, reads_teacher)?;
        self.upload(rows)?;
        Ok(size)
    }

    /// Uploads what a section of an inference program reads and returns the index of its row size. Tokens without a range are not
    /// cached.
    pub(super) fn feed_section(&mut self, section: usize, feed: &SectionFeed<'_>) -> Result<usize, RunError> {
        let compiled = self.compiled;
        let kind = compiled.program.sections[section].kind;
        let sizes = if kind == SectionKind::Decode { &compiled.decode_sizes } else { &compiled.row_sizes };
        // An encoder and a decoder read one stream each.
        let only = self.feed.cross.and_then(|[decoder, encoder]| match kind {
            SectionKind::Encode => Some(encoder),
            SectionKind::Decode => Some(decoder),
            _ => None,
        });
        let (size, rows) = match only {
            Some(_) => self.stage_apart(sizes, feed.streams)?,
            None => self.stage(sizes, feed.streams)?,
        };
        self.feed.fill_inputs(&[], rows, true)?;
        let cached = rows[only.unwrap_or(0)] as usize;
        self.feed.fill_ranges([feed.ranges, feed.source_ranges], cached);
        self.device.equal_sequences(self.feed.length());
        for (stream, rows) in rows.iter().enumerate() {
            if only.is_none_or(|only| only == stream) {
                self.upload_stream(stream, *rows as usize)?;
            }
        }
        self.upload_ranges(cached)?;
        Ok(if kind == SectionKind::Decode { compiled.row_sizes.len() + size } else { size })
    }

    /// Stages the streams of a micro-batch, padded to one of these sizes; returns its index and rows.
    fn stage<'s>(
        &mut self,
        sizes: &'s StreamSizes,
        batches: &[StreamRows<'_>],
    ) -> Result<(usize, &'s [u64]), RunError> {
        let staged = self.stage_apart(sizes, batches)?;
        if let Some([decoder, encoder]) = self.feed.cross {
            let sequences = |stream: usize| batches[stream].starts.len().saturating_sub(1);
            let (targets, sources) = (sequences(decoder), sequences(encoder));
            if targets != sources {
                return Err(RunError::Sources { targets, sources });
            }
        }
        Ok(staged)
    }

    /// As [`Self::stage`], of streams that need not belong together.
    fn stage_apart<'s>(
        &mut self,
        sizes: &'s StreamSizes,
        batches: &[StreamRows<'_>],
    ) -> Result<(usize, &'s [u64]), RunError> {
        let streams = &self.compiled.graph.streams;
        let (found, expected) = (batches.len(), streams.len());
        if found != expected {
            return Err(RunError::Streams { what: "streams", found, expected });
        }
        let given = batches.iter().map(|batch| batch.ids.len());
        let Some((size, rows)) = sizes.fit(&given) else {
            let most = sizes.iter().last().unwrap_or(&[]);
            let mut both = given.zip(most.iter().copied());
            let (rows, most) = both.find(|(rows, most)| *rows as u64 > *most).unwrap_or((0, 0));
            return Err(RunError::Rows { rows, most });
        };
        self.feed.fill(batches, rows)?;
        Ok((size, rows))
    }

    /// Uploads what is staged.
    fn upload(&mut self, rows: &[u64]) -> Result<(), RunError> {
        self.device.equal_sequences(self.feed.length());
        for (stream, rows) in rows.iter().enumerate() {
            self.upload_stream(stream, *rows as usize)?;
        }
        for input in &self.feed.inputs {
            let bytes: &[u8] = cast_slice(&input.numbers);
            let to = self.compiled.span(0, BufferId::Value(input.value.index()));
            let uploaded = self.device.upload(Queue::Compute, bytes, to.part(0, bytes.len() as u64, 1));
            uploaded.map_err(RunError::device(self.step, "upload of a micro-batch"))?;
        }
        Ok(())
    }

    /// Uploads the cache rows of the tokens and of their sources.
    fn upload_ranges(&mut self, rows: usize) -> Result<(), RunError> {
        let (ranges, source_ranges) = (&self.feed.ranges, &self.feed.source_ranges);
        for (id, ranges) in [(BufferId::CacheRanges, ranges), (BufferId::SourceRanges, source_ranges)] {
            let Some(ranges) = ranges.get(..rows) else { continue };
            let bytes: &[u8] = cast_slice(ranges);
            let to = self.compiled.span(0, id).part(0, bytes.len() as u64, 1);
            let uploaded = self.device.upload(Queue::Compute, bytes, to);
            uploaded.map_err(RunError::device(self.step, "upload of a micro-batch"))?;
        }
        Ok(())
    }

    /// Uploads what is staged of a stream.
    fn upload_stream(&mut self, stream: usize, rows: usize) -> Result<(), RunError> {
        let (feed, compiled, step) = (&self.feed.streams[stream], self.compiled, self.step);
        let inputs = compiled.graph.streams[stream];
        let keys = BufferId::Keys(stream);
        let parts: [(Option<BufferId>, &[u8]); 5] = [
            (Some(BufferId::Value(inputs.ids.index())), cast_slice(&feed.ids[..rows])),
            (Some(BufferId::Value(inputs.labels.index())), cast_slice(&feed.labels[..rows])),
            (Some(BufferId::Value(inputs.positions.index())), cast_slice(&feed.positions[..rows])),
            (Some(BufferId::Starts(stream)), cast_slice(&feed.starts)),
            (compiled.find(0, keys).map(|_| keys), cast_slice(&feed.keys[..rows])),
        ];
        let angles = feed.rotaries.iter().enumerate().flat_map(|(index, rotary)| {
            let count = rows * rotary.pairs();
            [
                (Some(BufferId::Cosines { stream, rotary: index }), cast_slice(&rotary.cosines[..count])),
                (Some(BufferId::Sines { stream, rotary: index }), cast_slice(&rotary.sines[..count])),
            ]
        });
        for (id, bytes) in parts.into_iter().chain(angles) {
            let Some(id) = id else { continue };
            let to = compiled.span(0, id).part(0, bytes.len() as u64, 1);
            let uploaded = self.device.upload(Queue::Compute, bytes, to);
            uploaded.map_err(RunError::device(step, "upload of a micro-batch"))?;
        }
        Ok(())
    }
}
