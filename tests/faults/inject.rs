//! Runs the real binary, optionally under `inject.c`, which fails a system call or kills a process at it.

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// No command here takes more than a few seconds on an idle machine.
pub(crate) const LIMIT: Duration = Duration::from_mins(2);

/// The result of a command.
pub(crate) struct Ended {
    /// The exit code, or 128 plus the signal number.
    pub(crate) code: i32,
    /// Standard error.
    pub(crate) said: String,
    /// Whether it was killed after [`LIMIT`].
    pub(crate) hung: bool,
}

/// What happens at which system call.
pub(crate) struct Injection<'a> {
    /// Classes of calls, as `inject.c` names them.
    pub(crate) calls: &'a str,
    /// The n-th of them, from 1.
    pub(crate) at: u64,
    /// An errno, `kill-…` or `count`.
    pub(crate) action: &'a str,
    /// Paths below which calls count.
    pub(crate) below: &'a [&'a Path],
}

/// The result of an injection.
pub(crate) struct Injected {
    pub(crate) ended: Ended,
    /// Number of matching calls.
    pub(crate) calls: u64,
    /// The affected call; `None` if there were fewer.
    pub(crate) hit: Option<String>,
}

/// Whether a process of the command was left behind.
pub(crate) const LEFT_BEHIND: i32 = 97;
const NO_FILTER: i32 = 98;

/// Runs `zeroth` with its token cache in `cache`.
pub(crate) fn zeroth(arguments: &[String], cache: &Path) -> Ended {
    let mut command = Command::new(env!("CARGO_BIN_EXE_zeroth"));
    command.args(arguments);
    ended(&mut command, cache)
}

/// Runs `zeroth` with an injection.
pub(crate) fn zeroth_with(
    tool: &Path,
    injection: &Injection<'_>,
    arguments: &[String],
    cache: &Path,
) -> Injected {
    let report = scratch("report");
    let mut command = Command::new(tool);
    command.arg(injection.calls).arg(injection.at.to_string()).arg(injection.action).arg(&report);
    command.args(injection.below).arg("--").arg(env!("CARGO_BIN_EXE_zeroth")).args(arguments);
    let ended = ended(&mut command, cache);
    let told = fs::read_to_string(&report).unwrap_or_default();
    // If nothing was written, the tool itself was killed.
    let _ = fs::remove_file(report);
    let (calls, hit) = told.trim_end().split_once(' ').unwrap_or(("0", "nothing"));
    let hit = (hit != "nothing").then(|| hit.to_owned());
    Injected { ended, calls: calls.parse().unwrap(), hit }
}

fn scratch(name: &str) -> PathBuf {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}-{number}", std::process::id()))
}

/// Runs a command with a time limit.
pub(crate) fn ended(command: &mut Command, cache: &Path) -> Ended {
    watched(command, cache, |_| true)
}

/// Runs a command with a time limit, and kills it once `goes_on` says no about its process.
pub(crate) fn watched(command: &mut Command, cache: &Path, mut goes_on: impl FnMut(u32) -> bool) -> Ended {
    let said = scratch("said");
    fs::create_dir_all(cache).unwrap();
    let mut child = command
        .env("NO_COLOR", "1")
        .env("ZEROTH_CACHE", cache)
        // The fallback location of the token cache, private to the test.
        .env("TMPDIR", cache)
        .env_remove("HF_HOME")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(&said).unwrap())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    let (status, hung) = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break (status, false);
        }
        let is_late = begun.elapsed() > LIMIT;
        if is_late || !goes_on(child.id()) {
            child.kill().unwrap();
            break (child.wait().unwrap(), is_late);
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let code = status.code().or(status.signal().map(|signal| 128 + signal)).expect("it has ended");
    let text = String::from_utf8_lossy(&fs::read(&said).unwrap()).into_owned();
    fs::remove_file(said).unwrap();
    Ended { code, said: text, hung }
}

impl Ended {
    /// Whether a process panicked or crashed.
    pub(crate) fn crashed(&self) -> bool {
        const ABORT: i32 = 128 + 6;
        const SEGMENTATION: i32 = 128 + 11;
        const BUS: i32 = 128 + 7;
        // The launcher reports ranks killed by a signal.
        let words = [
            "panicked",
            "RUST_BACKTRACE",
            "SIGABRT",
            "SIGSEGV",
            "SIGBUS",
            "memory allocation of",
            "overflowed its stack",
        ];
        [ABORT, SEGMENTATION, BUS].contains(&self.code) || words.iter().any(|word| self.said.contains(word))
    }
}

/// The tool, compiled once; `None` with a message if that fails.
pub(crate) fn tool() -> Option<&'static Path> {
    static TOOL: OnceLock<Option<PathBuf>> = OnceLock::new();
    TOOL.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/faults/inject.c");
        let tool = scratch("inject");
        let compiled = Command::new("cc").args(["-O1", "-o"]).arg(&tool).arg(source).output();
        match compiled {
            Ok(output) if output.status.success() => {}
            Ok(output) => {
                println!("skipped: inject.c does not compile here: {}", String::from_utf8_lossy(&output.stderr));
                return None;
            }
            Err(error) => {
                println!("skipped: failing system calls need a C compiler, and cc cannot be run: {error}");
                return None;
            }
        }
        let tried = Command::new(&tool).args(["open", "1", "count", "/dev/null", "/", "--", "/bin/true"]).output().unwrap();
        if tried.status.code() == Some(NO_FILTER) {
            println!("skipped: failing system calls need seccomp listeners (Linux 5.5), which this system or container refuses");
            return None;
        }
        Some(tool)
    })
    .as_deref()
}
