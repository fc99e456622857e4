//! Writes models as Hugging Face folders: at the end of a run, from a checkpoint, and of adapters merged into their base.

mod error;
mod from_checkpoint;
mod merge;
mod record;
mod staged_files;
mod stream;

pub use error::ExportError;
pub(crate) use from_checkpoint::export_from;
pub use from_checkpoint::{ExportDestination, export_checkpoint};
pub use merge::{MergeBase, MergeOutput};
pub(crate) use record::{ExportSource, RECORD, is_exported, recorded_base};
pub use record::{RunEnd, check_export, completed_run, exported_step};
pub(crate) use stream::{export, propagate_failure};
