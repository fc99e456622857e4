//! File and folder names of checkpoints. Anything with another name is foreign, and is never removed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::checksums::{MANIFEST, SUMS};
use super::commit::{MODEL, parse_step_folder};
use super::shard::is_shard_name;
use crate::export::{COMPANION_FILES, CONFIG};
use crate::run_lock::start_time;

/// Foreign files in a checkpoint's folder, as relative paths. Symlinks are not followed.
pub(crate) fn foreign_files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut foreign = Vec::new();
    if !fs::symlink_metadata(folder)?.is_dir() {
        return Ok(foreign);
    }
    for (name, is_folder) in entries(folder)? {
        if name == Path::new(MODEL) && is_folder {
            let inside = entries(&folder.join(MODEL))?.into_iter().filter(|(name, is_folder)| {
                let name = name.to_str().unwrap_or_default();
                *is_folder || (name != CONFIG && !COMPANION_FILES.contains(&name))
            });
            foreign.extend(inside.map(|(name, _)| Path::new(MODEL).join(name)));
            continue;
        }
        let text = name.to_str().unwrap_or_default();
        if is_folder || !(text == MANIFEST || text == SUMS || is_shard_name(text)) {
            foreign.push(name);
        }
    }
    foreign.sort_unstable();
    Ok(foreign)
}

/// Entries of a folder, and whether each is itself a folder.
fn entries(folder: &Path) -> io::Result<Vec<(PathBuf, bool)>> {
    let read = |entry: io::Result<fs::DirEntry>| {
        let entry = entry?;
        Ok((PathBuf::from(entry.file_name()), entry.file_type()?.is_dir()))
    };
    fs::read_dir(folder)?.map(read).collect()
}

/// Removes a checkpoint's folder unless it contains foreign files. Returns whether it was removed.
pub(super) fn remove_unless_foreign(folder: &Path) -> io::Result<bool> {
    if !foreign_files(folder)?.is_empty() {
        return Ok(false);
    }
    fs::remove_dir_all(folder).map(|()| true)
}

/// A hidden name that a zeroth process created: `.step-5.unfinished-123-456`, or `.latest.unfinished-123`.
pub(crate) struct StaleName {
    pub(crate) step: Option<u64>,
    pub(super) is_replaced: bool,
    pid: u32,
    /// Start time of that process, if the name includes it.
    started: Option<u64>,
}

impl StaleName {
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let (of, mark) = name.strip_prefix('.')?.split_once('.')?;
        let (what, process) = mark.split_once('-')?;
        if !["unfinished", "replaced", "removed"].contains(&what) {
            return None;
        }
        let step = parse_step_folder(of);
        if step.is_none() && of != "latest" {
            return None;
        }
        let (pid, started) = match process.split_once('-') {
            Some((pid, started)) => (pid.parse().ok()?, Some(started.parse().ok()?)),
            None => (process.parse().ok()?, None),
        };
        Some(Self { step, is_replaced: what == "replaced", pid, started })
    }

    /// Whether the process that created it is alive. Process ids are reused, start times are not.
    pub(super) fn is_in_use(&self) -> bool {
        start_time(self.pid).is_some_and(|found| self.started.is_none_or(|started| started == found))
    }
}
