//! `generate --num-return-sequences`: several sampled texts of one prompt, decoded together.

use std::time::Instant;

use serde_json::{Value, json};
use zeroth::base::{counted, format_bytes};
use zeroth::kernel::Tier;
use zeroth::train::{Generated, Generation};

use super::generate_setup::{GenerateSetup, end_name};
use super::generate_stream::TextStream;
use crate::exit::Exit;
use crate::generate_flags::GenerateArgs;
use crate::output::{self, Output};

pub(super) fn sample(
    setup: &GenerateSetup,
    prompt: &[i32],
    generation: &Generation,
    arguments: &GenerateArgs,
    output: &Output,
) -> anyhow::Result<Exit> {
    let count = arguments.sampling.num_return_sequences as usize;
    let prompts = vec![prompt.to_vec(); count];
    let compiled = setup.compile_batch(&prompts, generation.max_new_tokens)?;
    let Some(mut generator) = setup.start(&compiled)? else { return Ok(Exit::DoesNotFit) };
    let logits = match &setup.pairs {
        _ if !arguments.logits => None,
        Some(pairs) => Some(generator.first_logits(prompt, pairs.pairs.start.token)?),
        None => Some(generator.logits(prompt)?),
    };
    let new_stream = || TextStream::new(&setup.encoder, &setup.stops, &arguments.sampling.stop, false);
    let mut streams: Vec<TextStream<'_>> = std::iter::repeat_with(new_stream).take(count).collect();
    let mut found: Vec<Option<Generated>> = vec![None; count];
    let begun = Instant::now();
    setup.continue_batch(
        &mut generator,
        &prompts,
        generation,
        &mut |place, id| streams[place].take(id),
        &mut |place, generated| found[place] = Some(generated),
    )?;
    let seconds = begun.elapsed().as_secs_f64();
    let sequences: Vec<(&TextStream<'_>, Generated)> =
        streams.iter().zip(found.into_iter().flatten()).collect();
    if output.is_json() {
        let sequence = |(stream, generated): &(&TextStream<'_>, Generated)| {
            json!({
                "ids": generated.ids,
                "text": setup.encoder.tokenizer_vocabulary().map(|_| stream.text()),
                "end": if stream.is_cut() { "stop" } else { end_name(generated.end) },
            })
        };
        let all: Vec<Value> = sequences.iter().map(sequence).collect();
        let mut result = json!({"prompt_ids": prompt, "sequences": all});
        if let Some(logits) = logits {
            result["logits"] = json!(logits);
        }
        output::json(&result)?;
        return Ok(Exit::Done);
    }
    for (number, (stream, _)) in (1..).zip(&sequences) {
        output::text(&format!("--- {number} of {count}\n{}\n", stream.text()));
    }
    let tokens: usize = sequences.iter().map(|(_, generated)| generated.ids.len()).sum();
    output::note(&format!(
        "{} of {count} sequences after {} in {seconds:.1} s; {} of memory, {} of them for cached keys and values",
        counted(tokens as u64, "token"),
        prompt.len(),
        format_bytes(compiled.memory.arena(Tier::Device)),
        format_bytes(compiled.cache_bytes())
    ));
    Ok(Exit::Done)
}
