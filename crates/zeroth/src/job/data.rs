//! A run's data: tokenised once by the launcher, and opened by every rank.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use zeroth_base::{counted, grouped};
use zeroth_data::{
    Columns, Encoder, EncoderOptions, LengthLimits, Packing, PairOptions, PrepareOptions, Prepared, Samples,
    Truncation, check_trained, prepare_with_progress,
};
use zeroth_model::ModelConfig;
use zeroth_train::split_dataset;

use super::data_error::DataRequestError;
use super::data_files::{data_files, refuse_output_inside, system_message, token_cache};
use super::events::{OnEvent, ResolveEvent};
use super::handoff::TokenCaches;
use super::request::{DataRequest, ReadingRequest};
use super::row_length::longest_row;

/// Tokenisation settings.
#[derive(Debug)]
pub struct Reading {
    folder: PathBuf,
    options: EncoderOptions,
    /// Values given that do not apply to pairs, by flag.
    idle: Vec<&'static str>,
    max_length: u64,
    /// The model's maximum sequence length.
    positions: Option<u64>,
    truncation: Truncation,
    template_command: Option<&'static str>,
}

impl Reading {
    /// The settings for a model in a folder.
    pub fn new(
        request: &ReadingRequest,
        model: &ModelConfig,
        folder: &Path,
    ) -> Result<Self, DataRequestError> {
        let columns: Columns = request.columns.join(",").parse()?;
        let pairs = request.pairs.options(model, folder)?;
        if pairs.is_some() && request.system.is_some() {
            return Err(DataRequestError::SystemOfPairs { family: model.family.model_type() });
        }
        let system = request.system.as_deref().map(system_message).transpose()?;
        let idle = [
            ("--max-length", request.max_length.is_some()),
            ("--truncation-strategy", request.truncation != Truncation::Drop),
        ];
        let idle = idle.into_iter().filter(|(_, is_given)| *is_given && pairs.is_some());
        Ok(Self {
            folder: folder.to_owned(),
            idle: idle.map(|(flag, _)| flag).collect(),
            options: EncoderOptions { columns, system, pairs, ..EncoderOptions::new(model.vocab) },
            max_length: longest_row(request.max_length, model),
            positions: model.max_positions,
            truncation: request.truncation,
            template_command: request.template_command,
        })
    }

    /// Maximum tokens of a row.
    pub fn max_length(&self) -> u64 {
        self.max_length
    }

    /// The maximum length of samples.
    pub fn limits(&self) -> LengthLimits {
        match self.pairs() {
            Some(options) => LengthLimits::Pairs(options.pairs.limits),
            None => LengthLimits::Rows(self.max_length),
        }
    }

    /// Set for encoder-decoder models.
    pub fn pairs(&self) -> Option<&PairOptions> {
        self.options.pairs.as_ref()
    }

    /// A note on values that do not apply, or if rows may exceed the model's maximum sequence length.
    pub fn note(&self) -> Option<String> {
        if self.pairs().is_some() {
            return (!self.idle.is_empty()).then(|| {
                format!(
                    "{} {} not apply to an encoder-decoder model: sources and targets are truncated to --max-source-length \
                     and --max-target-length",
                    self.idle.join(" and "),
                    if self.idle.len() == 1 { "does" } else { "do" }
                )
            });
        }
        let positions = self.positions.filter(|positions| *positions < self.max_length)?;
        Some(format!(
            "--max-length {} exceeds the {} of the model (max_position_embeddings): longer rows train \
             untrained positions, and `zeroth generate` stops at {}",
            grouped(self.max_length),
            counted(positions, "position"),
            grouped(positions)
        ))
    }

    /// The encoder of rows.
    pub fn encoder(&self) -> Result<Encoder, DataRequestError> {
        let encoder = Encoder::open(&self.folder, self.options.clone())?;
        let Some(command) = self.template_command else { return Ok(encoder) };
        let program = std::env::current_exe().map_err(DataRequestError::NoExecutable)?;
        Ok(encoder.rendering_in(program, &[command]))
    }

    /// How rows become samples.
    pub fn options(&self, max_samples: Option<u64>, packing: bool) -> PrepareOptions {
        PrepareOptions {
            max_length: self.max_length,
            truncation: self.truncation,
            max_samples: max_samples.and_then(NonZeroU64::new),
            packing,
        }
    }
}

/// The data of a run, and its token caches.
pub(super) struct RunData {
    pub(super) samples: Samples,
    /// Those of the token cache, before any are held out.
    pub(super) all_samples: Samples,
    pub(super) evaluation: Option<Samples>,
    pub(super) caches: TokenCaches,
}

impl DataRequest {
    /// Opens the caches that the launcher prepared.
    pub(super) fn open(
        &self,
        caches: &TokenCaches,
        reading: &Reading,
        seed: u64,
    ) -> Result<RunData, DataRequestError> {
        let all_samples = Samples::open(&caches.samples)?;
        let (samples, held_out) = self.hold_out(all_samples.clone(), reading, seed)?;
        let evaluation = caches.evaluation.as_deref().map(Samples::open).transpose()?;
        Ok(RunData { samples, all_samples, evaluation: evaluation.or(held_out), caches: caches.clone() })
    }

    /// Divides the samples into training and evaluation.
    fn hold_out(
        &self,
        samples: Samples,
        reading: &Reading,
        seed: u64,
    ) -> Result<(Samples, Option<Samples>), DataRequestError> {
        let Some(ratio) = self.split_ratio else { return Ok((samples, None)) };
        let packing = match reading.limits() {
            _ if !self.packing => Packing::Off,
            LengthLimits::Pairs(limits) => Packing::Pairs(limits),
            LengthLimits::Rows(limit) => NonZeroU64::new(limit).map_or(Packing::Off, Packing::UpTo),
        };
        let (train, evaluation) = split_dataset(&samples, ratio, seed, packing)?;
        Ok((train, Some(evaluation)))
    }

    /// Tokenises the data, or finds it in the cache.
    pub(super) fn prepare(
        &self,
        reading: &Reading,
        output: &Path,
        seed: u64,
        on_event: OnEvent<'_>,
    ) -> Result<RunData, DataRequestError> {
        refuse_output_inside("--data", &self.paths, output)?;
        refuse_output_inside("--eval-data", &self.evaluation_paths, output)?;
        let encoder = reading.encoder()?;
        let cache = token_cache(output);
        let make = |paths: &[PathBuf], most: Option<u64>, packing: bool| -> Result<_, DataRequestError> {
            let (files, note) = data_files(paths)?;
            if let Some(note) = note {
                on_event(ResolveEvent::Note(&note));
            }
            let options = reading.options(most, packing);
            let prepared = prepare_with_progress(&files, &encoder, &options, &cache, &|done| {
                on_event(ResolveEvent::Tokenising(done));
            })?;
            on_event(ResolveEvent::Tokenised(&prepared));
            check_trained(&prepared.samples, &files, &encoder, &options)?;
            Ok((prepared, files))
        };
        // What is held out is chosen from samples, and packs are made of the others.
        let packing = self.packing && self.split_ratio.is_none();
        let (train, files) = make(&self.paths, self.max_samples, packing)?;
        let all_samples = train.samples.clone();
        let (samples, held_out) = self.hold_out(train.samples, reading, seed)?;
        for part in held_out.iter().chain([&samples]) {
            check_trained(part, &files, &encoder, &reading.options(self.max_samples, packing))?;
        }
        let evaluation = match self.evaluation_paths.as_slice() {
            [] => None,
            paths => Some(make(paths, None, false)?),
        };
        let (evaluation, evaluation_path) =
            evaluation.map(|(Prepared { samples, path, .. }, _)| (samples, path)).unzip();
        let evaluation = evaluation.or(held_out);
        let caches = TokenCaches { samples: train.path, evaluation: evaluation_path };
        Ok(RunData { samples, all_samples, evaluation, caches })
    }
}
