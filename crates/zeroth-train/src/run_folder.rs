//! The folder of a run: what lies where, who may write into it, and what an earlier run left there.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::checkpoint::{checkpoint_around, step_folder};
use crate::leftovers;
use crate::overwrite::Removal;
use crate::run_inputs::Input;
use crate::run_lock::{LockError, RunLock};
use crate::unstarted::{Unstarted, holds_steps, missing};

/// What to do with a folder that already holds a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// Say no.
    Refuse,
    /// `--overwrite-output-dir`: remove it.
    Overwrite,
    /// `--resume`: go on with it.
    Keep,
}

/// A folder that a run cannot have.
#[derive(Debug, thiserror::Error)]
pub enum RunFolderError {
    /// It holds a run, and nothing was said about that.
    #[error(
        "{} already holds a run ({}): go on with it by --resume auto, replace it by \
         --overwrite-output-dir, or choose another --output", folder.display(), found.join(", ")
    )]
    HoldsARun {
        /// The folder.
        folder: PathBuf,
        /// What of a run was found.
        found: Vec<String>,
    },
    /// It holds files named like a run's that no run wrote.
    #[error(
        "{} holds {} but neither origin.json nor metrics.jsonl: that is no run, and a run would write over it; choose \
         another --output", folder.display(), found.join(", ")
    )]
    NotARun {
        /// The folder.
        folder: PathBuf,
        /// What was found.
        found: Vec<String>,
    },
    /// It would lie in a checkpoint, or its model would.
    #[error(
        "{} lies in the checkpoint {}, and a run there would damage it: choose another --output", path.display(),
        checkpoint.display()
    )]
    InsideCheckpoint {
        /// The folder, or the model's folder in it.
        path: PathBuf,
        /// The checkpoint.
        checkpoint: PathBuf,
    },
    /// What is to be removed is needed.
    #[error(
        "--overwrite-output-dir would remove {}, and {flag} {} needs it: nothing was removed from {}; choose another --output, \
         or move the input to another folder first", removed.display(), input.display(), folder.display()
    )]
    HoldsInput {
        /// The flag that names the input.
        flag: &'static str,
        /// The input as given.
        input: PathBuf,
        /// What would be removed.
        removed: PathBuf,
        /// The run's folder.
        folder: PathBuf,
    },
    /// A folder has the name of a run's file, or the other way round.
    #[error("{} is {found}, and a run makes {made} of that name: move it, or choose another --output", path.display())]
    InTheWay {
        /// What is there.
        path: PathBuf,
        /// What it is.
        found: &'static str,
        /// What it should be.
        made: &'static str,
    },
    /// A file stands where the folder should be.
    #[error("{} is a file: --output names a folder", path.display())]
    NotAFolder {
        /// The path as given.
        path: PathBuf,
    },
    /// Another run is at work in it.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The system refused.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// The files that a run writes at the top of its folder.
pub(crate) const FILES: &[&str] =
    &["config.json", "origin.json", "plan.json", "metrics.jsonl", "metrics.csv", "loss.svg"];
/// And the folders.
const FOLDERS: &[&str] = &["checkpoints", "model", "logs", "tensorboard"];
/// What only a run of ours writes.
pub(crate) const MARKS: &[&str] = &["origin.json", "metrics.jsonl"];
/// What others write too: a `config.json` without any mark is a model's. No run may write over it.
const AMBIGUOUS: &[&str] = &["config.json", "plan.json", "loss.svg", "model"];
const LOCK: &str = ".lock";

/// The folder of a run, held for this process until dropped.
#[derive(Debug)]
pub struct RunFolder {
    root: PathBuf,
    removal: Removal,
    /// None where it goes on with a run that has steps.
    unstarted: Option<Unstarted>,
    _lock: RunLock,
}

impl RunFolder {
    /// Makes the folder where it is missing, takes it, and deals with a run that it holds. Nothing is removed where that
    /// would take away one of the `inputs`.
    pub fn open(root: &Path, existing: Existing, inputs: &[Input]) -> Result<Self, RunFolderError> {
        if fs::metadata(root).is_ok_and(|found| !found.is_dir()) {
            return Err(RunFolderError::NotAFolder { path: root.to_owned() });
        }
        for path in [root.to_owned(), root.join("model")] {
            if let Some(checkpoint) = checkpoint_around(&path) {
                return Err(RunFolderError::InsideCheckpoint { path, checkpoint });
            }
        }
        let made = missing(root);
        fs::create_dir_all(root).map_err(failed("create", root))?;
        let lock = RunLock::take(root, &root.join(LOCK))?;
        let mut folder =
            Self { root: root.to_owned(), removal: Removal::default(), unstarted: None, _lock: lock };
        let found: Vec<String> = FILES
            .iter()
            .chain(FOLDERS)
            .filter(|name| exists(&root.join(name)))
            .map(ToString::to_string)
            .collect();
        let any_of = |names: &[&str]| found.iter().any(|name| names.contains(&name.as_str()));
        if any_of(AMBIGUOUS) && !any_of(MARKS) {
            return Err(RunFolderError::NotARun { folder: root.to_owned(), found });
        }
        // One that stopped before its first step is not a run.
        let has_steps = holds_steps(root, any_of(MARKS));
        match existing {
            _ if found.is_empty() => {}
            Existing::Keep => {}
            Existing::Refuse if !has_steps => {}
            Existing::Refuse => return Err(RunFolderError::HoldsARun { folder: root.to_owned(), found }),
            Existing::Overwrite => {
                folder.removal = Removal::plan(root)?;
                folder.removal.refuse_inputs(inputs)?;
                folder.removal.carry_out()?;
            }
        }
        leftovers::remove(root);
        if existing != Existing::Keep || !has_steps {
            folder.unstarted = Some(Unstarted::new(root, made));
        }
        Ok(folder)
    }

    /// The folder itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// What a run that stops before its first step takes back; none where the folder holds steps of an earlier one.
    pub fn unstarted(&self) -> Option<Unstarted> {
        self.unstarted.clone()
    }

    /// What of an earlier run was removed, by name.
    pub fn removed(&self) -> &[String] {
        &self.removal.removed
    }

    /// What was found among that and left, because no run wrote it.
    pub fn kept(&self) -> &[String] {
        &self.removal.kept
    }

    /// The resolved config.
    pub fn config(&self) -> PathBuf {
        self.root.join("config.json")
    }

    /// Where each value of the config came from. To be written before [`Self::config`]: it marks the folder as a run.
    pub fn origin(&self) -> PathBuf {
        self.root.join("origin.json")
    }

    /// Bytes per tier and category.
    pub fn plan(&self) -> PathBuf {
        self.root.join("plan.json")
    }

    /// One line a step.
    pub fn metrics(&self) -> PathBuf {
        self.root.join("metrics.jsonl")
    }

    /// The loss curve as a picture.
    pub fn loss_curve(&self) -> PathBuf {
        self.root.join("loss.svg")
    }

    /// The folder of the trained model.
    pub fn model(&self) -> PathBuf {
        self.root.join("model")
    }

    /// The folder of checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.root.join("checkpoints")
    }

    /// The state after `step` steps.
    pub fn checkpoint(&self, step: u64) -> PathBuf {
        self.checkpoints().join(step_folder(step))
    }

    /// The name of the newest checkpoint, as a text.
    pub fn latest(&self) -> PathBuf {
        self.checkpoints().join("latest")
    }

    /// A file that, when it appears, asks for a save.
    pub fn save_now(&self) -> PathBuf {
        self.root.join("save-now")
    }

    /// What a rank says; its folder is made.
    pub fn log(&self, rank: u64) -> Result<PathBuf, RunFolderError> {
        let logs = self.root.join("logs");
        fs::create_dir_all(&logs).map_err(failed("create", &logs))?;
        Ok(logs.join(format!("rank-{rank}.log")))
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        // Ranks of this run may have been killed too.
        leftovers::remove(&self.root);
    }
}

pub(crate) fn exists(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

pub(crate) fn failed(doing: &'static str, path: &Path) -> impl Fn(io::Error) -> RunFolderError {
    move |source| RunFolderError::Io { doing, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder as a run leaves it.
    fn with_a_run() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let run = RunFolder::open(folder.path(), Existing::Refuse, &[]).unwrap();
        for path in
            [run.config(), run.origin(), run.plan(), run.metrics(), run.log(0).unwrap(), run.log(11).unwrap()]
        {
            fs::write(path, "x").unwrap();
        }
        let checkpoints = run.checkpoints();
        fs::create_dir_all(run.checkpoint(5)).unwrap();
        fs::write(run.checkpoint(5).join("rank-00000-of-00001.safetensors"), "x").unwrap();
        fs::create_dir_all(run.model()).unwrap();
        fs::write(run.model().join("model.safetensors"), "x").unwrap();
        fs::write(run.latest(), "step-5").unwrap();
        drop(run);
        // As a kill leaves it.
        let unfinished = checkpoints.join(".step-10.unfinished-4194304-1");
        fs::create_dir(&unfinished).unwrap();
        fs::write(unfinished.join("rank-00000-of-00001.safetensors"), "x").unwrap();
        fs::write(checkpoints.join(".latest.unfinished-12"), "step").unwrap();
        folder
    }

    #[test]
    fn a_new_folder_is_made_with_those_above_it() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("a/b");
        let run = RunFolder::open(&root, Existing::Refuse, &[]).unwrap();
        assert_eq!(run.checkpoint(12), root.join("checkpoints/step-12"));
        assert_eq!(run.log(3).unwrap(), root.join("logs/rank-3.log"));
        drop(run);
        assert!(!root.join(LOCK).exists());
        assert!(RunFolder::open(folder.path(), Existing::Refuse, &[]).is_ok(), "foreign files are no run");
    }

    #[test]
    fn a_folder_with_a_run_is_refused_with_both_ways_out() {
        let folder = with_a_run();
        let message = RunFolder::open(folder.path(), Existing::Refuse, &[]).unwrap_err().to_string();
        assert!(
            message.ends_with(
                " already holds a run (config.json, origin.json, plan.json, metrics.jsonl, checkpoints, model, logs): \
                 go on with it by --resume auto, replace it by --overwrite-output-dir, or choose another --output"
            ),
            "{message}"
        );
        let kept = RunFolder::open(folder.path(), Existing::Keep, &[]).unwrap();
        assert!(kept.metrics().exists() && kept.checkpoint(5).exists());
    }

    #[test]
    fn overwriting_removes_what_a_run_wrote_and_nothing_else() {
        let folder = with_a_run();
        let foreign = ["notes.txt", "model/README.md", "logs/mine.log", "checkpoints/best"];
        for name in foreign {
            fs::write(folder.path().join(name), "mine").unwrap();
        }
        let run = RunFolder::open(folder.path(), Existing::Overwrite, &[]).unwrap();
        assert_eq!(
            run.removed(),
            [
                "checkpoints/.latest.unfinished-12",
                "checkpoints/.step-10.unfinished-4194304-1",
                "checkpoints/latest",
                "checkpoints/step-5",
                "model/model.safetensors",
                "logs/rank-0.log",
                "logs/rank-11.log",
                "config.json",
                "plan.json",
                "origin.json",
                "metrics.jsonl",
            ]
        );
        for name in foreign {
            assert_eq!(fs::read_to_string(folder.path().join(name)).unwrap(), "mine", "{name}");
        }
        assert_eq!(run.kept(), ["checkpoints/best", "model/README.md", "logs/mine.log"]);
    }

    #[test]
    fn a_folder_in_a_checkpoint_is_no_place_for_a_run() {
        let folder = with_a_run();
        let step = folder.path().join("checkpoints/step-5");
        let error = RunFolder::open(&step.join("new"), Existing::Refuse, &[]).unwrap_err().to_string();
        assert!(error.contains("lies in the checkpoint") && !step.join("new").exists(), "{error}");
        // Nor for the model of one, by a link.
        fs::remove_dir_all(folder.path().join("model")).unwrap();
        fs::create_dir(step.join("model")).unwrap();
        std::os::unix::fs::symlink(step.join("model"), folder.path().join("model")).unwrap();
        let error = RunFolder::open(folder.path(), Existing::Keep, &[]).unwrap_err().to_string();
        assert!(error.contains("/model lies in the checkpoint"), "{error}");
    }

    #[test]
    fn overwriting_leaves_an_empty_folder_where_nothing_else_was() {
        let folder = with_a_run();
        drop(RunFolder::open(folder.path(), Existing::Overwrite, &[]).unwrap());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        drop(RunFolder::open(folder.path(), Existing::Overwrite, &[]).unwrap());
    }

    #[test]
    fn a_model_folder_is_never_written_into() {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("config.json");
        fs::write(&config, "{\"model_type\": \"qwen3\"}").unwrap();
        for existing in [Existing::Refuse, Existing::Overwrite, Existing::Keep] {
            let message = RunFolder::open(folder.path(), existing, &[]).unwrap_err().to_string();
            assert!(message.contains(" holds config.json but neither origin.json nor "), "{message}");
            assert!(config.exists());
        }
    }

    #[test]
    fn a_run_that_was_killed_before_its_first_file_can_be_gone_on_with() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(RunFolder::open(folder.path(), Existing::Keep, &[]).unwrap().log(0).unwrap(), "x").unwrap();
        assert!(RunFolder::open(folder.path(), Existing::Keep, &[]).is_ok());
        let removed = RunFolder::open(folder.path(), Existing::Overwrite, &[]).unwrap().removed().to_vec();
        assert_eq!(removed, ["logs/rank-0.log"]);
    }

    #[test]
    fn a_link_to_a_folder_stays_and_what_a_run_wrote_behind_it_goes() {
        let folder = with_a_run();
        let elsewhere = tempfile::tempdir().unwrap();
        for name in ["latest", "notes.txt"] {
            fs::write(elsewhere.path().join(name), "x").unwrap();
        }
        fs::remove_dir_all(folder.path().join("checkpoints")).unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), folder.path().join("checkpoints")).unwrap();
        let run = RunFolder::open(folder.path(), Existing::Overwrite, &[]).unwrap();
        assert_eq!(run.kept(), ["checkpoints/notes.txt"]);
        assert!(!elsewhere.path().join("latest").exists() && elsewhere.path().join("notes.txt").exists());
        assert_eq!(fs::read_link(run.checkpoints()).unwrap(), elsewhere.path());
    }

    #[test]
    fn a_file_in_the_way_and_a_folder_in_use_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("out");
        fs::write(&file, "x").unwrap();
        let error = RunFolder::open(&file, Existing::Refuse, &[]).unwrap_err();
        assert!(matches!(error, RunFolderError::NotAFolder { .. }), "{error}");
        let _held = RunFolder::open(folder.path(), Existing::Refuse, &[]).unwrap();
        let error = RunFolder::open(folder.path(), Existing::Overwrite, &[]).unwrap_err();
        assert!(matches!(error, RunFolderError::Lock(LockError::Held { .. })), "{error}");
    }
}
