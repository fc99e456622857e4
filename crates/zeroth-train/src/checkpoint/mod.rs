//! Checkpoints: the state of a run on disk, committed atomically.
//!
//! A checkpoint is a folder `step-N`. Every rank streams the state it owns into one safetensors file ([`ShardWriter`])
//! in a folder with a hidden name ([`UnfinishedCheckpoint`]). Once all files are complete and synced, the manifest is added and
//! a rename publishes the folder. Tensors are named by state, parameter and first element, so each file is
//! self-describing, and [`Checkpoint`] reads any range on any number of ranks and any ZeRO stage. Opening proves that
//! every element of every state is stored exactly once; verifying compares the checksum of every byte.

mod bounds;
mod checksums;
mod commit;
mod completeness;
mod directory;
mod distill_entry;
mod enclosing;
mod error;
pub(crate) mod exact;
mod file_names;
mod lora_entry;
mod manifest;
mod model_files;
mod reader;
mod shard;
mod space;
mod state;
mod verify;

pub(crate) use bounds::MAX_SAMPLES;
pub(crate) use checksums::hex;
pub use commit::UnfinishedCheckpoint;
pub(crate) use directory::look_at_unfinished;
pub use directory::{
    CheckpointPath, ListedCheckpoint, NewestValid, Pruned, clean, list, newest_resumable, newest_valid,
    prune, resolve,
};
pub use distill_entry::{CacheEntry, DistillEntry};
pub(crate) use enclosing::{enclosing_checkpoint, is_inside, is_same_folder, nearest_existing};
pub use error::CheckpointError;
pub(crate) use file_names::{StaleName, foreign_files};
pub use file_names::{parse_step_folder, shard_name, step_folder};
pub use lora_entry::{BaseEntry, LoraEntry, TargetsEntry};
pub use manifest::{
    BatchEntry, BestEntry, ControlState, DataEntry, Evaluated, FORMAT_VERSION, FileEntry, Manifest,
    ModelEntry, ParameterEntry, ZEROTH_VERSION, now,
};
pub(crate) use model_files::{COMPANION_FILES, CONFIG, GENERATION_CONFIG};
pub use model_files::{ModelFile, ModelFiles, ModelFilesError};
pub use reader::Checkpoint;
pub use shard::{ShardPiece, ShardWriter, WrittenShard};
pub use space::{free_bytes, needed_bytes};
pub use state::{SAVED_STATES, state_from_name, state_name};
pub use verify::{Verified, verify_folder};
