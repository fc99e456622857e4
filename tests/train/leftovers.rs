//! Unfinished files of killed processes: the next run removes them and nothing else.

use std::fs;
use std::path::Path;
use std::process::{Child, Command};

use zeroth::base::ProcessOwner;

use super::train;

/// Creates the unfinished files of a killed process.
fn leave(run: &Path, process: &ProcessOwner) -> Vec<String> {
    let folders = [
        format!("checkpoints/.step-9.unfinished-{process}"),
        format!("checkpoints/.step-8.removed-{process}"),
        format!("checkpoints/.step-1.replaced-{process}"),
    ];
    for folder in &folders {
        fs::create_dir(run.join(folder)).unwrap();
        fs::write(run.join(folder).join("rank-00000-of-00001.safetensors"), "x").unwrap();
    }
    let files = [
        ".config.json",
        ".origin.json",
        ".plan.json",
        ".loss.svg",
        ".metrics.jsonl",
        "model/.config.json",
        "model/.tokenizer.json",
        "model/.model.safetensors",
        "model/.model-00001-of-00002.safetensors",
        "model/.model.safetensors.index.json",
        "checkpoints/.latest",
    ]
    .map(|name| format!("{name}.unfinished-{process}"));
    for file in &files {
        fs::write(run.join(file), "x").unwrap();
    }
    folders.into_iter().chain(files).collect()
}

/// A live process, killed on drop.
struct Alive(Child);

impl Drop for Alive {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An exited process.
fn gone() -> ProcessOwner {
    let alive = Alive(Command::new("sleep").arg("600").spawn().unwrap());
    ProcessOwner::of(alive.0.id()).unwrap()
}

#[test]
fn stale_files_of_dead_processes_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let goes_on = |steps: &str| {
        train("qwen3-tied", &run, &["--save-steps", "1", "--resume", "auto", "--max-steps", steps])
            .assert_done();
    };
    goes_on("1");
    let alive = Alive(Command::new("sleep").arg("600").spawn().unwrap());
    let file = format!(".config.json.unfinished-{}", ProcessOwner::of(alive.0.id()).unwrap());
    let others = [
        file.as_str(),
        "model/.notes.md.unfinished-4194304",
        "model/.config.json.unfinished-mine",
        ".notes.unfinished-4194304",
        "checkpoints/.step-x.unfinished-4194304-1",
        // Of a process of another host, whose id is of none here, and of an earlier version.
        "checkpoints/.latest.unfinished-00000001-00000002-4194304-1",
        "model/.config.json.unfinished-00000001-00000002-4194304-1",
        "checkpoints/.latest.unfinished-4194304",
    ];
    for name in others {
        fs::write(run.join(name), "mine").unwrap();
    }
    // Once while resuming, once when already complete.
    for (steps, what) in [("2", "resuming from"), ("2", "complete")] {
        let left = leave(&run, &gone());
        goes_on(steps);
        for name in left {
            assert!(fs::symlink_metadata(run.join(&name)).is_err(), "{what}: {name} is still there");
        }
        for name in others {
            assert_eq!(fs::read_to_string(run.join(name)).unwrap(), "mine", "{what}: {name}");
        }
        assert!(run.join("checkpoints/step-1").is_dir() && run.join("checkpoints/step-2").is_dir());
    }
}

#[test]
fn a_checkpoint_moved_aside_is_restored() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let flags = ["--save-steps", "1", "--resume", "auto", "--max-steps", "2"];
    train("qwen3-tied", &run, &flags).assert_done();
    let checkpoints = run.join("checkpoints");
    let aside = checkpoints.join(format!(".step-2.replaced-{}", gone()));
    fs::rename(checkpoints.join("step-2"), &aside).unwrap();
    let ended = train("qwen3-tied", &run, &flags);
    ended.assert_done();
    assert!(checkpoints.join("step-2").is_dir() && !aside.exists(), "{}", ended.stderr);
}
