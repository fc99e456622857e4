//! What the walk over a file finds for one key, before the verdict.

use serde_json::Value as Json;

use crate::read::{Location, Span};
use crate::schema::Key;

/// What was found for one key of the file, before its effect is decided.
#[derive(Debug)]
pub(super) struct Finding {
    pub(super) spelled: String,
    pub(super) span: Span,
    pub(super) location: Location,
    pub(super) value: Json,
    pub(super) outcome: Outcome,
}

#[derive(Debug, Clone)]
pub(super) enum Outcome {
    /// A key of the table with a readable value.
    Known { key: &'static Key, notes: Vec<String> },
    /// Wrong, with what to write; the place is the value's when that is what is wrong.
    Wrong { key: Option<&'static Key>, message: String, at: Option<Span> },
    /// Not in the table. `near` is what was likely meant.
    Unknown { message: String, near: bool },
    /// A parameter of an optimizer or scheduler that zeroth does not have.
    OfForeignType { message: String },
}
