//! Reports of a run: metrics, events and status files, monitors, progress, loss curves and performance figures.
//!
//! [`Reporters`] always writes metrics.jsonl. `--report-to` adds files in the run folder: `tensorboard/`, indexed by
//! step, and metrics.csv. The config's `tensorboard` and `csv_monitor` sections write what DeepSpeed writes, into
//! `output_path/job_name`, indexed by samples. Each has its own folder, so their x axes never mix.
//!
//! [`flops`] computes FLOPs and MFU, [`breakdown`] step time by phase, and [`profile`] both per unit and op.

mod append_file;
pub mod breakdown;
mod csv;
mod events;
pub mod flops;
mod loss_curve;
mod metrics;
pub mod pair_flops;
pub mod profile;
pub mod progress;
mod resident;
mod router_load;
mod status;
mod tensorboard;
pub mod timing;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use zeroth_base::nearest;
use zeroth_config::resolve::Resolved;
use zeroth_config::schema::Values;

use self::csv::{DeepSpeedTables, MetricsTable};
pub use self::events::{EventLog, RunEvent};
pub use self::loss_curve::{loss_curve, loss_curves};
pub use self::metrics::{
    EvalMetrics, LossParts, MetricsError, MetricsFile, StepMetrics, StepSummary, read_evaluation_losses,
    read_losses, summarize_steps,
};
pub use self::resident::resident_bytes;
pub use self::router_load::RouterLoad;
pub(crate) use self::router_load::RouterWatch;
pub use self::status::{RunFacts, RunState, StatusWriter, WriteGate};
use self::tensorboard::EventFile;
use crate::run_folder::{event_files, exists, missing};

/// A report that `--report-to` accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReportTo {
    /// Event files in `tensorboard/`.
    TensorBoard,
    /// One table, metrics.csv.
    Csv,
    /// metrics.jsonl, always written.
    Jsonl,
}

/// An invalid `--report-to`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "names say what they are")]
pub enum ReportToError {
    #[error(
        "--report-to {name}: unknown report{}; available are tensorboard, csv, jsonl (always written) and none. A run \
         connects to no service", nearest.map(|name| format!(" (did you mean `{name}`?)")).unwrap_or_default()
    )]
    Unknown { name: String, nearest: Option<&'static str> },
    #[error(
        "{} is there already: move it away, or give another --logging-dir for this run", path.display()
    )]
    Exists { path: PathBuf },
    #[error("--report-to none and {other}: leave one of them out")]
    NoneAnd { other: String },
}

impl ReportTo {
    const NAMES: [(&'static str, Self); 3] =
        [("tensorboard", Self::TensorBoard), ("csv", Self::Csv), ("jsonl", Self::Jsonl)];

    /// Parses `--report-to`: names separated by spaces or commas.
    pub fn parse<'a>(typed: impl IntoIterator<Item = &'a str>) -> Result<Vec<Self>, ReportToError> {
        let names = typed.into_iter().flat_map(|names| names.split(',')).map(str::trim);
        let names: Vec<&str> = names.filter(|name| !name.is_empty()).collect();
        let is_none = |name: &&&str| name.eq_ignore_ascii_case("none");
        if names.iter().any(|name| is_none(&name)) {
            let other = names.iter().find(|name| !is_none(name));
            return other
                .map_or(Ok(Vec::new()), |other| Err(ReportToError::NoneAnd { other: (*other).to_owned() }));
        }
        let known = |name: &&str| {
            let found = Self::NAMES.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
            found.map(|(_, report)| *report).ok_or_else(|| ReportToError::Unknown {
                name: (*name).to_owned(),
                nearest: nearest(name, Self::NAMES.iter().map(|(known, _)| *known)),
            })
        };
        names.iter().map(known).collect()
    }
}

/// The reports to write besides metrics.jsonl, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportPlan {
    /// Folder of the event files.
    tensorboard: Option<PathBuf>,
    /// The table of all metrics.
    csv: Option<PathBuf>,
    /// Whether the table is outside of the run folder.
    is_elsewhere: bool,
    /// DeepSpeed's folder for each enabled config section.
    deepspeed_tensorboard: Option<PathBuf>,
    deepspeed_csv: Option<PathBuf>,
    /// Whether loss scaling is on.
    is_scaled: bool,
    /// Names of the loss's parts, which get columns and plots of their own.
    loss_parts: Vec<&'static str>,
}

impl ReportPlan {
    /// The reports enabled by the config and `--report-to`; `folder` is the run folder.
    pub fn new(resolved: &Resolved, reports: &[ReportTo], folder: &Path) -> Self {
        let Values { tensorboard, csv_monitor, fp16, .. } = &resolved.values;
        let monitor = |enabled: bool, path: &str, job: &str| {
            let base = if path.is_empty() { folder } else { Path::new(path) };
            enabled.then(|| base.join(job))
        };
        Self {
            tensorboard: reports.contains(&ReportTo::TensorBoard).then(|| folder.join("tensorboard")),
            csv: reports.contains(&ReportTo::Csv).then(|| folder.join("metrics.csv")),
            is_elsewhere: false,
            deepspeed_tensorboard: monitor(
                tensorboard.enabled,
                &tensorboard.output_path,
                &tensorboard.job_name,
            ),
            deepspeed_csv: monitor(csv_monitor.enabled, &csv_monitor.output_path, &csv_monitor.job_name),
            is_scaled: fp16.enabled,
            loss_parts: Vec::new(),
        }
    }

    /// Reports the parts of the loss, too.
    #[must_use]
    pub fn with_loss_parts(self, loss_parts: Vec<&'static str>) -> Self {
        Self { loss_parts, ..self }
    }

    /// Puts the files of `--report-to` into a folder (`--logging-dir`): event files directly, as Hugging Face does.
    #[must_use]
    pub fn in_folder(mut self, folder: &Path) -> Self {
        self.tensorboard = self.tensorboard.map(|_| folder.to_owned());
        self.csv = self.csv.map(|_| folder.join("metrics.csv"));
        self.is_elsewhere = true;
        self
    }

    /// Puts event files into a folder of this name (`--run-name`), which TensorBoard shows as the run's name.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        self.tensorboard = self.tensorboard.map(|folder| folder.join(name));
        self
    }

    /// Refuses to replace a table outside of the run folder, unless the run `resumes` and the file is such a table.
    pub fn check_table(&self, resumes: bool) -> Result<(), ReportToError> {
        let Some(path) = self.csv.as_ref().filter(|path| self.is_elsewhere && path.exists()) else {
            return Ok(());
        };
        let is_free = MetricsTable::is_empty_at(path) || resumes && MetricsTable::is_at(path);
        if is_free { Ok(()) } else { Err(ReportToError::Exists { path: path.clone() }) }
    }

    /// What to remove outside of the run folder if the run stops before its first step.
    pub fn unstarted(&self) -> UnstartedReports {
        let elsewhere = self.is_elsewhere;
        let events = self.tensorboard.clone().filter(|_| elsewhere);
        let deepspeed = [&self.deepspeed_tensorboard, &self.deepspeed_csv].into_iter().flatten();
        let monitors: Vec<PathBuf> = deepspeed.filter(|folder| !exists(folder)).cloned().collect();
        UnstartedReports {
            before: events.iter().flat_map(|folder| event_files(folder)).collect(),
            made: [&self.tensorboard, &self.csv]
                .into_iter()
                .flatten()
                .filter(|_| elsewhere)
                .chain(&monitors)
                .flat_map(|path| missing(path))
                .collect(),
            events,
            csv: self.csv.clone().filter(|_| elsewhere),
            monitors,
        }
    }

    /// The paths that will be written besides metrics.jsonl.
    pub fn paths(&self) -> Vec<PathBuf> {
        let all = [&self.tensorboard, &self.csv, &self.deepspeed_tensorboard, &self.deepspeed_csv];
        all.into_iter().flatten().cloned().collect()
    }
}

/// Reports outside of the run folder, and in folders of their own, before the first step.
#[derive(Debug, Clone)]
pub struct UnstartedReports {
    events: Option<PathBuf>,
    csv: Option<PathBuf>,
    /// Event files that existed before.
    before: BTreeSet<PathBuf>,
    /// DeepSpeed's folders that did not.
    monitors: Vec<PathBuf>,
    /// Folders that did not, innermost first.
    made: Vec<PathBuf>,
}

impl UnstartedReports {
    /// Removes event files that were added and a table without rows. Best effort.
    pub fn remove(&self) {
        let added = self.events.iter().flat_map(|folder| event_files(folder));
        for path in added.filter(|path| !self.before.contains(path)) {
            let _ = std::fs::remove_file(path);
        }
        if let Some(path) = self.csv.as_ref().filter(|path| MetricsTable::is_empty_at(path)) {
            let _ = std::fs::remove_file(path);
        }
        for folder in &self.monitors {
            let tables = DeepSpeedTables::files_in(folder);
            for path in event_files(folder).chain(tables) {
                let _ = std::fs::remove_file(path);
            }
        }
        // These fail for files and for folders that are not empty.
        for folder in &self.made {
            let _ = std::fs::remove_dir(folder);
        }
    }
}

/// The position of a resumed run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResumePosition {
    /// Completed steps.
    pub step: u64,
    /// Samples they consumed.
    pub samples: u64,
}

/// The open report files of a run.
#[derive(Debug)]
pub struct Reporters {
    metrics: MetricsFile,
    is_scaled: bool,
    /// Parts of the loss that are reported.
    loss_parts: usize,
    tensorboard: Option<EventFile>,
    csv: Option<MetricsTable>,
    deepspeed_tensorboard: Option<EventFile>,
    deepspeed_csv: Option<DeepSpeedTables>,
    /// Whether a line that could not be written was reported.
    has_told: bool,
}

const LOSS: &str = "Train/Samples/train_loss";
const RATE: &str = "Train/Samples/lr";
const SCALE: &str = "Train/Samples/loss_scale";

impl Reporters {
    /// Opens all files: new ones or, for a resumed run, existing ones with later steps removed.
    pub fn open(
        plan: &ReportPlan,
        folder: &Path,
        from: Option<ResumePosition>,
    ) -> Result<Self, MetricsError> {
        let metrics = folder.join("metrics.jsonl");
        let (step, samples) = (from.map(|from| from.step), from.map(|from| from.samples));
        // TensorBoard discards events from a START step on; a new run discards everything.
        let next = |last: Option<u64>| last.map_or(0, |last| last + 1);
        let tags = if plan.is_scaled { &[LOSS, RATE, SCALE][..] } else { &[LOSS, RATE] };
        Ok(Self {
            metrics: match step {
                Some(step) => MetricsFile::resume(&metrics, step)?,
                None => MetricsFile::create(&metrics)?,
            },
            is_scaled: plan.is_scaled,
            loss_parts: plan.loss_parts.len(),
            tensorboard: plan
                .tensorboard
                .as_ref()
                .map(|folder| EventFile::create(folder, next(step)))
                .transpose()?,
            csv: plan
                .csv
                .as_ref()
                .map(|path| MetricsTable::open(path, &plan.loss_parts, step))
                .transpose()?,
            deepspeed_tensorboard: plan
                .deepspeed_tensorboard
                .as_ref()
                .map(|folder| EventFile::create(folder, next(samples)))
                .transpose()?,
            deepspeed_csv: plan
                .deepspeed_csv
                .as_ref()
                .map(|folder| DeepSpeedTables::open(folder, tags, samples))
                .transpose()?,
            has_told: false,
        })
    }

    /// Writes a step to all files.
    pub fn step(&mut self, line: &StepMetrics, mfu: Option<f64>) {
        self.metrics.step(line, mfu);
        // A constant scale of 1 is not worth a plot.
        let values = if self.is_scaled { 5 } else { 4 };
        if let Some(file) = &mut self.tensorboard {
            let scalars = [
                ("train/loss", line.loss),
                ("train/grad_norm", line.grad_norm),
                ("train/learning_rate", line.lr),
                ("train/tokens_per_second", line.tokens_per_second()),
                ("train/loss_scale", line.loss_scale),
            ];
            let parts = line.loss_parts.iter().flatten().take(self.loss_parts);
            let parts: Vec<(String, f64)> =
                parts.map(|(name, part)| (format!("train/{name}"), *part)).collect();
            let parts = parts.iter().map(|(name, part)| (name.as_str(), *part));
            let scalars: Vec<(&str, f64)> = scalars[..values].iter().copied().chain(parts).collect();
            file.scalars(line.step, &scalars);
        }
        if let Some(table) = &mut self.csv {
            table.step(line);
        }
        let events = [(LOSS, line.loss), (RATE, line.lr), (SCALE, line.loss_scale)];
        let events = &events[..values - 2];
        if let Some(file) = &mut self.deepspeed_tensorboard {
            file.scalars(line.samples_seen, events);
        }
        if let Some(tables) = &mut self.deepspeed_csv {
            tables.rows(line.samples_seen, events);
        }
    }

    /// Writes an evaluation. DeepSpeed has no event for it, so its files get none.
    pub fn evaluation(&mut self, line: &EvalMetrics) {
        self.metrics.evaluation(line);
        if let Some(file) = &mut self.tensorboard {
            let scalars = [("eval/loss", line.eval_loss), ("eval/perplexity", line.eval_perplexity)];
            file.scalars(line.step, &scalars);
        }
        if let Some(table) = &mut self.csv {
            table.evaluation(line);
        }
    }

    /// What to tell about the first line that could not be written to a file: one note a run, as the disk is mostly the same.
    pub fn take_problem(&mut self) -> Option<String> {
        let problems = [
            self.metrics.take_problem(),
            self.tensorboard.as_mut().and_then(EventFile::take_problem),
            self.csv.as_mut().and_then(MetricsTable::take_problem),
            self.deepspeed_tensorboard.as_mut().and_then(EventFile::take_problem),
            self.deepspeed_csv.as_mut().and_then(DeepSpeedTables::take_problem),
        ];
        let problem = problems.into_iter().flatten().next()?;
        (!std::mem::replace(&mut self.has_told, true)).then_some(problem)
    }

    /// Waits until metrics.jsonl is on disk. Called before a checkpoint of its last step is published.
    pub fn sync(&mut self) {
        self.metrics.sync();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_parsed_from_names_and_lists() {
        assert_eq!(ReportTo::parse(["tensorboard"]), Ok(vec![ReportTo::TensorBoard]));
        assert_eq!(
            ReportTo::parse(["csv,TensorBoard", "jsonl"]),
            Ok(vec![ReportTo::Csv, ReportTo::TensorBoard, ReportTo::Jsonl])
        );
        assert_eq!(ReportTo::parse(["none"]), Ok(vec![]));
        assert_eq!(ReportTo::parse([]), Ok(vec![]));
    }

    #[test]
    fn unknown_reports_are_refused_with_a_suggestion() {
        let message = ReportTo::parse(["tensorbord"]).unwrap_err().to_string();
        assert!(
            message.starts_with("--report-to tensorbord: unknown report (did you mean `tensorboard`?)"),
            "{message}"
        );
        let message = ReportTo::parse(["wandb"]).unwrap_err().to_string();
        assert!(message.contains("connects to no service") && !message.contains("did you mean"), "{message}");
        let both = ReportTo::parse(["none", "csv"]).unwrap_err();
        assert_eq!(both, ReportToError::NoneAnd { other: "csv".to_owned() });
    }
}
