//! Location of the machine's profile, which `bench` writes and other commands read.

use std::path::PathBuf;

use anyhow::Context;
use zeroth::data::CacheFolder;
use zeroth::machine::bench::{Identity, Profile, ProfileError};

/// The profile's file: the given one, or the machine's own in the cache folder.
pub(super) fn place(named: Option<&PathBuf>, machine: &Identity) -> anyhow::Result<PathBuf> {
    named.cloned().or_else(|| default_location(machine)).context(
        "no location for the machine's profile: neither ZEROTH_CACHE nor HOME is set; give --profile FILE or --no-save",
    )
}

fn default_location(machine: &Identity) -> Option<PathBuf> {
    Some(folder()?.join(machine.file_name()))
}

fn folder() -> Option<PathBuf> {
    Some(CacheFolder::default_location().folder()?.join("machines"))
}

/// Whether any profile exists. Checking whether it belongs to this machine requires probing its GPUs, which takes
/// time and memory.
pub(super) fn is_any_kept() -> bool {
    let files = folder().and_then(|folder| std::fs::read_dir(folder).ok());
    files.is_some_and(|mut files| files.next().is_some())
}

/// This machine's saved profile, and its file.
pub(super) fn kept(machine: &Identity) -> Result<Option<(PathBuf, Profile)>, ProfileError> {
    let Some(path) = default_location(machine) else { return Ok(None) };
    Ok(Profile::read(&path, machine)?.map(|profile| (path, profile)))
}
