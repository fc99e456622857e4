//! Where the machine's profile lies, and what other commands read of it.

use std::path::PathBuf;

use anyhow::Context;
use zeroth::data::CacheFolder;
use zeroth::machine::bench::{Identity, Profile, ProfileError};

/// The file of a machine's profile: the one named, or the machine's own in the cache folder.
pub(super) fn place(named: Option<&PathBuf>, machine: &Identity) -> anyhow::Result<PathBuf> {
    named.cloned().or_else(|| default_place(machine)).context(
        "there is no place for the machine's profile: neither ZEROTH_CACHE nor HOME is set; give --profile FILE or --no-save",
    )
}

fn default_place(machine: &Identity) -> Option<PathBuf> {
    Some(folder()?.join(machine.file_name()))
}

fn folder() -> Option<PathBuf> {
    Some(CacheFolder::default_place().folder()?.join("machines"))
}

/// Whether an earlier `zeroth bench` left anything: to know whether it was on this machine, its cards are looked for, which
/// takes time and memory.
pub(in crate::commands) fn is_any_kept() -> bool {
    let files = folder().and_then(|folder| std::fs::read_dir(folder).ok());
    files.is_some_and(|mut files| files.next().is_some())
}

/// The profile that an earlier `zeroth bench` left on this machine, and its file.
pub(in crate::commands) fn kept(machine: &Identity) -> Result<Option<(PathBuf, Profile)>, ProfileError> {
    let Some(path) = default_place(machine) else { return Ok(None) };
    Ok(Profile::read(&path, machine)?.map(|profile| (path, profile)))
}
