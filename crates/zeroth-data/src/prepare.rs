//! Prepares data files as samples in the token cache, reusing an existing cache.

use std::fs::{self, File};
use std::io;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime};

use super::cache::{CacheFolder, key};
use super::find_files::check;
use super::index_builder::IndexBuilder;
use super::pipeline::{BlockSizes, ProgressFn, each_row};
use super::token_file::{Reject, TokenFile, TokenWriter};
use super::{DataError, Encode, PrepareOptions, Samples};

/// Prepared samples.
#[derive(Debug)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Prepared {
    pub samples: Samples,
    /// Their token cache; other ranks open it with [`Samples::open`].
    pub path: PathBuf,
    /// Whether it already existed.
    pub found: bool,
    /// Rows read to create it.
    pub rows: u64,
    pub seconds: f64,
    /// Cache directories that could not be used, each with its error.
    pub unusable: Vec<(PathBuf, io::Error)>,
}

/// Encodes the rows of `files`, as one dataset in the given order, into the cache; or finds them there if file
/// contents, encoder and options are those of an earlier call.
///
/// Stops at the first invalid row.
pub fn prepare(
    files: &[PathBuf],
    encoder: &dyn Encode,
    options: &PrepareOptions,
    cache: &CacheFolder,
) -> Result<Prepared, DataError> {
    prepare_with_progress(files, encoder, options, cache, &|_| ())
}

/// Progress of tokenisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenizeProgress {
    /// Rows encoded so far.
    pub rows: u64,
    /// Approximate bytes of the files they took.
    pub bytes: u64,
    /// Size of all files.
    pub total_bytes: u64,
}

/// As [`prepare`]; `progress` receives progress from the encoding threads.
pub fn prepare_with_progress(
    files: &[PathBuf],
    encoder: &dyn Encode,
    options: &PrepareOptions,
    cache: &CacheFolder,
    progress: &(dyn Fn(TokenizeProgress) + Sync),
) -> Result<Prepared, DataError> {
    prepare_at(
        BlockSizes::for_samples(options.max_samples.map(u64::from)),
        files,
        encoder,
        options,
        cache,
        progress,
    )
}

pub(super) fn prepare_at(
    sizes: BlockSizes,
    files: &[PathBuf],
    encoder: &dyn Encode,
    options: &PrepareOptions,
    cache: &CacheFolder,
    progress: &(dyn Fn(TokenizeProgress) + Sync),
) -> Result<Prepared, DataError> {
    let begun = Instant::now();
    check(files)?;
    let before = stamps(files);
    // A file changed meanwhile must not produce a cache that matches neither version.
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
                // Relaxed: only for display.
                let rows = rows.fetch_add(more_rows, Ordering::Relaxed) + more_rows;
                let bytes = bytes.fetch_add(more_bytes, Ordering::Relaxed) + more_bytes;
                progress(TokenizeProgress { rows, bytes, total_bytes });
            };
            write(unfinished.file()?, key, sizes, files, encoder, options, &each)?;
            unchanged()?;
            let (file, path) = unfinished.publish()?;
            Ok((Samples::of_file(TokenFile::new(file, &path)?)?, path, false))
        });
        match made {
            Ok((samples, path, found)) => {
                let (rows, seconds) = (samples.totals().rows(), begun.elapsed().as_secs_f64());
                return Ok(Prepared { samples, path, found, rows, seconds, unusable: tried });
            }
            Err(Failed::Data(error)) => return Err(error),
            Err(Failed::Cache(source)) => tried.push((path, source)),
        }
    }
    Err(DataError::NoCache { tried })
}

/// Length and modification time, to detect changes.
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

/// Invalid data, or a cache location that cannot be written, in which case the next is tried.
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
    sizes: BlockSizes,
    files: &[PathBuf],
    encoder: &dyn Encode,
    options: &PrepareOptions,
    progress: ProgressFn<'_>,
) -> Result<(), Failed> {
    let mut out = TokenWriter::new(file)?;
    let mut index_builder = IndexBuilder::for_rows(encoder, options);
    each_row(files, encoder, sizes, options.skips(0), progress, |row| -> Result<_, Failed> {
        let (ids, labels) = row.row.map_err(|problem| DataError::Row {
            path: files[row.file].clone(),
            at: row.at,
            problem,
        })?;
        if row.skipped.is_some() {
            index_builder.drop_too_long();
        } else if let Some((ids, labels)) = index_builder.take_row(ids, labels, row.cut) {
            out.push(ids, labels)?;
        }
        let enough = options.max_samples.is_some_and(|most| index_builder.kept() >= most.get());
        Ok(if enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    out.finish(&index_builder.finish(options.packing)?, key)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;
    use std::path::Path;

    use proptest::prelude::*;
    use serde_json::Value;

    use super::super::{Encoded, Encoder, EncoderOptions, RowNumber, SamplesBuilder, Truncation};
    use super::*;

    fn encoder() -> Encoder {
        Encoder::open(Path::new("there is no tokenizer"), EncoderOptions::new(50)).unwrap()
    }

    /// Reference implementation: one row after the other.
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
    fn progress_covers_every_row_and_byte() {
        let folder = tempfile::tempdir().unwrap();
        let files = ["one", "two"].map(|name| folder.path().join(name));
        for path in &files {
            fs::write(path, "{\"input_ids\": [1, 2, 3]}\n".repeat(500)).unwrap();
        }
        let total_bytes = files.iter().map(|path| fs::metadata(path).unwrap().len()).sum();
        let options =
            PrepareOptions { max_length: 6, truncation: Truncation::Drop, max_samples: None, packing: false };
        let reports = std::sync::Mutex::new(Vec::new());
        let progress = |done| reports.lock().unwrap().push(done);
        prepare_with_progress(&files, &encoder(), &options, &CacheFolder::at(folder.path()), &progress)
            .unwrap();
        let reports = reports.into_inner().unwrap();
        assert!(reports.len() > 10, "{reports:?}");
        let all = TokenizeProgress { rows: 1000, bytes: total_bytes, total_bytes };
        assert_eq!(reports.iter().max_by_key(|done| done.rows), Some(&all));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn any_block_and_chunk_size_matches_serial_encoding(
            // A length of 0 is a blank line; of 12, a row with a token beyond the vocabulary.
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

            let sizes = BlockSizes { block_bytes, block_rows, chunk_rows };
            let cache = CacheFolder::at(folder.path());
            let found = prepare_at(sizes, std::slice::from_ref(&path), &encoder(), &options, &cache, &|_| ());
            match (found, serial(&path, &text, &options)) {
                (Ok(found), Ok(expected)) => prop_assert_eq!(found.samples, expected),
                (Err(found), Err(expected)) => prop_assert_eq!(found.to_string(), expected.to_string()),
                (found, expected) => prop_assert!(false, "{:?} and not {:?}", found, expected),
            }
        }
    }
}
