//! Commands that write a model folder and are stopped, killed, or started twice: nothing unfinished stays, and the same command
//! works again.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::running::{Running, signal};
use super::{new_data, text, train_on};
use crate::common::{Ended, zeroth};

/// A model that takes a while to write: 34 million parameters.
const LARGE: [&str; 12] = [
    "--family",
    "llama",
    "--hidden",
    "512",
    "--layers",
    "6",
    "--heads",
    "8",
    "--intermediate-size",
    "1024",
    "--vocab-size",
    "20000",
];

fn init<'a>(to: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    [&["init"], &LARGE[..], &["--output", text(to)], more].concat()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

fn is_unfinished(name: &str) -> bool {
    name.contains("safetensors.unfinished-")
}

/// Starts a command, and waits until it writes weights to a folder.
fn start(folder: &Path, to: &Path, arguments: &[&str]) -> Running {
    let mut running = Running::start(folder, arguments);
    running.wait_until(Duration::from_secs(30), "it writes weights", || {
        names(to).iter().any(|name| is_unfinished(name))
    });
    running
}

/// Stops a command in every way, and runs it again.
fn stop_and_repeat(folder: &Path, to: &Path, arguments: &[&str], whole: &[&str]) {
    for (name, code) in [("INT", Some(130)), ("TERM", Some(143)), ("KILL", None)] {
        let mut running = start(folder, to, arguments);
        signal(running.launcher.id(), name);
        assert_eq!(running.code(), code, "{}", running.said());
        if code.is_some() {
            assert!(running.said().contains("; no unfinished files are left"), "{}", running.said());
            assert!(!to.exists(), "{name}: {:?}", names(to));
        } else {
            assert!(names(to).iter().any(|name| is_unfinished(name)), "{:?}", names(to));
        }
    }
    let ended = zeroth(arguments);
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert_eq!(names(to), whole);
}

/// A large base, and an adapter over it.
fn base_and_adapter(folder: &Path) -> (PathBuf, PathBuf) {
    let base = folder.join("base");
    let ended = zeroth(&init(&base, &[]));
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let data = new_data(folder, 2, 4, 300);
    let run = folder.join("run");
    let flags = ["--train-type", "lora", "--lora-rank", "2", "--max-steps", "1", "--save-steps", "0"];
    train_on(&base, &data, &run, &flags).assert_done();
    (base, run.join("model"))
}

#[test]
fn a_stopped_init_leaves_nothing_and_works_again() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("new");
    stop_and_repeat(folder.path(), &to, &init(&to, &[]), &["config.json", "model.safetensors"]);
}

#[test]
fn a_stopped_export_leaves_nothing_and_works_again() {
    let folder = tempfile::tempdir().unwrap();
    let (_, adapter) = base_and_adapter(folder.path());
    let to = folder.path().join("merged");
    let merge = ["checkpoint", "export", text(&adapter), "--merge", "--output", text(&to)];
    stop_and_repeat(folder.path(), &to, &merge, &["config.json", "export.json", "model.safetensors"]);
}

#[test]
fn a_folder_is_written_by_one_command_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("new");
    let first = init(&to, &["--max-shard-size", "10MB"]);
    let mut running = start(folder.path(), &to, &first);
    // Stopped, it holds the folder for as long as the test needs.
    signal(running.launcher.id(), "STOP");
    let pid = running.launcher.id();
    let refused = |ended: &Ended| {
        let words = format!("{} is in use by another command (process {pid}): ", to.display());
        assert!(ended.code == 2 && ended.stderr.contains(&words), "{}", ended.stderr);
    };
    refused(&zeroth(&init(&to, &["--seed", "1"])));
    refused(&zeroth(&init(&to, &["--seed", "1", "--overwrite-output-dir"])));
    signal(pid, "CONT");
    assert_eq!(running.code(), Some(0), "{}", running.said());
    assert!(names(&to).iter().all(|name| !name.starts_with('.')), "{:?}", names(&to));
    let other = folder.path().join("other");
    assert_eq!(zeroth(&init(&other, &["--max-shard-size", "10MB"])).code, 0);
    assert_eq!(names(&other), names(&to));
    for name in names(&to) {
        assert!(fs::read(to.join(&name)).unwrap() == fs::read(other.join(&name)).unwrap(), "{name}");
    }
}
