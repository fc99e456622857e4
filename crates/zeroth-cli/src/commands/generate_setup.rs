//! A model that is ready to generate: its device, its tokenizer, and what ends a text.

use std::ops::ControlFlow;

use zeroth::base::{DType, counted, format_bytes};
use zeroth::data::{Encoder, PairOptions};
use zeroth::kernel::Target;
use zeroth::machine::Machine;
use zeroth::program::Compiled;
use zeroth::train::{
    BatchSize, BeamSettings, End, GenerateError, Generated, Generation, Generator, Inference,
};

use super::process_memory::{MemoryShortfall, ProcessMemory};
use crate::output;

/// More cached tokens than prompts of a decoder-only model have: sources are long, and so are many beams.
pub(super) const ANSWERS_AT_ONCE: BatchSize = BatchSize { sequences: 64, tokens: 8192 };

/// A model with its device and compute dtype.
pub(super) struct GenerateSetup {
    pub(super) model: Inference,
    pub(super) encoder: Encoder,
    pub(super) run: DType,
    pub(super) target: &'static dyn Target,
    pub(super) machine: Machine,
    pub(super) memory: ProcessMemory,
    /// End-of-text token ids.
    pub(super) stops: Vec<i32>,
    /// The system message (`--system`).
    pub(super) system: Option<String>,
    /// Set for encoder-decoder models.
    pub(super) pairs: Option<PairOptions>,
    pub(super) beams: BeamSettings,
}

impl GenerateSetup {
    /// Loads the weights; prints an error and returns `None` if the program does not fit.
    pub(super) fn start<'c>(&'c self, compiled: &'c Compiled) -> anyhow::Result<Option<Generator<'c>>> {
        if let Some(shortfall) = self.memory.shortfall(compiled, &self.machine) {
            output::error(&misfit(compiled, shortfall));
            return Ok(None);
        }
        let device = self.target.open(0, compiled.memory.arenas())?;
        Ok(Some(self.model.start(compiled, device)?))
    }

    /// Compiles the program that continues prompts, or answers sources, in batches. Of an encoder-decoder the batch has the size
    /// for sources.
    pub(super) fn compile_batch(
        &self,
        prompts: &[Vec<i32>],
        max_new_tokens: u64,
    ) -> Result<Compiled, GenerateError> {
        let Self { model, run, target, beams, .. } = self;
        match self.pairs {
            Some(_) => {
                model.compile_answers(prompts, max_new_tokens, *beams, ANSWERS_AT_ONCE, (*run, *target))
            }
            None => model.compile_batch(prompts, max_new_tokens, BatchSize::default(), *run, *target),
        }
    }

    /// Continues prompts, or answers sources; `each` and `done` are those of [`Generator::generate_batch`].
    pub(super) fn continue_batch(
        &self,
        generator: &mut Generator<'_>,
        prompts: &[Vec<i32>],
        generation: &Generation,
        each: &mut dyn FnMut(usize, i32) -> ControlFlow<()>,
        done: &mut dyn FnMut(usize, Generated),
    ) -> Result<(), GenerateError> {
        match &self.pairs {
            None => generator.generate_batch(prompts, generation, each, done),
            Some(pairs) => {
                generator.answer((prompts, pairs.pairs.start.token), generation, self.beams, each, done)
            }
        }
    }

    /// Decodes tokens without the end-of-text token; `None` without a tokenizer.
    pub(super) fn text(&self, ids: &[i32]) -> Option<String> {
        self.encoder.tokenizer_vocabulary().map(|_| self.encoder.decode(self.without_stop(ids)))
    }

    /// Tokens without the end-of-text token.
    pub(super) fn without_stop<'a>(&self, ids: &'a [i32]) -> &'a [i32] {
        ids.split_last().filter(|(last, _)| self.stops.contains(last)).map_or(ids, |(_, before)| before)
    }
}

/// The finish reason in JSON.
pub(super) fn end_name(end: End) -> &'static str {
    match end {
        End::Length => "length",
        End::Stop(_) => "stop",
        End::Positions => "positions",
        End::Stopped => "stopped",
    }
}

/// The error if the program does not fit into free memory.
fn misfit(compiled: &Compiled, shortfall: MemoryShortfall) -> String {
    let MemoryShortfall { program, process, free } = shortfall;
    let process = match process {
        0 => String::new(),
        process => format!(", and {} for the process itself", format_bytes(process)),
    };
    format!(
        "the model needs {}, {} of them for the cached keys and values of {}{process}, but {} are free: fewer \
         --max-new-tokens or --bf16 may fit",
        format_bytes(program),
        format_bytes(compiled.cache_bytes()),
        counted(compiled.program.cached_tokens, "token"),
        format_bytes(free)
    )
}
