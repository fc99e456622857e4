//! ZeRO training of transformer language models, as a library.
//!
//! A facade: every part is its own crate, re-exported here, and code that combines several of them lives here.

pub mod bench;
pub mod job;
pub mod planning;
mod session;

pub use session::{RankSession, Session, SessionError};
pub use zeroth_base as base;
pub use zeroth_comm as comm;
pub use zeroth_config as config;
pub use zeroth_cpu as cpu;
pub use zeroth_cuda as cuda;
pub use zeroth_data as data;
pub use zeroth_engine as engine;
pub use zeroth_graph as graph;
pub use zeroth_kernel as kernel;
pub use zeroth_machine as machine;
pub use zeroth_model as model;
pub use zeroth_plan as plan;
pub use zeroth_program as program;
pub use zeroth_train as train;
