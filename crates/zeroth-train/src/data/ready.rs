//! Rows of ready tokens: {"input_ids": [...], "labels": [...]}. No tokenizer, and no token added.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;
use zeroth_base::nearest;

use super::columns::Columns;
use super::lines::{Lines, check};
use super::ready_row::{Lists, kind};
use super::{DataError, Encoded, RowProblem, Samples, SamplesBuilder};

/// What to hold rows to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadOptions {
    /// Tokens of the model's vocabulary.
    pub vocabulary: u64,
    /// Longer rows are left out and counted.
    pub max_length: u64,
    /// `--max-train-samples`: reading ends once so many are kept.
    pub max_samples: Option<NonZeroU64>,
}

/// Keys by which other formats of rows are known, and how a message names them.
const OTHER_FORMATS: &[(&[&str], &str)] = &[
    (&["messages"], "{\"messages\": [...]}"),
    (&["conversations"], "{\"conversations\": [...]} (sharegpt)"),
    (&["instruction", "output"], "{\"instruction\", \"input\", \"output\"} (alpaca)"),
    (&["prompt", "completion"], "{\"prompt\", \"completion\"}"),
    (&["question", "answer"], "{\"question\", \"answer\"}"),
    (&["translation"], "{\"translation\": {...}}"),
    (&["text"], "{\"text\"}"),
];

/// A row as it should be; keys that are not named here are ignored.
#[derive(Deserialize)]
struct Row {
    input_ids: Vec<i64>,
    #[serde(default)]
    labels: Option<Vec<i64>>,
    #[serde(default)]
    attention_mask: Option<Vec<i64>>,
}

/// Reads rows of ready tokens; several files are one dataset, in the order given.
pub fn read_ready_tokens(files: &[PathBuf], options: &ReadOptions) -> Result<Samples, DataError> {
    check(files)?;
    let mut samples = SamplesBuilder::new(options.max_length);
    let mut row = Encoded::default();
    'files: for path in files {
        let mut lines = Lines::open(path)?;
        let mut rows = 0_u64;
        loop {
            if options.max_samples.is_some_and(|most| samples.kept() >= most.get()) {
                break 'files;
            }
            let Some((line, text)) = lines.next()? else { break };
            rows += 1;
            take_row(text, options.vocabulary, &mut row).map_err(|problem| DataError::Row {
                path: path.clone(),
                line,
                problem,
            })?;
            samples.push(&row.ids, &row.labels);
        }
        refuse_empty(path, rows)?;
    }
    samples.finish()
}

fn refuse_empty(path: &Path, rows: u64) -> Result<(), DataError> {
    if rows == 0 { Err(DataError::Empty { path: path.to_owned() }) } else { Ok(()) }
}

/// Puts the row's tokens and labels into the two buffers.
fn take_row(text: &[u8], vocabulary: u64, into: &mut Encoded) -> Result<(), RowProblem> {
    let row: Row = serde_json::from_slice(text).map_err(|error| diagnose(text, &error))?;
    Lists { ids: row.input_ids, labels: row.labels, mask: row.attention_mask }.take(vocabulary, into)
}

/// Why a line is no [`Row`]. It is parsed again, as anything at all: only a run that ends pays for it.
fn diagnose(text: &[u8], error: &serde_json::Error) -> RowProblem {
    let not_json = |error: &serde_json::Error| {
        // The parser saw one line; "line 1" would be mistaken for the file's.
        let message = error.to_string();
        let message = message.split(" at line ").next().unwrap_or_default().to_owned();
        RowProblem::NotJson { message, column: error.column(), array: text.starts_with(b"[") }
    };
    let value: Value = match serde_json::from_slice(text) {
        Ok(value) => value,
        Err(error) => return not_json(&error),
    };
    let Value::Object(row) = &value else { return RowProblem::NotAnObject { found: kind(&value) } };
    if !row.contains_key("input_ids") {
        let has = |keys: &[&str]| keys.iter().all(|key| row.contains_key(*key));
        if let Some((_, format)) = OTHER_FORMATS.iter().find(|(keys, _)| has(keys)) {
            return RowProblem::FormatNotYet { format };
        }
        let near = nearest("input_ids", row.keys().map(String::as_str)).map(str::to_owned);
        return RowProblem::NoInputIds { found: row.keys().cloned().collect(), near };
    }
    // A key given twice: the general parser takes the last, ours refuses.
    Lists::of(row, &Columns::default()).err().unwrap_or_else(|| not_json(error))
}
