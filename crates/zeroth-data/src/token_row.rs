//! Rows of ready tokens: {"input_ids": [...], "labels": [...], "attention_mask": [...]}. No tokens are added.

use serde_json::{Map, Value};

use super::columns::Columns;
use super::row_problem::{kind, shortened};
use super::{Encoded, IGNORED, RowProblem};

/// The lists of a row.
pub(super) struct TokenLists {
    pub(super) ids: Vec<i64>,
    pub(super) labels: Option<Vec<i64>>,
    pub(super) mask: Option<Vec<i64>>,
}

impl TokenLists {
    /// Reads the lists of a row.
    pub(super) fn of(row: &Map<String, Value>, columns: &Columns) -> Result<Self, RowProblem> {
        let list = |key| columns.get(row, key).map(|value| whole_numbers(key, value)).transpose();
        let ids = match row.get(columns.theirs("input_ids")) {
            Some(value) => whole_numbers("input_ids", value)?,
            None => Vec::new(),
        };
        Ok(Self { ids, labels: list("labels")?, mask: list("attention_mask")? })
    }

    /// Validates the lists, removes padding at the end, and stores them in `into`.
    pub(super) fn take(mut self, vocabulary: u64, into: &mut Encoded) -> Result<(), RowProblem> {
        let tokens = self.ids.len();
        let same_length = |key, list: Option<&Vec<i64>>| match list {
            Some(list) if list.len() != tokens => {
                Err(RowProblem::Lengths { key, found: list.len(), expected: tokens })
            }
            _ => Ok(()),
        };
        same_length("labels", self.labels.as_ref())?;
        same_length("attention_mask", self.mask.as_ref())?;
        if let Some(mask) = &self.mask {
            let end = without_padding(mask)?;
            self.ids.truncate(end);
            self.labels.iter_mut().for_each(|labels| labels.truncate(end));
        }
        if self.ids.is_empty() {
            return Err(RowProblem::Empty);
        }

        let within = |id: i64| u64::try_from(id).is_ok_and(|id| id < vocabulary);
        into.ids.clear();
        into.labels.clear();
        for (place, &id) in self.ids.iter().enumerate() {
            if !within(id) {
                return Err(RowProblem::Token { place, id, vocabulary });
            }
            into.ids.push(id as i32);
        }
        let Some(given) = self.labels else {
            into.labels.extend_from_slice(&into.ids);
            return Ok(());
        };
        for (place, &label) in given.iter().enumerate() {
            if label != i64::from(IGNORED) && !within(label) {
                return Err(RowProblem::Label { place, label, vocabulary });
            }
            into.labels.push(label as i32);
        }
        Ok(())
    }
}

fn whole_numbers(key: &'static str, value: &Value) -> Result<Vec<i64>, RowProblem> {
    let Value::Array(list) = value else { return Err(RowProblem::NotAList { key, found: kind(value) }) };
    let number = |(place, entry): (usize, &Value)| {
        entry.as_i64().ok_or_else(|| RowProblem::NotAnInteger { key, place, found: shortened(entry) })
    };
    list.iter().enumerate().map(number).collect()
}

/// The start of the padding at the end.
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
