//! metrics.jsonl: one line a step, there for good once its step is done.
//!
//! A line is one write to a file opened for appending, so a kill leaves whole lines and at most one torn one at the
//! end. Going on from a checkpoint removes that one and the steps after the checkpoint: each step appears once.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::ser::SerializeStruct;
use serde::{Deserialize, Serialize, Serializer};
use zeroth_base::{PublishError, publish};

/// The metrics of a run cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// The system refused.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The shortened file could not be put in place.
    #[error(transparent)]
    Publish(#[from] PublishError),
    /// A line that no run wrote, before others that stay.
    #[error(
        "{}: line {line} is not one of metrics (a JSON object with a step): remove that line, or go on into another \
         --output", path.display()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
    },
}

/// What a step gave. `tokens_per_second` follows from the rest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepLine {
    /// Counted from 1.
    pub step: u64,
    /// Mean over the trained tokens of the whole step.
    pub loss: f64,
    /// Global L2 norm of the gradient, before clipping.
    pub grad_norm: f64,
    /// The learning rate used.
    pub lr: f64,
    /// All tokens of all ranks.
    pub tokens: u64,
    /// Milliseconds that the step took.
    pub step_ms: f64,
    /// 1 where no scale is used.
    pub loss_scale: f64,
    /// Whether the update was not applied.
    pub skipped: bool,
    /// The most device memory a rank has held so far.
    pub device_bytes_peak: u64,
    /// The most host memory a rank has held so far.
    pub host_bytes_peak: u64,
    /// Samples taken since the start of the run: the position in the data.
    pub samples_seen: u64,
}

impl StepLine {
    /// Tokens by the time of the step.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / (self.step_ms / 1000.0)
    }
}

impl Serialize for StepLine {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut line = serializer.serialize_struct("StepLine", 12)?;
        line.serialize_field("step", &self.step)?;
        line.serialize_field("loss", &self.loss)?;
        line.serialize_field("grad_norm", &self.grad_norm)?;
        line.serialize_field("lr", &self.lr)?;
        line.serialize_field("tokens", &self.tokens)?;
        line.serialize_field("tokens_per_second", &self.tokens_per_second())?;
        line.serialize_field("step_ms", &self.step_ms)?;
        line.serialize_field("loss_scale", &self.loss_scale)?;
        line.serialize_field("skipped", &self.skipped)?;
        line.serialize_field("device_bytes_peak", &self.device_bytes_peak)?;
        line.serialize_field("host_bytes_peak", &self.host_bytes_peak)?;
        line.serialize_field("samples_seen", &self.samples_seen)?;
        line.end()
    }
}

/// What an evaluation gave.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct EvaluationLine {
    /// The steps done before it.
    pub step: u64,
    /// Mean over the trained tokens of the evaluation data.
    pub eval_loss: f64,
    /// e to the power of it.
    pub eval_perplexity: f64,
    /// All tokens of the evaluation data.
    pub eval_tokens: u64,
    /// Samples of the training data taken before it.
    pub samples_seen: u64,
}

/// A metrics.jsonl that is being written.
#[derive(Debug)]
pub struct MetricsFile {
    path: PathBuf,
    file: File,
}

impl MetricsFile {
    /// A new one; whatever was there is gone.
    pub fn create(path: &Path) -> Result<Self, MetricsError> {
        File::create(path).map_err(|source| failed("create", path, source))?;
        Self::append_to(path)
    }

    /// Goes on after `step` steps: lines of later ones and a torn last line are removed. A missing file is made.
    pub fn resume(path: &Path, step: u64) -> Result<Self, MetricsError> {
        let contents = match fs::read(path) {
            Ok(contents) => contents,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(source) => return Err(failed("read", path, source)),
        };
        let kept = lines_up_to(&contents, step)
            .map_err(|line| MetricsError::Foreign { path: path.to_owned(), line })?;
        if contents.starts_with(&kept) {
            let file = Self::append_to(path)?;
            file.file.set_len(kept.len() as u64).map_err(|source| failed("shorten", path, source))?;
            return Ok(file);
        }
        publish(path, &kept)?;
        Self::append_to(path)
    }

    fn append_to(path: &Path) -> Result<Self, MetricsError> {
        let file = OpenOptions::new()
            .append(true)
            .create(true)
            .open(path)
            .map_err(|source| failed("open", path, source))?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Writes the line of a step that is done.
    pub fn step(&mut self, line: &StepLine) -> Result<(), MetricsError> {
        self.write(line)
    }

    /// Writes the line of an evaluation that is done.
    pub fn evaluation(&mut self, line: &EvaluationLine) -> Result<(), MetricsError> {
        self.write(line)
    }

    fn write(&mut self, line: &impl Serialize) -> Result<(), MetricsError> {
        let mut text =
            serde_json::to_vec(line).expect("numbers and booleans under fixed keys always have a JSON");
        text.push(b'\n');
        // Not buffered: the whole line in one call, and with the system when it returns.
        self.file.write_all(&text).map_err(|source| failed("write", &self.path, source))
    }

    /// Waits until all lines are on disk. Before a checkpoint is published: its steps must not be missing here.
    pub fn sync(&self) -> Result<(), MetricsError> {
        self.file.sync_data().map_err(|source| failed("sync", &self.path, source))
    }
}

fn failed(doing: &'static str, path: &Path, source: io::Error) -> MetricsError {
    MetricsError::Io { doing, path: path.to_owned(), source }
}

#[derive(Deserialize)]
struct Known {
    step: u64,
    #[serde(default)]
    loss: Option<f64>,
    #[serde(default)]
    eval_loss: Option<f64>,
    /// Only lines of steps have it.
    #[serde(default)]
    skipped: Option<bool>,
}

/// What the steps of a metrics.jsonl came to.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepCounts {
    /// All of them.
    pub steps: u64,
    /// Those whose update was not applied.
    pub skipped: u64,
    /// Those whose loss was not finite.
    pub non_finite: u64,
    /// The last one, and its loss where that was finite.
    pub last: Option<(u64, Option<f64>)>,
}

/// Counts the steps that a metrics.jsonl holds. Torn lines are passed over.
pub fn count_steps(path: &Path) -> Result<StepCounts, MetricsError> {
    let mut counts = StepCounts::default();
    for line in known(path)? {
        let Some(skipped) = line.skipped else { continue };
        counts.steps += 1;
        counts.skipped += u64::from(skipped);
        counts.non_finite += u64::from(line.loss.is_none());
        counts.last = Some((line.step, line.loss));
    }
    Ok(counts)
}

/// The lines that stay, each with its end of line; or the number of a broken one before lines that stay.
fn lines_up_to(contents: &[u8], step: u64) -> Result<Vec<u8>, usize> {
    let mut kept = Vec::with_capacity(contents.len());
    let mut broken = None;
    for (number, line) in (1..).zip(contents.split_inclusive(|&byte| byte == b'\n')) {
        // A line that lacks nothing but its end is kept: no later run would write that step again.
        let text = line.strip_suffix(b"\n").unwrap_or(line);
        match serde_json::from_slice::<Known>(text) {
            Ok(known) if known.step <= step => {
                if let Some(line) = broken {
                    return Err(line);
                }
                kept.extend_from_slice(text);
                kept.push(b'\n');
            }
            Ok(_) => {}
            Err(_) => broken = broken.or(Some(number)),
        }
    }
    Ok(kept)
}

/// The losses that a metrics.jsonl holds, by step; skipped where they were not finite. Torn lines are passed over.
pub fn read_losses(path: &Path) -> Result<Vec<(u64, f64)>, MetricsError> {
    read(path, |line| line.loss)
}

/// The losses of its evaluations, by the steps done before them.
pub fn read_evaluation_losses(path: &Path) -> Result<Vec<(u64, f64)>, MetricsError> {
    read(path, |line| line.eval_loss)
}

fn read(path: &Path, loss: impl Fn(&Known) -> Option<f64>) -> Result<Vec<(u64, f64)>, MetricsError> {
    Ok(known(path)?.iter().filter_map(|line| Some((line.step, loss(line)?))).collect())
}

fn known(path: &Path) -> Result<Vec<Known>, MetricsError> {
    let contents = fs::read(path).map_err(|source| failed("read", path, source))?;
    let lines = contents.split(|&byte| byte == b'\n');
    Ok(lines.filter_map(|line| serde_json::from_slice(line).ok()).collect())
}
