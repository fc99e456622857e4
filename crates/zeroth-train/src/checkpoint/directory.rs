//! A run's checkpoint directory: listing, the newest valid checkpoint, pruning, cleanup after crashes.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use zeroth_base::RenewedFolder;

use super::checksums::MANIFEST;
use super::error::{CheckpointError, reading, writing};
use super::file_names::{
    StaleName, foreign_files, hidden, parse_step_folder, remove_unless_foreign, step_folder,
};
use super::reader::Checkpoint;

/// A checkpoint's folder, found by name; its contents have not been read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedCheckpoint {
    /// The step in its name.
    pub step: u64,
    /// The folder.
    pub folder: PathBuf,
}

/// The kind of checkpoint path given on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CheckpointPath {
    /// A single checkpoint.
    Step(PathBuf),
    /// A run's checkpoint directory.
    Run(PathBuf),
}

/// The newest checkpoint that verifies.
#[derive(Debug)]
pub struct NewestValid {
    /// The checkpoint, verified.
    pub found: Option<Checkpoint>,
    /// Newer checkpoints that were rejected, each with its error.
    pub refused: Vec<(PathBuf, CheckpointError)>,
}

/// All checkpoints in a directory, sorted by step. A missing directory has none.
pub fn list(checkpoints: &Path) -> Result<Vec<ListedCheckpoint>, CheckpointError> {
    let mut found = Vec::new();
    for name in names(checkpoints)? {
        let folder = checkpoints.join(&name);
        // An unreadable folder, or a symlink to an unmounted disk, is still listed.
        let is_file = || fs::metadata(&folder).is_ok_and(|found| !found.is_dir());
        if let Some(step) = parse_step_folder(&name).filter(|_| !is_file()) {
            found.push(ListedCheckpoint { step, folder });
        }
    }
    found.sort_by_key(|found| found.step);
    Ok(found)
}

/// Classifies a path: a step folder, a run folder, or a run's checkpoint directory.
pub fn resolve(path: &Path) -> Result<CheckpointPath, CheckpointError> {
    if path.join(MANIFEST).is_file() {
        return Ok(CheckpointPath::Step(path.to_owned()));
    }
    // A folder named like a checkpoint but without a manifest: report the missing manifest.
    let is_step = path.file_name().and_then(|name| name.to_str()).and_then(parse_step_folder).is_some();
    let not_one = CheckpointError::NotACheckpoint { folder: path.to_owned() };
    if !path.is_dir() {
        return Err(not_one);
    }
    for checkpoints in [path.join("checkpoints"), path.to_owned()] {
        if !list(&checkpoints)?.is_empty() {
            return Ok(CheckpointPath::Run(checkpoints));
        }
    }
    if is_step {
        return Err(not_one);
    }
    Err(CheckpointError::NoCheckpoints { folder: path.to_owned() })
}

/// Tries checkpoints from newest to oldest until one verifies, ignoring `latest`. Call [`clean`] first if this
/// process may write to the directory.
pub fn newest_valid(checkpoints: &Path) -> Result<NewestValid, CheckpointError> {
    let mut refused = Vec::new();
    for ListedCheckpoint { folder, .. } in list(checkpoints)?.into_iter().rev() {
        match good(&folder) {
            Ok(checkpoint) => return Ok(NewestValid { found: Some(checkpoint), refused }),
            Err(error) => refused.push((folder, error)),
        }
    }
    Ok(NewestValid { found: None, refused })
}

/// As [`newest_valid`], but prefers checkpoints that training can be resumed from: one with weights only is found if
/// no other is valid.
pub fn newest_resumable(checkpoints: &Path) -> Result<NewestValid, CheckpointError> {
    let (mut refused, mut weights_only) = (Vec::new(), None);
    for ListedCheckpoint { folder, .. } in list(checkpoints)?.into_iter().rev() {
        match good(&folder) {
            Ok(found) if !found.manifest().weights_only => {
                return Ok(NewestValid { found: Some(found), refused });
            }
            Ok(found) => {
                refused.push((folder, CheckpointError::WeightsOnly));
                weights_only = weights_only.or(Some(found));
            }
            Err(error) => refused.push((folder, error)),
        }
    }
    refused.retain(|(_, error)| weights_only.is_none() || !matches!(error, CheckpointError::WeightsOnly));
    Ok(NewestValid { found: weights_only, refused })
}

/// The outcome of pruning.
#[derive(Debug, Default)]
pub struct Pruned {
    /// Folders that were removed.
    pub removed: Vec<PathBuf>,
    /// Errors of removals that failed.
    pub failed: Vec<CheckpointError>,
}

/// Keeps the newest `limit` checkpoints (all if `None`), the newest valid one, and any that contain foreign files.
/// `just_written` is a step that this process has committed: it is valid without being read again. The step `best` is
/// kept too and counts towards the limit, which is then at least 2, as in Hugging Face.
pub fn prune(
    checkpoints: &Path,
    limit: Option<u64>,
    just_written: Option<u64>,
    best: Option<u64>,
) -> Result<Pruned, CheckpointError> {
    let mut pruned = Pruned::default();
    let Some(limit) = limit else { return Ok(pruned) };
    let mut all = list(checkpoints)?;
    let mut limit = limit.max(1) as usize;
    if let Some(at) = all.iter().position(|found| Some(found.step) == best)
        && at + limit < all.len()
    {
        all.remove(at);
        limit = limit.saturating_sub(1).max(1);
    }
    let older = all.len().saturating_sub(limit);
    if older == 0 {
        return Ok(pruned);
    }
    let kept = all.split_off(older);
    let is_good = |found: &ListedCheckpoint| just_written == Some(found.step) || good(&found.folder).is_ok();
    if !kept.iter().rev().any(is_good) {
        // The newest valid checkpoint is among the older ones; everything newer is damaged.
        if let Some(newest) = all.iter().rposition(is_good) {
            all.remove(newest);
        }
    }
    for ListedCheckpoint { step, folder } in all {
        // A folder that contains foreign files is kept.
        if foreign_files(&folder).is_ok_and(|foreign| foreign.is_empty()) {
            match remove(checkpoints, step, &folder) {
                Ok(()) => pruned.removed.push(folder),
                Err(error) => pruned.failed.push(error),
            }
        }
    }
    Ok(pruned)
}

/// Removes what killed processes left behind: unfinished folders, and folders whose removal was interrupted. A folder
/// that was being replaced gets its name back if the replacement never arrived. What processes of other hosts made goes
/// once this process has seen it unchanged for a minute. Returns the errors of removals that failed.
pub fn clean(checkpoints: &Path) -> Result<Vec<CheckpointError>, CheckpointError> {
    let mut failed = Vec::new();
    for name in names(checkpoints)? {
        let path = checkpoints.join(&name);
        let Some(leftover) = StaleName::parse(&name).filter(|leftover| !leftover.is_in_use(&path)) else {
            continue;
        };
        let target = leftover.step.map(|step| checkpoints.join(step_folder(step)));
        let done = match target.filter(|target| leftover.is_replaced && !target.exists()) {
            Some(target) => fs::rename(&path, &target).map_err(writing("rename to", &target, 0)),
            None if path.is_dir() => {
                remove_unless_foreign(&path).map(drop).map_err(writing("remove", &path, 0))
            }
            None => fs::remove_file(&path).map_err(writing("remove", &path, 0)),
        };
        failed.extend(done.err());
    }
    Ok(failed)
}

fn good(folder: &Path) -> Result<Checkpoint, CheckpointError> {
    let checkpoint = Checkpoint::open(folder)?;
    checkpoint.verify()?;
    Ok(checkpoint)
}

/// Renames before removing, so a half-removed checkpoint is never taken for a valid one.
fn remove(checkpoints: &Path, step: u64, folder: &Path) -> Result<(), CheckpointError> {
    let path = hidden(checkpoints, step, "removed");
    let _renewed = RenewedFolder::new(&path);
    fs::rename(folder, &path).map_err(writing("rename", folder, 0))?;
    sync_folder(checkpoints)?;
    fs::remove_dir_all(&path).map_err(writing("remove", &path, 0))
}

fn names(folder: &Path) -> Result<Vec<String>, CheckpointError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        // A file or a dangling symlink exists but cannot be listed.
        Err(source) if fs::symlink_metadata(folder).is_ok() => {
            return Err(CheckpointError::Io { doing: "read", path: folder.to_owned(), source });
        }
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        Err(error) => return Err(reading(folder)(error)),
    };
    let mut names = Vec::new();
    for entry in entries {
        // zeroth only writes UTF-8 names.
        if let Ok(name) = entry.map_err(reading(folder))?.file_name().into_string() {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// Looks at what processes of other hosts have not finished, so that [`clean`] knows a minute later whether they live.
pub(crate) fn look_at_unfinished(checkpoints: &Path) {
    for name in names(checkpoints).unwrap_or_default() {
        if let Some(leftover) = StaleName::parse(&name) {
            leftover.is_in_use(&checkpoints.join(&name));
        }
    }
}

/// Fsyncs a folder, so that the names in it are durable.
pub(super) fn sync_folder(folder: &Path) -> Result<(), CheckpointError> {
    zeroth_base::sync_folder(folder).map_err(writing("sync", folder, 0))
}
