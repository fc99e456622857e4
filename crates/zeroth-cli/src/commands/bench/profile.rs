//! Where the machine's profile lies, and what other commands read of it.

use std::path::PathBuf;

use anyhow::Context;
use zeroth::device::bench::{Identity, Profile, ProfileError};
use zeroth::train::data::CacheFolder;

/// The file of a machine's profile: the one named, or the machine's own in the cache folder.
pub(super) fn place(named: Option<&PathBuf>, machine: &Identity) -> anyhow::Result<PathBuf> {
    named.cloned().or_else(|| default_place(machine)).context(
        "there is no place for the machine's profile: neither ZEROTH_CACHE nor HOME is set; give --profile FILE or --no-save",
    )
}

fn default_place(machine: &Identity) -> Option<PathBuf> {
    let cache = CacheFolder::default_place();
    Some(cache.places().first()?.join("machines").join(machine.file_name()))
}

/// The profile that an earlier `zeroth bench` left on this machine, and its file.
pub(in crate::commands) fn kept(machine: &Identity) -> Result<Option<(PathBuf, Profile)>, ProfileError> {
    let Some(path) = default_place(machine) else { return Ok(None) };
    Ok(Profile::read(&path, machine)?.map(|profile| (path, profile)))
}
