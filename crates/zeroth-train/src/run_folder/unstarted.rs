//! Cleanup of runs that stop before their first step, and therefore do not count as runs.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use zeroth_base::LOCK_FILE;

use super::files::{EVENTS, STATUS, exists, is_event_file_name, is_log_name};
use crate::checkpoint::list;

/// Whether a folder contains a step of a run: a metrics line, a checkpoint, or later files.
///
/// Without a marker file (`is_marked`), a metrics.csv or an event file is foreign.
pub(crate) fn holds_steps(root: &Path, is_marked: bool) -> bool {
    let lines = |name: &str| fs::read_to_string(root.join(name)).map_or(0, |text| text.lines().count());
    let is_filled = |name: &str| fs::symlink_metadata(root.join(name)).is_ok_and(|found| found.len() > 0);
    // An unreadable folder may contain some.
    let has_checkpoints = list(&root.join("checkpoints")).map_or(true, |found| !found.is_empty());
    let of_others = |name: &str| !is_marked && exists(&root.join(name));
    is_filled("metrics.jsonl")
        || has_checkpoints
        || ["model", "loss.svg"].iter().any(|name| exists(&root.join(name)))
        // The first line is the header.
        || lines("metrics.csv") > 1
        || of_others("metrics.csv")
        || of_others("tensorboard")
}

fn names_in(folder: &Path) -> impl Iterator<Item = String> + use<> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok())
}

/// Files that a run writes before its first step.
#[derive(Debug, Clone)]
pub struct UnstartedRun {
    root: PathBuf,
    /// Folders created for it, innermost first.
    made: Vec<PathBuf>,
    /// Logs and event files that existed before.
    before: BTreeSet<PathBuf>,
}

/// Whether a file name is a run's.
type IsOurs = fn(&str) -> bool;
/// Folders that a run adds files to, and how to recognise them.
const ADDED: [(&str, IsOurs); 2] = [("logs", is_log_name), ("tensorboard", is_event_file_name)];

impl UnstartedRun {
    pub(crate) fn new(root: &Path, made: Vec<PathBuf>) -> Self {
        Self { root: root.to_owned(), made, before: added(root).collect() }
    }

    /// Removes those files, unless a step was completed after all; false then. Best effort: what remains does not count
    /// as a run.
    pub fn remove(&self) -> bool {
        if holds_steps(&self.root, true) {
            return false;
        }
        for path in added(&self.root).filter(|path| !self.before.contains(path)) {
            let _ = fs::remove_file(&path);
            // The folder of a named run.
            let named =
                path.parent().filter(|folder| folder.parent() == Some(&self.root.join("tensorboard")));
            let _ = named.map(fs::remove_dir);
        }
        // Marker files last: without them the others would look like a model's.
        let others = ["config.json", "plan.json", "metrics.csv", STATUS, EVENTS];
        for name in others.into_iter().chain(["metrics.jsonl", "origin.json", LOCK_FILE]) {
            let _ = fs::remove_file(self.root.join(name));
        }
        // These fail for non-empty folders, which should stay.
        for (name, _) in ADDED {
            let _ = fs::remove_dir(self.root.join(name));
        }
        for folder in &self.made {
            let _ = fs::remove_dir(folder);
        }
        true
    }
}

/// Logs and event files of runs.
fn added(root: &Path) -> impl Iterator<Item = PathBuf> {
    let named = root.join("tensorboard");
    let named = names_in(&named).map(move |name| named.join(name)).flat_map(|folder| event_files(&folder));
    let direct = ADDED.into_iter().flat_map(move |(name, is_ours)| {
        let folder = root.join(name);
        names_in(&folder).filter(move |name| is_ours(name)).map(move |name| folder.join(name))
    });
    direct.chain(named)
}

/// The event files in a folder.
pub(crate) fn event_files(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let folder = folder.to_owned();
    names_in(&folder).filter(|name| is_event_file_name(name)).map(move |name| folder.join(name))
}

/// The missing ancestors of `root`, including itself, innermost first.
pub(crate) fn missing(root: &Path) -> Vec<PathBuf> {
    let above = root.ancestors().filter(|folder| !folder.as_os_str().is_empty());
    above.take_while(|folder| !exists(folder)).map(Path::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{ExistingRun, RunFolder};
    use super::*;

    /// A run prepared up to its first step.
    fn prepared(root: &Path) -> RunFolder {
        let run = RunFolder::open(root, ExistingRun::Refuse, &[]).unwrap();
        for path in [run.origin(), run.config(), run.plan(), run.log(0).unwrap()] {
            fs::write(path, "x").unwrap();
        }
        fs::write(run.metrics(), "").unwrap();
        fs::write(root.join("metrics.csv"), "step,loss\n").unwrap();
        fs::create_dir(root.join("tensorboard")).unwrap();
        fs::write(root.join("tensorboard/events.out.tfevents.1.host.2.0"), "x").unwrap();
        fs::create_dir(root.join("tensorboard/named")).unwrap();
        fs::write(root.join("tensorboard/named/events.out.tfevents.1.host.2.0"), "x").unwrap();
        run
    }

    #[test]
    fn all_files_and_created_folders_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("runs/first");
        let run = prepared(&root);
        run.unstarted().unwrap().remove();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn foreign_files_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let theirs = ["logs/rank-0.log", "logs/mine.log"];
        fs::create_dir(folder.path().join("logs")).unwrap();
        for name in theirs {
            fs::write(folder.path().join(name), "mine").unwrap();
        }
        let run = RunFolder::open(folder.path(), ExistingRun::Refuse, &[]).unwrap();
        for path in [run.origin(), run.config(), run.plan(), run.log(1).unwrap()] {
            fs::write(path, "x").unwrap();
        }
        run.unstarted().unwrap().remove();
        let mut left: Vec<String> =
            names_in(folder.path()).chain(names_in(&folder.path().join("logs"))).collect();
        left.sort_unstable();
        assert_eq!(left, ["logs", "mine.log", "rank-0.log"]);
    }

    #[test]
    fn only_runs_without_steps_are_taken_over() {
        let folder = tempfile::tempdir().unwrap();
        drop(prepared(folder.path()));
        let again = RunFolder::open(folder.path(), ExistingRun::Refuse, &[]).unwrap();
        let unstarted = again.unstarted().unwrap();
        fs::write(again.metrics(), "{\"step\":1}\n").unwrap();
        unstarted.remove();
        assert!(again.origin().exists() && again.metrics().exists(), "a step was completed");
        drop(again);
        assert!(RunFolder::open(folder.path(), ExistingRun::Refuse, &[]).is_err());
        assert!(RunFolder::open(folder.path(), ExistingRun::Keep, &[]).unwrap().unstarted().is_none());
    }

    #[test]
    fn any_sign_of_a_step_makes_it_a_run() {
        for trace in ["checkpoints/step-3/manifest.json", "model/config.json", "loss.svg", "metrics.csv"] {
            let folder = tempfile::tempdir().unwrap();
            drop(prepared(folder.path()));
            let path = folder.path().join(trace);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "step,loss\n1,2\n").unwrap();
            assert!(RunFolder::open(folder.path(), ExistingRun::Refuse, &[]).is_err(), "{trace}");
            assert!(path.exists());
        }
        // Without a marker file, metrics.csv is foreign.
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("metrics.csv"), "mine\n").unwrap();
        assert!(RunFolder::open(folder.path(), ExistingRun::Refuse, &[]).is_err());
    }
}
