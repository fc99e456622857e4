//! Checkpoints: the state of a run on disk, whole or not there at all.
//!
//! A checkpoint is a folder `step-N`. Every rank streams what it owns into one safetensors file ([`PartWriter`]) of a
//! folder with a hidden name ([`Unfinished`]); when all files are whole and synced, the manifest is added and a rename
//! makes the folder a checkpoint. Tensors are named by state, parameter and first element, so a file says by itself
//! what it holds, and [`Checkpoint`] reads any range on any number of ranks, whatever wrote it. Nothing is believed:
//! opening proves that every element of every state is there once, verifying compares every byte's checksum.

mod around;
mod bounds;
mod collection;
mod commit;
mod complete;
mod error;
mod export;
mod manifest;
mod names;
mod open;
mod part;
mod space;
mod state;
mod sums;
mod verify;

pub(crate) use around::checkpoint_around;
pub(crate) use bounds::MAX_SAMPLES;
pub use collection::{Found, Named, Newest, Pruned, clean, list, newest_good, prune, resolve};
pub use commit::{Unfinished, is_step_folder, step_folder};
pub use error::CheckpointError;
pub use export::{Destination, export};
pub use manifest::{
    BatchEntry, ControlState, DataEntry, FORMAT_VERSION, FileEntry, Manifest, ModelEntry, ParameterEntry,
    ZEROTH_VERSION, now,
};
pub(crate) use names::{Leftover, foreign_in};
pub use open::Checkpoint;
pub use part::{PartWriter, PartWritten, Piece, part_name};
pub use space::{free_bytes, needed_bytes};
pub use state::{SAVED, state_name, state_named};
pub use verify::{Verified, problems};
