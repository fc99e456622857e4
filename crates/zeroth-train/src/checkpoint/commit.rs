//! Commits an unfinished folder as a checkpoint: all files complete and synced, then one rename.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};
use zeroth_base::{RenewedFolder, publish};

use super::checksums::{MANIFEST, SUMS, checksums_text, hex};
use super::directory::{clean, sync_folder};
use super::error::{CheckpointError, writing};
use super::file_names::{MODEL, foreign_files, hidden, remove_unless_foreign, step_folder};
use super::manifest::{FileEntry, Manifest};
use super::model_files::{ModelFile, ModelFiles};
use super::reader::Checkpoint;

/// The file that names the newest checkpoint.
const LATEST: &str = "latest";
/// Copy buffer size in bytes.
const COPY: usize = 1 << 20;

/// A checkpoint being written, owned by rank 0. Removed on drop unless [`UnfinishedCheckpoint::commit`] succeeded. A process
/// writes one at a time.
#[derive(Debug)]
pub struct UnfinishedCheckpoint {
    checkpoints: PathBuf,
    path: PathBuf,
    step: u64,
    not_removed: Vec<CheckpointError>,
    /// Ranks may take minutes to write and sync what other hosts must not remove.
    _renewed: RenewedFolder,
}

impl UnfinishedCheckpoint {
    /// Creates the folder that all ranks write their shard into, after removing leftovers of killed processes.
    pub fn begin(checkpoints: &Path, step: u64) -> Result<Self, CheckpointError> {
        fs::create_dir_all(checkpoints).map_err(writing("create", checkpoints, 0))?;
        let not_removed = clean(checkpoints)?;
        let path = hidden(checkpoints, step, "unfinished");
        if path.exists() {
            remove_unless_foreign(&path).map_err(writing("remove", &path, 0))?;
        }
        fs::create_dir(&path).map_err(writing("create", &path, 0))?;
        let renewed = RenewedFolder::new(&path);
        let checkpoints = checkpoints.to_owned();
        Ok(Self { checkpoints, path, step, not_removed, _renewed: renewed })
    }

    /// Errors of leftovers that could not be removed.
    pub fn not_removed(&self) -> &[CheckpointError] {
        &self.not_removed
    }

    /// The folder, passed to [`super::ShardWriter::create`] on every rank.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Publishes the checkpoint. `manifest` lists the synced shards of all ranks; `model` holds the config and
    /// tokenizer files to include. An existing checkpoint of the same step is replaced atomically; foreign files in
    /// it are kept.
    pub fn commit(self, mut manifest: Manifest, model: &ModelFiles) -> Result<PathBuf, CheckpointError> {
        if manifest.step != self.step {
            let problem = format!("step {} in the folder of step {}", manifest.step, self.step);
            return Err(CheckpointError::Manifest { path: self.path.join(MANIFEST), problem });
        }
        manifest.files.extend(copy_model(model, &self.path.join(MODEL))?);
        manifest.files.sort_by(|a, b| a.name.cmp(&b.name));
        let text = serde_json::to_string_pretty(&manifest).map_err(|error| CheckpointError::Manifest {
            path: self.path.join(MANIFEST),
            problem: error.to_string(),
        })?;
        let text = format!("{text}\n").into_bytes();
        write_synced(&self.path.join(SUMS), checksums_text(&text, &manifest.files).as_bytes())?;
        write_synced(&self.path.join(MANIFEST), &text)?;
        // Do not publish a checkpoint that cannot be opened.
        Checkpoint::open(&self.path)?;
        sync_folder(&self.path)?;
        self.put_in_place()
    }

    fn put_in_place(self) -> Result<PathBuf, CheckpointError> {
        let target = self.checkpoints.join(step_folder(self.step));
        if let Ok(found) = fs::symlink_metadata(&target) {
            if found.is_file() {
                let source = io::Error::new(io::ErrorKind::AlreadyExists, "a file of that name exists");
                return Err(CheckpointError::Io { doing: "write", path: target, source });
            }
            exchange(&self.path, &target, &hidden(&self.checkpoints, self.step, "replaced"))?;
            self.move_foreign(&target);
        } else {
            fs::rename(&self.path, &target).map_err(writing("rename to", &target, 0))?;
        }
        sync_folder(&self.checkpoints)?;
        let latest = self.checkpoints.join(LATEST);
        let name = step_folder(self.step);
        publish(&latest, name.as_bytes())
            .map_err(|error| writing("write", &latest, name.len() as u64)(error.source))?;
        // Dropping removes the replaced folder, which now has the hidden name.
        Ok(target)
    }
}

impl UnfinishedCheckpoint {
    /// Moves foreign files from the replaced folder, now hidden, into the new checkpoint.
    fn move_foreign(&self, target: &Path) {
        for name in foreign_files(&self.path).unwrap_or_default() {
            // Best effort: on failure the hidden folder stays, because it holds foreign files.
            let _ = fs::rename(self.path.join(&name), target.join(&name));
        }
    }
}

impl Drop for UnfinishedCheckpoint {
    fn drop(&mut self) {
        // Best effort: a hidden folder is never taken for a checkpoint, and the next save removes it.
        let _ = remove_unless_foreign(&self.path);
    }
}

/// Exchanges `new` and `old`, atomically where the filesystem supports it.
fn exchange(new: &Path, old: &Path, aside: &Path) -> Result<(), CheckpointError> {
    match renameat_with(CWD, new, CWD, old, RenameFlags::EXCHANGE) {
        Ok(()) => Ok(()),
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => exchange_in_steps(new, old, aside),
        Err(errno) => Err(writing("rename to", old, 0)(errno.into())),
    }
}

/// Exchanges in three renames. After a kill, [`clean`] restores the old folder from `aside`.
fn exchange_in_steps(new: &Path, old: &Path, aside: &Path) -> Result<(), CheckpointError> {
    fs::rename(old, aside).map_err(writing("rename", old, 0))?;
    if let Err(error) = fs::rename(new, old) {
        fs::rename(aside, old).map_err(writing("rename to", old, 0))?;
        return Err(writing("rename to", old, 0)(error));
    }
    fs::rename(aside, new).map_err(writing("rename", aside, 0))
}

/// Copies the config and tokenizer files, hashing them on the way.
fn copy_model(from: &ModelFiles, to: &Path) -> Result<Vec<FileEntry>, CheckpointError> {
    fs::create_dir(to).map_err(writing("create", to, 0))?;
    let entries = from.iter().map(|(name, file)| copy(file, &to.join(name), format!("{MODEL}/{name}")));
    let entries = entries.collect::<Result<_, _>>()?;
    sync_folder(to)?;
    Ok(entries)
}

fn copy(mut source: ModelFile<'_>, to: &Path, name: String) -> Result<FileEntry, CheckpointError> {
    let needed = source.len();
    let mut target = File::create(to).map_err(writing("create", to, needed))?;
    let (mut hash, mut bytes, mut buffer) = (Sha256::new(), 0, vec![0; COPY.min(needed.max(1) as usize)]);
    loop {
        let count = match source.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(source) => return Err(CheckpointError::Io { doing: "copy", path: to.to_owned(), source }),
        };
        target.write_all(&buffer[..count]).map_err(writing("write", to, needed))?;
        hash.update(&buffer[..count]);
        bytes += count as u64;
    }
    target.sync_all().map_err(writing("sync", to, needed))?;
    Ok(FileEntry { name, bytes, sha256: hex(hash) })
}

fn write_synced(path: &Path, contents: &[u8]) -> Result<(), CheckpointError> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(contents)?;
        file.sync_all()
    };
    write().map_err(writing("write", path, contents.len() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exchange_in_steps_matches_the_atomic_exchange() {
        let folder = tempfile::tempdir().unwrap();
        let [new, old, aside] = ["new", "old", "aside"].map(|name| folder.path().join(name));
        for path in [&new, &old] {
            fs::create_dir(path).unwrap();
            fs::write(path.join("who"), path.file_name().unwrap().to_str().unwrap()).unwrap();
        }
        let who = |path: &Path| fs::read_to_string(path.join("who")).unwrap();
        for exchange in [exchange, exchange_in_steps] {
            let before = (who(&new), who(&old));
            exchange(&new, &old, &aside).unwrap();
            assert_eq!((who(&old), who(&new)), before);
            assert!(!aside.exists());
        }
        fs::remove_dir_all(&new).unwrap();
        let before = who(&old);
        assert!(exchange_in_steps(&new, &old, &aside).is_err());
        assert_eq!(who(&old), before, "a failed exchange restores the old folder");
    }
}
