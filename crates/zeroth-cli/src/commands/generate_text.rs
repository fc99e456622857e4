//! `generate`: text from a model folder, on our own kernels.

use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use serde_json::json;
use zeroth::base::{DType, counted, format_bytes};
use zeroth::config::resolve::Precision;
use zeroth::cpu::CpuDevice;
use zeroth::cuda::CudaDevice;
use zeroth::data::{Encoder, EncoderOptions};
use zeroth::kernel::{Device, Tier};
use zeroth::machine::{Gpus, Machine, probe};
use zeroth::model::locate;
use zeroth::program::Compiled;
use zeroth::program::Target;
use zeroth::train::{End, GenerateError, Generation, Inference, begin_id, stop_ids};

use super::render_templates;
use crate::cli::DeviceArg;
use crate::exit::Exit;
use crate::generate_flags::GenerateArgs;
use crate::output::{self, Output};
use crate::train_flags::precision;

pub(super) fn run(arguments: &GenerateArgs, output: &Output) -> anyhow::Result<Exit> {
    anyhow::ensure!(
        !arguments.logits || output.is_json(),
        "--logits gives numbers for programs: add --format json"
    );
    let folder = locate(&arguments.model)?;
    let model = Inference::open(&folder)?;
    for warning in model.warnings() {
        output::note(&format!("note: {warning}"));
    }
    let encoder = render_templates::encoder(&folder, EncoderOptions::new(model.model().vocab))?;
    let prompt = prompt(arguments, &folder, &encoder)?;
    let run = match precision(arguments.bf16, arguments.fp16, arguments.fp32)? {
        Some(Precision::Bf16) => DType::Bf16,
        Some(Precision::Fp16) => DType::F16,
        Some(Precision::Fp32) => DType::F32,
        None => model.stored(),
    };
    let machine = probe();
    let target = target(arguments, &machine)?;
    let compiled = model.compile(&prompt, arguments.max_new_tokens, run, target)?;
    if let Some(misfit) = misfit(&compiled, &machine) {
        output::error(&misfit);
        return Ok(Exit::DoesNotFit);
    }
    let device: Box<dyn Device> = {
        let [bytes, host] = [Tier::Device, Tier::Host].map(|tier| compiled.memory.arena(tier));
        match target {
            Target::Cpu { threads } => Box::new(CpuDevice::new(threads, bytes, host)?),
            Target::Cuda => Box::new(CudaDevice::open(0, bytes, host)?),
        }
    };
    let generation = Generation {
        max_new_tokens: arguments.max_new_tokens,
        temperature: arguments.temperature,
        top_k: arguments.top_k,
        top_p: arguments.top_p,
        seed: arguments.seed,
        stops: stop_ids(&folder),
    };
    match speak(&model, &compiled, device, &prompt, &generation, &encoder, arguments, output) {
        Ok(()) => Ok(Exit::Done),
        // What was given was right, and the run failed.
        Err(error) if is_failure(&error) => {
            output::error(&error.to_string());
            Ok(Exit::Failed)
        }
        Err(error) => Err(error),
    }
}

fn is_failure(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(GenerateError::Run(_) | GenerateError::NotFinite { .. }))
}

/// The prompt's tokens. An empty one goes on from the token that begins a text, as in transformers.
fn prompt(arguments: &GenerateArgs, folder: &Path, encoder: &Encoder) -> anyhow::Result<Vec<i32>> {
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
    anyhow::ensure!(chat || arguments.system.is_none(), "--system belongs to a chat, and --chat is false");
    let ids = encoder.prompt(&text, arguments.system.as_deref(), chat)?;
    if !ids.is_empty() {
        return Ok(ids);
    }
    let begin = begin_id(folder).with_context(|| {
        format!(
            "the prompt is empty, and {} names no token that begins a text (bos_token_id): give a prompt, or its tokens with \
             --prompt-ids",
            arguments.model
        )
    })?;
    output::note(&format!("note: the prompt is empty: this goes on from token {begin}, bos_token_id"));
    Ok(vec![begin])
}

fn target(arguments: &GenerateArgs, machine: &Machine) -> anyhow::Result<Target> {
    let has_cards = matches!(&machine.gpus, Gpus::Found { devices, .. } if !devices.is_empty());
    let device = arguments.device.unwrap_or(if has_cards { DeviceArg::Cuda } else { DeviceArg::Cpu });
    anyhow::ensure!(
        device == DeviceArg::Cpu || has_cards,
        "--device cuda was asked for and no GPU was found: `zeroth doctor` says what was looked for; --device cpu computes \
         on the processor"
    );
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(match device {
        DeviceArg::Cuda => Target::Cuda,
        DeviceArg::Cpu => {
            Target::Cpu { threads: arguments.threads.map_or(processors, |threads| threads as usize) }
        }
    })
}

/// Why the program does not fit what is free, where it does not.
fn misfit(compiled: &Compiled, machine: &Machine) -> Option<String> {
    let needed = compiled.memory.arena(Tier::Device);
    let free = match compiled.target {
        Target::Cpu { .. } => machine.host_memory_available(),
        Target::Cuda => machine.device_memory().map(|memory| memory.free),
    };
    let free = free.filter(|free| *free < needed)?;
    Some(format!(
        "the model with {} needs {} and {} are free: fewer --max-new-tokens or --bf16 may fit",
        counted(compiled.row_sizes.last().copied().unwrap_or(0), "token"),
        format_bytes(needed),
        format_bytes(free)
    ))
}

#[allow(clippy::too_many_arguments, reason = "all that a text comes from")]
fn speak(
    model: &Inference,
    compiled: &Compiled,
    device: Box<dyn Device>,
    prompt: &[i32],
    generation: &Generation,
    encoder: &Encoder,
    arguments: &GenerateArgs,
    output: &Output,
) -> anyhow::Result<()> {
    let mut generator = model.start(compiled, device)?;
    let logits = if arguments.logits { Some(generator.logits(prompt)?) } else { None };
    let mut stream = Stream { encoder, stops: &generation.stops, ids: Vec::new(), shown: 0 };
    let begun = Instant::now();
    let generated = generator.generate(prompt, generation, &mut |id| {
        if !output.is_json() {
            stream.take(id);
        }
    })?;
    let (count, seconds) = (generated.ids.len(), begun.elapsed().as_secs_f64());
    if output.is_json() {
        let spoken: Vec<i32> = without_stop(&generated.ids, &generation.stops);
        let mut result = json!({
            "prompt_ids": prompt,
            "ids": generated.ids,
            "text": encoder.tokenizer_vocabulary().map(|_| encoder.decode(&spoken)),
            "end": match generated.end {
                End::Length => "length",
                End::Stop(_) => "stop",
                End::Positions => "positions",
            },
        });
        if let Some(logits) = logits {
            result["logits"] = json!(logits);
        }
        return output::json(&result);
    }
    stream.end();
    let end = match generated.end {
        End::Length => "as many as asked for".to_owned(),
        End::Stop(id) => format!("ended by token {id}"),
        End::Positions => "the model has no more positions".to_owned(),
    };
    output::note(&format!(
        "{} after {} in {seconds:.1} s, {end}",
        counted(count as u64, "token"),
        prompt.len()
    ));
    Ok(())
}

/// Tokens without the one that ended them.
fn without_stop(ids: &[i32], stops: &[i32]) -> Vec<i32> {
    let spoken = ids.split_last().filter(|(last, _)| stops.contains(last)).map_or(ids, |(_, before)| before);
    spoken.to_vec()
}

/// Text that is shown as it comes. Characters of several tokens are shown when they are whole.
struct Stream<'a> {
    encoder: &'a Encoder,
    stops: &'a [i32],
    ids: Vec<i32>,
    /// Bytes of the text that are shown.
    shown: usize,
}

impl Stream<'_> {
    fn take(&mut self, id: i32) {
        if self.stops.contains(&id) {
            return;
        }
        self.ids.push(id);
        let text = self.encoder.decode(&self.ids);
        let whole = text.trim_end_matches(char::REPLACEMENT_CHARACTER).len();
        self.show(&text, whole);
    }

    fn show(&mut self, text: &str, until: usize) {
        if let Some(new) = text.get(self.shown..until) {
            output::stream(new);
            self.shown = until;
        }
    }

    /// What was held back, and the end of the line.
    fn end(&mut self) {
        let text = self.encoder.decode(&self.ids);
        self.show(&text, text.len());
        output::stream("\n");
    }
}
