//! zeroth as a library: ZeRO training of transformer language models.
//!
//! A facade: each part is its own crate, named here once, and what joins two of them lives here.

pub mod bench;
pub mod planning;
mod session;

pub use session::{RankSession, Session, SessionError};
pub use zeroth_base as base;
pub use zeroth_comm as comm;
pub use zeroth_config as config;
pub use zeroth_device as device;
pub use zeroth_graph as graph;
pub use zeroth_model as model;
pub use zeroth_step as step;
pub use zeroth_train as train;
