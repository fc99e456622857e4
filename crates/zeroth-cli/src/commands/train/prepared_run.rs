//! A run before its ranks are started.

use zeroth::job::ResolvedJob;
use zeroth::program::Compiled;
use zeroth::train::RunFolder;

use super::checkpoints::Earlier;

/// A run that is ready to start: checked, shown, and written to its folder.
pub(super) struct PreparedRun {
    pub(super) resolved_job: ResolvedJob,
    pub(super) compiled: Compiled,
    pub(super) folder: RunFolder,
    /// Checkpoints that existed before.
    pub(super) earlier: Earlier,
}
