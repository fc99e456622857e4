//! Resolves a file and a command line into one config, value by value, with the origin of each.
//!
//! A key absent from the file counts as `"auto"`: the flag that was typed, else the file, else the default. Only a
//! flag that was typed can contradict the file. Every value is resolved before any weight is read.

mod batch;
mod choice;
mod fill;
mod flags;
mod mismatch;
mod request;
mod resolved;

pub use batch::{Batch, BatchError, triangulate};
pub use choice::Choice;
pub use flags::Flags;
pub use mismatch::Mismatch;
pub use request::{ModelFacts, Request, ResolveError};
pub use resolved::{Origin, Resolved, Setting};

/// Resolves every value.
pub fn resolve(request: &Request<'_>) -> Result<Resolved, ResolveError> {
    fill::Filler::new(request).fill()
}
