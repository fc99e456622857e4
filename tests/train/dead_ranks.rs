//! A rank or launcher that dies during a step: nothing hangs, and the message names the rank, step and op.

use std::time::{Duration, Instant};

use super::running::{Long, is_alive, signal};
use super::{text, written};

/// Sends a signal to rank 1 of 3: the command ends in time, says why, and leaves no process.
fn assert_named(name: &str, how: &str) {
    let folder = tempfile::tempdir().unwrap();
    let config = r#"{"zero_optimization": {"stage": 3}, "zeroth": {"stall_seconds": 5}}"#;
    let config = written(folder.path(), "ds.json", &[config]);
    let mut long = Long::start(3, &["--deepspeed", text(&config)]);
    let run = &mut long.running;
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
fn a_killed_rank_is_reported_with_step_and_op() {
    assert_named("KILL", "is dead");
}

#[test]
fn a_stopped_rank_ends_the_run_within_ten_seconds() {
    assert_named("STOP", "is stopped");
}

#[test]
fn ranks_do_not_outlive_their_launcher() {
    let mut long = Long::start(2, &[]);
    let run = &mut long.running;
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
