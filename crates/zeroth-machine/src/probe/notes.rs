//! Facts that could not be determined.

use std::fmt;

use serde::Serialize;

use super::tree::Tree;

/// A fact that could not be determined.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct Unknown {
    /// The field: `memory.available`.
    pub what: &'static str,
    pub why: String,
}

/// Collects facts that could not be determined.
#[derive(Debug, Default)]
pub(super) struct Notes(pub(super) Vec<Unknown>);

impl Notes {
    pub(super) fn add(&mut self, what: &'static str, why: impl fmt::Display) {
        self.0.push(Unknown { what, why: why.to_string() });
    }

    /// The value, or `None` with a note.
    pub(super) fn or_note<T>(
        &mut self,
        what: &'static str,
        found: Result<T, impl fmt::Display>,
    ) -> Option<T> {
        found.map_err(|why| self.add(what, why)).ok()
    }

    /// The parsed contents of a system file, or `None` with a note.
    pub(super) fn parse_file<T>(
        &mut self,
        what: &'static str,
        tree: &Tree,
        path: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        let text = self.or_note(what, tree.read(path))?;
        self.or_note(what, parse(&text).ok_or_else(|| format!("{path} has an unknown format")))
    }
}
