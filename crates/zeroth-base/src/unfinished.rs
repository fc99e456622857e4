//! Files with hidden names until they are whole: `.NAME.unfinished-OWNER`, with the process that writes them.
//!
//! A process that ends early removes its own ([`remove_own`]); what a killed one has left is removed by the next command that
//! has the folder to itself ([`remove_abandoned`]).

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::signs_of_life::renew_from_now_on;
use crate::{LOCK_FILE, ProcessOwner, sync_folder};

/// What this process has to remove if it ends early.
#[derive(Debug, Default)]
struct Own {
    files: Vec<PathBuf>,
    /// Folders that it made, which go if they are empty.
    folders: Vec<PathBuf>,
}

static OWN: Mutex<Own> = Mutex::new(Own { files: Vec::new(), folders: Vec::new() });
/// Held while whole files get their names.
static PUBLISHING: Mutex<()> = Mutex::new(());
const MARK: &str = ".unfinished-";
/// The final name of a [`PublicationList`], which it never gets.
pub const PUBLICATION_LIST: &str = "published";

/// The path that a file is written to until it is whole.
pub fn unfinished_path(folder: &Path, name: impl AsRef<OsStr>) -> PathBuf {
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(format!("{MARK}{}", ProcessOwner::own()));
    folder.join(hidden)
}

/// Parses a name of [`unfinished_path`] into the final name and the process that writes it.
pub fn parse_unfinished(name: &str) -> Option<(&str, ProcessOwner)> {
    let (name, owner) = name.strip_prefix('.')?.rsplit_once(MARK)?;
    Some((name, owner.parse().ok()?))
}

/// Creates an unfinished file.
pub fn create_unfinished(path: &Path) -> io::Result<File> {
    renew_from_now_on();
    let mut own = lock(&OWN);
    own.files.push(path.to_owned());
    // The lock is held: a file that appears after the others were removed would stay.
    File::create(path)
}

/// The files that this process has not finished, but for locks.
pub(crate) fn own_unfinished() -> Vec<PathBuf> {
    let is_lock = |path: &PathBuf| path.file_name().is_some_and(|name| name == LOCK_FILE);
    lock(&OWN).files.iter().filter(|path| !is_lock(path)).cloned().collect()
}

/// Gives a whole file its name.
pub fn publish_unfinished(path: &Path, to: &Path) -> io::Result<()> {
    let mut own = lock(&OWN);
    fs::rename(path, to)?;
    own.files.retain(|file| file != path);
    Ok(())
}

/// Removes an unfinished file, if it is there. Best effort: the next command removes it too.
pub fn remove_unfinished(path: &Path) {
    let mut own = lock(&OWN);
    let _ = fs::remove_file(path);
    own.files.retain(|file| file != path);
}

/// Removes a file that is there already if this process ends early.
pub(crate) fn own_file(path: &Path) {
    lock(&OWN).files.push(path.to_owned());
}

/// The file is gone, or stays.
pub(crate) fn disown_file(path: &Path) {
    lock(&OWN).files.retain(|file| file != path);
}

/// Creates a folder and its missing parents. Returns those that were missing, the innermost first.
pub(crate) fn make_folders(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut own = lock(&OWN);
    let around = folder.ancestors().filter(|path| !path.as_os_str().is_empty());
    let made: Vec<PathBuf> =
        around.take_while(|path| fs::symlink_metadata(path).is_err()).map(Path::to_owned).collect();
    fs::create_dir_all(folder)?;
    own.folders.extend(made.iter().rev().cloned());
    Ok(made)
}

/// The folders stay, whatever happens.
pub(crate) fn keep_folders(made: &[PathBuf]) {
    lock(&OWN).folders.retain(|folder| !made.contains(folder));
}

/// Holds off [`remove_own`] while whole files get their names, one after the other.
pub fn while_publishing() -> MutexGuard<'static, ()> {
    lock(&PUBLISHING)
}

/// Removes what this process has not finished, before it exits: no more can be created or published.
pub fn remove_own() {
    std::mem::forget(lock(&PUBLISHING));
    let mut own = lock(&OWN);
    for path in own.files.drain(..) {
        let _ = fs::remove_file(path);
    }
    // Fails for those that hold something.
    for folder in own.folders.drain(..).rev() {
        let _ = fs::remove_dir(folder);
    }
    std::mem::forget(own);
}

/// Removes files that processes left unfinished which are gone, if `is_ours` knows their final name; the caller holds the lock
/// of the folder. Files that one of them was giving their names in an empty folder go with it.
pub fn remove_abandoned(folder: &Path, is_ours: impl Fn(&str) -> bool) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (hidden, path) = (entry.file_name(), entry.path());
        let Some((name, owner)) = hidden.to_str().and_then(parse_unfinished) else { continue };
        let is_known = is_ours(name) || name == PUBLICATION_LIST;
        let is_file = entry.file_type().is_ok_and(|kind| !kind.is_dir());
        if !is_known || !is_file || !owner.has_abandoned(&path) {
            continue;
        }
        if name == PUBLICATION_LIST {
            unpublish(folder, &fs::read_to_string(&path).unwrap_or_default());
        }
        // Best effort: it is hidden and harmless.
        let _ = fs::remove_file(path);
    }
}

/// Removes the files of a list, unless the last of them is there too: then all of them are.
fn unpublish(folder: &Path, list: &str) {
    let is_name = |name: &&str| !name.is_empty() && !name.contains('/') && !name.starts_with('.');
    let names: Vec<&str> = list.lines().filter(is_name).collect();
    if names.last().is_some_and(|last| fs::symlink_metadata(folder.join(last)).is_ok()) {
        return;
    }
    for name in names {
        let _ = fs::remove_file(folder.join(name));
    }
}

/// Says which files are about to get their names in a folder that holds no others. If the process is killed before the last of
/// them has, they are removed by the next command that has the folder to itself.
#[derive(Debug)]
pub struct PublicationList {
    path: PathBuf,
    folder: PathBuf,
    text: String,
}

impl PublicationList {
    /// Writes the list, in the order of publication.
    pub fn write<'a>(folder: &Path, names: impl IntoIterator<Item = &'a str>) -> io::Result<Self> {
        let path = unfinished_path(folder, PUBLICATION_LIST);
        let names: Vec<&str> = names.into_iter().collect();
        let text = names.join("\n");
        let mut file = create_unfinished(&path)?;
        let list = Self { path, folder: folder.to_owned(), text };
        file.write_all(list.text.as_bytes())?;
        file.sync_all()?;
        sync_folder(folder)?;
        Ok(list)
    }

    /// Removes the files that have their names, unless all of them do.
    pub fn undo(self) {
        unpublish(&self.folder, &self.text);
    }
}

impl Drop for PublicationList {
    fn drop(&mut self) {
        remove_unfinished(&self.path);
    }
}

/// No holder of these locks panics.
fn lock<T>(mutex: &'static Mutex<T>) -> MutexGuard<'static, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::process_owner::ended_process;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn only_names_of_unfinished_files_are_parsed() {
        let path = unfinished_path(Path::new("x"), "a.json");
        let name = path.file_name().unwrap().to_str().unwrap();
        assert_eq!(parse_unfinished(name), Some(("a.json", ProcessOwner::own())));
        let of = |name| parse_unfinished(name).map(|(name, owner)| (name, owner.pid()));
        assert_eq!(of(".config.json.unfinished-12"), Some(("config.json", 12)));
        assert_eq!(of(".a.unfinished-1.unfinished-2"), Some(("a.unfinished-1", 2)));
        for other in [
            "config.json",
            "config.json.unfinished-12",
            ".config.json.unfinished-",
            ".config.json.unfinished-+1",
            ".config.json.unfinished-1-2",
            ".config.json.unfinished-99999999999",
            ".unfinished-mine",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }

    #[test]
    fn files_of_processes_that_are_gone_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let mut alive = Command::new("sleep").arg("600").spawn().unwrap();
        let living = format!(".a.unfinished-{}", ProcessOwner::of(alive.id()).unwrap());
        // Of a process of another host with the id of one that is gone, and of an earlier version.
        let there = ".a.unfinished-00000001-00000001-4194304-1";
        let stay = [living.as_str(), there, ".a.unfinished-4194304", ".a.unfinished-mine", "a"];
        let unknown = [".b.unfinished-4194304", ".b.unfinished-00000001-00000001-4194304-1"];
        for name in unknown {
            fs::write(folder.path().join(name), "x").unwrap();
        }
        let gone = ended_process();
        for name in stay.iter().map(ToString::to_string).chain([format!(".a.unfinished-{gone}")]) {
            fs::write(folder.path().join(name), "x").unwrap();
        }
        remove_abandoned(folder.path(), |name| name == "a");
        alive.kill().unwrap();
        alive.wait().unwrap();
        let mut stay: Vec<&str> = [&stay[..], &unknown[..]].concat();
        stay.sort_unstable();
        assert_eq!(names(folder.path()), stay);
    }

    #[test]
    fn a_publication_that_stopped_halfway_is_undone() {
        let folder = tempfile::tempdir().unwrap();
        let list = format!(".published.unfinished-{}", ended_process());
        let write = |names: &[&str]| {
            for name in names {
                fs::write(folder.path().join(name), "weights\nconfig\nrecord").unwrap();
            }
        };
        write(&[&list, "weights", "config", "mine"]);
        remove_abandoned(folder.path(), |_| false);
        assert_eq!(names(folder.path()), ["mine"]);
        // Killed after the last file had its name.
        write(&[&list, "weights", "config", "record"]);
        remove_abandoned(folder.path(), |_| false);
        assert_eq!(names(folder.path()), ["config", "mine", "record", "weights"]);
        // Of this process.
        let list = PublicationList::write(folder.path(), ["weights", "new"]).unwrap();
        remove_abandoned(folder.path(), |_| false);
        assert_eq!(names(folder.path()).len(), 5);
        drop(list);
        assert_eq!(names(folder.path()).len(), 4);
    }
}
