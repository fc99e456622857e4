//! `--columns`: maps column names of the data to those of the row formats.
//!
//! Written as `ours=theirs`, separated by commas: `--columns question=problem,answer=solution` reads `problem` as the
//! question. Mapping a column to itself (`messages=messages`) selects a format if a row matches several.

use std::str::FromStr;

use serde_json::{Map, Value};
use zeroth_base::nearest;

/// All column names of the row formats.
pub(super) const NAMES: [&str; 21] = [
    "messages",
    "conversations",
    "instruction",
    "input",
    "output",
    "prompt",
    "completion",
    "question",
    "answer",
    "query",
    "response",
    "text",
    "translation",
    "source",
    "target",
    "input_ids",
    "labels",
    "attention_mask",
    "system",
    "history",
    "tools",
];

/// A mapping of column names. Unmapped columns keep their names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Columns {
    /// Our name, and the name in the data.
    renamed: Vec<(&'static str, String)>,
}

/// An invalid `--columns`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each message names its fields")]
pub enum ColumnsError {
    #[error(
        "--columns expects `ours=theirs`, as in --columns question=problem,answer=solution: found `{found}`"
    )]
    NotAPair { found: String },
    #[error(
        "--columns: no row format has a column `{name}`{}; known columns are {}",
        near.map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default(),
        NAMES.join(", ")
    )]
    Unknown { name: String, near: Option<&'static str> },
    #[error("--columns expects zeroth's name first: write `{ours}={theirs}` instead of `{theirs}={ours}`")]
    Swapped { ours: &'static str, theirs: String },
    #[error("--columns maps `{name}` twice, to `{first}` and to `{second}`")]
    Twice { name: &'static str, first: String, second: String },
}

impl FromStr for Columns {
    type Err = ColumnsError;

    fn from_str(text: &str) -> Result<Self, ColumnsError> {
        let mut renamed: Vec<(&'static str, String)> = Vec::new();
        for pair in text.split(',').filter(|pair| !pair.trim().is_empty()) {
            let not_a_pair = || ColumnsError::NotAPair { found: pair.trim().to_owned() };
            let (ours, theirs) = pair.split_once('=').ok_or_else(not_a_pair)?;
            let (ours, theirs) = (ours.trim(), theirs.trim());
            if ours.is_empty() || theirs.is_empty() {
                return Err(not_a_pair());
            }
            let known = |name: &str| NAMES.into_iter().find(|known| *known == name);
            let Some(name) = known(ours) else {
                return Err(match known(theirs) {
                    Some(swapped) => ColumnsError::Swapped { ours: swapped, theirs: ours.to_owned() },
                    None => ColumnsError::Unknown { name: ours.to_owned(), near: nearest(ours, NAMES) },
                });
            };
            if let Some((_, first)) = renamed.iter().find(|(other, _)| *other == name) {
                return Err(ColumnsError::Twice { name, first: first.clone(), second: theirs.to_owned() });
            }
            renamed.push((name, theirs.to_owned()));
        }
        Ok(Self { renamed })
    }
}

impl Columns {
    /// The name of this column in the data.
    pub(super) fn theirs<'a>(&'a self, ours: &'a str) -> &'a str {
        self.renamed.iter().find(|(name, _)| *name == ours).map_or(ours, |(_, theirs)| theirs)
    }

    /// Whether `--columns` maps this column.
    pub(super) fn names(&self, ours: &str) -> bool {
        self.renamed.iter().any(|(name, _)| *name == ours)
    }

    /// The column's value; `null`, which Parquet has for empty cells, counts as absent.
    pub(super) fn get<'a>(&self, row: &'a Map<String, Value>, ours: &str) -> Option<&'a Value> {
        row.get(self.theirs(ours)).filter(|value| !value.is_null())
    }

    /// All pairs, in the order given.
    pub(super) fn pairs(&self) -> &[(&'static str, String)] {
        &self.renamed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_columns_use_their_names_in_the_data() {
        let columns: Columns = "question=problem, answer = a=b".parse().unwrap();
        assert_eq!([columns.theirs("question"), columns.theirs("answer")], ["problem", "a=b"]);
        assert_eq!(columns.theirs("text"), "text");
        assert_eq!("".parse(), Ok(Columns::default()));
    }

    #[test]
    fn invalid_mappings_are_explained() {
        for (text, message) in [
            ("question", "as in --columns question=problem,answer=solution: found `question`"),
            ("question=", "found `question=`"),
            (
                "qestion=a",
                "no row format has a column `qestion` (did you mean `question`?); known columns are messages, ",
            ),
            ("zzz=a", "no row format has a column `zzz`; known columns are "),
            ("problem=question", "write `question=problem` instead of `problem=question`"),
            ("text=a,text=b", "--columns maps `text` twice, to `a` and to `b`"),
        ] {
            let error = text.parse::<Columns>().unwrap_err().to_string();
            assert!(error.contains(message), "{text}: {error}");
        }
    }
}
