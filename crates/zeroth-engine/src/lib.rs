//! `run`: carries a compiled program out, on a device, with other ranks.
//!
//! [`Compiled`] is a program with a place for every buffer. An [`Engine`] is one rank of a run: it holds a device whose
//! arena is exactly as large as planned, lowers the program once for every number of rows a micro-batch may have, and
//! then only walks lists: a step decides nothing and allocates nothing.

mod chaos;
mod early;
mod engine;
mod error;
mod feed;
mod gpu_collectives;
mod meet;
mod rehearsal;
mod replay;
mod seat;
mod states;
mod trace;

pub use chaos::Chaos;
pub use engine::{Engine, Rank, StepRecord};
pub use error::RunError;
pub use feed::{MicroBatch, MicroBatches};
pub use rehearsal::{Rehearsal, Rehearsed};
pub use states::{Sink, Source, State};
pub use trace::{Timed, Trace};
