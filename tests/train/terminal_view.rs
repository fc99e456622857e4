//! `train --monitor` in a terminal: a view that is killed or stopped leaves it as it was, so that Ctrl-C reaches the run.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::running::signal;
use super::stops::{last_step, saved};
use super::{cache, new_data, new_model, text};

/// A process and its arguments, by /proc.
fn processes() -> Vec<(u32, String)> {
    let ids =
        fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let command = |id: u32| fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
    ids.map(|id| (id, String::from_utf8_lossy(&command(id)).replace('\0', " "))).collect()
}

fn wait<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < Duration::from_mins(1), "not so after a minute: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_view_that_is_killed_or_stopped_leaves_a_terminal_whose_ctrl_c_reaches_the_run() {
    if Command::new("script").arg("--version").output().is_err() {
        println!("skipped: script (util-linux) is not installed");
        return;
    }
    for sent in ["KILL", "STOP"] {
        let folder = tempfile::tempdir().unwrap();
        let model = new_model(folder.path(), 64, 2, 128, 256);
        let data = new_data(folder.path(), 50, 24, 256);
        let run = folder.path().join("run");
        let train = format!(
            "exec {} train --device cpu --threads-per-rank 1 --model {} --data {} --output {} --monitor --max-steps 1000000 \
             --save-steps 0",
            env!("CARGO_BIN_EXE_zeroth"),
            text(&model),
            text(&data),
            text(&run)
        );
        let mut script = Command::new("script");
        script.args(["--quiet", "--return", "--flush", "--command", &train, "/dev/null"]);
        script.env("ZEROTH_CACHE", cache()).env("TERM", "xterm");
        script.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut terminal = Killed(script.spawn().unwrap());
        let is_view = |(id, command): (u32, String)| {
            (command.contains(" monitor ") && command.contains(text(&run))).then_some(id)
        };
        let view = wait("the view is open", || processes().into_iter().find_map(is_view));
        let tty = wait("it has a terminal", || fs::read_link(format!("/proc/{view}/fd/0")).ok());
        wait("the terminal is raw", || modes(&tty).contains("-icanon").then_some(()));
        wait("it trains", || {
            fs::read_to_string(run.join("metrics.jsonl"))
                .is_ok_and(|text| text.lines().count() > 2)
                .then_some(())
        });
        signal(view, sent);
        wait("the terminal is restored", || {
            let now = modes(&tty);
            let is_set = |mode: &str| now.split_whitespace().any(|word| word.trim_end_matches(';') == mode);
            ["icanon", "isig", "echo"].into_iter().all(is_set).then_some(())
        });
        terminal.0.stdin.as_mut().unwrap().write_all(b"\x03").unwrap();
        let status = wait("Ctrl-C ends the run", || terminal.0.try_wait().unwrap());
        assert_eq!(status.code(), Some(130), "{sent}");
        assert_eq!(saved(&run), [last_step(&run)], "{sent}");
    }
}

fn modes(tty: &Path) -> String {
    let output = Command::new("stty").args(["-a", "-F", text(tty)]).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}
