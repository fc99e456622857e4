//! Writes TensorBoard event files: a few protobuf fields in TFRecord frames.
//!
//! A folder is one run to TensorBoard, and its files are read in name order. Resuming adds a file that begins with a
//! `SessionLog` START: TensorBoard then discards events of older files from that step on. All tags of a folder must
//! therefore share the same x axis.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use super::append_file::AppendFile;
use super::metrics::{MetricsError, io_error};

const PREFIX: &str = "events.out.tfevents.";
/// The only version TensorBoard writes, and the first that honours START.
const VERSION: &str = "brain.Event:2";

/// An open event file.
#[derive(Debug)]
pub(super) struct EventFile {
    file: AppendFile,
}

impl EventFile {
    /// Creates a file in `folder`, creating the folder if missing. Events of older files from `first` on are
    /// superseded.
    pub(super) fn create(folder: &Path, first: u64) -> Result<Self, MetricsError> {
        fs::create_dir_all(folder).map_err(io_error("create", folder))?;
        let newest = newest_of(folder).map_err(io_error("list", folder))?;
        // Files sort by the timestamp in their name, and a resumed run must sort after its predecessor.
        let seconds = newest.map_or(0, |seconds| seconds + 1).max(wall_time() as u64);
        let path = folder.join(format!("{PREFIX}{seconds:010}.{}.{}.0", host(), std::process::id()));
        let file = OpenOptions::new().append(true).create_new(true).open(&path);
        let file = file.map_err(io_error("create", &path))?;
        let mut file = Self { file: AppendFile::new(&path, file) };
        let start = [What::Version, What::Start];
        let begin = if newest.is_some() { &start[..] } else { &start[..1] };
        let mut bytes = Vec::new();
        for what in begin {
            // PyTorch's writer also puts the step on the version event after a crash.
            let step = if newest.is_some() { first } else { 0 };
            TensorBoardEvent { wall_time: wall_time(), step, what: *what }.frame(&mut bytes);
        }
        file.file.append(&bytes);
        Ok(file)
    }

    /// Appends the scalars of a step, unbuffered.
    pub(super) fn scalars(&mut self, step: u64, values: &[(&str, f64)]) {
        let mut bytes = Vec::new();
        TensorBoardEvent { wall_time: wall_time(), step, what: What::Scalars(values) }.frame(&mut bytes);
        self.file.append(&bytes);
    }

    /// What to tell about the first event that could not be written; once.
    pub(super) fn take_problem(&mut self) -> Option<String> {
        self.file.take_problem()
    }
}

fn wall_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// The timestamp in the name of the newest event file.
fn newest_of(folder: &Path) -> io::Result<Option<u64>> {
    let mut newest = None;
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        let seconds =
            name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('.').next()?.parse().ok());
        newest = newest.max(seconds);
    }
    Ok(newest)
}

fn host() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "localhost".to_owned() } else { name.replace('/', "_") }
}

/// The fields of `tensorboard.Event` that are used.
struct TensorBoardEvent<'a> {
    wall_time: f64,
    step: u64,
    what: What<'a>,
}

#[derive(Clone, Copy)]
enum What<'a> {
    Version,
    Start,
    Scalars(&'a [(&'a str, f64)]),
}

/// Protobuf wire types: the low bits of a field's key.
const VARINT: u8 = 0;
const EIGHT_BYTES: u8 = 1;
const LENGTH: u8 = 2;
const FOUR_BYTES: u8 = 5;

impl TensorBoardEvent<'_> {
    /// Appends the event as a TFRecord: length, its checksum, message, its checksum.
    fn frame(&self, into: &mut Vec<u8>) {
        let message = self.message();
        let length = (message.len() as u64).to_le_bytes();
        into.extend(length);
        into.extend(masked_crc(&length).to_le_bytes());
        into.extend(&message);
        into.extend(masked_crc(&message).to_le_bytes());
    }

    fn message(&self) -> Vec<u8> {
        let mut message = vec![key(1, EIGHT_BYTES)];
        message.extend(self.wall_time.to_le_bytes());
        if self.step != 0 {
            message.push(key(2, VARINT));
            varint(&mut message, self.step);
        }
        match self.what {
            What::Version => bytes(&mut message, 3, VERSION.as_bytes()),
            What::Start => bytes(&mut message, 7, &[key(1, VARINT), 1]),
            What::Scalars(values) => {
                let mut summary = Vec::new();
                for (tag, value) in values {
                    let mut scalar = Vec::with_capacity(tag.len() + 8);
                    bytes(&mut scalar, 1, tag.as_bytes());
                    scalar.push(key(2, FOUR_BYTES));
                    scalar.extend((*value as f32).to_le_bytes());
                    bytes(&mut summary, 1, &scalar);
                }
                bytes(&mut message, 5, &summary);
            }
        }
        message
    }
}

const fn key(field: u8, layout: u8) -> u8 {
    field << 3 | layout
}

fn varint(into: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        into.push(value as u8 | 0x80);
        value >>= 7;
    }
    into.push(value as u8);
}

fn bytes(into: &mut Vec<u8>, field: u8, contents: &[u8]) {
    into.push(key(field, LENGTH));
    varint(into, contents.len() as u64);
    into.extend(contents);
}

/// TFRecord's masked CRC32C: rotated and offset, so that checksums of data containing checksums stay meaningful.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written by TensorBoard's own writer (tests/make_tensorboard.py), and read back with its reader.
    const FIRST: &[u8] = include_bytes!("../../tests/tensorboard/first.tfevents");
    const RESUMED: &[u8] = include_bytes!("../../tests/tensorboard/resumed.tfevents");

    fn framed(events: &[(f64, u64, What<'_>)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for &(wall_time, step, what) in events {
            TensorBoardEvent { wall_time, step, what }.frame(&mut bytes);
        }
        bytes
    }

    #[test]
    fn bytes_match_tensorboards_writer() {
        let losses = [
            [("train/loss", 2.5), ("train/learning_rate", 1e-5)],
            [("train/loss", 2.25), ("train/learning_rate", 0.0)],
        ];
        let first = framed(&[
            (1_700_000_000.25, 0, What::Version),
            (1_700_000_001.5, 1, What::Scalars(&losses[0])),
            (1_700_000_002.5, 2, What::Scalars(&losses[1])),
            (1_700_000_003.5, 300, What::Scalars(&[("train/loss", f64::NAN)])),
        ]);
        assert_eq!(first, FIRST);
        let resumed = framed(&[
            (1_700_000_100.0, 2, What::Version),
            (1_700_000_100.0, 2, What::Start),
            (1_700_000_101.0, 2, What::Scalars(&[("train/loss", 2.125)])),
        ]);
        assert_eq!(resumed, RESUMED);
    }

    #[test]
    fn resuming_adds_a_later_file_that_begins_with_start() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = EventFile::create(folder.path(), 1).unwrap();
        file.scalars(1, &[("train/loss", 2.5)]);
        let older = file.file.path().to_owned();
        let before = fs::read(&older).unwrap();
        let resumed = EventFile::create(folder.path(), 2).unwrap();
        assert!(resumed.file.path().file_name() > older.file_name(), "{:?} {older:?}", resumed.file.path());
        assert_eq!(fs::read(&older).unwrap(), before, "the older file is unchanged");
        let start = [key(7, LENGTH), 2, 8, 1];
        let has_start = |bytes: &[u8]| bytes.windows(4).any(|window| window == start);
        assert!(has_start(&fs::read(resumed.file.path()).unwrap()) && !has_start(&before));
    }
}
