//! `generate` with an encoder-decoder model: the answer to one source.

use std::ops::ControlFlow;
use std::time::Instant;

use anyhow::Context;
use serde_json::json;
use zeroth::base::{counted, format_bytes, grouped};
use zeroth::data::PairOptions;
use zeroth::kernel::Tier;
use zeroth::train::{BeamSettings, End, Generated, Generation};

use super::generate_sampling::generation;
use super::generate_sequences;
use super::generate_setup::{ANSWERS_AT_ONCE, GenerateSetup, end_name};
use super::generate_stream::TextStream;
use crate::exit::Exit;
use crate::generate_flags::GenerateArgs;
use crate::output::{self, Output};

/// Default number of new tokens.
const MAX_NEW_TOKENS: u64 = 128;

/// The source: tokens as given, or a text after the prefix.
fn source(setup: &GenerateSetup, arguments: &GenerateArgs) -> anyhow::Result<Vec<i32>> {
    let given = &arguments.prompt;
    if !given.prompt_ids.is_empty() {
        return Ok(given.prompt_ids.clone());
    }
    let text = match (&given.text, &given.file) {
        (Some(text), _) => text.clone(),
        (None, Some(file)) => std::fs::read_to_string(file)
            .with_context(|| format!("cannot read the prompt from {}", file.display()))?,
        (None, None) => anyhow::bail!(
            "no prompt: an encoder-decoder model answers one text at a time and has no chat; give --prompt, --prompt-file, \
             --prompt-ids or --data"
        ),
    };
    let (ids, truncated) = setup.encoder.source(&text)?;
    if truncated > 0 {
        output::note(&format!(
            "note: the source was truncated to {}, of {} (--max-source-length)",
            counted(ids.len() as u64, "token"),
            grouped((ids.len() + truncated) as u64)
        ));
    }
    Ok(ids)
}

pub(super) fn answer(
    setup: &GenerateSetup,
    pairs: &PairOptions,
    arguments: &GenerateArgs,
    output: &Output,
) -> anyhow::Result<Exit> {
    anyhow::ensure!(
        arguments.chat != Some(true) && setup.system.is_none(),
        "--chat and --system are for chat templates, and this is an encoder-decoder model: --source-prefix puts a text \
         before the prompt"
    );
    let sources = [source(setup, arguments)?];
    let start = pairs.pairs.start.token;
    let max_new_tokens = arguments.max_new_tokens.unwrap_or(MAX_NEW_TOKENS);
    let generation = generation(&arguments.sampling, max_new_tokens, &setup.stops)?;
    let beams = check_beams(setup.beams, &generation)?;
    if arguments.sampling.num_return_sequences > 1 {
        return generate_sequences::sample(setup, &sources[0], &generation, arguments, output);
    }
    let compiled = setup.model.compile_answers(
        &sources,
        max_new_tokens,
        beams,
        ANSWERS_AT_ONCE,
        (setup.run, setup.target),
    )?;
    let Some(mut generator) = setup.start(&compiled)? else { return Ok(Exit::DoesNotFit) };
    let logits = if arguments.logits { Some(generator.first_logits(&sources[0], start)?) } else { None };
    let mut stream =
        TextStream::new(&setup.encoder, &setup.stops, &arguments.sampling.stop, !output.is_json());
    let begun = Instant::now();
    let mut found = Generated { ids: Vec::new(), end: End::Length };
    let mut each = |_: usize, id: i32| stream.take(id);
    generator.answer((&sources, start), &generation, beams, &mut each, &mut |_, answer| found = answer)?;
    if beams.beams > 1 {
        // Only the best of all is shown.
        for id in &found.ids {
            if let ControlFlow::Break(()) = stream.take(*id) {
                break;
            }
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    if output.is_json() {
        let mut result = json!({
            "prompt_ids": sources[0],
            "ids": found.ids,
            "text": setup.encoder.tokenizer_vocabulary().map(|_| stream.text()),
            "end": if stream.is_cut() { "stop" } else { end_name(found.end) },
        });
        if let Some(logits) = logits {
            result["logits"] = json!(logits);
        }
        output::json(&result)?;
        return Ok(Exit::Done);
    }
    stream.end();
    let end = match found.end {
        End::Length | End::Positions => "reached --max-new-tokens".to_owned(),
        End::Stop(id) => format!("ended by token {id}"),
        End::Stopped => "ended by --stop".to_owned(),
    };
    output::note(&format!(
        "{} from {} in {seconds:.1} s, {end}; {} of memory, {} of them for cached keys and values",
        counted(found.ids.len() as u64, "token"),
        counted(sources[0].len() as u64, "source token"),
        format_bytes(compiled.memory.arena(Tier::Device)),
        format_bytes(compiled.cache_bytes())
    ));
    Ok(Exit::Done)
}

/// Refuses sampling in a beam search.
fn check_beams(beams: BeamSettings, generation: &Generation) -> anyhow::Result<BeamSettings> {
    anyhow::ensure!(
        beams.beams == 1 || generation.temperature == 0.0,
        "--num-beams {} searches for the most likely text, and sampling draws one: leave out --do-sample and --temperature, \
         or --num-beams",
        beams.beams
    );
    Ok(beams)
}
