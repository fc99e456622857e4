//! The names that a save gives to files and folders. What has another name is somebody else's, and stays.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::commit::{MODEL, is_step_folder};
use super::part::is_part_name;
use super::sums::{MANIFEST, SUMS};
use crate::export::{BESIDE, CONFIG};
use crate::run_lock::start_time;

/// What of a checkpoint's folder no save has written, by its path inside the folder. A link is not followed.
pub(crate) fn foreign_in(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut foreign = Vec::new();
    if !fs::symlink_metadata(folder)?.is_dir() {
        return Ok(foreign);
    }
    for (name, is_folder) in entries(folder)? {
        if name == Path::new(MODEL) && is_folder {
            let inside = entries(&folder.join(MODEL))?.into_iter().filter(|(name, is_folder)| {
                let name = name.to_str().unwrap_or_default();
                *is_folder || (name != CONFIG && !BESIDE.contains(&name))
            });
            foreign.extend(inside.map(|(name, _)| Path::new(MODEL).join(name)));
            continue;
        }
        let text = name.to_str().unwrap_or_default();
        if is_folder || !(text == MANIFEST || text == SUMS || is_part_name(text)) {
            foreign.push(name);
        }
    }
    foreign.sort_unstable();
    Ok(foreign)
}

/// The names in a folder, and which of them are folders themselves.
fn entries(folder: &Path) -> io::Result<Vec<(PathBuf, bool)>> {
    let read = |entry: io::Result<fs::DirEntry>| {
        let entry = entry?;
        Ok((PathBuf::from(entry.file_name()), entry.file_type()?.is_dir()))
    };
    fs::read_dir(folder)?.map(read).collect()
}

/// Removes a checkpoint's folder, unless it holds what no save has written; whether it is gone.
pub(super) fn remove_own(folder: &Path) -> io::Result<bool> {
    if !foreign_in(folder)?.is_empty() {
        return Ok(false);
    }
    fs::remove_dir_all(folder).map(|()| true)
}

/// A hidden name that a process of ours made: `.step-5.unfinished-123-456`, or `.latest.unfinished-123`.
pub(crate) struct Leftover {
    pub(crate) step: Option<u64>,
    pub(super) is_replaced: bool,
    pid: u32,
    /// When that process started, where the name says it.
    started: Option<u64>,
}

impl Leftover {
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let (of, mark) = name.strip_prefix('.')?.split_once('.')?;
        let (what, process) = mark.split_once('-')?;
        if !["unfinished", "replaced", "removed"].contains(&what) {
            return None;
        }
        let step = is_step_folder(of);
        if step.is_none() && of != "latest" {
            return None;
        }
        let (pid, started) = match process.split_once('-') {
            Some((pid, started)) => (pid.parse().ok()?, Some(started.parse().ok()?)),
            None => (process.parse().ok()?, None),
        };
        Some(Self { step, is_replaced: what == "replaced", pid, started })
    }

    /// Whether the process that made it is still there. Ids are used again, start times are not.
    pub(super) fn is_in_use(&self) -> bool {
        start_time(self.pid).is_some_and(|found| self.started.is_none_or(|started| started == found))
    }
}
