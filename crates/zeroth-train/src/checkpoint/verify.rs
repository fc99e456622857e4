//! Verifies every byte of a checkpoint against its checksum.

use std::path::Path;
use std::time::{Duration, Instant};

use rayon::iter::{IntoParallelRefIterator as _, ParallelIterator as _};

use super::checksums::sha256_of;
use super::error::{CheckpointError, reading};
use super::manifest::{FileEntry, Manifest};
use super::reader::{Checkpoint, check_length, read_manifest};

/// The result of a successful verification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verified {
    /// Files read, not counting the manifest.
    pub files: usize,
    /// Their total size.
    pub bytes: u64,
    /// Elapsed time.
    pub took: Duration,
}

impl Checkpoint {
    /// Reads all files in parallel and compares checksums; returns the first mismatch as the error.
    pub fn verify(&self) -> Result<Verified, CheckpointError> {
        let begin = Instant::now();
        match damaged(self.folder(), self.manifest()).into_iter().next() {
            Some(error) => Err(error),
            None => Ok(verified(self.manifest(), begin)),
        }
    }
}

/// Verifies the checkpoint in a folder and returns all problems found.
pub fn verify_folder(folder: &Path) -> Result<Verified, Vec<CheckpointError>> {
    let begin = Instant::now();
    let (manifest, _) = read_manifest(folder).map_err(|error| vec![error])?;
    let damaged = damaged(folder, &manifest);
    if !damaged.is_empty() {
        return Err(damaged);
    }
    Checkpoint::open(folder).map_err(|error| vec![error])?;
    Ok(verified(&manifest, begin))
}

fn damaged(folder: &Path, manifest: &Manifest) -> Vec<CheckpointError> {
    manifest.files.par_iter().filter_map(|entry| check(folder, entry).err()).collect()
}

fn check(folder: &Path, entry: &FileEntry) -> Result<(), CheckpointError> {
    let path = folder.join(&entry.name);
    check_length(&path, entry)?;
    let (found, bytes) = sha256_of(&path).map_err(reading(&path))?;
    if bytes != entry.bytes {
        return Err(CheckpointError::Size { path, expected: entry.bytes, found: bytes });
    }
    if found != entry.sha256 {
        return Err(CheckpointError::Checksum { path, expected: entry.sha256.clone(), found });
    }
    Ok(())
}

fn verified(manifest: &Manifest, begin: Instant) -> Verified {
    Verified { files: manifest.files.len(), bytes: manifest.bytes(), took: begin.elapsed() }
}
