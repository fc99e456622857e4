//! Metrics as CSV: one table of all metrics, or DeepSpeed's one file per metric.
//!
//! As in metrics.jsonl, a row is a single write, and resuming removes a torn last row and rows after the checkpoint.
//! Numbers have enough digits to parse to the same value; non-finite ones are `NaN`, `inf` or `-inf`.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use zeroth_base::publish;

use super::append_file::AppendFile;
use super::metrics::{EvalMetrics, MetricsError, StepMetrics, io_error};

/// An open CSV file. Its first column is a non-decreasing integer.
#[derive(Debug)]
struct CsvTable {
    file: AppendFile,
    ending: &'static str,
}

impl CsvTable {
    /// Opens a file with this header. Keeps rows whose first cell is at most `last`, or none without `last`.
    fn open(path: &Path, head: &str, ending: &'static str, last: Option<u64>) -> Result<Self, MetricsError> {
        let old = match last.map(|last| (last, fs::read_to_string(path))) {
            Some((last, Ok(text))) if !text.is_empty() => {
                kept(&text, head, last).map_err(io_error("resume", path))?
            }
            Some((_, Err(error))) if error.kind() != io::ErrorKind::NotFound => {
                return Err(io_error("read", path)(error));
            }
            _ => format!("{head}{ending}"),
        };
        publish(path, old.as_bytes())?;
        let file = OpenOptions::new().append(true).open(path).map_err(io_error("open", path))?;
        Ok(Self { file: AppendFile::new(path, file), ending })
    }

    fn row(&mut self, cells: &[String]) {
        let row = format!("{}{}", cells.join(","), self.ending);
        self.file.append(row.as_bytes());
    }
}

/// The header and the complete rows up to `last`.
fn kept(text: &str, head: &str, last: u64) -> io::Result<String> {
    let mut lines = text.split_inclusive('\n');
    let found = lines.next().unwrap_or_default();
    if found.trim_end() != head {
        let problem = format!(
            "its first line is {:?}, expected {head:?}: remove it, or resume into another --output",
            found.trim_end()
        );
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    let columns = head.split(',').count();
    let stays = |line: &&str| {
        let mut cells = line.split(',');
        let first = cells.next().and_then(|cell| cell.parse::<u64>().ok());
        line.ends_with('\n') && first.is_some_and(|first| first <= last) && cells.count() + 1 == columns
    };
    Ok(std::iter::once(found).chain(lines.filter(stays)).collect())
}

/// The shortest text that parses to the same value.
fn number(value: f64) -> String {
    format!("{value:?}")
}

/// All metrics in one table, with the column names of metrics.jsonl. Evaluation rows fill only their own columns.
#[derive(Debug)]
pub(super) struct MetricsTable {
    table: CsvTable,
    /// Parts of the loss, which have the last columns.
    parts: usize,
}

const STEP_COLUMNS: usize = 12;
const EVALUATION_COLUMNS: usize = 3;
const HEAD: &str = "step,loss,grad_norm,lr,tokens,tokens_per_second,step_ms,loss_scale,skipped,device_bytes_peak,\
                    host_bytes_peak,samples_seen,eval_loss,eval_perplexity,eval_tokens";

impl MetricsTable {
    /// `parts` are the names of the loss's parts, where there are any.
    pub(super) fn open(path: &Path, parts: &[&str], last: Option<u64>) -> Result<Self, MetricsError> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(io_error("create", folder))?;
        }
        let head: String =
            std::iter::once(HEAD.to_owned()).chain(parts.iter().map(|part| format!(",{part}"))).collect();
        Ok(Self { table: CsvTable::open(path, &head, "\n", last)?, parts: parts.len() })
    }

    /// Whether a file is such a table without rows.
    pub(super) fn is_empty_at(path: &Path) -> bool {
        let mut text = String::new();
        let read =
            File::open(path).and_then(|file| file.take(2 * HEAD.len() as u64).read_to_string(&mut text));
        read.is_ok() && text.starts_with(HEAD) && text.find('\n') == Some(text.len() - 1)
    }

    /// Whether a file begins as such a table.
    pub(super) fn is_at(path: &Path) -> bool {
        let mut first = String::new();
        let read = File::open(path).and_then(|file| file.take(HEAD.len() as u64).read_to_string(&mut first));
        read.is_ok() && first == HEAD
    }

    pub(super) fn step(&mut self, line: &StepMetrics) {
        let mut cells = vec![
            line.step.to_string(),
            number(line.loss),
            number(line.grad_norm),
            number(line.lr),
            line.tokens.to_string(),
            number(line.tokens_per_second()),
            number(line.step_ms),
            number(line.loss_scale),
            line.skipped.to_string(),
            line.device_bytes_peak.to_string(),
            line.host_bytes_peak.to_string(),
            line.samples_seen.to_string(),
        ];
        cells.resize(STEP_COLUMNS + EVALUATION_COLUMNS, String::new());
        let parts = line.loss_parts.iter().flatten().take(self.parts);
        cells.extend(parts.map(|(_, part)| number(*part)));
        self.table.row(&cells);
    }

    pub(super) fn evaluation(&mut self, line: &EvalMetrics) {
        let mut cells = vec![line.step.to_string()];
        cells.resize(STEP_COLUMNS - 1, String::new());
        cells.push(line.samples_seen.to_string());
        cells.extend([number(line.eval_loss), number(line.eval_perplexity), line.eval_tokens.to_string()]);
        cells.resize(STEP_COLUMNS + EVALUATION_COLUMNS + self.parts, String::new());
        self.table.row(&cells);
    }

    /// What to tell about the first row that could not be written; once.
    pub(super) fn take_problem(&mut self) -> Option<String> {
        self.table.file.take_problem()
    }
}

/// DeepSpeed's csv_monitor: a folder with one file per event, indexed by samples instead of steps.
#[derive(Debug)]
pub(super) struct DeepSpeedTables(Vec<CsvTable>);

impl DeepSpeedTables {
    /// Opens the files of these events, such as `Train/Samples/lr`.
    pub(super) fn open(folder: &Path, tags: &[&str], last: Option<u64>) -> Result<Self, MetricsError> {
        fs::create_dir_all(folder).map_err(io_error("create", folder))?;
        let table = |tag: &&str| {
            let metric = tag.rsplit('/').next().unwrap_or(tag);
            let path = folder.join(format!("{}.csv", tag.replace(['/', ' '], "_")));
            // Python's csv module writes CRLF.
            CsvTable::open(&path, &format!("step,{metric}"), "\r\n", last)
        };
        Ok(Self(tags.iter().map(table).collect::<Result<_, _>>()?))
    }

    /// The files in a folder that were made for it.
    pub(super) fn files_in(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
        let paths = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
        paths.filter(|path| path.extension().is_some_and(|extension| extension == "csv"))
    }

    /// Appends a row to each file, in the order of the tags.
    pub(super) fn rows(&mut self, samples: u64, values: &[(&str, f64)]) {
        for (table, (_, value)) in self.0.iter_mut().zip(values) {
            table.row(&[samples.to_string(), number(*value)]);
        }
    }

    /// What to tell about the first row that could not be written; once for each file.
    pub(super) fn take_problem(&mut self) -> Option<String> {
        self.0.iter_mut().find_map(|table| table.file.take_problem())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: StepMetrics = StepMetrics {
        step: 1,
        loss: 2.5,
        loss_parts: [None; zeroth_kernel::LOSSES],
        router: None,
        grad_norm: 0.125,
        lr: 1e-5,
        tokens: 100,
        step_ms: 500.0,
        loss_scale: 1.0,
        skipped: false,
        device_bytes_peak: 7,
        host_bytes_peak: 8,
        samples_seen: 4,
    };

    #[test]
    fn one_table_holds_steps_and_evaluations() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.csv");
        let mut table = MetricsTable::open(&path, &[], None).unwrap();
        table.step(&STEP);
        table.step(&StepMetrics { step: 2, loss: f64::NAN, skipped: true, ..STEP });
        let found = EvalMetrics {
            step: 2,
            eval_loss: 2.0,
            loss_parts: [None; zeroth_kernel::LOSSES],
            eval_perplexity: 7.389_056_098_930_65,
            eval_tokens: 9,
            samples_seen: 8,
        };
        table.evaluation(&found);
        let text = fs::read_to_string(path).unwrap();
        assert_eq!(
            text.lines().skip(1).collect::<Vec<_>>(),
            [
                "1,2.5,0.125,1e-5,100,200.0,500.0,1.0,false,7,8,4,,,",
                "2,NaN,0.125,1e-5,100,200.0,500.0,1.0,true,7,8,4,,,",
                "2,,,,,,,,,,,8,2.0,7.38905609893065,9",
            ]
        );
        assert!(
            text.lines().all(|line| line.split(',').count() == STEP_COLUMNS + EVALUATION_COLUMNS),
            "{text}"
        );
    }

    #[test]
    fn resuming_removes_later_and_torn_rows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.csv");
        let mut table = MetricsTable::open(&path, &[], None).unwrap();
        for step in 1..=3 {
            table.step(&StepMetrics { step, ..STEP });
        }
        let whole = fs::read_to_string(&path).unwrap();
        let two = whole.split_inclusive('\n').take(3).collect::<String>();
        fs::write(&path, format!("{whole}4,2.5,0.1")).unwrap();
        drop(MetricsTable::open(&path, &[], Some(2)).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), two);
        // A run into another folder starts a new file.
        let other = folder.path().join("other.csv");
        drop(MetricsTable::open(&other, &[], Some(2)).unwrap());
        assert_eq!(fs::read_to_string(other).unwrap(), format!("{HEAD}\n"));
    }

    #[test]
    fn foreign_files_are_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.csv");
        fs::write(&path, "when,what\n1,2\n").unwrap();
        let message = MetricsTable::open(&path, &[], Some(2)).unwrap_err().to_string();
        assert!(message.contains("metrics.csv: its first line is \"when,what\""), "{message}");
        assert_eq!(fs::read_to_string(path).unwrap(), "when,what\n1,2\n");
    }

    #[test]
    fn layout_matches_deepspeeds_csv_monitor() {
        // Generated by DeepSpeed's csvMonitor: tests/make_csv_monitor.py.
        let golden: std::collections::BTreeMap<String, String> =
            serde_json::from_str(include_str!("../../tests/csv_monitor.json")).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let tags = ["Train/Samples/train_loss", "Train/Samples/lr", "Train/Samples/loss_scale"];
        let mut tables = DeepSpeedTables::open(&folder.path().join("job"), &tags, None).unwrap();
        for (samples, values) in [(4, [2.5, 0.001, 65536.0]), (8, [2.25, 0.0005, 32768.0])] {
            let values: Vec<(&str, f64)> = tags.into_iter().zip(values).collect();
            tables.rows(samples, &values);
        }
        assert_eq!(golden.len(), 3);
        for (name, text) in &golden {
            assert_eq!(fs::read_to_string(folder.path().join(name)).unwrap(), *text, "{name}");
        }
        drop(DeepSpeedTables::open(&folder.path().join("job"), &tags, Some(4)).unwrap());
        let shorter = fs::read_to_string(folder.path().join("job/Train_Samples_lr.csv")).unwrap();
        assert_eq!(shorter, "step,lr\r\n4,0.001\r\n");
    }
}
