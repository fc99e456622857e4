//! From data files to samples in the token cache: found there, or made and kept there.

use std::fs::{self, File};
use std::io;
use std::num::NonZeroU64;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime};

use super::cache::{CacheFolder, key};
use super::intake::Intake;
use super::lines::check;
use super::pipeline::{Cuts, Watch, each_row};
use super::token_file::{Reject, TokenFile, TokenWriter};
use super::{DataError, Encode, Samples, Truncation};

/// What becomes of rows besides their tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrepareOptions {
    /// `--max-length`: the most tokens of a sample, and of a pack.
    pub max_length: u64,
    /// What is done with longer rows.
    pub truncation: Truncation,
    /// `--max-train-samples`: reading ends once so many are kept.
    pub max_samples: Option<NonZeroU64>,
    /// `--packing`: samples are joined into packs.
    pub packing: bool,
}

/// Samples that are ready, and how they came to be.
#[derive(Debug)]
pub struct Prepared {
    /// The samples.
    pub samples: Samples,
    /// The token cache that holds them: [`Samples::open`] opens it on other ranks.
    pub path: PathBuf,
    /// Whether it was there before.
    pub found: bool,
    /// Rows that were read to make it.
    pub rows: u64,
    /// How long all of it took.
    pub seconds: f64,
    /// Where it should have been kept, and why it could not be.
    pub passed_over: Vec<(PathBuf, io::Error)>,
}

/// Reads, encodes and keeps the rows of `files`, which are one dataset in the order given; or finds them in the cache,
/// where the contents of the files, the encoder and the options are those of an earlier call.
///
/// Stops at the first row that is wrong.
pub fn prepare(
    files: &[PathBuf],
    encoder: &dyn Encode,
    options: &PrepareOptions,
    cache: &CacheFolder,
) -> Result<Prepared, DataError> {
    prepare_watched(files, encoder, options, cache, &|_| ())
}

/// How far tokenising is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tokenising {
    /// Rows that are done.
    pub rows: u64,
    /// About how many bytes of the files those are.
    pub bytes: u64,
    /// Bytes of all files.
    pub total_bytes: u64,
}

/// As [`prepare`], and `watch` is told how far it is, by the threads that tokenise.
pub fn prepare_watched(
    files: &[PathBuf],
    encoder: &dyn Encode,
    options: &PrepareOptions,
    cache: &CacheFolder,
    watch: &(dyn Fn(Tokenising) + Sync),
) -> Result<Prepared, DataError> {
    prepare_at(Cuts::for_samples(options.max_samples.map(u64::from)), files, encoder, options, cache, watch)
}

pub(super) fn prepare_at(
    cuts: Cuts,
    files: &[PathBuf],
    encoder: &dyn Encode,
    options: &PrepareOptions,
    cache: &CacheFolder,
    watch: &(dyn Fn(Tokenising) + Sync),
) -> Result<Prepared, DataError> {
    let begun = Instant::now();
    check(files)?;
    let before = stamps(files);
    // Whoever changes a file meanwhile must not get a cache that belongs to neither.
    let unchanged = || match files.iter().zip(before.iter().zip(stamps(files))).find(changed) {
        Some((path, _)) => Err(DataError::Changed { path: path.clone() }),
        None => Ok(()),
    };
    let key = key(files, encoder, options)?;
    let mut tried = Vec::new();
    for (path, destination) in cache.destinations() {
        let made = destination.map_err(Failed::Cache).and_then(|destination| {
            if let Some((samples, path)) = destination.find(&key) {
                return Ok((samples, path, true));
            }
            let unfinished = destination.create(&key)?;
            let total_bytes = before.iter().flatten().map(|(bytes, _)| bytes).sum();
            let (rows, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
            let each = |more_rows, more_bytes| {
                // Relaxed: figures for people.
                let rows = rows.fetch_add(more_rows, Ordering::Relaxed) + more_rows;
                let bytes = bytes.fetch_add(more_bytes, Ordering::Relaxed) + more_bytes;
                watch(Tokenising { rows, bytes, total_bytes });
            };
            write(unfinished.file()?, key, cuts, files, encoder, options, &each)?;
            unchanged()?;
            let (file, path) = unfinished.publish()?;
            Ok((Samples::of_file(TokenFile::new(file, &path)?)?, path, false))
        });
        match made {
            Ok((samples, path, found)) => {
                let (rows, seconds) = (samples.totals().rows(), begun.elapsed().as_secs_f64());
                return Ok(Prepared { samples, path, found, rows, seconds, passed_over: tried });
            }
            Err(Failed::Data(error)) => return Err(error),
            Err(Failed::Cache(source)) => tried.push((path, source)),
        }
    }
    Err(DataError::NoCache { tried })
}

/// What tells that a file was written to.
type Stamp = Option<(u64, SystemTime)>;

fn stamps(files: &[PathBuf]) -> Vec<Stamp> {
    let stamp = |path: &PathBuf| {
        let found = fs::metadata(path).ok()?;
        Some((found.len(), found.modified().ok()?))
    };
    files.iter().map(stamp).collect()
}

fn changed((_, (before, after)): &(&PathBuf, (&Stamp, Stamp))) -> bool {
    *before != after
}

/// Data that is wrong, or a place that cannot be written: another one may be.
enum Failed {
    Data(DataError),
    Cache(io::Error),
}

impl From<DataError> for Failed {
    fn from(error: DataError) -> Self {
        Self::Data(error)
    }
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::Cache(error)
    }
}

impl From<Reject> for Failed {
    fn from(reject: Reject) -> Self {
        Self::Cache(match reject {
            Reject::Io(error) => error,
            Reject::Damaged(why) => io::Error::new(io::ErrorKind::InvalidData, why),
        })
    }
}

/// Fills a token cache with the rows of the files.
fn write(
    file: File,
    key: [u8; 32],
    cuts: Cuts,
    files: &[PathBuf],
    encoder: &dyn Encode,
    options: &PrepareOptions,
    watch: Watch<'_>,
) -> Result<(), Failed> {
    let mut out = TokenWriter::new(file)?;
    let mut intake = Intake::new(options.max_length, options.truncation);
    each_row(files, encoder, cuts, watch, |row| -> Result<_, Failed> {
        let (ids, labels) = row.row.map_err(|problem| DataError::Row {
            path: files[row.file].clone(),
            at: row.at,
            problem,
        })?;
        if let Some((ids, labels)) = intake.take(ids, labels) {
            out.push(ids, labels)?;
        }
        let enough = options.max_samples.is_some_and(|most| intake.kept() >= most.get());
        Ok(if enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    out.finish(&intake.finish(options.packing)?, key)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;
    use serde_json::Value;

    use super::super::{Encoded, Encoder, EncoderOptions, RowNumber, SamplesBuilder};
    use super::*;

    fn encoder() -> Encoder {
        Encoder::open(Path::new("there is no tokenizer"), EncoderOptions::new(50)).unwrap()
    }

    /// One row after the other, as plainly as it can be said.
    fn serial(path: &Path, text: &str, options: &PrepareOptions) -> Result<Samples, DataError> {
        let mut samples = SamplesBuilder::with(options.max_length, options.truncation, options.packing);
        let mut row = Encoded::default();
        for (line, text) in (1..).zip(text.lines()).filter(|(_, text)| !text.is_empty()) {
            let Value::Object(object) = serde_json::from_str(text).unwrap() else { unreachable!() };
            row.ids.clear();
            row.labels.clear();
            encoder().encode(&object, &mut row).map_err(|problem| DataError::Row {
                path: path.to_owned(),
                at: RowNumber::Line(line),
                problem,
            })?;
            samples.push(&row.ids, &row.labels);
            if options.max_samples.is_some_and(|most| samples.kept() == most.get()) {
                break;
            }
        }
        samples.finish()
    }

    #[test]
    fn whoever_watches_is_told_of_every_row_and_byte() {
        let folder = tempfile::tempdir().unwrap();
        let files = ["one", "two"].map(|name| folder.path().join(name));
        for path in &files {
            fs::write(path, "{\"input_ids\": [1, 2, 3]}\n".repeat(500)).unwrap();
        }
        let total_bytes = files.iter().map(|path| fs::metadata(path).unwrap().len()).sum();
        let options =
            PrepareOptions { max_length: 6, truncation: Truncation::Drop, max_samples: None, packing: false };
        let told = std::sync::Mutex::new(Vec::new());
        let watch = |done| told.lock().unwrap().push(done);
        prepare_watched(&files, &encoder(), &options, &CacheFolder::at(folder.path()), &watch).unwrap();
        let told = told.into_inner().unwrap();
        assert!(told.len() > 10, "{told:?}");
        let all = Tokenising { rows: 1000, bytes: total_bytes, total_bytes };
        assert_eq!(told.iter().max_by_key(|done| done.rows), Some(&all));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn any_cut_into_blocks_and_chunks_gives_what_one_row_after_the_other_gives(
            // A length of 0 is a blank line; of 12, a row with a token that the vocabulary has not.
            lengths in proptest::collection::vec(prop_oneof![20 => 1_usize..9, 2 => Just(0), 1 => Just(12)], 1..60),
            (block_bytes, block_rows, chunk_rows) in (1_usize..2000, 1_usize..40, 1_usize..12),
            (truncation, packing) in (0_usize..3, any::<bool>()),
            most in 0_u64..80,
        ) {
            let line = |(number, &length): (usize, &usize)| match length {
                0 => String::new(),
                12 => format!("{{\"input_ids\": [{}]}}", 50 + number),
                _ => format!("{{\"input_ids\": {:?}}}", (number % 40..number % 40 + length).collect::<Vec<_>>()),
            };
            let text = lengths.iter().enumerate().map(line).collect::<Vec<_>>().join("\n") + "\n";
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("rows.jsonl");
            fs::write(&path, &text).unwrap();
            let truncation = [Truncation::Drop, Truncation::Left, Truncation::Right][truncation];
            let options =
                PrepareOptions { max_length: 6, truncation, max_samples: NonZeroU64::new(most), packing };
            prop_assume!(lengths.iter().any(|&length| length > 0));

            let cuts = Cuts { block_bytes, block_rows, chunk_rows };
            let cache = CacheFolder::at(folder.path());
            let found = prepare_at(cuts, std::slice::from_ref(&path), &encoder(), &options, &cache, &|_| ());
            match (found, serial(&path, &text, &options)) {
                (Ok(found), Ok(expected)) => prop_assert_eq!(found.samples, expected),
                (Err(found), Err(expected)) => prop_assert_eq!(found.to_string(), expected.to_string()),
                (found, expected) => prop_assert!(false, "{:?} and not {:?}", found, expected),
            }
        }
    }
}
