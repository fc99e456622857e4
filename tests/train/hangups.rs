//! SIGHUP, which a terminal sends to its foreground processes when it is closed.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::{metrics, new_data, new_model, text};

/// A run in its own process group, as a shell starts it. Killed on drop with its ranks.
struct Grouped {
    launcher: Child,
    output: PathBuf,
}

impl Grouped {
    /// Starts a run in a shell behind `before`, and waits for some steps.
    fn start(folder: &Path, before: &str, ranks: u32) -> Self {
        let model = new_model(folder, 64, 2, 128, 256);
        let data = new_data(folder, 32, 32, 256);
        let output = folder.join("run");
        let launcher = Command::new("/bin/sh")
            .args(["-c", &format!("{before} exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_zeroth")])
            .args(["train", "--device", "cpu", "--model", text(&model), "--data", text(&data)])
            .args(["--output", text(&output), "--ranks", &ranks.to_string()])
            .args(["--threads-per-rank", "1", "--max-steps", "1000000"])
            .env("ZEROTH_CACHE", super::cache())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap();
        let mut run = Self { launcher, output };
        run.wait_for_steps(3);
        run
    }

    fn steps(&self) -> usize {
        fs::read_to_string(self.output.join("metrics.jsonl")).map_or(0, |text| text.lines().count())
    }

    fn wait_for_steps(&mut self, steps: usize) {
        let begun = Instant::now();
        while self.steps() < steps {
            assert!(self.launcher.try_wait().unwrap().is_none(), "it ended before step {steps}");
            assert!(begun.elapsed() < Duration::from_mins(1), "no step {steps} within a minute");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends SIGHUP to the process group, like a closing terminal.
    fn hang_up(&self) {
        let kill = format!("kill -HUP -{}", self.launcher.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    }

    fn code(&mut self) -> Option<i32> {
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_mins(1) {
            if let Some(status) = self.launcher.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("it goes on after a minute");
    }
}

impl Drop for Grouped {
    fn drop(&mut self) {
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

#[test]
fn a_closed_terminal_saves_and_stops() {
    for ranks in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let mut run = Grouped::start(folder.path(), "", ranks);
        run.hang_up();
        assert_eq!(run.code(), Some(129), "{ranks} ranks");
        let last = metrics(&run.output).last().unwrap()["step"].as_u64().unwrap();
        let saved = fs::read_to_string(run.output.join("checkpoints/latest")).unwrap();
        assert_eq!(saved.trim(), format!("step-{last}"), "{ranks} ranks");
    }
}

#[test]
fn a_run_under_nohup_goes_on() {
    for ranks in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        // As nohup does.
        let mut run = Grouped::start(folder.path(), "trap '' HUP;", ranks);
        run.hang_up();
        let steps = run.steps() + 20;
        run.wait_for_steps(steps);
        assert!(!run.output.join("checkpoints/latest").exists(), "{ranks} ranks");
    }
}
