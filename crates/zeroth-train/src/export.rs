//! The trained model as a Hugging Face folder, streamed parameter by parameter: no rank ever holds the model.

use std::io;
use std::path::{Path, PathBuf};

use half::bf16;
use serde_json::{Map, Value};
use zeroth_base::{DType, publish};
use zeroth_model::{DEFAULT_SHARD_BYTES, NewTensor, WeightWriter, WeightsError, read_config};
use zeroth_step::run::{Engine, RunError, State};

use crate::Job;

/// Elements that are gathered at once.
const PIECE: u64 = 1 << 20;
/// Files of a model's folder that belong to the model and not to its weights.
const BESIDE: &[&str] = &[
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
];

/// A model that could not be written.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// Weights did not come together.
    #[error(transparent)]
    Run(#[from] RunError),
    /// Weights could not be written.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// Another file could not.
    #[error("cannot write {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// Writes the model to `folder` on rank 0; all ranks must call it. 16-bit runs give bf16 weights, others f32.
pub(crate) fn export(
    job: &Job,
    engine: &mut Engine<'_>,
    names: &[String],
    folder: &Path,
) -> Result<(), ExportError> {
    let dtype = if job.settings.types.run == DType::F32 { DType::F32 } else { DType::Bf16 };
    let is_writer = engine.rank() == 0;
    let mut writer = None;
    if is_writer {
        std::fs::create_dir_all(folder).map_err(failed(folder))?;
        let tensors = job.table.iter().map(|parameter| NewTensor::of(parameter, dtype)).collect();
        writer = Some(WeightWriter::create(folder, tensors, DEFAULT_SHARD_BYTES)?);
    }
    let params = engine.params();
    let mut elements = vec![0.0f32; PIECE as usize];
    let mut rounded: Vec<bf16> = Vec::new();
    for parameter in job.table.iter() {
        let Some(param) = names.iter().position(|name| *name == parameter.name).map(|place| params[place])
        else {
            continue;
        };
        for first in (0..parameter.elements()).step_by(PIECE as usize) {
            let range = first..(first + PIECE).min(parameter.elements());
            let piece = &mut elements[..(range.end - range.start) as usize];
            engine.gather(State::Weights, param, range, piece)?;
            let Some(writer) = &mut writer else { continue };
            if dtype == DType::F32 {
                writer.append_f32(&parameter.name, piece)?;
            } else {
                rounded.clear();
                rounded.extend(piece.iter().map(|element| bf16::from_f32(*element)));
                writer.append_bf16(&parameter.name, &rounded)?;
            }
        }
    }
    if let Some(writer) = writer {
        writer.finish()?;
        write_beside(&job.folder, folder, dtype)?;
    }
    Ok(())
}

/// config.json with the type the weights have now, and the tokenizer's files as they are.
fn write_beside(from: &Path, to: &Path, dtype: DType) -> Result<(), ExportError> {
    let path = to.join("config.json");
    let (mut config, _): (Map<String, Value>, String) = read_config(from)
        .map_err(|error| ExportError::Io { path: path.clone(), source: io::Error::other(error) })?;
    let key = if config.contains_key("torch_dtype") { "torch_dtype" } else { "dtype" };
    let name = if dtype == DType::F32 { "float32" } else { "bfloat16" };
    config.insert(key.to_owned(), name.into());
    let text = serde_json::to_string_pretty(&config).map_err(io::Error::other).map_err(failed(&path))?;
    publish(&path, format!("{text}\n").as_bytes()).map_err(io::Error::other).map_err(failed(&path))?;
    for name in BESIDE {
        let (source, target) = (from.join(name), to.join(name));
        if source.is_file() {
            std::fs::copy(&source, &target).map_err(failed(&target))?;
        }
    }
    Ok(())
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> ExportError + '_ {
    move |source| ExportError::Io { path: path.to_owned(), source }
}
