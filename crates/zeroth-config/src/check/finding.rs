//! What the walk over a file finds for one key, before the verdict.

use serde_json::Value as Json;

use crate::read::{Location, TextSpan};
use crate::schema::Key;

/// The match of one key of the file against the schema, before its effect is decided.
#[derive(Debug)]
pub(super) struct KeyMatch {
    pub(super) spelled: String,
    pub(super) span: TextSpan,
    pub(super) location: Location,
    pub(super) value: Json,
    pub(super) outcome: MatchOutcome,
}

#[derive(Debug, Clone)]
pub(super) enum MatchOutcome {
    /// A key of the schema with a readable value.
    Known { key: &'static Key, notes: Vec<String> },
    /// Wrong, with a remedy; `at` is the value where that is what is wrong.
    Wrong { key: Option<&'static Key>, message: String, at: Option<TextSpan> },
    /// Not in the schema; `near`: another key has nearly that name.
    Unknown { message: String, near: bool },
    /// A parameter of an optimizer or scheduler that zeroth does not have.
    OfForeignType { message: String },
}
