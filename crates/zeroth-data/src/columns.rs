//! `--columns`: other names for the columns of a row.
//!
//! Written as `ours=theirs`, several with commas: `--columns question=problem,answer=solution` reads a row's `problem`
//! as its question. A column may be named as itself (`messages=messages`): that chooses a format where a row would do
//! for several.

use std::str::FromStr;

use serde_json::{Map, Value};
use zeroth_base::nearest;

/// Every name that a format of rows knows.
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

/// Where each column of a row is found. Columns that are not named here have their own names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Columns {
    /// Our name and theirs.
    renamed: Vec<(&'static str, String)>,
}

/// A mapping of columns that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ColumnsError {
    /// No `=` in it, or nothing beside it.
    #[error(
        "--columns takes `ours=theirs`, as in --columns question=problem,answer=solution: found `{found}`"
    )]
    NotAPair {
        /// The part that is no pair.
        found: String,
    },
    /// A name that no format has.
    #[error(
        "--columns: no format has a column `{name}`{}; known are {}",
        near.map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default(),
        NAMES.join(", ")
    )]
    Unknown {
        /// The name.
        name: String,
        /// One that may be meant.
        near: Option<&'static str>,
    },
    /// The pair the other way round.
    #[error("--columns takes our name first: write `{ours}={theirs}` instead of `{theirs}={ours}`")]
    Swapped {
        /// The name that a format has.
        ours: &'static str,
        /// The name in the data.
        theirs: String,
    },
    /// One column from two.
    #[error("--columns names `{name}` twice, from `{first}` and from `{second}`")]
    Twice {
        /// Our name.
        name: &'static str,
        /// Where it was said to be first.
        first: String,
        /// And then.
        second: String,
    },
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
    /// The name under which a row has this column.
    pub(super) fn theirs<'a>(&'a self, ours: &'a str) -> &'a str {
        self.renamed.iter().find(|(name, _)| *name == ours).map_or(ours, |(_, theirs)| theirs)
    }

    /// Whether `--columns` says where this one is.
    pub(super) fn names(&self, ours: &str) -> bool {
        self.renamed.iter().any(|(name, _)| *name == ours)
    }

    /// The column's value; `null`, as Parquet has it for an empty cell, counts as absent.
    pub(super) fn get<'a>(&self, row: &'a Map<String, Value>, ours: &str) -> Option<&'a Value> {
        row.get(self.theirs(ours)).filter(|value| !value.is_null())
    }

    /// Our name and theirs, in the order given.
    pub(super) fn pairs(&self) -> &[(&'static str, String)] {
        &self.renamed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_found_under_their_other_names() {
        let columns: Columns = "question=problem, answer = a=b".parse().unwrap();
        assert_eq!([columns.theirs("question"), columns.theirs("answer")], ["problem", "a=b"]);
        assert_eq!(columns.theirs("text"), "text");
        assert_eq!("".parse(), Ok(Columns::default()));
    }

    #[test]
    fn each_mistake_in_a_mapping_has_its_sentence() {
        for (text, message) in [
            ("question", "as in --columns question=problem,answer=solution: found `question`"),
            ("question=", "found `question=`"),
            (
                "qestion=a",
                "no format has a column `qestion` (did you mean `question`?); known are messages, ",
            ),
            ("zzz=a", "no format has a column `zzz`; known are "),
            ("problem=question", "write `question=problem` instead of `problem=question`"),
            ("text=a,text=b", "--columns names `text` twice, from `a` and from `b`"),
        ] {
            let error = text.parse::<Columns>().unwrap_err().to_string();
            assert!(error.contains(message), "{text}: {error}");
        }
    }
}
