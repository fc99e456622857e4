//! A reader that stops reading stalls neither steps nor a stop: standard error is a pipe that is full.

use std::fs;
use std::io::{PipeReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::running::signal;
use super::{new_data, new_model, text};

/// A pipe that nobody reads, filled to the last byte, and its reader.
fn full_pipe() -> (PipeReader, Stdio) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let stdio = Stdio::from(writer.try_clone().unwrap());
    let written = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&written);
    // It stays in its last write until the reader is gone.
    std::thread::spawn(move || {
        while writer.write_all(&[b'x'; 512]).is_ok() {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    });
    let mut before = 0;
    loop {
        std::thread::sleep(Duration::from_millis(100));
        match written.load(Ordering::Relaxed) {
            now if now == before && now > 0 => return (reader, stdio),
            now => before = now,
        }
    }
}

/// A run whose standard error nobody reads. Dropped, it is killed, and its ranks die with it.
struct Unread {
    launcher: Child,
    output: PathBuf,
    _reader: PipeReader,
}

impl Unread {
    fn start(folder: &Path, ranks: u32, more: &[&str]) -> Self {
        Self::start_with(folder, ranks, more, Stdio::null())
    }

    fn start_with(folder: &Path, ranks: u32, more: &[&str], stdout: Stdio) -> Self {
        let model = new_model(folder, 64, 2, 128, 256);
        let data = new_data(folder, 32, 32, 256);
        let output = folder.join("run");
        let (reader, stderr) = full_pipe();
        let launcher = Command::new(env!("CARGO_BIN_EXE_zeroth"))
            .args(["train", "--device", "cpu", "--model", text(&model), "--data", text(&data)])
            .args(["--output", text(&output), "--ranks", &ranks.to_string()])
            .args(["--threads-per-rank", "1", "--logging-steps", "1"])
            .args(more)
            .env("ZEROTH_CACHE", super::cache())
            .stdout(stdout)
            .stderr(stderr)
            .spawn()
            .unwrap();
        Self { launcher, output, _reader: reader }
    }

    fn wait_until(&mut self, what: &str, mut is_so: impl FnMut(&mut Self) -> bool) {
        let begun = Instant::now();
        while !is_so(self) {
            assert!(begun.elapsed() < Duration::from_secs(30), "not so after 30 s: {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn code(&mut self) -> Option<i32> {
        self.wait_until("the run has ended", |run| run.launcher.try_wait().unwrap().is_some());
        self.launcher.wait().unwrap().code()
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

#[test]
fn a_run_whose_standard_error_nobody_reads_completes() {
    for ranks in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let mut run = Unread::start(folder.path(), ranks, &["--max-steps", "200"]);
        assert_eq!(run.code(), Some(0), "{ranks} ranks");
        assert_eq!(super::metrics(&run.output).len(), 200);
        assert!(run.output.join("model/model.safetensors").exists());
    }
}

#[test]
fn a_run_whose_standard_error_nobody_reads_saves_and_ends_when_told_to() {
    for ranks in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let mut run = Unread::start(folder.path(), ranks, &["--max-steps", "1000000"]);
        let metrics = run.output.join("metrics.jsonl");
        run.wait_until("it has done 50 steps", |_| {
            fs::read_to_string(&metrics).is_ok_and(|text| text.lines().count() >= 50)
        });
        signal(run.launcher.id(), "TERM");
        assert_eq!(run.code(), Some(143), "{ranks} ranks");
        assert!(run.output.join("checkpoints/latest").exists(), "{ranks} ranks: it has saved");
    }
}

#[test]
fn a_result_that_nobody_reads_is_given_up_when_told_to() {
    let folder = tempfile::tempdir().unwrap();
    let (_reader, stdout) = full_pipe();
    let mut run = Unread::start_with(folder.path(), 1, &["--max-steps", "2", "--format", "json"], stdout);
    let model = run.output.join("loss.svg");
    run.wait_until("the run is done", |_| model.exists());
    std::thread::sleep(Duration::from_millis(500));
    assert!(run.launcher.try_wait().unwrap().is_none(), "the result waits for its reader");
    signal(run.launcher.id(), "TERM");
    run.wait_until("it has ended", |run| run.launcher.try_wait().unwrap().is_some());
}

#[test]
fn what_is_wrong_is_said_once_the_reader_reads_again() {
    let folder = tempfile::tempdir().unwrap();
    let (mut reader, stderr) = full_pipe();
    let mut refused = Command::new(env!("CARGO_BIN_EXE_zeroth"))
        .args(["train", "--model", text(folder.path()), "--data", "none", "--output", "none"])
        .stderr(stderr)
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let mut said = Vec::new();
    let begun = Instant::now();
    while refused.try_wait().unwrap().is_none() {
        let mut part = [0; 4096];
        let read = std::io::Read::read(&mut reader, &mut part).unwrap();
        said.extend_from_slice(&part[..read]);
        assert!(begun.elapsed() < Duration::from_secs(30));
    }
    let mut part = vec![0; 1 << 16];
    let read = std::io::Read::read(&mut reader, &mut part).unwrap();
    said.extend_from_slice(&part[..read]);
    assert!(String::from_utf8_lossy(&said).contains("error: "));
    assert_eq!(refused.wait().unwrap().code(), Some(2));
}
