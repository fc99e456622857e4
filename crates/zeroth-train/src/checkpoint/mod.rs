//! Checkpoints: the state of a run on disk, committed atomically.
//!
//! A checkpoint is a folder `step-N`. Every rank streams the state it owns into one safetensors file ([`PartWriter`])
//! in a folder with a hidden name ([`Unfinished`]). Once all files are complete and synced, the manifest is added and
//! a rename publishes the folder. Tensors are named by state, parameter and first element, so each file is
//! self-describing, and [`Checkpoint`] reads any range on any number of ranks and any ZeRO stage. Opening proves that
//! every element of every state is stored exactly once; verifying compares the checksum of every byte.

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
