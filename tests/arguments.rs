//! Arguments that are not UTF-8, and results that cannot be written.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{cache, root};

fn command(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_zeroth"));
    command.current_dir(folder).env("NO_COLOR", "1").env("ZEROTH_CACHE", cache()).env_remove("HF_HOME");
    command
}

#[test]
fn non_utf8_paths_are_refused() {
    let golden = root().join("tests/golden/qwen3-tied").canonicalize().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let odd = |prefix: &[u8]| OsString::from(OsStr::from_bytes(&[prefix, b"run-\xff"].concat()));
    for flag in ["--output", "--data", "--model", "--deepspeed", "--resume"] {
        for joined in [false, true] {
            let mut tried = command(folder.path());
            tried.args(["train", "--device", "cpu", "--max-steps", "1"]);
            for (name, path) in [
                ("--output", "out".into()),
                ("--data", golden.join("data.jsonl")),
                ("--model", golden.clone()),
            ] {
                if name != flag {
                    tried.arg(name).arg(path);
                }
            }
            if joined {
                tried.arg(odd(format!("{flag}=").as_bytes()));
            } else {
                tried.arg(flag).arg(odd(b""));
            }
            let ended = tried.output().unwrap();
            let said = String::from_utf8(ended.stderr).unwrap();
            assert_eq!(ended.status.code(), Some(2), "{flag}: {said}");
            for words in [flag, "UTF-8", "run-\u{fffd}"] {
                assert!(said.contains(words), "{flag}: {words}: {said}");
            }
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "{flag}: {said}");
        }
    }
}

#[test]
fn an_unwritable_result_is_an_error() {
    let model = root().join("tests/golden/qwen3-tied").canonicalize().unwrap();
    for arguments in [
        vec!["config", "schema"],
        vec!["config", "presets", "--format", "json"],
        vec!["config", "explain", "zero_optimization.stage"],
        vec!["config", "check", "zero2"],
        vec!["completions", "bash"],
        vec!["--help"],
        vec!["--version"],
    ] {
        let ended = command(&model)
            .args(&arguments)
            .stdout(File::options().write(true).open("/dev/full").unwrap())
            .output()
            .unwrap();
        let said = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(1), "{arguments:?}: {said}");
        assert!(said.contains("standard output") && said.contains("No space left"), "{arguments:?}: {said}");
    }
    let folder = tempfile::tempdir().unwrap();
    let ended = command(&model)
        .args(["train", "--device", "cpu", "--max-steps", "1", "--format", "json", "--model", "."])
        .args(["--data", "data.jsonl", "--output"])
        .arg(folder.path().join("run"))
        .stdout(File::options().write(true).open("/dev/full").unwrap())
        .output()
        .unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("standard output") && folder.path().join("run/model").is_dir(), "{said}");
}

#[test]
fn a_closed_reader_is_not_an_error() {
    for arguments in [vec!["config", "schema"], vec!["--help"]] {
        let mut child =
            command(&root()).args(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let ended = child.wait_with_output().unwrap();
        assert_eq!(ended.status.code(), Some(0), "{arguments:?}");
        assert_eq!(String::from_utf8(ended.stderr).unwrap(), "", "{arguments:?}");
    }
}

/// Exit code and stderr of a command line that is killed, and fails the test, if it does not end.
fn ended(arguments: &[&str]) -> (Option<i32>, String) {
    let mut child = command(&root())
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let begin = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begin.elapsed() > Duration::from_mins(1) {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{arguments:?} did not end");
        }
        thread::sleep(Duration::from_millis(10));
    }
    let ended = child.wait_with_output().unwrap();
    (ended.status.code(), String::from_utf8(ended.stderr).unwrap())
}

#[test]
fn a_wrong_format_in_front_of_a_command_is_one_error() {
    for rest in [
        &["plan", "--params", "8B"][..],
        &["generate", "--model", "x", "--prompt", "y"],
        &["init", "--family", "llama", "--hidden", "8", "--layers", "1", "--heads", "1", "--output", "z"],
        &["config", "new", "--micro-batch-size", "1"],
        &["config", "check", "ds.json"],
        &["train", "--model", "x", "--data", "y", "--output", "z"],
        &["doctor"],
    ] {
        let joined = ended(&[&["--format=xml"], rest].concat());
        let apart = ended(&[&["--format", "xml"], rest].concat());
        assert_eq!((joined.0, apart.0), (Some(2), Some(2)), "{rest:?}: {}", apart.1);
        assert_eq!(joined.1, apart.1, "{rest:?}");
        let first = apart.1.lines().next().unwrap();
        assert!(first.starts_with("error: invalid value 'xml' for '--format <FORM>'"), "{}", apart.1);
    }
    // The command is taken for the value.
    let (code, said) = ended(&["--format", "plan", "--params", "8B"]);
    assert_eq!(code, Some(2));
    assert_eq!(said.matches("error: ").count(), 1, "{said}");
    assert!(said.contains("invalid value 'plan' for '--format <FORM>'"), "{said}");
}

#[test]
fn flags_in_front_of_their_command_are_pointed_behind_it() {
    for typed in [&["--params", "8B", "plan"][..], &["--bf16", "plan", "--params", "8B"], &["--bf61", "plan"]]
    {
        let (code, said) = ended(typed);
        assert_eq!(code, Some(2), "{typed:?}: {said}");
        assert!(said.contains("zeroth plan"), "{typed:?}: {said}");
    }
    let (_, said) = ended(&["--model", "x", "train", "--data", "y", "--output", "z"]);
    assert!(said.contains("--model stands in front of the command: write it after `zeroth train`"), "{said}");
}
