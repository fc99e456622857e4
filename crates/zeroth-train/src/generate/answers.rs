//! Text of encoder-decoder models: the encoder reads a source once, then the decoder writes its answer, greedily, by sampling or
//! by beam search. Sources take turns in lanes: each has cache rows for one source and for its beams.

use std::ops::ControlFlow;

use zeroth_base::DType;
use zeroth_engine::NewTokens;
use zeroth_kernel::{CacheRange, Target};
use zeroth_model::{BatchTokens, forward};
use zeroth_program::{CachedTokens, Compiled, StreamSizes};

use super::batch::BatchSize;
use super::beams::{BeamSearch, BeamSettings, log_softmax};
use super::slots::{Placed, place};
use super::{End, GenerateError, Generated, Generation, Generator, Inference, Prompts, sample};
use crate::RowSizes;

/// Most tokens that one run of the decoder takes, unless more sequences are decoded.
const FED: u64 = 256;

/// How a program's cache is divided. It follows from the program and the beams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Lanes {
    count: u64,
    /// Cache rows of a source, and of each of its beams.
    source: u64,
    beam: u64,
    beams: u64,
}

impl Lanes {
    /// As many lanes as a batch of this size has room for.
    fn of(longest: u64, sources: u64, max_new: u64, beams: BeamSettings, size: BatchSize) -> Self {
        let beams = beams.beams.max(1) as u64;
        // The decoder's first token, and all new ones but the last, which is never fed back.
        let beam = max_new.max(1);
        let most = (size.sequences / beams).min(size.tokens / longest.max(beams * beam).max(1));
        Self { count: most.clamp(1, sources.max(1)), source: longest, beam, beams }
    }

    fn sources(&self, lane: usize, length: usize) -> CacheRange {
        let first = lane as u64 * self.source;
        CacheRange { first: first as u32, end: (first + length as u64) as u32 }
    }

    fn first_row(&self, lane: usize, slot: usize) -> u32 {
        ((lane as u64 * self.beams + slot as u64) * self.beam) as u32
    }
}

/// A source that is being answered.
struct Active {
    source: usize,
    search: AnswerSearch,
    rows: CacheRange,
    /// Tokens in the cache of each beam.
    slots: Vec<Vec<i32>>,
}

/// The state of an answer.
enum AnswerSearch {
    /// Tokens, the decoder's first included, chosen one by one.
    Single {
        ids: Vec<i32>,
        end: Option<End>,
    },
    Beams(BeamSearch),
}

impl Inference {
    /// Whether the model is an encoder-decoder, which [`Generator::answer`] and [`Self::compile_answers`] are for.
    pub fn is_encoder_decoder(&self) -> bool {
        self.model.family.is_encoder_decoder()
    }

    /// Compiles the program that answers sources with up to `max_new_tokens` each.
    pub fn compile_answers(
        &self,
        sources: &[Vec<i32>],
        max_new_tokens: u64,
        beams: BeamSettings,
        size: BatchSize,
        (run, target): (DType, &'static dyn Target),
    ) -> Result<Compiled, GenerateError> {
        sources.iter().try_for_each(|source| self.check(source))?;
        let longest = sources.iter().map(Vec::len).max().ok_or(GenerateError::EmptyPrompt)? as u64;
        let total: u64 = sources.iter().map(|source| source.len() as u64).sum();
        let lanes = Lanes::of(longest, sources.len() as u64, max_new_tokens, beams, size);
        let sequences = lanes.count * lanes.beams;
        // Where beams change places, they are fed again from where they differ.
        let fed = if lanes.beams > 1 { (sequences * lanes.beam).min(FED) } else { 1 }.max(sequences);
        let source_rows = total.min(size.tokens).max(longest);
        let sizes: Vec<Vec<u64>> =
            RowSizes::of_streams([source_rows, 0]).iter().map(<[u64]>::to_vec).collect();
        let fed = fed.next_multiple_of(16);
        let rows = sizes.iter().map(|rows| vec![rows[0], fed]).collect();
        let largest = sizes.last().map_or(source_rows, |rows| rows[0]);
        let graph = forward(&self.model, &self.table, BatchTokens::of_pairs(largest, fed))?;
        let cached =
            CachedTokens { tokens: sequences * lanes.beam, source_tokens: lanes.count * lanes.source };
        let sizes = StreamSizes::of_streams(rows);
        Ok(Compiled::inference(graph, run, sequences, cached, target, sizes)?)
    }
}

impl Generator<'_> {
    /// The logits of the first token of an answer.
    pub fn first_logits(&mut self, source: &[i32], start: i32) -> Result<Vec<f32>, GenerateError> {
        self.model.check(source)?;
        let prompts = Prompts::new(std::iter::once(source));
        self.engine.encode(&prompts.batch(), &[0])?;
        let rows = CacheRange { first: 0, end: source.len() as u32 };
        let first = NewTokens { ids: &[start], position: 0, first_row: 0, source: rows };
        let logits = self.engine.decode_sequences(&[first])?;
        self.check_finite(&logits, std::iter::once(0))?;
        Ok(logits)
    }

    /// Answers every source; the decoder's inputs start with `start`. `each` is called with the index of a source and every new
    /// token, and may end its text, except in a beam search; `done` with the tokens of an answer as soon as it is complete. Random
    /// numbers follow the index, as in [`Self::generate_batch`].
    pub fn answer(
        &mut self,
        (sources, start): (&[Vec<i32>], i32),
        generation: &Generation,
        beams: BeamSettings,
        each: &mut dyn FnMut(usize, i32) -> ControlFlow<()>,
        done: &mut dyn FnMut(usize, Generated),
    ) -> Result<(), GenerateError> {
        generation.check()?;
        sources.iter().try_for_each(|source| self.model.check(source))?;
        let lanes = self.lanes_of(sources, generation, beams);
        let mut waiting = sources.iter().enumerate().peekable();
        let mut active: Vec<Option<Active>> = Vec::new();
        active.resize_with(lanes.count as usize, || None);
        loop {
            let mut joining = Vec::new();
            for (lane, place) in active.iter_mut().enumerate().filter(|(_, place)| place.is_none()) {
                let Some((source, ids)) = waiting.next() else { break };
                let rows = lanes.sources(lane, ids.len());
                joining.push((&ids[..], rows.first));
                let search = AnswerSearch::new(generation, beams, start);
                *place = Some(Active { source, search, rows, slots: vec![Vec::new(); lanes.beams as usize] });
            }
            self.encode(&joining)?;
            let mut is_idle = true;
            for place in &mut active {
                is_idle &= place.is_none();
                if let Some(found) = place.as_ref().and_then(|active| active.search.answer(generation)) {
                    let source = place.take().map_or(0, |active| active.source);
                    done(source, found);
                }
            }
            if is_idle {
                return Ok(());
            }
            self.advance(&mut active, &lanes, (generation, start), each)?;
        }
    }

    /// How the program's cache is divided.
    fn lanes_of(&self, sources: &[Vec<i32>], generation: &Generation, beams: BeamSettings) -> Lanes {
        let program = &self.compiled.program;
        let beams = beams.beams.max(1) as u64;
        let beam = generation.max_new_tokens.max(1);
        let longest = sources.iter().map(Vec::len).max().unwrap_or(1).max(1) as u64;
        let count = (program.cached_source_tokens / longest).min(program.cached_tokens / (beams * beam));
        Lanes { count: count.max(1), source: longest, beam, beams }
    }

    /// Encodes sources into their cache rows, as many at a time as the program takes.
    fn encode(&mut self, sources: &[(&[i32], u32)]) -> Result<(), GenerateError> {
        let most = self.compiled.graph.streams.first().map_or(0, |stream| stream.rows as usize);
        let mut rest = sources;
        while !rest.is_empty() {
            let mut rows = 0;
            let fit = rest.iter().take_while(|(ids, _)| {
                rows += ids.len();
                rows <= most
            });
            let (now, later) = rest.split_at(fit.count().max(1));
            let prompts = Prompts::new(now.iter().map(|(ids, _)| *ids));
            let first_rows: Vec<u32> = now.iter().map(|(_, first)| *first).collect();
            self.engine.encode(&prompts.batch(), &first_rows)?;
            rest = later;
        }
        Ok(())
    }

    /// Chooses the next token of every active answer.
    fn advance(
        &mut self,
        active: &mut [Option<Active>],
        lanes: &Lanes,
        (generation, start): (&Generation, i32),
        each: &mut dyn FnMut(usize, i32) -> ControlFlow<()>,
    ) -> Result<(), GenerateError> {
        let mut fed = Vec::new();
        for (lane, active) in active.iter_mut().enumerate() {
            let Some(active) = active else { continue };
            let sequences = active.search.sequences(start);
            let placed = place(&sequences, &mut active.slots);
            let first_row = |placed: &Placed| lanes.first_row(lane, placed.slot);
            fed.extend(placed.iter().zip(sequences).map(|(placed, ids)| Fed {
                first_row: first_row(placed),
                cached: placed.cached,
                source: active.rows,
                ids,
            }));
        }
        let logits = self.feed(&fed)?;
        let mut logits = logits.into_iter();
        for active in active.iter_mut().flatten() {
            let count = active.search.running();
            let of_beams: Vec<Vec<f32>> = logits.by_ref().take(count).collect();
            match &mut active.search {
                AnswerSearch::Beams(search) => {
                    let mut log_probs: Vec<Vec<f32>> =
                        of_beams.iter().map(|logits| log_softmax(logits)).collect();
                    // transformers penalises log-probabilities in a beam search, else logits.
                    for (log_probs, ids) in log_probs.iter_mut().zip(search.running()) {
                        sample::penalise(log_probs, generation.repetition_penalty, &[&[start], ids].concat());
                    }
                    search.advance(&log_probs);
                }
                AnswerSearch::Single { ids, end } => {
                    let Some(logits) = of_beams.first() else { continue };
                    let id = sample::choose(logits, generation, active.source, ids);
                    ids.push(id);
                    let is_stopped = each(active.source, id).is_break();
                    if generation.stops.contains(&id) {
                        *end = Some(End::Stop(id));
                    } else if is_stopped {
                        *end = Some(End::Stopped);
                    }
                }
            }
        }
        Ok(())
    }

    /// The next-token logits of sequences, of which a part is cached.
    fn feed(&mut self, fed: &[Fed]) -> Result<Vec<Vec<f32>>, GenerateError> {
        let program = &self.compiled.program;
        let most_sequences = program.sequences().map_or(1, |count| count as usize);
        let most = self.compiled.graph.streams.last().map_or(1, |stream| stream.rows as usize);
        let mut found: Vec<Vec<f32>> = Vec::with_capacity(fed.len());
        let mut rest = fed;
        while let Some(first) = rest.first() {
            // A suffix that is longer than a run of the decoder is fed in parts, of which only the last has a result.
            let mut cached = first.cached;
            while first.ids.len() - cached > most {
                self.engine.decode_sequences(&[first.tokens(cached..cached + most)])?;
                cached += most;
            }
            let mut rows = first.ids.len() - cached;
            let more = rest[1..].iter().take(most_sequences.saturating_sub(1)).take_while(|next| {
                rows += next.ids.len() - next.cached;
                rows <= most
            });
            let count = 1 + more.count();
            let (now, later) = rest.split_at(count);
            let first = first.tokens(cached..first.ids.len());
            let others = now[1..].iter().map(|fed| fed.tokens(fed.cached..fed.ids.len()));
            let tokens: Vec<NewTokens<'_>> = std::iter::once(first).chain(others).collect();
            let logits = self.engine.decode_sequences(&tokens)?;
            self.check_finite(&logits, now.iter().map(|fed| fed.ids.len()))?;
            found.extend(logits.chunks_exact(logits.len() / count).map(<[f32]>::to_vec));
            rest = later;
        }
        Ok(found)
    }
}

/// A sequence to feed.
struct Fed {
    first_row: u32,
    /// Tokens that are in the cache.
    cached: usize,
    source: CacheRange,
    ids: Vec<i32>,
}

impl Fed {
    fn tokens(&self, part: std::ops::Range<usize>) -> NewTokens<'_> {
        let position = part.start as u32;
        NewTokens { ids: &self.ids[part], position, first_row: self.first_row, source: self.source }
    }
}

impl AnswerSearch {
    fn new(generation: &Generation, beams: BeamSettings, start: i32) -> Self {
        match beams.beams {
            0 | 1 => Self::Single { ids: vec![start], end: None },
            _ => Self::Beams(BeamSearch::new(beams, generation.max_new_tokens, &generation.stops)),
        }
    }

    /// Sequences that need the logits of their next token.
    fn running(&self) -> usize {
        match self {
            Self::Single { .. } => 1,
            Self::Beams(search) => search.running().count(),
        }
    }

    /// Their tokens, the decoder's first included.
    fn sequences(&self, start: i32) -> Vec<Vec<i32>> {
        match self {
            Self::Single { ids, .. } => vec![ids.clone()],
            Self::Beams(search) => search.running().map(|ids| [&[start], ids].concat()).collect(),
        }
    }

    /// The answer, once it is complete.
    fn answer(&self, generation: &Generation) -> Option<Generated> {
        match self {
            Self::Beams(search) => search.best(),
            Self::Single { ids, end } => {
                let is_full = ids.len() as u64 > generation.max_new_tokens;
                let end = end.or(is_full.then_some(End::Length))?;
                Some(Generated { ids: ids[1..].to_vec(), end })
            }
        }
    }
}
