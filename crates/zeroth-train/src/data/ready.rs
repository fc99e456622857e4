//! Rows of ready tokens: {"input_ids": [...], "labels": [...]}. No tokenizer, and no token added.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use zeroth_base::nearest;

use super::lines::{Lines, check};
use super::{DataError, Encode, Encoded, IGNORED, RowNumber, RowProblem, Samples, SamplesBuilder};

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
    let (mut ids, mut labels) = (Vec::new(), Vec::new());
    'files: for path in files {
        let mut lines = Lines::open(path)?;
        let mut rows = 0_u64;
        loop {
            if options.max_samples.is_some_and(|most| samples.kept() >= most.get()) {
                break 'files;
            }
            let Some((line, text)) = lines.next()? else { break };
            rows += 1;
            take_row(text, options.vocabulary, &mut ids, &mut labels).map_err(|problem| DataError::Row {
                path: path.clone(),
                at: RowNumber::Line(line),
                problem,
            })?;
            samples.push(&ids, &labels);
        }
        refuse_empty(path, rows)?;
    }
    samples.finish()
}

fn refuse_empty(path: &Path, rows: u64) -> Result<(), DataError> {
    if rows == 0 { Err(DataError::Empty { path: path.to_owned() }) } else { Ok(()) }
}

/// Rows of ready tokens as an encoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadyTokens {
    /// Tokens of the model's vocabulary.
    pub vocabulary: u64,
}

impl Encode for ReadyTokens {
    fn encode(&self, row: &Map<String, Value>, into: &mut Encoded) -> Result<(), RowProblem> {
        let parsed = Row::deserialize(row)
            .map_err(|error| diagnose_object(row).unwrap_or_else(|| not_json(b"", &error)))?;
        take_parsed(parsed, self.vocabulary, &mut into.ids, &mut into.labels)
    }

    fn fingerprint(&self) -> [u8; 32] {
        Sha256::new()
            .chain_update("ready tokens")
            .chain_update(self.vocabulary.to_le_bytes())
            .finalize()
            .into()
    }
}

/// Puts the row's tokens and labels into the two buffers.
fn take_row(
    text: &[u8],
    vocabulary: u64,
    ids: &mut Vec<i32>,
    labels: &mut Vec<i32>,
) -> Result<(), RowProblem> {
    let row: Row = serde_json::from_slice(text).map_err(|error| diagnose(text, &error))?;
    take_parsed(row, vocabulary, ids, labels)
}

fn take_parsed(
    mut row: Row,
    vocabulary: u64,
    ids: &mut Vec<i32>,
    labels: &mut Vec<i32>,
) -> Result<(), RowProblem> {
    let tokens = row.input_ids.len();
    let same_length = |key, list: Option<&Vec<i64>>| match list {
        Some(list) if list.len() != tokens => {
            Err(RowProblem::Lengths { key, found: list.len(), expected: tokens })
        }
        _ => Ok(()),
    };
    same_length("labels", row.labels.as_ref())?;
    same_length("attention_mask", row.attention_mask.as_ref())?;
    if let Some(mask) = &row.attention_mask {
        let end = without_padding(mask)?;
        row.input_ids.truncate(end);
        row.labels.iter_mut().for_each(|labels| labels.truncate(end));
    }
    if row.input_ids.is_empty() {
        return Err(RowProblem::Empty);
    }

    let within = |id: i64| u64::try_from(id).is_ok_and(|id| id < vocabulary);
    ids.clear();
    labels.clear();
    for (place, &id) in row.input_ids.iter().enumerate() {
        if !within(id) {
            return Err(RowProblem::Token { place, id, vocabulary });
        }
        ids.push(id as i32);
    }
    let Some(given) = row.labels else {
        labels.extend_from_slice(ids);
        return Ok(());
    };
    for (place, &label) in given.iter().enumerate() {
        if label != i64::from(IGNORED) && !within(label) {
            return Err(RowProblem::Label { place, label, vocabulary });
        }
        labels.push(label as i32);
    }
    Ok(())
}

/// Where the padding at the end begins.
fn without_padding(mask: &[i64]) -> Result<usize, RowProblem> {
    if let Some(place) = mask.iter().position(|&entry| entry != 0 && entry != 1) {
        return Err(RowProblem::Mask { place, found: mask[place] });
    }
    let end = mask.iter().rposition(|&entry| entry == 1).map_or(0, |last| last + 1);
    match mask[..end].iter().position(|&entry| entry == 0) {
        Some(place) => Err(RowProblem::PaddingInside { place }),
        None => Ok(end),
    }
}

/// Why a line is no [`Row`]. It is parsed again, as anything at all: only a run that ends pays for it.
fn diagnose(text: &[u8], error: &serde_json::Error) -> RowProblem {
    match serde_json::from_slice(text) {
        // A key given twice: the general parser takes the last, ours refuses.
        Ok(Value::Object(row)) => diagnose_object(&row).unwrap_or_else(|| not_json(text, error)),
        Ok(value) => RowProblem::NotAnObject { found: kind(&value) },
        Err(error) => not_json(text, &error),
    }
}

pub(super) fn not_json(text: &[u8], error: &serde_json::Error) -> RowProblem {
    // The parser saw one line; "line 1" would be mistaken for the file's.
    let message = error.to_string();
    let message = message.split(" at line ").next().unwrap_or_default().to_owned();
    RowProblem::NotJson { message, column: error.column(), array: text.starts_with(b"[") }
}

/// Why an object is no [`Row`].
fn diagnose_object(row: &Map<String, Value>) -> Option<RowProblem> {
    if !row.contains_key("input_ids") {
        let has = |keys: &[&str]| keys.iter().all(|key| row.contains_key(*key));
        if let Some((_, format)) = OTHER_FORMATS.iter().find(|(keys, _)| has(keys)) {
            return Some(RowProblem::FormatNotYet { format });
        }
        let near = nearest("input_ids", row.keys().map(String::as_str)).map(str::to_owned);
        return Some(RowProblem::NoInputIds { found: row.keys().cloned().collect(), near });
    }
    for key in ["input_ids", "labels", "attention_mask"] {
        let list = match row.get(key) {
            Some(Value::Array(list)) => list,
            Some(Value::Null) if key != "input_ids" => continue,
            None => continue,
            Some(other) => return Some(RowProblem::NotAList { key, found: kind(other) }),
        };
        if let Some(place) = list.iter().position(|entry| entry.as_i64().is_none()) {
            return Some(RowProblem::NotAnInteger { key, place, found: shortened(&list[place]) });
        }
    }
    None
}

pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn shortened(value: &Value) -> String {
    const SHOWN: usize = 40;
    let text = value.to_string();
    if text.chars().count() <= SHOWN { text } else { text.chars().take(SHOWN).chain(['…']).collect() }
}
