//! Shared basics: dtypes, axes of the mesh of ranks, optimizers, activation functions, position buckets, human-readable sizes, escaped control characters, did-you-mean suggestions, counter-based random numbers, atomic files, locked folders, libraries opened at run time.

mod activation_fn;
mod axis;
mod control_characters;
mod dtype;
mod exclusive_folder;
mod folder_lock;
mod nearest;
mod optimizer;
mod philox;
mod position_bucket;
mod process_owner;
mod publish;
mod shared_library;
mod signs_of_life;
mod size;
mod unfinished;

pub use activation_fn::ActivationFn;
pub use axis::Axis;
pub use control_characters::{escape_control_characters, is_control_character};
pub use dtype::DType;
pub use exclusive_folder::{ExclusiveFolder, ExclusiveFolderError};
pub use folder_lock::{FolderLock, LOCK_FILE, LockError};
pub use nearest::nearest;
pub use optimizer::{MOMENTS, Moment, Optimizer};
pub use philox::{
    PHILOX_MULTIPLIERS, PHILOX_WEYL, halves, name_key, normal_at, philox4x32, philox4x32_lanes,
};
pub use position_bucket::PositionBuckets;
pub use process_owner::{NoProcessOwner, ProcessOwner, host_name, process_start};
pub use publish::{PublishError, publish, sync_folder};
pub use shared_library::SharedLibrary;
pub use signs_of_life::{RenewedFolder, SILENCE, is_silent};
pub use size::{SizeError, counted, format_bytes, format_count, grouped, parse_bytes, parse_count, was};
pub use unfinished::{
    PUBLICATION_LIST, PublicationList, create_unfinished, parse_unfinished, publish_unfinished,
    remove_abandoned, remove_own, remove_unfinished, unfinished_path, while_publishing,
};
