//! The run folder: its layout, its lock, and handling of an earlier run in it.

mod error;
mod files;
mod input;
mod output_folder;
mod overwrite;
mod shared_folder;
mod stale_files;
mod unstarted;

use std::fs;
use std::path::{Path, PathBuf};

use zeroth_base::FolderLock;

pub use self::error::RunFolderError;
use self::error::failed;
pub(crate) use self::files::{EVENTS, MARKERS, STATUS, exists};
pub use self::input::RunInput;
pub use self::output_folder::{check_output, check_writable};
use self::output_folder::{is_marked, run_files};
use self::overwrite::OverwritePlan;
pub use self::shared_folder::{SharedFolderProof, SharedFolderQuestion, weights_identity};
pub(crate) use self::stale_files::is_of_a_model;
pub use self::unstarted::UnstartedRun;
use self::unstarted::holds_steps;
pub(crate) use self::unstarted::{event_files, missing};
use crate::checkpoint::step_folder;

/// Handling of a folder that already contains a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExistingRun {
    /// Refuse it.
    Refuse,
    /// `--overwrite-output-dir`: remove the earlier run.
    Overwrite,
    /// `--resume`: continue it.
    Keep,
}

/// A run folder, locked by this process until dropped.
#[derive(Debug)]
pub struct RunFolder {
    root: PathBuf,
    overwritten: OverwritePlan,
    /// `None` if it continues a run that has steps.
    unstarted: Option<UnstartedRun>,
    _lock: FolderLock,
}

impl RunFolder {
    /// Creates the folder if missing, locks it, and handles an earlier run. Nothing is removed if that would remove
    /// one of the `inputs`.
    pub fn open(root: &Path, existing: ExistingRun, inputs: &[RunInput]) -> Result<Self, RunFolderError> {
        Self::open_telling(root, existing, inputs, &|_| ())
    }

    /// As [`Self::open`]; calls `tell` before it waits for a sign of life of a run on another host.
    pub fn open_telling(
        root: &Path,
        existing: ExistingRun,
        inputs: &[RunInput],
        tell: &dyn Fn(&str),
    ) -> Result<Self, RunFolderError> {
        check_output(root, existing)?;
        let made = missing(root);
        fs::create_dir_all(root).map_err(failed("create", root))?;
        // Before a wait for the lock, which may be as long as that for what a run on another host left.
        stale_files::look(root);
        let lock = FolderLock::take_telling(root, tell)?;
        let mut folder = Self {
            root: root.to_owned(),
            overwritten: OverwritePlan::default(),
            unstarted: None,
            _lock: lock,
        };
        let found = run_files(root)?;
        // A run that stopped before its first step does not count.
        let has_steps = holds_steps(root, is_marked(&found));
        match existing {
            _ if found.is_empty() => {}
            ExistingRun::Keep => {}
            ExistingRun::Refuse if !has_steps => {}
            ExistingRun::Refuse => return Err(RunFolderError::HoldsARun { folder: root.to_owned(), found }),
            ExistingRun::Overwrite => {
                folder.overwritten = OverwritePlan::plan(root)?;
                folder.overwritten.refuse_inputs(inputs)?;
                folder.overwritten.carry_out()?;
            }
        }
        stale_files::remove(root);
        if existing != ExistingRun::Keep || !has_steps {
            folder.unstarted = Some(UnstartedRun::new(root, made));
        }
        Ok(folder)
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Cleanup for a run that stops before its first step; `None` if the folder contains steps of an earlier run.
    pub fn unstarted(&self) -> Option<UnstartedRun> {
        self.unstarted.clone()
    }

    /// Removed files of an earlier run.
    pub fn removed(&self) -> &[String] {
        &self.overwritten.removed
    }

    /// Foreign files among them that were kept.
    pub fn kept(&self) -> &[String] {
        &self.overwritten.kept
    }

    /// config.json: the resolved config.
    pub fn config(&self) -> PathBuf {
        self.root.join("config.json")
    }

    /// origin.json: the origin of each config value. Written before [`Self::config`], because it marks the folder as
    /// a run.
    pub fn origin(&self) -> PathBuf {
        self.root.join("origin.json")
    }

    /// plan.json: planned bytes per tier and category.
    pub fn plan(&self) -> PathBuf {
        self.root.join("plan.json")
    }

    /// metrics.jsonl: one line per step.
    pub fn metrics(&self) -> PathBuf {
        self.root.join("metrics.jsonl")
    }

    /// loss.svg: the loss curve.
    pub fn loss_curve(&self) -> PathBuf {
        self.root.join("loss.svg")
    }

    /// The exported model.
    pub fn model(&self) -> PathBuf {
        self.root.join("model")
    }

    /// The checkpoint directory.
    pub fn checkpoints(&self) -> PathBuf {
        self.root.join("checkpoints")
    }

    /// The checkpoint after `step` steps.
    pub fn checkpoint(&self, step: u64) -> PathBuf {
        self.checkpoints().join(step_folder(step))
    }

    /// The file with the newest checkpoint's name.
    pub fn latest(&self) -> PathBuf {
        self.checkpoints().join("latest")
    }

    /// The file whose appearance requests a checkpoint.
    pub fn save_now(&self) -> PathBuf {
        self.root.join("save-now")
    }

    /// The file whose appearance requests a timeline of the next step.
    pub fn trace_now(&self) -> PathBuf {
        self.root.join("trace-now")
    }

    /// events.jsonl: what happened.
    pub fn events(&self) -> PathBuf {
        self.root.join(EVENTS)
    }

    /// A rank's log file; creates its folder.
    pub fn log(&self, rank: u64) -> Result<PathBuf, RunFolderError> {
        let logs = self.root.join("logs");
        fs::create_dir_all(&logs).map_err(failed("create", &logs))?;
        Ok(logs.join(format!("rank-{rank}.log")))
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        // Ranks of this run may have been killed.
        stale_files::remove(&self.root);
    }
}

#[cfg(test)]
mod tests {
    use zeroth_base::{LOCK_FILE, LockError};

    use super::*;

    /// A run folder as a finished run leaves it.
    fn with_a_run() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let run = RunFolder::open(folder.path(), ExistingRun::Refuse, &[]).unwrap();
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
        // Leftovers of a kill.
        let unfinished = checkpoints.join(".step-10.unfinished-00000001-00000001-4194304-1");
        fs::create_dir(&unfinished).unwrap();
        fs::write(unfinished.join("rank-00000-of-00001.safetensors"), "x").unwrap();
        fs::write(checkpoints.join(".latest.unfinished-12"), "step").unwrap();
        folder
    }

    #[test]
    fn missing_parent_folders_are_created() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("a/b");
        let run = RunFolder::open(&root, ExistingRun::Refuse, &[]).unwrap();
        assert_eq!(run.checkpoint(12), root.join("checkpoints/step-12"));
        assert_eq!(run.log(3).unwrap(), root.join("logs/rank-3.log"));
        drop(run);
        assert!(!root.join(LOCK_FILE).exists());
    }

    #[test]
    fn an_existing_run_is_refused_with_remedies() {
        let folder = with_a_run();
        let message = RunFolder::open(folder.path(), ExistingRun::Refuse, &[]).unwrap_err().to_string();
        assert!(
            message.ends_with(
                " already contains a run (config.json, origin.json, plan.json, metrics.jsonl, checkpoints, model, logs): \
                 continue it with --resume auto, replace it with --overwrite-output-dir, or choose another --output"
            ),
            "{message}"
        );
        let kept = RunFolder::open(folder.path(), ExistingRun::Keep, &[]).unwrap();
        assert!(kept.metrics().exists() && kept.checkpoint(5).exists());
    }

    #[test]
    fn overwriting_removes_only_files_of_a_run() {
        let folder = with_a_run();
        let foreign = ["notes.txt", "model/README.md", "logs/mine.log", "checkpoints/best"];
        for name in foreign {
            fs::write(folder.path().join(name), "mine").unwrap();
        }
        let run = RunFolder::open(folder.path(), ExistingRun::Overwrite, &[]).unwrap();
        assert_eq!(
            run.removed(),
            [
                "checkpoints/.latest.unfinished-12",
                "checkpoints/.step-10.unfinished-00000001-00000001-4194304-1",
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
    fn a_run_inside_a_checkpoint_is_refused() {
        let folder = with_a_run();
        let step = folder.path().join("checkpoints/step-5");
        let error = RunFolder::open(&step.join("new"), ExistingRun::Refuse, &[]).unwrap_err().to_string();
        assert!(error.contains("is inside the checkpoint") && !step.join("new").exists(), "{error}");
        // Nor may its model folder be a symlink into one.
        fs::remove_dir_all(folder.path().join("model")).unwrap();
        fs::create_dir(step.join("model")).unwrap();
        std::os::unix::fs::symlink(step.join("model"), folder.path().join("model")).unwrap();
        let error = RunFolder::open(folder.path(), ExistingRun::Keep, &[]).unwrap_err().to_string();
        assert!(error.contains("/model is inside the checkpoint"), "{error}");
    }

    #[test]
    fn overwriting_removes_emptied_folders() {
        let folder = with_a_run();
        drop(RunFolder::open(folder.path(), ExistingRun::Overwrite, &[]).unwrap());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        drop(RunFolder::open(folder.path(), ExistingRun::Overwrite, &[]).unwrap());
    }

    #[test]
    fn a_model_folder_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("config.json");
        fs::write(&config, "{\"model_type\": \"qwen3\"}").unwrap();
        for existing in [ExistingRun::Refuse, ExistingRun::Overwrite, ExistingRun::Keep] {
            let message = RunFolder::open(folder.path(), existing, &[]).unwrap_err().to_string();
            assert!(message.contains(" contains config.json but neither origin.json nor "), "{message}");
            assert!(config.exists());
        }
    }

    #[test]
    fn a_run_killed_before_its_first_file_can_be_resumed() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(RunFolder::open(folder.path(), ExistingRun::Keep, &[]).unwrap().log(0).unwrap(), "x")
            .unwrap();
        assert!(RunFolder::open(folder.path(), ExistingRun::Keep, &[]).is_ok());
        let removed = RunFolder::open(folder.path(), ExistingRun::Overwrite, &[]).unwrap().removed().to_vec();
        assert_eq!(removed, ["logs/rank-0.log"]);
    }

    #[test]
    fn symlinked_folders_are_kept_and_cleaned_behind() {
        let folder = with_a_run();
        let elsewhere = tempfile::tempdir().unwrap();
        for name in ["latest", "notes.txt"] {
            fs::write(elsewhere.path().join(name), "x").unwrap();
        }
        fs::remove_dir_all(folder.path().join("checkpoints")).unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), folder.path().join("checkpoints")).unwrap();
        let run = RunFolder::open(folder.path(), ExistingRun::Overwrite, &[]).unwrap();
        assert_eq!(run.kept(), ["checkpoints/notes.txt"]);
        assert!(!elsewhere.path().join("latest").exists() && elsewhere.path().join("notes.txt").exists());
        assert_eq!(fs::read_link(run.checkpoints()).unwrap(), elsewhere.path());
    }

    #[test]
    fn a_file_and_a_locked_folder_give_different_errors() {
        let folder = tempfile::tempdir().unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = RunFolder::open(file.path(), ExistingRun::Refuse, &[]).unwrap_err();
        assert!(matches!(error, RunFolderError::NotAFolder { .. }), "{error}");
        let _held = RunFolder::open(folder.path(), ExistingRun::Refuse, &[]).unwrap();
        let error = RunFolder::open(folder.path(), ExistingRun::Overwrite, &[]).unwrap_err();
        assert!(matches!(error, RunFolderError::Lock(LockError::Held { .. })), "{error}");
    }
}
