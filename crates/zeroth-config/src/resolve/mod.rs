//! Resolves a file and a command line into one config, value by value, with the origin of each.
//!
//! A key absent from the file counts as `"auto"`: the flag that was given, else the file, else the default. Only a
//! flag that was given can contradict the file. Every value is resolved before any weight is read.

mod batch;
mod choice;
mod fill;
mod flags;
mod groups;
mod mismatch;
mod request;
mod resolved;

pub use batch::{BatchError, BatchSizes, triangulate};
pub use choice::Choice;
pub use flags::Flags;
pub use groups::GroupError;
pub use mismatch::Mismatch;
pub use request::{ModelFacts, ResolveError, ResolveRequest};
pub use resolved::{Origin, Resolved, ResolvedSetting};

/// Resolves every value.
pub fn resolve(request: &ResolveRequest<'_>) -> Result<Resolved, ResolveError> {
    fill::Filler::new(request).fill()
}

/// Fills in what waits for the number of steps of a run, which is known once its data is read. `request` is that of
/// [`resolve`].
pub fn fill_steps(
    request: &ResolveRequest<'_>,
    steps: u64,
    resolved: &mut Resolved,
) -> Result<(), ResolveError> {
    let request = ResolveRequest { steps: Some(steps), ..*request };
    fill::Filler::new(&request).fill_steps(resolved)
}
