//! The engine: runs a compiled program on a device, together with the other ranks.
//!
//! A [`Compiled`](zeroth_program::Compiled) program has every buffer placed. An [`Engine`] is one rank of a run: it
//! owns a device whose arena has exactly the planned size, lowers the program once per row size, and then only walks
//! instruction lists. A step decides nothing and allocates nothing.

mod batch_staging;
mod chaos;
mod collective_bench;
mod collectives;
mod cpu_share;
mod early_loads;
mod engine;
mod error;
mod feed;
mod gpu_collectives;
mod graph_capture;
mod inference;
mod loss_counts;
mod loss_of_a_rank;
mod lowering_check;
mod nf4_states;
mod states;
mod trace;

pub use batch_staging::{Feed, FurtherInput, MicroBatches, StreamBatch, StreamRows};
pub use chaos::Chaos;
pub use collective_bench::{BenchedCollective, CollectiveBench};
pub use engine::{Engine, RankSetup, StepRecord};
pub use error::RunError;
pub use inference::{NewToken, NewTokens};
pub use loss_counts::LossCounts;
pub use loss_of_a_rank::{await_verdict, end_soon_after_loss};
pub use states::{Sink, StateKind, StateSource};
pub use trace::{InstructionTime, Trace};
