//! Runs the real binary.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// The result of running the binary.
pub(crate) struct Ended {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs `zeroth` in a folder, without colours and with a clean environment.
pub(crate) fn zeroth_in(folder: &Path, arguments: &[&str]) -> Ended {
    let output: Output = Command::new(env!("CARGO_BIN_EXE_zeroth"))
        .args(arguments)
        .current_dir(folder)
        .env("NO_COLOR", "1")
        .env("ZEROTH_CACHE", cache())
        .env_remove("HF_HOME")
        .output()
        .expect("the binary was built for this test");
    Ended {
        code: output.status.code().expect("it ended by itself"),
        stdout: String::from_utf8(output.stdout).expect("it prints UTF-8"),
        stderr: String::from_utf8(output.stderr).expect("it prints UTF-8"),
    }
}

/// Runs `zeroth` at the root of the repository.
pub(crate) fn zeroth(arguments: &[&str]) -> Ended {
    zeroth_in(&root(), arguments)
}

/// Runs `zeroth … --format json` and parses the JSON object on stdout.
pub(crate) fn zeroth_json(arguments: &[&str]) -> (i32, Value) {
    let ended = zeroth(&[arguments, &["--format", "json"]].concat());
    let value = serde_json::from_str(&ended.stdout)
        .unwrap_or_else(|error| panic!("{error}\n{}\n{}", ended.stdout, ended.stderr));
    (ended.code, value)
}

/// The token cache of the tests.
pub(crate) fn cache() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache")
}

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The folder of a model whose config.json is among zeroth-model's tests.
pub(crate) fn model(name: &str) -> String {
    format!("crates/zeroth-model/tests/configs/{name}")
}

impl Ended {
    /// No user mistake panics or prints a backtrace.
    pub(crate) fn is_orderly(&self) -> bool {
        !self.stderr.contains("panicked") && !self.stderr.contains("RUST_BACKTRACE")
    }
}
