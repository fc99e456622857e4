//! A run's data: tokenised once, before ranks meet, and opened by each of them.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use zeroth::base::{counted, grouped};
use zeroth::data::{
    CacheFolder, Columns, Encoder, EncoderOptions, PrepareOptions, Prepared, Samples, Truncation,
    check_trained, prepare_watched,
};
use zeroth::model::ModelConfig;

use super::super::render_templates;
use super::saves;
use super::told::Told;
use crate::cli::{ReadingArgs, TrainArgs, TruncationArg};
use crate::output;
use crate::terminal::Meter;

/// Longer rows are taken only where that is typed.
const LONGEST: u64 = 2048;

/// How rows become tokens.
pub(in super::super) struct Reading {
    folder: PathBuf,
    options: EncoderOptions,
    max_length: u64,
    /// Positions that the model was made for.
    positions: Option<u64>,
    truncation: Truncation,
}

impl Reading {
    pub(in super::super) fn new(
        arguments: &ReadingArgs,
        model: &ModelConfig,
        folder: &Path,
    ) -> anyhow::Result<Self> {
        let columns: Columns = arguments.columns.join(",").parse()?;
        Ok(Self {
            folder: folder.to_owned(),
            options: EncoderOptions { columns, ..EncoderOptions::new(model.vocab) },
            max_length: arguments
                .max_length
                .unwrap_or_else(|| model.max_positions.unwrap_or(LONGEST).min(LONGEST)),
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

    /// What a user should hear where rows may be longer than the model was made for.
    pub(in super::super) fn note(&self) -> Option<String> {
        let positions = self.positions.filter(|positions| *positions < self.max_length)?;
        Some(format!(
            "--max-length {} is beyond the {} that the model was made for (max_position_embeddings): longer rows are trained \
             at positions it has not learnt, and `zeroth generate` ends at {}",
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

/// The data of a run, and the caches that hold it.
pub(super) struct Data {
    pub(super) samples: Samples,
    pub(super) path: PathBuf,
    pub(super) evaluation: Option<Samples>,
    pub(super) evaluation_path: Option<PathBuf>,
}

/// What a rank was told to open.
pub(super) fn open(told: &Told) -> anyhow::Result<Data> {
    Ok(Data {
        samples: Samples::open(&told.samples)?,
        path: told.samples.clone(),
        evaluation: told.evaluation.as_deref().map(Samples::open).transpose()?,
        evaluation_path: told.evaluation.clone(),
    })
}

/// Tokenises, or finds what was tokenised before.
pub(super) fn prepare(arguments: &TrainArgs, reading: &Reading) -> anyhow::Result<Data> {
    anyhow::ensure!(
        !arguments.eval_data.is_empty() || arguments.eval_steps.is_none(),
        "--eval-steps was given without --eval-data"
    );
    let encoder = reading.encoder()?;
    let cache = cache(arguments);
    let make = |files: &[PathBuf], most: Option<u64>, packing: bool| -> anyhow::Result<Prepared> {
        let meter = Mutex::new(Meter::new("tokenising"));
        let options = reading.options(most, packing);
        let prepared = prepare_watched(files, &encoder, &options, &cache, &|done| {
            // Where another thread is at it, this one goes on with its rows.
            if let Ok(mut meter) = meter.try_lock() {
                meter.tell(done.bytes, done.total_bytes, || Some(format!("{} rows", grouped(done.rows))));
            }
        })?;
        drop(meter);
        say(&prepared);
        check_trained(&prepared.samples, files, &encoder, &options)?;
        Ok(prepared)
    };
    let train = make(&arguments.data, arguments.max_train_samples, arguments.packing)?;
    let evaluation = match arguments.eval_data.as_slice() {
        [] => None,
        files => Some(make(files, None, false)?),
    };
    let (evaluation, evaluation_path) = evaluation.map(|found| (found.samples, found.path)).unzip();
    Ok(Data { samples: train.samples, path: train.path, evaluation, evaluation_path })
}

/// Where token caches are kept: the user's own, else beside the output, for this run only.
pub(super) fn cache(arguments: &TrainArgs) -> CacheFolder {
    let cache = CacheFolder::default_place();
    match saves::existing(&arguments.output) {
        Some(folder) => cache.or_unnamed_in(folder),
        None => cache,
    }
}

fn say(prepared: &Prepared) {
    for (folder, error) in &prepared.passed_over {
        output::note(&format!(
            "note: tokens are kept for this run only: the token cache in {} cannot be used: {error}",
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
