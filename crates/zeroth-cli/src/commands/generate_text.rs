//! `generate`: generates text with a model.

use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use serde_json::json;
use zeroth::base::{counted, format_bytes};
use zeroth::data::{Columns, EncoderOptions};
use zeroth::job::system_message;
use zeroth::kernel::Tier;
use zeroth::machine::probe;
use zeroth::model::locate;
use zeroth::train::{End, GenerateError, GivenBase, Inference, begin_id, check_adapter_base, stop_ids};

use super::generate_sampling::generation;
use super::generate_setup::{GenerateSetup, end_name};
use super::generate_stream::TextStream;
use super::process_memory::ProcessMemory;
use super::{generate_answers, generate_chat, generate_rows, generate_sequences, render_templates};
use crate::exit::Exit;
use crate::generate_flags::{GenerateArgs, PromptArgs, RowsArgs};
use crate::output::{self, Output};
use crate::train_flags::precision;
use crate::value_args::target;

/// Default number of new tokens.
const MAX_NEW_TOKENS: u64 = 128;

pub(super) fn run(arguments: &GenerateArgs, output: &Output) -> anyhow::Result<Exit> {
    anyhow::ensure!(!arguments.logits || output.is_json(), "--logits needs --format json");
    let memory = ProcessMemory::at_start();
    let folder = locate(&arguments.model)?;
    let model = Inference::open_with(&folder, arguments.adapter.as_deref())?;
    for warning in model.warnings() {
        output::note(&format!("note: {warning}"));
    }
    if let Some(adapter) = &arguments.adapter {
        let given = GivenBase { name: &arguments.model, folder: &folder };
        let note = check_adapter_base(adapter, given, arguments.allow_other_base, || model.sample());
        if let Some(note) = note.context("--adapter")? {
            output::note(&format!("note: {note}"));
        }
    } else if arguments.allow_other_base {
        output::note("note: --allow-other-base has no effect without --adapter");
    }
    let columns: Columns = arguments.rows.columns.join(",").parse()?;
    let system = arguments.system.as_deref().map(system_message).transpose()?;
    // That of a prompt is the caller's, whether or not its template has a place for it.
    let of_rows = system.clone().filter(|_| !arguments.prompt.data.is_empty());
    let pairs = arguments.pairs.request().options(model.model(), &folder)?;
    let beams = arguments.beams.settings(pairs.is_some())?;
    let options = EncoderOptions {
        columns,
        system: of_rows,
        pairs: pairs.clone(),
        ..EncoderOptions::new(model.model().vocab)
    };
    let run = precision(arguments.bf16, arguments.fp16, arguments.fp32)?.unwrap_or(model.stored());
    let machine = probe();
    let target = target(arguments.device, arguments.threads, &machine)?;
    let encoder = render_templates::encoder(&folder, options)?;
    let stop_texts = &arguments.sampling.stop;
    anyhow::ensure!(
        stop_texts.is_empty() || encoder.tokenizer_vocabulary().is_some(),
        "--stop needs a tokenizer, but {} has no tokenizer.json",
        arguments.model
    );
    let mut stops = stop_ids(&folder);
    // Special tokens have no text that could be found.
    stops.extend(stop_texts.iter().filter_map(|text| encoder.special_token(text)));
    let setup = GenerateSetup { model, encoder, run, target, machine, memory, stops, system, pairs, beams };
    let PromptArgs { text, file, prompt_ids, data } = &arguments.prompt;
    let ended = if !data.is_empty() {
        generate_rows::answer(&setup, arguments, output)
    } else if let Some(pairs) = &setup.pairs {
        generate_answers::answer(&setup, pairs, arguments, output)
    } else if text.is_some() || file.is_some() || !prompt_ids.is_empty() {
        speak(&setup, &folder, arguments, output)
    } else {
        let RowsArgs { columns, max_eval_samples, rows } = &arguments.rows;
        let is_for_rows = !columns.is_empty() || max_eval_samples.is_some() || rows.is_some();
        anyhow::ensure!(!is_for_rows, "--columns, --max-eval-samples and --rows need --data");
        anyhow::ensure!(!arguments.logits, "--logits needs a prompt");
        anyhow::ensure!(
            arguments.sampling.num_return_sequences == 1,
            "--num-return-sequences needs a prompt: a turn of a chat has one answer"
        );
        generate_chat::converse(&setup, arguments, output)
    };
    match ended {
        // The input was valid, but execution failed.
        Err(error) if is_failure(&error) => {
            output::error(&error.to_string());
            Ok(Exit::Failed)
        }
        ended => ended,
    }
}

fn is_failure(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(GenerateError::Run(_) | GenerateError::NotFinite { .. }))
}

/// The prompt's tokens. An empty prompt becomes the begin-of-text token, as in transformers.
fn prompt(arguments: &GenerateArgs, folder: &Path, setup: &GenerateSetup) -> anyhow::Result<Vec<i32>> {
    let encoder = &setup.encoder;
    let ids = &arguments.prompt.prompt_ids;
    if !ids.is_empty() {
        return Ok(ids.clone());
    }
    let text = match (&arguments.prompt.text, &arguments.prompt.file) {
        (Some(text), _) => text.clone(),
        (None, Some(file)) => std::fs::read_to_string(file)
            .with_context(|| format!("cannot read the prompt from {}", file.display()))?,
        (None, None) => String::new(),
    };
    anyhow::ensure!(
        encoder.tokenizer_vocabulary().is_some(),
        "{} has no tokenizer.json: give tokens with --prompt-ids",
        arguments.model
    );
    let chat = arguments.chat.unwrap_or_else(|| encoder.has_chat_template());
    anyhow::ensure!(chat || setup.system.is_none(), "--system needs a chat, but --chat is false");
    let ids = encoder.prompt(&text, setup.system.as_deref(), chat)?;
    if !ids.is_empty() {
        return Ok(ids);
    }
    let begin = begin_id(folder).with_context(|| {
        format!(
            "the prompt is empty, and {} defines no begin-of-text token (bos_token_id): give a prompt, or its tokens with \
             --prompt-ids",
            arguments.model
        )
    })?;
    output::note(&format!("note: the prompt is empty: starting from token {begin} (bos_token_id)"));
    Ok(vec![begin])
}

fn speak(
    setup: &GenerateSetup,
    folder: &Path,
    arguments: &GenerateArgs,
    output: &Output,
) -> anyhow::Result<Exit> {
    let prompt = prompt(arguments, folder, setup)?;
    let max_new_tokens = arguments.max_new_tokens.unwrap_or(MAX_NEW_TOKENS);
    let generation = generation(&arguments.sampling, max_new_tokens, &setup.stops)?;
    if arguments.sampling.num_return_sequences > 1 {
        return generate_sequences::sample(setup, &prompt, &generation, arguments, output);
    }
    let compiled = setup.model.compile(&prompt, generation.max_new_tokens, setup.run, setup.target)?;
    let Some(mut generator) = setup.start(&compiled)? else { return Ok(Exit::DoesNotFit) };
    let logits = if arguments.logits { Some(generator.logits(&prompt)?) } else { None };
    let mut stream =
        TextStream::new(&setup.encoder, &setup.stops, &arguments.sampling.stop, !output.is_json());
    let begun = Instant::now();
    let generated = generator.generate(&prompt, &generation, &mut |id| stream.take(id))?;
    let (count, seconds) = (generated.ids.len(), begun.elapsed().as_secs_f64());
    if output.is_json() {
        let mut result = json!({
            "prompt_ids": prompt,
            "ids": generated.ids,
            "text": setup.encoder.tokenizer_vocabulary().map(|_| stream.text()),
            "end": if stream.is_cut() { "stop" } else { end_name(generated.end) },
        });
        if let Some(logits) = logits {
            result["logits"] = json!(logits);
        }
        output::json(&result)?;
        return Ok(Exit::Done);
    }
    stream.end();
    let end = match generated.end {
        End::Length => "reached --max-new-tokens".to_owned(),
        End::Stop(id) => format!("ended by token {id}"),
        End::Positions => "the context is full".to_owned(),
        End::Stopped => "ended by --stop".to_owned(),
    };
    output::note(&format!(
        "{} after {} in {seconds:.1} s, {end}; {} of memory, {} of them for cached keys and values",
        counted(count as u64, "token"),
        prompt.len(),
        format_bytes(compiled.memory.arena(Tier::Device)),
        format_bytes(compiled.cache_bytes())
    ));
    Ok(Exit::Done)
}
