//! What a run gives to a checkpoint and takes back from it: saving, refusing to resume another run, and restoring.

mod changes;
mod error;
mod restore;
mod save;

pub use changes::{SettingChange, config_changes};
pub use error::{ResumeError, SaveError};
pub use restore::{
    check_same_adapters, check_same_data, check_same_distillation, check_same_function, redistribute_batch,
};
pub(crate) use restore::{data_hash, restore, restore_optimizer};
pub use save::CheckpointOptions;
pub(crate) use save::{CheckpointSaver, FrozenModels};
