//! Folders that no new run is written to: those that hold something else, and those that everything else is in.

use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};
use zeroth_base::{LOCK_FILE, parse_unfinished};

use super::ExistingRun;
use super::error::{RunFolderError, failed};
use super::files::{AMBIGUOUS, FILES, FOLDERS, MARKERS, REQUESTS, exists};
use super::shared_folder::PROOF;
use crate::checkpoint::{enclosing_checkpoint, is_same_folder, nearest_existing};

/// Names that are listed in a message.
const NAMED: usize = 5;

/// Refuses a folder that no run can be written to. Nothing is changed, so a command may ask before it does any work.
pub fn check_output(root: &Path, existing: ExistingRun) -> Result<(), RunFolderError> {
    if fs::metadata(root).is_ok_and(|found| !found.is_dir()) {
        return Err(RunFolderError::NotAFolder { path: root.to_owned() });
    }
    for path in [root.to_owned(), root.join("model")] {
        if let Some(checkpoint) = enclosing_checkpoint(&path) {
            return Err(RunFolderError::InsideCheckpoint { path, checkpoint });
        }
    }
    refuse_pipes(root)?;
    let is_run = is_marked(&run_files(root)?);
    if !is_run || existing == ExistingRun::Overwrite {
        refuse_shared(root)?;
    }
    if !is_run {
        refuse_foreign(root)?;
        check_writable(root)?;
    }
    Ok(())
}

/// The names of a run's files and folders that are found. Fails if they are something else's.
pub(crate) fn run_files(root: &Path) -> Result<Vec<String>, RunFolderError> {
    let known = FILES.iter().chain(FOLDERS).filter(|name| exists(&root.join(name)));
    let found: Vec<String> = known.map(ToString::to_string).collect();
    if found.iter().any(|name| AMBIGUOUS.contains(&name.as_str())) && !is_marked(&found) {
        return Err(RunFolderError::NotARun { folder: root.to_owned(), found });
    }
    Ok(found)
}

/// Whether these files are those of a run.
pub(crate) fn is_marked(found: &[String]) -> bool {
    found.iter().any(|name| MARKERS.contains(&name.as_str()))
}

/// Fails if this user may not write to a folder or, where it does not exist yet, may not create it.
pub fn check_writable(folder: &Path) -> Result<(), RunFolderError> {
    let Some(nearest) = nearest_existing(folder) else { return Ok(()) };
    access(&nearest, Access::WRITE_OK | Access::EXEC_OK).map_err(|errno| RunFolderError::NotWritable {
        output: folder.to_owned(),
        folder: nearest,
        source: errno.into(),
    })
}

/// Refuses FIFOs and sockets with the names of a run's files: opening one would wait for somebody at its other end.
fn refuse_pipes(root: &Path) -> Result<(), RunFolderError> {
    let entries = fs::read_dir(root.join("logs")).into_iter().flatten().flatten();
    let logs = entries.map(|entry| entry.path());
    let others = [LOCK_FILE, "checkpoints/latest", "model/export.json"].into_iter();
    for path in FILES.iter().copied().chain(others).map(|name| root.join(name)).chain(logs) {
        let Ok(found) = fs::metadata(&path).map(|found| found.file_type()) else { continue };
        if found.is_fifo() || found.is_socket() {
            let found = if found.is_fifo() { "a FIFO" } else { "a socket" };
            return Err(RunFolderError::InTheWay { path, found, made: "a file" });
        }
    }
    Ok(())
}

/// Refuses folders that other things are kept in, even while they are empty.
fn refuse_shared(root: &Path) -> Result<(), RunFolderError> {
    let shared = [
        ("the root of the file system", Some(PathBuf::from("/"))),
        ("the home folder", std::env::home_dir()),
        ("the working directory", std::env::current_dir().ok()),
    ];
    let found = shared.into_iter().find(|(_, place)| {
        place.as_ref().is_some_and(|place| !place.as_os_str().is_empty() && is_same_folder(root, place))
    });
    match found {
        Some((what, _)) => Err(RunFolderError::Shared { folder: root.to_owned(), what }),
        None => Ok(()),
    }
}

/// Refuses a folder without a run that holds anything that a run does not write.
fn refuse_foreign(root: &Path) -> Result<(), RunFolderError> {
    let entries = match fs::read_dir(root) {
        Ok(entries) => entries,
        // It does not exist yet.
        Err(_) if !exists(root) => return Ok(()),
        Err(error) => return Err(failed("read", root)(error)),
    };
    let mut foreign = Vec::new();
    for entry in entries {
        let name = entry.map_err(failed("read", root))?.file_name();
        if !name.to_str().is_some_and(is_of_a_run) {
            foreign.push(name.to_string_lossy().into_owned());
        }
    }
    if foreign.is_empty() {
        return Ok(());
    }
    foreign.sort_unstable();
    let more = foreign.len().saturating_sub(NAMED);
    foreign.truncate(NAMED);
    Err(RunFolderError::HoldsOthers { folder: root.to_owned(), found: foreign, more })
}

/// Whether a run writes, or reads, an entry of this name at the top of its folder.
fn is_of_a_run(name: &str) -> bool {
    let whole = parse_unfinished(name).map_or(name, |(name, _)| name);
    // A fresh file system has `lost+found`.
    FILES.contains(&whole)
        || (whole == PROOF && name != PROOF)
        || FOLDERS.contains(&name)
        || REQUESTS.contains(&name)
        || [LOCK_FILE, "lost+found"].contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_with_other_things_are_refused() {
        for name in ["notes.txt", ".hidden", "step-1", "adapter_config.json", ".notes.unfinished-12"] {
            let folder = tempfile::tempdir().unwrap();
            fs::write(folder.path().join(name), "mine").unwrap();
            for existing in [ExistingRun::Refuse, ExistingRun::Overwrite, ExistingRun::Keep] {
                let message = check_output(folder.path(), existing).unwrap_err().to_string();
                let words = format!(" holds {name}, which no run writes: ");
                assert!(message.contains(&words), "{message}");
            }
            // With a run there, they are kept.
            fs::write(folder.path().join("origin.json"), "{}").unwrap();
            check_output(folder.path(), ExistingRun::Overwrite).unwrap();
        }
        let folder = tempfile::tempdir().unwrap();
        for number in 0..7 {
            fs::write(folder.path().join(format!("{number}.txt")), "mine").unwrap();
        }
        let message = check_output(folder.path(), ExistingRun::Refuse).unwrap_err().to_string();
        assert!(
            message.contains("holds 0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 2 more, which no run"),
            "{message}"
        );
    }

    #[test]
    fn what_runs_leave_and_read_is_no_obstacle() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["logs", "checkpoints", "lost+found"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        for name in [
            ".lock",
            "save-now",
            "trace-now",
            "metrics.csv",
            ".origin.json.unfinished-12",
            ".shared-folder.unfinished-12",
        ] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        check_output(folder.path(), ExistingRun::Refuse).unwrap();
        check_output(&folder.path().join("absent/run"), ExistingRun::Refuse).unwrap();
    }

    #[test]
    fn folders_that_everything_is_in_are_refused() {
        let here = std::env::current_dir().unwrap();
        for (place, what) in
            [(Path::new("/"), "the root of the file system"), (&here, "the working directory")]
        {
            for existing in [ExistingRun::Refuse, ExistingRun::Overwrite, ExistingRun::Keep] {
                let message = check_output(place, existing).unwrap_err().to_string();
                assert!(message.contains(&format!("is {what}")), "{message}");
            }
        }
    }
}
