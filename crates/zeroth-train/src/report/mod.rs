//! What a run reports: metrics for programs and monitors, figures for people.
//!
//! [`Reporters`] writes metrics.jsonl always, and what else was asked for. `--report-to` writes into the run folder:
//! `tensorboard/` with tags that count steps, and metrics.csv. The config's `tensorboard` and `csv_monitor` sections
//! write what DeepSpeed writes, into `output_path/job_name`, with events that count samples. Each has a folder of its
//! own, so that neither's x axis is mixed with the other's.
//!
//! [`figures`] says how much arithmetic a step is and what a device could do, [`breakdown`] where its time went,
//! [`profile`] the same unit by unit and op by op.

pub mod breakdown;
mod csv;
pub mod figures;
pub mod profile;
mod tensorboard;
pub mod timing;

use std::io;
use std::path::{Path, PathBuf};

use zeroth_base::nearest;
use zeroth_config::resolve::Resolved;
use zeroth_config::schema::Values;

use self::csv::{DeepSpeedTables, MetricsTable};
use self::tensorboard::EventFile;
use crate::{EvaluationLine, MetricsError, MetricsFile, StepLine};

/// A report that `--report-to` may name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Report {
    /// Event files in `tensorboard/`.
    TensorBoard,
    /// One table, metrics.csv.
    Csv,
    /// metrics.jsonl, which is written whether named or not.
    Jsonl,
}

/// Names of `--report-to` that cannot be honoured.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReportToError {
    /// No such report.
    #[error(
        "--report-to {name}: there is no such report{}; there are tensorboard, csv, jsonl (always written) and none. A run \
         speaks to no service", nearest.map(|name| format!(" (did you mean `{name}`?)")).unwrap_or_default()
    )]
    Unknown {
        /// What was typed.
        name: String,
        /// What was probably meant.
        nearest: Option<&'static str>,
    },
    /// `none` beside others.
    #[error("--report-to none and {other}: leave one of them out")]
    NoneAnd {
        /// The other one.
        other: String,
    },
}

impl Report {
    const NAMES: [(&'static str, Self); 3] =
        [("tensorboard", Self::TensorBoard), ("csv", Self::Csv), ("jsonl", Self::Jsonl)];

    /// The reports of a `--report-to`: one name or several, also with commas between them.
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

/// What is to be written besides metrics.jsonl, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportPlan {
    tensorboard: bool,
    csv: bool,
    /// The config's sections: the folder in which DeepSpeed would write, where one is on.
    deepspeed_tensorboard: Option<PathBuf>,
    deepspeed_csv: Option<PathBuf>,
    /// Whether there is a loss scale to report.
    is_scaled: bool,
}

impl ReportPlan {
    /// What the config and `--report-to` ask for; `folder` is the run's.
    pub fn new(resolved: &Resolved, reports: &[Report], folder: &Path) -> Self {
        let Values { tensorboard, csv_monitor, fp16, .. } = &resolved.values;
        let monitor = |enabled: bool, path: &str, job: &str| {
            let base = if path.is_empty() { folder } else { Path::new(path) };
            enabled.then(|| base.join(job))
        };
        Self {
            tensorboard: reports.contains(&Report::TensorBoard),
            csv: reports.contains(&Report::Csv),
            deepspeed_tensorboard: monitor(
                tensorboard.enabled,
                &tensorboard.output_path,
                &tensorboard.job_name,
            ),
            deepspeed_csv: monitor(csv_monitor.enabled, &csv_monitor.output_path, &csv_monitor.job_name),
            is_scaled: fp16.enabled,
        }
    }

    /// What besides metrics.jsonl will be written, for a line at the start of a run.
    pub fn places(&self, folder: &Path) -> Vec<PathBuf> {
        let own = [(self.tensorboard, "tensorboard"), (self.csv, "metrics.csv")];
        let own = own.into_iter().filter(|(is_on, _)| *is_on).map(|(_, name)| folder.join(name));
        own.chain(self.deepspeed_tensorboard.clone()).chain(self.deepspeed_csv.clone()).collect()
    }
}

/// Where a resumed run goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// Steps done.
    pub step: u64,
    /// Samples taken by them.
    pub samples: u64,
}

/// The files that a run's numbers go to.
#[derive(Debug)]
pub struct Reporters {
    metrics: MetricsFile,
    is_scaled: bool,
    tensorboard: Option<EventFile>,
    csv: Option<MetricsTable>,
    deepspeed_tensorboard: Option<EventFile>,
    deepspeed_csv: Option<DeepSpeedTables>,
}

const LOSS: &str = "Train/Samples/train_loss";
const RATE: &str = "Train/Samples/lr";
const SCALE: &str = "Train/Samples/loss_scale";

impl Reporters {
    /// Opens all files in a run's folder: new ones, or, where a run goes on, those there are, without what they say of
    /// later steps.
    pub fn open(plan: &ReportPlan, folder: &Path, from: Option<Position>) -> Result<Self, MetricsError> {
        let metrics = folder.join("metrics.jsonl");
        let (step, samples) = (from.map(|from| from.step), from.map(|from| from.samples));
        // TensorBoard supersedes from a step on; a run that begins supersedes all there is.
        let next = |last: Option<u64>| last.map_or(0, |last| last + 1);
        let tags = if plan.is_scaled { &[LOSS, RATE, SCALE][..] } else { &[LOSS, RATE] };
        Ok(Self {
            metrics: match step {
                Some(step) => MetricsFile::resume(&metrics, step)?,
                None => MetricsFile::create(&metrics)?,
            },
            is_scaled: plan.is_scaled,
            tensorboard: plan
                .tensorboard
                .then(|| EventFile::create(&folder.join("tensorboard"), next(step)))
                .transpose()?,
            csv: plan.csv.then(|| MetricsTable::open(folder.join("metrics.csv"), step)).transpose()?,
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
        })
    }

    /// Writes what a step gave, everywhere.
    pub fn step(&mut self, line: &StepLine) -> Result<(), MetricsError> {
        self.metrics.step(line)?;
        // A scale of 1 that nothing moves is no news.
        let values = if self.is_scaled { 5 } else { 4 };
        if let Some(file) = &mut self.tensorboard {
            let scalars = [
                ("train/loss", line.loss),
                ("train/grad_norm", line.grad_norm),
                ("train/learning_rate", line.lr),
                ("train/tokens_per_second", line.tokens_per_second()),
                ("train/loss_scale", line.loss_scale),
            ];
            file.scalars(line.step, &scalars[..values])?;
        }
        if let Some(table) = &mut self.csv {
            table.step(line)?;
        }
        let events = [(LOSS, line.loss), (RATE, line.lr), (SCALE, line.loss_scale)];
        let events = &events[..values - 2];
        if let Some(file) = &mut self.deepspeed_tensorboard {
            file.scalars(line.samples_seen, events)?;
        }
        if let Some(tables) = &mut self.deepspeed_csv {
            tables.rows(line.samples_seen, events)?;
        }
        Ok(())
    }

    /// Writes what an evaluation gave. DeepSpeed has no event for it, so its files have none here.
    pub fn evaluation(&mut self, line: &EvaluationLine) -> Result<(), MetricsError> {
        self.metrics.evaluation(line)?;
        if let Some(file) = &mut self.tensorboard {
            let scalars = [("eval/loss", line.eval_loss), ("eval/perplexity", line.eval_perplexity)];
            file.scalars(line.step, &scalars)?;
        }
        if let Some(table) = &mut self.csv {
            table.evaluation(line)?;
        }
        Ok(())
    }

    /// Waits until metrics.jsonl is on disk: before a checkpoint of its last step appears.
    pub fn sync(&self) -> Result<(), MetricsError> {
        self.metrics.sync()
    }
}

fn io_error(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> MetricsError + use<> {
    let path = path.to_owned();
    move |source| MetricsError::Io { doing, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_reports_are_known_by_themselves_and_in_lists() {
        assert_eq!(Report::parse(["tensorboard"]), Ok(vec![Report::TensorBoard]));
        assert_eq!(
            Report::parse(["csv,TensorBoard", "jsonl"]),
            Ok(vec![Report::Csv, Report::TensorBoard, Report::Jsonl])
        );
        assert_eq!(Report::parse(["none"]), Ok(vec![]));
        assert_eq!(Report::parse([]), Ok(vec![]));
    }

    #[test]
    fn a_name_that_is_none_is_refused_with_what_was_meant() {
        let message = Report::parse(["tensorbord"]).unwrap_err().to_string();
        assert!(
            message
                .starts_with("--report-to tensorbord: there is no such report (did you mean `tensorboard`?)"),
            "{message}"
        );
        let message = Report::parse(["wandb"]).unwrap_err().to_string();
        assert!(message.contains("speaks to no service") && !message.contains("did you mean"), "{message}");
        let both = Report::parse(["none", "csv"]).unwrap_err();
        assert_eq!(both, ReportToError::NoneAnd { other: "csv".to_owned() });
    }
}
