//! The token cache: private to the user or temporary, with a clear error if truncated.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use super::running::Running;
use super::{new_data, new_model, text};

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// A command that trains a small model for some steps, without a configured cache.
fn command(folder: &Path, steps: &str, more: &[&str]) -> Command {
    let model = new_model(folder, 64, 2, 128, 256);
    let data = new_data(folder, 50, 24, 256);
    let output = folder.join("run");
    let mut command = Command::new(env!("CARGO_BIN_EXE_zeroth"));
    command
        .args(["train", "--device", "cpu", "--threads-per-rank", "1", "--max-steps", steps])
        .args(["--model", text(&model), "--data", text(&data), "--output", text(&output)])
        .args(more)
        .env("NO_COLOR", "1")
        .env("TMPDIR", temporary(folder))
        .env_remove("ZEROTH_CACHE")
        .env_remove("XDG_CACHE_HOME")
        .env_remove("HOME");
    command
}

/// The temporary folder of a test's commands.
fn temporary(folder: &Path) -> PathBuf {
    let temporary = folder.join("temporary");
    fs::create_dir_all(&temporary).unwrap();
    temporary
}

fn assert_done(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    said
}

#[test]
fn without_a_home_the_token_cache_is_temporary() {
    for ranks in ["1", "2"] {
        let folder = tempfile::tempdir().unwrap();
        assert_done(&command(folder.path(), "3", &["--ranks", ranks]).output().unwrap());
        assert_eq!(names(&temporary(folder.path())), [""; 0], "nobody else can find or leave tokens there");
        let left = [names(folder.path()), names(&folder.path().join("run"))].concat();
        assert!(!left.iter().any(|name| name.contains("tokens")), "{left:?}");
    }
}

#[test]
fn temporary_folders_are_not_trusted_as_cache() {
    let folder = tempfile::tempdir().unwrap();
    let home = |name: &str| {
        let home = folder.path().join(name);
        fs::create_dir_all(&home).unwrap();
        home
    };
    let dry_run = |name: &str| {
        assert_done(&command(folder.path(), "1", &["--dry-run"]).env("HOME", home(name)).output().unwrap())
    };
    assert!(dry_run("first").contains("rows read and tokenised"));
    assert!(!dry_run("first").contains("rows read and tokenised"), "its own cache is found");
    // Whoever made it, it is complete and correctly named.
    let shared = temporary(folder.path()).join("zeroth-cache/tokens");
    fs::create_dir_all(&shared).unwrap();
    let tokens = home("first").join(".cache/zeroth/tokens");
    for name in names(&tokens) {
        fs::copy(tokens.join(&name), shared.join(&name)).unwrap();
    }
    assert!(dry_run("second").contains("rows read and tokenised"));
}

#[test]
fn a_truncated_cache_ends_the_run_with_an_error() {
    for ranks in ["1", "2"] {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("cache");
        let mut command = command(folder.path(), "1000000", &["--ranks", ranks, "--save-steps", "0"]);
        command.env("ZEROTH_CACHE", &cache);
        let mut running = Running::spawn(folder.path(), command);
        running.wait_for_steps(&folder.path().join("run"), 3);
        let tokens = cache.join("tokens");
        let file = tokens.join(&names(&tokens)[0]);
        fs::File::options().write(true).open(&file).unwrap().set_len(256).unwrap();
        let (ended, _) = running.end(Duration::from_mins(1));
        let said = running.said();
        assert_eq!(ended.and_then(|status| status.code()), Some(1), "{said}");
        assert!(
            said.contains(&format!("from the token cache {}: the file was truncated", file.display())),
            "{said}"
        );
    }
}
