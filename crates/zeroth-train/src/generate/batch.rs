//! Continuous batching: sequences share forward passes, and the next prompt joins as soon as there is room.

use zeroth_base::DType;
use zeroth_program::{Compiled, Target};

use super::{End, GenerateError, Generated, Generation, Generator, Inference, sample};

/// The most that one forward pass of a batch takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchSize {
    /// Sequences.
    pub sequences: u64,
    /// Tokens of all sequences, where one alone does not need more.
    pub tokens: u64,
}

impl Default for BatchSize {
    /// Enough rows to keep a matmul busy, few enough that activations stay small.
    fn default() -> Self {
        Self { sequences: 64, tokens: 2048 }
    }
}

/// A sequence that is being generated.
struct Active {
    /// The place of its prompt.
    prompt: usize,
    /// Tokens of the prompt and those after it.
    ids: Vec<i32>,
    /// Rows that it may come to need.
    rows: u64,
}

impl Inference {
    /// The program that continues prompts together, for up to `max_new_tokens` each.
    pub fn compile_batch(
        &self,
        prompts: &[Vec<i32>],
        max_new_tokens: u64,
        size: BatchSize,
        run: DType,
        target: Target,
    ) -> Result<Compiled, GenerateError> {
        prompts.iter().try_for_each(|prompt| self.check(prompt))?;
        let rows = || prompts.iter().map(|prompt| self.rows_of(prompt, max_new_tokens));
        let longest = rows().max().ok_or(GenerateError::EmptyPrompt)?;
        let sequences = size.sequences.clamp(1, prompts.len() as u64);
        self.compile_rows(rows().sum::<u64>().min(size.tokens).max(longest), sequences, run, target)
    }
}

impl Generator<'_> {
    /// Continues every prompt. `done` is called with the place of a prompt and its tokens as soon as they are complete,
    /// shorter ones before longer ones.
    pub fn generate_batch(
        &mut self,
        prompts: &[Vec<i32>],
        generation: &Generation,
        done: &mut dyn FnMut(usize, Generated),
    ) -> Result<(), GenerateError> {
        generation.check()?;
        prompts.iter().try_for_each(|prompt| self.model.check(prompt))?;
        let most_rows = self.compiled.row_sizes.last().copied().unwrap_or(0);
        let most_sequences = self.compiled.program.logits().map_or(1, |(_, sequences)| sequences as usize);
        let mut waiting = prompts.iter().enumerate().peekable();
        let mut active: Vec<Active> = Vec::new();
        loop {
            let mut rows: u64 = active.iter().map(|sequence| sequence.rows).sum();
            while active.len() < most_sequences {
                let needed = |prompt: &[i32]| self.model.rows_of(prompt, generation.max_new_tokens);
                // A prompt that needs more than the program has is let in alone: the engine names both figures.
                let fits = |ids: &[i32]| active.is_empty() || rows + needed(ids) <= most_rows;
                let Some((prompt, ids)) = waiting.next_if(|(_, ids)| fits(ids)) else { break };
                rows += needed(ids);
                active.push(Active { prompt, ids: ids.clone(), rows: needed(ids) });
            }
            if active.is_empty() {
                return Ok(());
            }
            let before = active.len();
            active.retain(|sequence| {
                let new = &sequence.ids[prompts[sequence.prompt].len()..];
                let end = self.end(new, sequence.ids.len(), generation);
                end.inspect(|end| done(sequence.prompt, Generated { ids: new.to_vec(), end: *end })).is_none()
            });
            if active.len() < before {
                continue;
            }
            let sequences: Vec<&[i32]> = active.iter().map(|sequence| &sequence.ids[..]).collect();
            let logits = self.next_logits(&sequences)?;
            let vocab = logits.len() / active.len();
            for (sequence, logits) in active.iter_mut().zip(logits.chunks_exact(vocab)) {
                let id = sample::choose(logits, generation, sequence.ids.len() as u64);
                sequence.ids.push(id);
            }
        }
    }

    /// Why a sequence of `length` tokens, the new ones included, is complete; `None` where it is not.
    fn end(&self, new: &[i32], length: usize, generation: &Generation) -> Option<End> {
        let stop = new.last().filter(|id| generation.stops.contains(id));
        let positions = self.model.model.max_positions.unwrap_or(u64::MAX);
        match stop {
            Some(id) => Some(End::Stop(*id)),
            None if new.len() as u64 >= generation.max_new_tokens => Some(End::Length),
            None if length as u64 >= positions => Some(End::Positions),
            None => None,
        }
    }
}
