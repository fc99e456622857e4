//! Being asked to stop or to save: by signals, and by a file.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use super::running::{Long, is_alive, signal};
use crate::common::zeroth;

/// The steps of the checkpoints in a run's folder.
pub(super) fn saved(run: &Path) -> Vec<u64> {
    let entries = fs::read_dir(run.join("checkpoints")).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut steps: Vec<u64> = names.filter_map(|name| name.strip_prefix("step-")?.parse().ok()).collect();
    steps.sort_unstable();
    steps
}

/// The last step that metrics.jsonl holds.
pub(super) fn last_step(run: &Path) -> u64 {
    super::metrics(run).last().unwrap()["step"].as_u64().unwrap()
}

#[test]
fn a_signal_finishes_the_step_saves_and_stops_with_its_own_exit_code() {
    for (ranks, name, code) in [(1, "INT", 130), (2, "INT", 130), (2, "TERM", 143)] {
        let mut long = Long::start(ranks, &[]);
        let run = &mut long.running;
        let processes = run.ranks();
        signal(run.launcher.id(), name);
        assert_eq!(run.code(), Some(code), "{}", run.said());
        assert!(!processes.iter().any(|rank| is_alive(*rank)), "{}", run.said());
        assert_eq!(saved(&long.output), [last_step(&long.output)], "{}", long.running.said());
        let checkpoint = long.output.join("checkpoints");
        let verified =
            zeroth(&["checkpoint", "verify", super::text(&checkpoint.join(saved_name(&checkpoint)))]);
        assert_eq!(verified.code, 0, "{}", verified.stderr);
        assert!(!long.output.join("model").exists(), "the run is not over");
    }
}

fn saved_name(checkpoints: &Path) -> String {
    fs::read_to_string(checkpoints.join("latest")).unwrap().trim().to_owned()
}

#[test]
fn a_second_interrupt_stops_at_once() {
    let mut long = Long::start(2, &[]);
    let run = &mut long.running;
    let processes = run.ranks();
    // Ranks that hang cannot finish their step.
    signal(processes[1], "STOP");
    signal(run.launcher.id(), "INT");
    std::thread::sleep(Duration::from_millis(300));
    signal(run.launcher.id(), "INT");
    let (status, _) = run.end(Duration::from_secs(10));
    assert_eq!(status.and_then(|status| status.code()), Some(130), "{}", run.said());
    // The system takes a moment to end them: their launcher does not wait for it.
    let ended = Instant::now();
    while processes.iter().any(|rank| is_alive(*rank)) {
        assert!(ended.elapsed() < Duration::from_secs(5), "ranks live on: {}", run.said());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_file_asks_for_one_save_and_the_run_goes_on() {
    let mut long = Long::start(2, &[]);
    let ask = long.output.join("save-now");
    fs::write(&ask, "").unwrap();
    let output = long.output.clone();
    long.running.wait_until(Duration::from_secs(30), "it has saved", || !saved(&output).is_empty());
    assert!(!ask.exists());
    let steps = last_step(&long.output) as usize;
    long.running.wait_for_steps(&output, steps + 2);
    assert_eq!(saved(&long.output).len(), 1);
}
