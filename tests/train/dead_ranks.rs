//! A rank that dies or stops in the middle of a step, and a launcher that dies: nobody waits for ever, and the message
//! says who, in which step and at which op.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use super::{new_data, new_model, text};

/// A run that would go on for minutes.
struct Long {
    launcher: Child,
    folder: tempfile::TempDir,
}

impl Long {
    /// Starts it and waits until it has done some steps.
    fn start(ranks: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let model = new_model(folder.path(), 256, 4, 512, 512);
        let data = new_data(folder.path(), 64, 64, 512);
        let output = folder.path().join("run");
        let launcher = Command::new(env!("CARGO_BIN_EXE_zeroth"))
            .args(["train", "--device", "cpu", "--model", text(&model), "--data", text(&data)])
            .args(["--output", text(&output), "--ranks", &ranks.to_string(), "--deepspeed", "zero3"])
            .args(["--max-steps", "2000", "--per-device-train-batch-size", "2", "--threads-per-rank", "1"])
            .stdout(File::create(folder.path().join("stdout")).unwrap())
            .stderr(File::create(folder.path().join("stderr")).unwrap())
            .spawn()
            .unwrap();
        let mut run = Self { launcher, folder };
        let metrics = output.join("metrics.jsonl");
        run.wait_until(Duration::from_mins(1), "it has done some steps", || {
            fs::read_to_string(&metrics).is_ok_and(|text| text.lines().count() >= 3)
        });
        run
    }

    fn said(&self) -> String {
        fs::read_to_string(self.folder.path().join("stderr")).unwrap()
    }

    fn wait_until(&mut self, limit: Duration, what: &str, mut is_so: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !is_so() {
            let ended = self.launcher.try_wait().unwrap();
            assert!(ended.is_none(), "ended before {what}: {}", self.said());
            assert!(begun.elapsed() < limit, "not so after {limit:?}: {what}: {}", self.said());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The processes of the ranks, by number.
    fn ranks(&self) -> Vec<u32> {
        let mut found: Vec<(u32, u32)> = processes()
            .into_iter()
            .filter(|process| parent(*process) == Some(self.launcher.id()))
            .filter_map(|process| Some((rank(process)?, process)))
            .collect();
        found.sort_unstable();
        found.into_iter().map(|(_, process)| process).collect()
    }

    /// Waits for the launcher; how it ended, and after how long.
    fn end(&mut self, limit: Duration) -> (Option<ExitStatus>, Duration) {
        let begun = Instant::now();
        while begun.elapsed() < limit {
            if let Some(status) = self.launcher.try_wait().unwrap() {
                return (Some(status), begun.elapsed());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        (None, begun.elapsed())
    }
}

impl Drop for Long {
    /// A test that failed leaves nothing behind: ranks die with their launcher.
    fn drop(&mut self) {
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
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

/// The rank that a launcher made it.
fn rank(process: u32) -> Option<u32> {
    let variables = fs::read(of_process(process, "environ")).ok()?;
    let mut variables = variables.split(|byte| *byte == 0);
    let rank = variables.find_map(|variable| variable.strip_prefix(b"ZEROTH_RANK="))?;
    std::str::from_utf8(rank).ok()?.parse().ok()
}

/// Whether it is there, and more than an entry that nobody has collected yet.
fn is_alive(process: u32) -> bool {
    let status = fs::read_to_string(of_process(process, "status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:") && !line.contains("(zombie)"))
}

fn signal(process: u32, name: &str) {
    let sent = Command::new("sh").args(["-c", &format!("kill -{name} {process}")]).status().unwrap();
    assert!(sent.success());
}

/// Sends a signal to rank 1 of 3: the command ends in time, says why, and leaves no process.
fn assert_named(name: &str, how: &str) {
    let mut run = Long::start(3);
    let ranks = run.ranks();
    assert_eq!(ranks.len(), 3, "{}", run.said());
    signal(ranks[1], name);
    let (status, after) = run.end(Duration::from_secs(20));
    let said = run.said();
    assert_eq!(status.and_then(|status| status.code()), Some(1), "{said}");
    assert!(after < Duration::from_secs(10), "ended only after {after:?}: {said}");
    assert!(!ranks.iter().any(|rank| is_alive(*rank)), "a rank is left: {said}");
    // What a rank that was left alone says of it: itself, the step and op it was in, and whom it waited for.
    let told = said.lines().find(|line| line.starts_with("[rank ") && line.contains(how));
    let told = told.unwrap_or_else(|| panic!("nobody says that it {how}: {said}"));
    assert!(told.contains("error: step ") && told.contains("rank 1 ") && told.contains(", op "), "{told}");
    assert!(said.contains(&format!("rank 1 (pid {})", ranks[1])), "{said}");
}

#[test]
fn a_killed_rank_ends_the_run_and_is_named_with_its_step_and_op() {
    assert_named("KILL", "is dead");
}

#[test]
fn a_stopped_rank_ends_the_run_within_ten_seconds_and_is_gone_then() {
    assert_named("STOP", "is stopped");
}

#[test]
fn ranks_do_not_outlive_their_launcher() {
    let mut run = Long::start(2);
    let ranks = run.ranks();
    assert_eq!(ranks.len(), 2, "{}", run.said());
    run.launcher.kill().unwrap();
    run.launcher.wait().unwrap();
    let begun = Instant::now();
    while ranks.iter().any(|rank| is_alive(*rank)) {
        assert!(begun.elapsed() < Duration::from_secs(5), "a rank is left 5 s after its launcher");
        std::thread::sleep(Duration::from_millis(20));
    }
}
