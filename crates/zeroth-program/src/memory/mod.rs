//! The memory of a program, in the order in which it is planned:
//!
//! 1. [`shared_buffers`]: values that live in the buffer of another value; [`buffer`]: the ids that operands name.
//! 2. [`buffer_analysis`]: the size, category and tier of every buffer.
//! 3. [`cross_section_buffers`]: gradients that are written by a step's only micro-batch and read by its update.
//! 4. [`views`]: parameters of other ranks that are mapped and take no memory.
//! 5. [`waits`]: what an instruction waits for because of its data.
//! 6. [`placement`] by [`occupancy`]: the offset of every transient buffer, and the waits that reuse of memory needs.
//! 7. [`cross_step_waits`] by [`address_accesses`]: the same across steps, where the update overlaps its neighbours.
//!
//! [`plan`] does all of it. The result is in [`placed`], its sums in [`category_bytes`].

mod address_accesses;
pub(crate) mod buffer;
pub(crate) mod buffer_analysis;
pub(crate) mod category_bytes;
mod cross_section_buffers;
mod cross_step_waits;
mod occupancy;
pub(crate) mod placed;
mod placement;
pub(crate) mod plan;
pub(crate) mod shared_buffers;
mod views;
mod waits;
