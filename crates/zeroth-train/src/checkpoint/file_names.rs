//! File and folder names of checkpoints. Anything with another name is foreign, and is never removed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use zeroth_base::{ProcessOwner, is_silent, parse_unfinished};

use super::checksums::{MANIFEST, SUMS};
use super::model_files::{COMPANION_FILES, CONFIG};

/// The subfolder with the model's config and tokenizer files.
pub(super) const MODEL: &str = "model";

/// The folder name of a step's checkpoint.
pub fn step_folder(step: u64) -> String {
    format!("step-{step}")
}

/// The step that a folder name stands for, if it names a checkpoint.
pub fn parse_step_folder(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    // `step-007` is rejected: one step must have one name.
    (step_folder(step) == name).then_some(step)
}

/// A hidden name for a folder that is not, or no longer, a checkpoint, tagged with this process.
pub(super) fn hidden(checkpoints: &Path, step: u64, what: &str) -> PathBuf {
    checkpoints.join(format!(".{}.{what}-{}", step_folder(step), ProcessOwner::own()))
}

/// The name of a rank's file.
pub fn shard_name(rank: u64, world: u64) -> String {
    format!("rank-{rank:05}-of-{world:05}.safetensors")
}

/// Whether a name matches [`shard_name`].
pub(super) fn is_shard_name(name: &str) -> bool {
    let numbers = name.strip_prefix("rank-").and_then(|rest| rest.strip_suffix(".safetensors"));
    let numbers = numbers.and_then(|numbers| numbers.split_once("-of-"));
    let numbers = numbers.and_then(|(rank, world)| Some((rank.parse().ok()?, world.parse().ok()?)));
    numbers.is_some_and(|(rank, world)| shard_name(rank, world) == name)
}

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

/// A hidden name that a zeroth process created: `.step-5.unfinished-OWNER`, or that of an unfinished `latest`.
pub(crate) struct StaleName {
    pub(crate) step: Option<u64>,
    pub(super) is_replaced: bool,
    /// Earlier versions wrote an id and a start time, of a process on any host.
    by: Option<ProcessOwner>,
}

impl StaleName {
    pub(crate) fn parse(name: &str) -> Option<Self> {
        if let Some(("latest", owner)) = parse_unfinished(name) {
            return Some(Self { step: None, is_replaced: false, by: Some(owner) });
        }
        let (of, mark) = name.strip_prefix('.')?.split_once('.')?;
        let (what, process) = mark.split_once('-')?;
        if !["unfinished", "replaced", "removed"].contains(&what) {
            return None;
        }
        let step = parse_step_folder(of)?;
        let by = match process.split_once('-') {
            Some((pid, started)) if pid.parse::<u32>().is_ok() && started.parse::<u64>().is_ok() => None,
            _ => Some(process.parse().ok()?),
        };
        Some(Self { step: Some(step), is_replaced: what == "replaced", by })
    }

    /// Whether the process that created it may be alive.
    pub(super) fn is_in_use(&self, path: &Path) -> bool {
        match &self.by {
            Some(owner) => !owner.has_abandoned(path),
            None => !is_silent(path),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_canonical_step_names_are_checkpoints() {
        assert_eq!(parse_step_folder(&step_folder(12)), Some(12));
        for name in ["step-", "step-012", "step-+1", "step-1.tmp", ".step-1.unfinished-1-2", "latest", "12"] {
            assert_eq!(parse_step_folder(name), None, "{name}");
        }
    }

    #[test]
    fn hidden_names_are_parsed_with_the_process_that_made_them() {
        let folder = Path::new("checkpoints");
        for what in ["unfinished", "replaced", "removed"] {
            let path = hidden(folder, 5, what);
            let found = StaleName::parse(path.file_name().unwrap().to_str().unwrap()).unwrap();
            assert_eq!((found.step, found.is_replaced), (Some(5), what == "replaced"));
            assert_eq!(found.by, Some(ProcessOwner::own()));
        }
        assert!(StaleName::parse(".step-5.unfinished-12-34").is_some_and(|found| found.by.is_none()));
        for name in
            [".step-5.unfinished-", ".step-5.unfinished-a-b", ".step-5.kept-1-2", ".step-05.removed-1-2"]
        {
            assert!(StaleName::parse(name).is_none(), "{name}");
        }
    }
}
