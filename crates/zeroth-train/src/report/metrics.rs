//! metrics.jsonl: one line per step.
//!
//! Each line is a single append, so a kill leaves complete lines and at most one torn line at the end. Resuming
//! removes that one and all lines after the checkpoint's step: each step appears once. A full disk does not end a run here.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use serde::ser::SerializeStruct;
use serde::{Deserialize, Serialize, Serializer};
use zeroth_base::{PublishError, publish};
use zeroth_kernel::LOSSES;

use super::append_file::AppendFile;
use super::router_load::RouterLoad;

/// An error writing or reading metrics.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "names say what they are")]
pub enum MetricsError {
    #[error("cannot {doing} {}: {source}", path.display())]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
    #[error(transparent)]
    Publish(#[from] PublishError),
    #[error(
        "{}: line {line} is not a metrics line (a JSON object with a `step`): remove that line, or resume into another \
         --output", path.display()
    )]
    Foreign { path: PathBuf, line: usize },
}

pub(super) fn io_error(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> MetricsError + use<> {
    let path = path.to_owned();
    move |source| MetricsError::Io { doing, path, source }
}

/// Names and values of the parts of a loss.
pub type LossParts = [Option<(&'static str, f64)>; LOSSES];

/// The metrics of one step. `tokens_per_second` is derived.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepMetrics {
    /// Step number, from 1.
    pub step: u64,
    /// Mean over the trained tokens of the whole step; of a loss with several parts, their weighted sum.
    pub loss: f64,
    /// The parts with their names and without their weights, where there are several.
    pub loss_parts: LossParts,
    /// The load of a mixture of experts.
    pub router: Option<RouterLoad>,
    /// Global L2 norm of the gradient, before clipping.
    pub grad_norm: f64,
    /// The learning rate used.
    pub lr: f64,
    /// Tokens over all ranks.
    pub tokens: u64,
    /// Duration of the step in milliseconds.
    pub step_ms: f64,
    /// Loss scale; 1 without loss scaling.
    pub loss_scale: f64,
    /// Whether the update was skipped.
    pub skipped: bool,
    /// Peak device memory of a rank so far.
    pub device_bytes_peak: u64,
    /// Peak host memory of a rank so far.
    pub host_bytes_peak: u64,
    /// Samples consumed since the start of the run.
    pub samples_seen: u64,
}

impl StepMetrics {
    /// Throughput of the step.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / (self.step_ms / 1000.0)
    }
}

impl Serialize for StepMetrics {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let parts = self.loss_parts.into_iter().flatten();
        let fields = 12 + parts.clone().count() + if self.router.is_some() { 3 } else { 0 };
        let mut line = serializer.serialize_struct("StepMetrics", fields)?;
        line.serialize_field("step", &self.step)?;
        line.serialize_field("loss", &self.loss)?;
        for (name, part) in parts {
            line.serialize_field(name, &part)?;
        }
        if let Some(RouterLoad { busiest, idlest, entropy }) = &self.router {
            line.serialize_field("router_busiest", busiest)?;
            line.serialize_field("router_idlest", idlest)?;
            line.serialize_field("router_entropy", entropy)?;
        }
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

/// A line of metrics.jsonl.
#[derive(Serialize)]
struct StepLine<'a> {
    #[serde(flatten)]
    line: &'a StepMetrics,
    #[serde(skip_serializing_if = "Option::is_none")]
    mfu: Option<f64>,
}

/// The metrics of one evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct EvalMetrics {
    /// Completed training steps.
    pub step: u64,
    /// Mean over the trained tokens of the evaluation data: the sum of the parts, each times its weight.
    pub eval_loss: f64,
    /// Its parts, means without their weights, where a model's loss has several that are evaluated. Reports have the sum.
    #[serde(skip)]
    pub loss_parts: LossParts,
    /// `exp(eval_loss)`.
    pub eval_perplexity: f64,
    /// All tokens of the evaluation data.
    pub eval_tokens: u64,
    /// Training samples consumed before it.
    pub samples_seen: u64,
}

/// An open metrics.jsonl.
#[derive(Debug)]
pub struct MetricsFile(AppendFile);

impl MetricsFile {
    /// Creates or truncates the file.
    pub fn create(path: &Path) -> Result<Self, MetricsError> {
        File::create(path).map_err(|source| failed("create", path, source))?;
        Ok(Self::of(path, Self::append_to(path)?))
    }

    /// Opens the file to continue after `step`, removing later lines and a torn last line. Creates it if missing.
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
            file.set_len(kept.len() as u64).map_err(|source| failed("shorten", path, source))?;
            return Ok(Self::of(path, file));
        }
        publish(path, &kept)?;
        Ok(Self::of(path, Self::append_to(path)?))
    }

    fn append_to(path: &Path) -> Result<File, MetricsError> {
        let file = OpenOptions::new().append(true).create(true).open(path);
        file.map_err(|source| failed("open", path, source))
    }

    fn of(path: &Path, file: File) -> Self {
        Self(AppendFile::new(path, file))
    }

    /// Appends the line of a completed step, with its model FLOPs utilisation where the devices' peak is known.
    pub fn step(&mut self, line: &StepMetrics, mfu: Option<f64>) {
        self.write(&StepLine { line, mfu });
    }

    /// Appends the line of a completed evaluation.
    pub fn evaluation(&mut self, line: &EvalMetrics) {
        self.write(line);
    }

    fn write(&mut self, line: &impl Serialize) {
        let mut text =
            serde_json::to_vec(line).expect("numbers and booleans under fixed keys always serialise");
        text.push(b'\n');
        self.0.append(&text);
    }

    /// What to tell about the first line that could not be written; once.
    pub fn take_problem(&mut self) -> Option<String> {
        self.0.take_problem()
    }

    /// Waits until the lines are on disk. Called before a checkpoint is published, so that its steps are not missing here
    /// unless the disk takes none.
    pub fn sync(&mut self) {
        self.0.sync();
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
    /// Only step lines have it.
    #[serde(default)]
    skipped: Option<bool>,
}

/// Summary of the steps in a metrics.jsonl.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepSummary {
    /// Number of steps.
    pub steps: u64,
    /// Steps whose update was skipped.
    pub skipped: u64,
    /// Steps with a non-finite loss.
    pub non_finite: u64,
    /// The last step, and its loss if finite.
    pub last: Option<(u64, Option<f64>)>,
}

/// Summarises a metrics.jsonl. Torn lines are ignored.
pub fn summarize_steps(path: &Path) -> Result<StepSummary, MetricsError> {
    let mut counts = StepSummary::default();
    for line in known(path)? {
        let Some(skipped) = line.skipped else { continue };
        counts.steps += 1;
        counts.skipped += u64::from(skipped);
        counts.non_finite += u64::from(line.loss.is_none());
        counts.last = Some((line.step, line.loss));
    }
    Ok(counts)
}

/// The lines up to `step`, each with its line end; the error is the number of an invalid line before lines that are
/// kept.
fn lines_up_to(contents: &[u8], step: u64) -> Result<Vec<u8>, usize> {
    let mut kept = Vec::with_capacity(contents.len());
    let mut broken = None;
    for (number, line) in (1..).zip(contents.split_inclusive(|&byte| byte == b'\n')) {
        // A complete line without its newline is kept: no later run would write that step again.
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

/// The finite losses in a metrics.jsonl by step. Torn lines are ignored.
pub fn read_losses(path: &Path) -> Result<Vec<(u64, f64)>, MetricsError> {
    read(path, |line| line.loss)
}

/// The evaluation losses by step.
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
