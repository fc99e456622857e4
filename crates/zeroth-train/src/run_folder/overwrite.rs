//! `--overwrite-output-dir`: removes a run's files, recognised by name, and keeps everything else.

use std::fs::{self, DirEntry};
use std::io;
use std::path::{Path, PathBuf};

use super::error::{RunFolderError, failed};
use super::files::{FILES, MARKERS, is_event_file_name, is_log_name};
use super::input::{InputTree, RunInput};
use super::stale_files::is_of_an_export;
use crate::checkpoint::{StaleName, foreign_files, parse_step_folder};
use crate::export::is_exported;

/// The plan of overwriting a run folder.
#[derive(Debug, Default)]
pub(crate) struct OverwritePlan {
    root: PathBuf,
    /// Files and folders of the run, relative to the root, in removal order.
    pub(crate) removed: Vec<String>,
    /// Foreign files among them.
    pub(crate) kept: Vec<String>,
}

impl OverwritePlan {
    /// Plans the removal without changing anything.
    pub(crate) fn plan(root: &Path) -> Result<Self, RunFolderError> {
        let mut plan = Self { root: root.to_owned(), ..Self::default() };
        plan.inside("checkpoints", of_checkpoints)?;
        plan.inside("model", of_a_model)?;
        plan.inside("logs", of_logs)?;
        plan.inside("tensorboard", of_tensorboard)?;
        // Marker files last, so that an interrupted removal still leaves a recognisable run folder.
        let (marks, others): (Vec<&str>, Vec<&str>) =
            FILES.iter().copied().partition(|name| MARKERS.contains(name));
        for name in others.into_iter().chain(marks) {
            match fs::symlink_metadata(root.join(name)) {
                Ok(found) if found.is_dir() => {
                    let path = root.join(name);
                    return Err(RunFolderError::InTheWay { path, found: "a folder", made: "a file" });
                }
                Ok(_) => plan.removed.push(name.to_owned()),
                Err(_) => {}
            }
        }
        Ok(plan)
    }

    fn inside(
        &mut self,
        name: &str,
        is_ours: fn(&str, &DirEntry) -> io::Result<bool>,
    ) -> Result<(), RunFolderError> {
        let path = self.root.join(name);
        match fs::symlink_metadata(&path) {
            Err(_) => return Ok(()),
            Ok(found) if found.is_symlink() && !path.exists() => {
                let found = "a dangling symlink";
                return Err(RunFolderError::InTheWay { path, found, made: "a folder" });
            }
            // A symlink to a folder, usually on another disk, is kept; the run's files behind it are removed.
            Ok(_) if path.is_dir() => {}
            Ok(_) => return Err(RunFolderError::InTheWay { path, found: "a file", made: "a folder" }),
        }
        // Any model folder has files of these names: behind a symlink, only an export may be removed.
        let is_known = name != "model" || !path.is_symlink() || is_exported(&path);
        let (mut ours, mut others) = (Vec::new(), Vec::new());
        for entry in fs::read_dir(&path).map_err(failed("read", &path))? {
            let entry = entry.map_err(failed("read", &path))?;
            let entry_name = entry.file_name();
            // Names that are not UTF-8 and entries that cannot be inspected are treated as foreign.
            let is_ours =
                is_known && entry_name.to_str().is_some_and(|name| is_ours(name, &entry).unwrap_or(false));
            let list = if is_ours { &mut ours } else { &mut others };
            list.push(format!("{name}/{}", entry_name.to_string_lossy()));
        }
        ours.sort_unstable();
        others.sort_unstable();
        self.removed.append(&mut ours);
        self.kept.append(&mut others);
        Ok(())
    }

    /// Fails if an input of the run would be removed.
    pub(crate) fn refuse_inputs(&self, inputs: &[RunInput]) -> Result<(), RunFolderError> {
        let root = self.root.canonicalize().map_err(failed("read", &self.root))?;
        let real = |name: &String| {
            let path = root.join(name);
            let folder = path.parent().and_then(|folder| folder.canonicalize().ok());
            folder.zip(path.file_name()).map_or_else(|| path.clone(), |(folder, name)| folder.join(name))
        };
        let removed: Vec<InputTree> = self.removed.iter().map(|name| InputTree::at(&real(name))).collect();
        for input in inputs {
            if let Some(tree) = removed.iter().find(|tree| tree.holds(input)) {
                return Err(RunFolderError::HoldsInput {
                    flag: input.flag,
                    input: input.path.clone(),
                    removed: tree.path.clone(),
                    folder: self.root.clone(),
                });
            }
        }
        Ok(())
    }

    /// Removes the planned files, then folders left empty.
    pub(crate) fn carry_out(&self) -> Result<(), RunFolderError> {
        for name in &self.removed {
            let path = self.root.join(name);
            let is_folder = fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir());
            let removed = if is_folder { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            removed.map_err(failed("remove", &path))?;
        }
        for name in ["checkpoints", "model", "logs", "tensorboard"] {
            // Fails for non-empty folders and symlinks, which should stay.
            let _ = fs::remove_dir(self.root.join(name));
        }
        Ok(())
    }
}

/// `latest`, and `step-12` or an unfinished save, unless they contain foreign files.
fn of_checkpoints(name: &str, entry: &DirEntry) -> io::Result<bool> {
    let kind = entry.file_type()?;
    let leftover = StaleName::parse(name);
    if name == "latest" || leftover.as_ref().is_some_and(|leftover| leftover.step.is_none()) {
        return Ok(!kind.is_dir());
    }
    if leftover.is_none() && parse_step_folder(name).is_none() {
        return Ok(false);
    }
    Ok(kind.is_symlink() || (kind.is_dir() && foreign_files(&entry.path())?.is_empty()))
}

fn of_logs(name: &str, entry: &DirEntry) -> io::Result<bool> {
    Ok(is_log_name(name) && !entry.file_type()?.is_dir())
}

/// Event files, and folders of them, which `--run-name` names.
fn of_tensorboard(name: &str, entry: &DirEntry) -> io::Result<bool> {
    if !entry.file_type()?.is_dir() {
        return Ok(is_event_file_name(name));
    }
    let mut files = fs::read_dir(entry.path())?.collect::<io::Result<Vec<_>>>()?.into_iter().peekable();
    let is_named = files.peek().is_some();
    Ok(is_named
        && files.all(|file| {
            let is_file = file.file_type().is_ok_and(|kind| !kind.is_dir());
            is_file && file.file_name().to_str().is_some_and(is_event_file_name)
        }))
}

/// Weights, adapters, config and tokenizer files, and unfinished ones of an export.
fn of_a_model(name: &str, entry: &DirEntry) -> io::Result<bool> {
    Ok(is_of_an_export(name) && !entry.file_type()?.is_dir())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes files, creating their folders.
    fn write(root: &Path, names: &[&str]) {
        for name in names {
            fs::create_dir_all(root.join(name).parent().unwrap()).unwrap();
            fs::write(root.join(name), "x").unwrap();
        }
    }

    #[test]
    fn only_files_of_a_run_are_removed_and_foreign_ones_listed() {
        let folder = tempfile::tempdir().unwrap();
        let ours = [
            "checkpoints/.step-3.unfinished-12-34/rank-00000-of-00002.safetensors",
            "checkpoints/latest",
            "checkpoints/step-5/manifest.json",
            "checkpoints/step-5/SHA256SUMS",
            "checkpoints/step-5/rank-00000-of-00001.safetensors",
            "checkpoints/step-5/model/config.json",
            "checkpoints/step-5/model/tokenizer.json",
            // Damaged: everything but its weights is missing.
            "checkpoints/step-6/rank-00000-of-00001.safetensors",
            "model/.lock",
            "model/.model.safetensors.unfinished-77",
            "model/.published.unfinished-77",
            "model/model-00001-of-00002.safetensors",
            "model/tokenizer.json",
            "model/adapter_config.json",
            "model/adapter_model.safetensors",
            "logs/rank-0.log",
            "logs/trace-0.part",
            "tensorboard/events.out.tfevents.1700000000.host.7.0",
            "tensorboard/first try/events.out.tfevents.1700000000.host.7.0",
            "metrics.jsonl",
        ];
        let others = [
            "checkpoints/notes.txt",
            "checkpoints/step-7-good/manifest.json",
            "checkpoints/step-007/manifest.json",
            "checkpoints/step-8/manifest.json",
            "checkpoints/step-8/notes.txt",
            "checkpoints/step-9/model/notes.txt",
            "checkpoints/step-10/rank-best.safetensors",
            "checkpoints/.step-11.unfinished-1-2/notes.txt",
            "model/model-best.safetensors",
            "model/.model.safetensors.unfinished-mine",
            "logs/rank-0.log.old",
            "logs/rank-x.log",
            "logs/rank-1.log/mine",
            "tensorboard/events.out.tfevents.notes",
            "tensorboard/second/events.out.tfevents.1700000000.host.7.0",
            "tensorboard/second/notes.txt",
            "notes.txt",
        ];
        write(folder.path(), &[&ours[..], &others[..]].concat());
        let overwritten = OverwritePlan::plan(folder.path()).unwrap();
        overwritten.carry_out().unwrap();
        for name in ours {
            assert!(!folder.path().join(name).exists(), "{name}");
        }
        for name in others {
            assert!(folder.path().join(name).exists(), "{name}");
        }
        assert_eq!(
            overwritten.kept,
            [
                "checkpoints/.step-11.unfinished-1-2",
                "checkpoints/notes.txt",
                "checkpoints/step-007",
                "checkpoints/step-10",
                "checkpoints/step-7-good",
                "checkpoints/step-8",
                "checkpoints/step-9",
                "model/.model.safetensors.unfinished-mine",
                "model/model-best.safetensors",
                "logs/rank-0.log.old",
                "logs/rank-1.log",
                "logs/rank-x.log",
                "tensorboard/events.out.tfevents.notes",
                "tensorboard/second",
            ]
        );
        assert!(overwritten.removed.contains(&"checkpoints/step-6".to_owned()), "{:?}", overwritten.removed);
    }

    #[test]
    fn name_conflicts_are_reported_before_anything_is_removed() {
        for (name, words) in [
            ("loss.svg/mine", "loss.svg is a folder, but a run creates a file of that name"),
            ("checkpoints", "checkpoints is a file, but a run creates a folder of that name"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            write(folder.path(), &["metrics.jsonl", name, "logs/rank-0.log"]);
            let message = OverwritePlan::plan(folder.path()).unwrap_err().to_string();
            assert!(message.contains(words), "{message}");
        }
    }

    #[test]
    fn inputs_inside_removed_paths_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &["metrics.jsonl", "model/config.json", "notes/data.jsonl", "logs/rank-0.log"]);
        let overwritten = OverwritePlan::plan(folder.path()).unwrap();
        let check =
            |flag, name: &str| overwritten.refuse_inputs(&[RunInput::new(flag, folder.path().join(name))]);
        check("--data", "notes/data.jsonl").unwrap();
        check("--data", "absent").unwrap();
        for (flag, name) in [("--model", "model"), ("--data", "logs/rank-0.log"), ("--data", "metrics.jsonl")]
        {
            let message = check(flag, name).unwrap_err().to_string();
            let needs = format!("{flag} {} depends on it", folder.path().join(name).display());
            assert!(
                message.starts_with("--overwrite-output-dir would remove ") && message.contains(&needs),
                "{message}"
            );
        }
    }
}
