//! A run's data: tokenised once by the launcher, and opened by every rank.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use zeroth::base::{counted, grouped};
use zeroth::data::{
    CacheFolder, Columns, Encoder, EncoderOptions, LengthLimits, Packing, PairOptions, PrepareOptions,
    Prepared, Samples, Truncation, check_trained, prepare_with_progress,
};
use zeroth::job::longest_row;
use zeroth::model::ModelConfig;
use zeroth::train::split_dataset;

use super::super::{data_inputs, render_templates};
use super::handoff::LauncherHandoff;
use super::strategies;
use crate::cli::{ReadingArgs, TrainArgs, TruncationArg};
use crate::output;
use crate::pair_args::PairArgs;
use crate::terminal::Meter;

/// Tokenisation settings.
pub(in super::super) struct Reading {
    folder: PathBuf,
    options: EncoderOptions,
    /// Typed flags that do not apply to pairs.
    idle: Vec<&'static str>,
    max_length: u64,
    /// The model's maximum sequence length.
    positions: Option<u64>,
    truncation: Truncation,
}

impl Reading {
    pub(in super::super) fn new(
        arguments: &ReadingArgs,
        pairs: &PairArgs,
        model: &ModelConfig,
        folder: &Path,
    ) -> anyhow::Result<Self> {
        let columns: Columns = arguments.columns.join(",").parse()?;
        let pairs = pairs.options(model, folder)?;
        anyhow::ensure!(
            pairs.is_none() || arguments.system.is_none(),
            "--system is for chat templates, and {} is an encoder-decoder model: --source-prefix puts a text before every \
             source",
            model.family.model_type()
        );
        let system = arguments.system.as_deref().map(data_inputs::system).transpose()?;
        let idle = [
            ("--max-length", arguments.rows.max_length.is_some()),
            ("--truncation-strategy", !matches!(arguments.truncation_strategy, TruncationArg::Delete)),
        ];
        let idle = idle.into_iter().filter(|(_, is_typed)| *is_typed && pairs.is_some());
        Ok(Self {
            folder: folder.to_owned(),
            idle: idle.map(|(flag, _)| flag).collect(),
            options: EncoderOptions { columns, system, pairs, ..EncoderOptions::new(model.vocab) },
            max_length: longest_row(arguments.rows.max_length, model),
            positions: model.max_positions,
            truncation: match arguments.truncation_strategy {
                TruncationArg::Delete => Truncation::Drop,
                TruncationArg::Left => Truncation::Left,
                TruncationArg::Right => Truncation::Right,
            },
        })
    }

    pub(in super::super) fn max_length(&self) -> u64 {
        self.max_length
    }

    /// The maximum length of samples.
    pub(in super::super) fn limits(&self) -> LengthLimits {
        match self.pairs() {
            Some(options) => LengthLimits::Pairs(options.pairs.limits),
            None => LengthLimits::Rows(self.max_length),
        }
    }

    /// Set for encoder-decoder models.
    pub(in super::super) fn pairs(&self) -> Option<&PairOptions> {
        self.options.pairs.as_ref()
    }

    /// A note on flags that do not apply, or if rows may exceed the model's maximum sequence length.
    pub(in super::super) fn note(&self) -> Option<String> {
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

    pub(in super::super) fn encoder(&self) -> anyhow::Result<Encoder> {
        render_templates::encoder(&self.folder, self.options.clone())
    }

    pub(in super::super) fn options(&self, max_samples: Option<u64>, packing: bool) -> PrepareOptions {
        PrepareOptions {
            max_length: self.max_length,
            truncation: self.truncation,
            max_samples: max_samples.and_then(NonZeroU64::new),
            packing,
        }
    }
}

/// The data of a run, and its token caches.
pub(super) struct Data {
    pub(super) samples: Samples,
    /// Those of the token cache, before any are held out.
    pub(super) all_samples: Samples,
    pub(super) path: PathBuf,
    pub(super) evaluation: Option<Samples>,
    pub(super) evaluation_path: Option<PathBuf>,
}

/// Opens the caches that the launcher prepared.
pub(super) fn open(
    handoff: &LauncherHandoff,
    arguments: &TrainArgs,
    reading: &Reading,
    seed: u64,
) -> anyhow::Result<Data> {
    let all_samples = Samples::open(&handoff.samples)?;
    let (samples, held_out) = hold_out(all_samples.clone(), arguments, reading, seed)?;
    let evaluation = handoff.evaluation.as_deref().map(Samples::open).transpose()?;
    Ok(Data {
        samples,
        all_samples,
        path: handoff.samples.clone(),
        evaluation: evaluation.or(held_out),
        evaluation_path: handoff.evaluation.clone(),
    })
}

/// Divides the samples into training and evaluation, as --split-dataset-ratio asks.
fn hold_out(
    samples: Samples,
    arguments: &TrainArgs,
    reading: &Reading,
    seed: u64,
) -> anyhow::Result<(Samples, Option<Samples>)> {
    let Some(ratio) = arguments.evaluation.split_ratio() else { return Ok((samples, None)) };
    let packing = match reading.limits() {
        _ if !arguments.packing => Packing::Off,
        LengthLimits::Pairs(limits) => Packing::Pairs(limits),
        LengthLimits::Rows(limit) => NonZeroU64::new(limit).map_or(Packing::Off, Packing::UpTo),
    };
    let (train, evaluation) = split_dataset(&samples, ratio, seed, packing)?;
    Ok((train, Some(evaluation)))
}

/// Tokenises the data, or finds it in the cache.
pub(super) fn prepare(arguments: &TrainArgs, reading: &Reading, seed: u64) -> anyhow::Result<Data> {
    let outside = |flag, paths: &[PathBuf]| data_inputs::refuse_output_inside(flag, paths, &arguments.output);
    outside("--data", &arguments.data)?;
    outside("--eval-data", &arguments.eval_data)?;
    let encoder = reading.encoder()?;
    let cache = cache(arguments);
    let make = |files: &[PathBuf], most: Option<u64>, packing: bool| -> anyhow::Result<Prepared> {
        let meter = Mutex::new(Meter::new("tokenising"));
        let options = reading.options(most, packing);
        let prepared = prepare_with_progress(files, &encoder, &options, &cache, &|done| {
            // Skip the update if another thread is printing.
            if let Ok(mut meter) = meter.try_lock() {
                meter.tell(done.bytes, done.total_bytes, || Some(format!("{} rows", grouped(done.rows))));
            }
        })?;
        drop(meter);
        print_summary(&prepared);
        check_trained(&prepared.samples, files, &encoder, &options)?;
        Ok(prepared)
    };
    // What is held out is chosen from samples, and packs are made of the others.
    let packing = arguments.packing && arguments.evaluation.split_ratio().is_none();
    let files = data_inputs::files(&arguments.data)?;
    let train = make(&files, arguments.max_train_samples, packing)?;
    let all_samples = train.samples.clone();
    let (samples, held_out) = hold_out(train.samples, arguments, reading, seed)?;
    for part in held_out.iter().chain([&samples]) {
        check_trained(part, &files, &encoder, &reading.options(arguments.max_train_samples, packing))?;
    }
    let evaluation = match arguments.eval_data.as_slice() {
        paths @ [_, ..] if strategies::evaluates(arguments) => {
            Some(make(&data_inputs::files(paths)?, None, false)?)
        }
        _ => None,
    };
    let (evaluation, evaluation_path) = evaluation.map(|found| (found.samples, found.path)).unzip();
    Ok(Data { samples, all_samples, path: train.path, evaluation: evaluation.or(held_out), evaluation_path })
}

/// The token cache: the user's, or a temporary one beside the output.
pub(super) fn cache(arguments: &TrainArgs) -> CacheFolder {
    let cache = CacheFolder::default_location();
    match nearest_existing(&arguments.output) {
        Some(folder) => cache.or_temporary_in(folder),
        None => cache,
    }
}

fn print_summary(prepared: &Prepared) {
    for (folder, error) in &prepared.unusable {
        output::note(&format!(
            "note: the token cache in {} cannot be used, so tokens are kept for this run only: {error}",
            folder.display()
        ));
    }
    if !prepared.found {
        output::note(&format!(
            "{} read and tokenised in {:.1} s",
            counted(prepared.rows, "row"),
            prepared.seconds
        ));
    }
}

/// The folder, or its nearest existing ancestor.
pub(in super::super) fn nearest_existing(folder: &Path) -> Option<&Path> {
    // A relative path ends with an empty ancestor: the working directory.
    folder
        .ancestors()
        .map(|above| if above.as_os_str().is_empty() { Path::new(".") } else { above })
        .find(|above| above.exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_working_directory_is_above_a_relative_folder() {
        let missing = Path::new("no-such-folder");
        assert_eq!(nearest_existing(missing), Some(Path::new(".")));
        assert_eq!(nearest_existing(&missing.join("run")), Some(Path::new(".")));
        assert_eq!(nearest_existing(Path::new("/no-such-folder/run")), Some(Path::new("/")));
    }
}
