//! Continuing one conversation: keys and values of a prompt's beginning are reused from the text before it.

use std::ops::ControlFlow;

use zeroth_base::DType;
use zeroth_engine::NewToken;
use zeroth_kernel::Target;
use zeroth_program::Compiled;

use super::{GenerateError, Generated, Generation, Generator, Inference, ProgramSize, SequenceState};

/// New tokens are decoded one by one if the whole prompt has at least this many times as many; otherwise the prompt is
/// prefilled. A prefill reads the weights once for all tokens, a decode once per token.
const REUSE: usize = 16;

impl Inference {
    /// Compiles the program for a conversation of up to `context` tokens.
    pub fn compile_context(
        &self,
        context: u64,
        run: DType,
        target: &'static dyn Target,
    ) -> Result<Compiled, GenerateError> {
        let context = self.model.max_positions.map_or(context, |most| context.min(most)).max(1);
        self.compile_size(ProgramSize { prefill: context, sequences: 1, cached: context }, run, target)
    }
}

impl Generator<'_> {
    /// As [`Self::generate`]; the cache of the previous call is reused for the tokens that both prompts begin with, if
    /// few are new. `turn` is the index of the prompt among those of the conversation: it is sampled as the prompt of that
    /// index in a batch.
    pub fn generate_reusing(
        &mut self,
        prompt: &[i32],
        turn: usize,
        generation: &Generation,
        each: &mut dyn FnMut(i32) -> ControlFlow<()>,
    ) -> Result<Generated, GenerateError> {
        generation.check()?;
        self.model.check(prompt)?;
        let rows = 0..self.compiled.program.cached_tokens;
        let mut sequence =
            SequenceState { prompt: turn, ids: prompt.to_vec(), rows, cached: 0, is_stopped: false };
        // Invalid until the call succeeds.
        let before = std::mem::take(&mut self.cached);
        let shared = before.iter().zip(prompt).take_while(|(before, now)| before == now).count();
        // The last token's logits are needed.
        let shared = shared.min(prompt.len() - 1);
        if shared > 0 && generation.max_new_tokens > 0 && (prompt.len() - shared) * REUSE <= prompt.len() {
            sequence.cached = shared;
            while sequence.cached + 1 < prompt.len() {
                let position = sequence.cached;
                self.engine.decode(&[NewToken {
                    id: prompt[position],
                    position: position as u32,
                    first_row: 0,
                }])?;
                sequence.cached += 1;
            }
        }
        let end = self.continue_sequence(&mut sequence, generation, each)?;
        self.cached = sequence.ids[..sequence.cached].to_vec();
        Ok(Generated { ids: sequence.ids.split_off(prompt.len()), end })
    }
}
