//! Continuous batching: sequences are decoded together, and the next prompt joins as soon as the cache has room for it.

use std::ops::ControlFlow;

use zeroth_base::DType;
use zeroth_kernel::Target;
use zeroth_program::Compiled;

use super::{
    End, GenerateError, Generated, Generation, Generator, Inference, ProgramSize, SequenceState, sample,
};

/// Limits of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchSize {
    /// Sequences that are decoded together.
    pub sequences: u64,
    /// Tokens of all sequences in the cache, and of the prompts of one prefill, unless a single one needs more.
    pub tokens: u64,
}

impl Default for BatchSize {
    /// Enough rows to keep a matmul busy, few enough that cache and activations stay small.
    fn default() -> Self {
        Self { sequences: 64, tokens: 2048 }
    }
}

/// The first cache row of `needed` free ones, where `active` sequences leave them contiguous.
fn free_rows(active: &[SequenceState], needed: u64, rows: u64) -> Option<u64> {
    let mut taken: Vec<_> = active.iter().map(|sequence| sequence.rows.clone()).collect();
    taken.sort_unstable_by_key(|rows| rows.start);
    let mut first = 0;
    for taken in taken {
        if taken.start - first >= needed {
            break;
        }
        first = taken.end;
    }
    (first + needed <= rows).then_some(first)
}

impl Inference {
    /// Compiles the program that continues prompts in batches, for up to `max_new_tokens` each.
    pub fn compile_batch(
        &self,
        prompts: &[Vec<i32>],
        max_new_tokens: u64,
        size: BatchSize,
        run: DType,
        target: &'static dyn Target,
    ) -> Result<Compiled, GenerateError> {
        prompts.iter().try_for_each(|prompt| self.check(prompt))?;
        // All of them, as many as the limit allows, or a single one.
        let limited = |tokens: &dyn Fn(&Vec<i32>) -> u64| {
            let (all, longest) = (prompts.iter().map(tokens).sum::<u64>(), prompts.iter().map(tokens).max());
            longest.map(|longest| all.min(size.tokens).max(longest)).ok_or(GenerateError::EmptyPrompt)
        };
        let size = ProgramSize {
            prefill: limited(&|prompt| prompt.len() as u64)?,
            sequences: size.sequences.clamp(1, prompts.len() as u64),
            cached: limited(&|prompt| self.cached_tokens(prompt, max_new_tokens))?,
        };
        self.compile_size(size, run, target)
    }
}

impl Generator<'_> {
    /// Continues every prompt. `each` is called with the index of a prompt and every new token, and may end its text; `done`
    /// with its tokens as soon as they are complete, shorter ones before longer ones. Equal prompts are sampled differently,
    /// and each alike in every batch: random numbers follow the index.
    pub fn generate_batch(
        &mut self,
        prompts: &[Vec<i32>],
        generation: &Generation,
        each: &mut dyn FnMut(usize, i32) -> ControlFlow<()>,
        done: &mut dyn FnMut(usize, Generated),
    ) -> Result<(), GenerateError> {
        generation.check()?;
        prompts.iter().try_for_each(|prompt| self.model.check(prompt))?;
        let most_rows = self.compiled.row_sizes.last().copied().unwrap_or(0);
        let cache_rows = self.compiled.program.cached_tokens;
        let most_sequences = self.compiled.program.logits().map_or(1, |(_, sequences)| sequences as usize);
        let mut waiting = prompts.iter().enumerate().peekable();
        // Those that wait for their prefill are last.
        let mut active: Vec<SequenceState> = Vec::new();
        loop {
            while active.len() < most_sequences {
                let Some((_, ids)) = waiting.peek() else { break };
                let needed = self.model.cached_tokens(ids, generation.max_new_tokens);
                let is_new = |sequence: &&SequenceState| sequence.cached == 0;
                let prefill: usize = active.iter().filter(is_new).map(|sequence| sequence.ids.len()).sum();
                let fits = (prefill + ids.len()) as u64 <= most_rows;
                let first = free_rows(&active, needed, cache_rows).filter(|_| fits);
                // A prompt that exceeds the program is admitted alone, and the engine reports both numbers.
                let Some(first) = first.or(active.is_empty().then_some(0)) else { break };
                let Some((prompt, ids)) = waiting.next() else { break };
                let rows = first..first + needed;
                active.push(SequenceState { prompt, ids: ids.clone(), rows, cached: 0, is_stopped: false });
            }
            if active.is_empty() {
                return Ok(());
            }
            let before = active.len();
            active.retain(|sequence| {
                let new = &sequence.ids[prompts[sequence.prompt].len()..];
                let end = self.end(new, sequence, generation);
                end.inspect(|end| done(sequence.prompt, Generated { ids: new.to_vec(), end: *end })).is_none()
            });
            if active.len() < before {
                continue;
            }
            let logits = self.next_logits(&mut active)?;
            let vocab = logits.len() / active.len();
            for (sequence, logits) in active.iter_mut().zip(logits.chunks_exact(vocab)) {
                let id = sample::choose(logits, generation, sequence.prompt, &sequence.ids);
                sequence.ids.push(id);
                sequence.is_stopped = each(sequence.prompt, id).is_break();
            }
        }
    }

    /// The finish reason of a sequence with these new tokens; `None` if it is not complete.
    fn end(&self, new: &[i32], sequence: &SequenceState, generation: &Generation) -> Option<End> {
        let stop = new.last().filter(|id| generation.stops.contains(id));
        let positions = self.model.model.max_positions.unwrap_or(u64::MAX);
        match stop {
            Some(id) => Some(End::Stop(*id)),
            None if sequence.is_stopped => Some(End::Stopped),
            None if new.len() as u64 >= generation.max_new_tokens => Some(End::Length),
            None if sequence.ids.len() as u64 >= positions => Some(End::Positions),
            None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_gets_the_first_free_rows_that_are_enough() {
        let active = |rows: &[std::ops::Range<u64>]| -> Vec<SequenceState> {
            let sequence = |rows: &std::ops::Range<u64>| SequenceState {
                prompt: 0,
                ids: Vec::new(),
                rows: rows.clone(),
                cached: 1,
                is_stopped: false,
            };
            rows.iter().map(sequence).collect()
        };
        assert_eq!(free_rows(&[], 10, 10), Some(0));
        assert_eq!(free_rows(&[], 11, 10), None);
        // Free: 0 to 3, 5 to 10 and 12 to 20.
        let taken = active(&[10..12, 3..5]);
        let found = [3, 4, 5, 6, 8, 9].map(|needed| free_rows(&taken, needed, 20));
        assert_eq!(found, [Some(0), Some(5), Some(5), Some(12), Some(12), None]);
    }
}
