//! A command running in the background: its ranks, output, signals and exit.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use super::text;

/// A run in the background. Killed on drop with its ranks.
pub(super) struct Running {
    pub(super) launcher: Child,
    said: PathBuf,
}

impl Running {
    /// Starts `zeroth`; its stderr goes to a file in `folder`.
    pub(super) fn start(folder: &Path, arguments: &[&str]) -> Self {
        Self::start_with(folder, arguments, &[])
    }

    /// The same with additional environment variables.
    pub(super) fn start_with(folder: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_zeroth"));
        command.args(arguments).env("ZEROTH_CACHE", super::cache()).envs(variables.iter().copied());
        Self::spawn(folder, command)
    }

    /// Starts a command; its stderr goes to a file in `folder`.
    pub(super) fn spawn(folder: &Path, mut command: Command) -> Self {
        let said = folder.join("said");
        let launcher = command
            .env("NO_COLOR", "1")
            .stdout(File::create(folder.join("stdout")).unwrap())
            .stderr(File::create(&said).unwrap())
            .spawn()
            .unwrap();
        Self { launcher, said }
    }

    /// Its stderr so far.
    pub(super) fn said(&self) -> String {
        fs::read_to_string(&self.said).unwrap()
    }

    pub(super) fn wait_until(&mut self, limit: Duration, what: &str, mut is_so: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !is_so() {
            let ended = self.launcher.try_wait().unwrap();
            assert!(ended.is_none(), "ended before {what}: {}", self.said());
            assert!(begun.elapsed() < limit, "not so after {limit:?}: {what}: {}", self.said());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the run's metrics have `steps` steps.
    pub(super) fn wait_for_steps(&mut self, run: &Path, steps: usize) {
        let metrics = run.join("metrics.jsonl");
        self.wait_until(Duration::from_mins(1), "it has done some steps", || {
            fs::read_to_string(&metrics).is_ok_and(|text| text.lines().count() >= steps)
        });
    }

    /// Process ids of the ranks, in rank order.
    pub(super) fn ranks(&self) -> Vec<u32> {
        ranks_of(self.launcher.id())
    }

    /// Waits for the launcher; returns its status and the time waited.
    pub(super) fn end(&mut self, limit: Duration) -> (Option<ExitStatus>, Duration) {
        let begun = Instant::now();
        while begun.elapsed() < limit {
            if let Some(status) = self.launcher.try_wait().unwrap() {
                return (Some(status), begun.elapsed());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        (None, begun.elapsed())
    }

    /// Its exit code, which must come within a minute.
    pub(super) fn code(&mut self) -> Option<i32> {
        self.end(Duration::from_mins(1)).0.and_then(|status| status.code())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

/// A run that would take minutes.
pub(super) struct Long {
    pub(super) running: Running,
    pub(super) output: PathBuf,
    _folder: tempfile::TempDir,
}

impl Long {
    /// Starts it and waits for some steps.
    pub(super) fn start(ranks: u32, more: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let model = super::new_model(folder.path(), 256, 4, 512, 512);
        let data = super::new_data(folder.path(), 64, 64, 512);
        let output = folder.path().join("run");
        let ranks = ranks.to_string();
        let arguments = [
            "train",
            "--device",
            "cpu",
            "--model",
            text(&model),
            "--data",
            text(&data),
            "--output",
            text(&output),
            "--ranks",
            &ranks,
            "--deepspeed",
            "zero3",
            "--max-steps",
            "2000",
            "--per-device-train-batch-size",
            "2",
            "--threads-per-rank",
            "1",
        ];
        let mut running = Running::start(folder.path(), &[&arguments, more].concat());
        running.wait_for_steps(&output, 3);
        Self { running, output, _folder: folder }
    }
}

/// Process ids of a launcher's ranks, in rank order.
pub(super) fn ranks_of(launcher: u32) -> Vec<u32> {
    let mut found: Vec<(u32, u32)> = processes()
        .into_iter()
        .filter(|process| parent(*process) == Some(launcher))
        .filter_map(|process| Some((rank(process)?, process)))
        .collect();
    found.sort_unstable();
    found.into_iter().map(|(_, process)| process).collect()
}

fn processes() -> Vec<u32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

fn of_process(process: u32, file: &str) -> PathBuf {
    Path::new("/proc").join(process.to_string()).join(file)
}

fn parent(process: u32) -> Option<u32> {
    let status = fs::read_to_string(of_process(process, "status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

/// The rank in a process's environment.
fn rank(process: u32) -> Option<u32> {
    let variables = fs::read(of_process(process, "environ")).ok()?;
    let mut variables = variables.split(|byte| *byte == 0);
    let rank = variables.find_map(|variable| variable.strip_prefix(b"ZEROTH_RANK="))?;
    std::str::from_utf8(rank).ok()?.parse().ok()
}

/// Whether a process exists and is not a zombie.
pub(super) fn is_alive(process: u32) -> bool {
    let status = fs::read_to_string(of_process(process, "status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:") && !line.contains("(zombie)"))
}

pub(super) fn signal(process: u32, name: &str) {
    let sent = Command::new("sh").args(["-c", &format!("kill -{name} {process}")]).status().unwrap();
    assert!(sent.success());
}
