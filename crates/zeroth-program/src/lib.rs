//! The step program: the instruction list that a rank executes in one training step, compiled before the run starts.
//!
//! `lower` emits forward and backward of a micro-batch. The passes after it add what ZeRO adds: all-gathers and
//! releases of parameters, reduce-scatters of gradients, the optimizer step, and overlap. A pass moves work and never
//! changes arithmetic. [`Memory`] places every buffer of a program, and the engine runs it.

mod cached_tokens;
mod check;
mod communication;
mod compiled;
mod dump;
mod grad_destinations;
mod grad_producers;
mod ir;
mod launches;
mod layout;
mod lowering_parts;
mod memory;
mod operands;
mod passes;
mod program;
mod router_counts;
mod settings;
mod stream_sizes;
mod streams;
mod sub_group;
mod top_log_probs;
mod world;

pub use cached_tokens::CachedTokens;
pub use check::{GatherStats, ProgramError};
pub use compiled::{CompileError, Compiled};
pub use grad_producers::GradProducers;
pub use ir::{Accumulate, Action, Chunk, GradientStorage, Instruction, Section, SectionKind, Subject};
pub use launches::{Binding, Collective, Lowering, Work};
pub use layout::{BLOCK, Flat, FlatKind, Layout, ParamPart, Slot, Storage};
pub use lowering_parts::{LoweringDifference, LoweringPart};
pub use memory::buffer::{Buffer, BufferId, Category};
pub use memory::buffer_analysis::vocabulary;
pub use memory::category_bytes::Bytes;
pub use memory::placed::{LiveRange, Memory, PlacedBuffer, SectionMemory};
pub use memory::plan::plan_memory;
pub use operands::Operands;
pub use passes::{compile, compile_inference, in_place};
pub use program::{Program, Residency};
pub use router_counts::RouterCounts;
pub use settings::{Offload, Settings, StateStream, TeacherPlacement, TopLogProbs, Types};
pub use stream_sizes::StreamSizes;
pub use streams::cross_streams;
pub use world::World;
pub use zeroth_config::schema::{FrozenPlacement, Gather, Recompute, UpdatedBy};
