//! Signals that cluster managers and limits send: saves that a run goes on after, ends with a save, and waits for a rank that
//! is suspended.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::running::{Long, Running, signal};
use super::stops::{last_step, saved};
use super::unequal_ranks::Ranks;
use super::{cache, golden, metrics, text};
use crate::common::zeroth;

/// Saves on request only.
const ON_REQUEST: [&str; 2] = ["--save-steps", "0"];

#[test]
fn sigusr1_and_sigusr2_save_once_each_and_the_run_goes_on() {
    for ranks in [1, 2] {
        let mut long = Long::start(ranks, &ON_REQUEST);
        let output = long.output.clone();
        for (count, name) in ["USR1", "USR2"].into_iter().enumerate() {
            signal(long.running.launcher.id(), name);
            long.running.wait_until(Duration::from_secs(30), name, || saved(&output).len() > count);
            let steps = last_step(&output) as usize;
            long.running.wait_for_steps(&output, steps + 3);
            assert_eq!(saved(&output).len(), count + 1, "{name}: {}", long.running.said());
        }
        signal(long.running.launcher.id(), "INT");
        assert_eq!(long.running.code(), Some(130), "{}", long.running.said());
    }
}

#[test]
fn signal_exit_ends_the_run_after_the_save_with_the_code_of_the_signal() {
    for (ranks, name, code) in [(1, "USR1", 138), (2, "USR2", 140)] {
        let mut long = Long::start(ranks, &[&ON_REQUEST[..], &["--signal-exit"]].concat());
        signal(long.running.launcher.id(), name);
        assert_eq!(long.running.code(), Some(code), "{}", long.running.said());
        assert_eq!(saved(&long.output), [last_step(&long.output)], "{}", long.running.said());
        assert_eq!(super::json(&long.output.join("status.json"))["state"], "stopped");
    }
}

#[test]
fn a_signal_to_every_rank_of_another_launcher_is_one_save() {
    let flags = [&["--max-steps", "1000000", "--shuffle", "false"], &ON_REQUEST[..]].concat();
    let mut ranks = Ranks::start("usr1", &flags, &[]);
    ranks.wait_for_steps(3);
    for rank in [0, 1] {
        signal(ranks.ranks[rank].id(), "USR1");
    }
    let begun = std::time::Instant::now();
    while saved(&ranks.output()).is_empty() {
        assert!(begun.elapsed() < Duration::from_mins(1), "{}", ranks.said());
        std::thread::sleep(Duration::from_millis(5));
    }
    let steps = metrics(&ranks.output()).len();
    ranks.wait_for_steps(steps + 5);
    // The second signal may arrive when the save has begun.
    assert!(saved(&ranks.output()).len() <= 2, "{}", ranks.said());
    signal(ranks.ranks[1].id(), "TERM");
    assert_eq!(ranks.codes(), [Some(143); 2], "{}", ranks.said());
    // One of them ends all, whichever it is.
    let mut ranks = Ranks::start("usr2-exit", &[&flags[..], &["--signal-exit"]].concat(), &[]);
    ranks.wait_for_steps(3);
    signal(ranks.ranks[1].id(), "USR2");
    assert_eq!(ranks.codes(), [Some(140); 2], "{}", ranks.said());
    assert_eq!(saved(&ranks.output()), [metrics(&ranks.output()).len() as u64], "{}", ranks.said());
}

#[test]
fn the_limit_of_cpu_time_ends_the_run_with_a_save_and_says_so() {
    for ranks in [1, 2] {
        let mut long = Long::start(ranks, &ON_REQUEST);
        // Each process has its own limit: that of a rank is reached first.
        let process = long.running.ranks().last().copied().unwrap_or(long.running.launcher.id());
        signal(process, "XCPU");
        assert_eq!(long.running.code(), Some(152), "{}", long.running.said());
        assert!(long.running.said().contains("CPU time"), "{}", long.running.said());
        assert_eq!(saved(&long.output), [last_step(&long.output)], "{}", long.running.said());
    }
}

#[test]
fn the_limit_of_file_sizes_ends_the_run_with_its_name_and_earlier_checkpoints_stay() {
    let folder = tempfile::tempdir().unwrap();
    let model = golden("qwen3-tied");
    let run = folder.path().join("run");
    let data = model.join("data.jsonl");
    let arguments = |steps: &'static str| {
        let named = ["train", "--device", "cpu", "--model", text(&model), "--data", text(&data)];
        let more = ["--output", text(&run), "--max-steps", steps, "--resume", "auto"];
        [&named[..], &more].concat().into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let first = arguments("2");
    let first: Vec<&str> = first.iter().map(String::as_str).collect();
    assert_eq!(zeroth(&first).code, 0);
    let size = |path: &Path| path.metadata().unwrap().len();
    let shard = size(&run.join("checkpoints/step-2/rank-00000-of-00001.safetensors"));
    // In blocks of 512 bytes; all other files of a run are smaller than half of a shard.
    let limit = format!("ulimit -f {}; exec \"$0\" \"$@\"", shard / 512 - 8);
    let mut limited = Command::new("/bin/sh");
    limited
        .args(["-c", &limit, env!("CARGO_BIN_EXE_zeroth")])
        .args(arguments("4"))
        .env("ZEROTH_CACHE", cache());
    let ended = limited.output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(1), "{said}");
    for words in ["cannot save step 4", "rank-00000-of-00001.safetensors", "ulimit -f"] {
        assert!(said.contains(words), "{words}: {said}");
    }
    assert_eq!(saved(&run), [2], "{said}");
    let verified = zeroth(&["checkpoint", "verify", text(&run.join("checkpoints/step-2"))]);
    assert_eq!(verified.code, 0, "{}", verified.stderr);
    let last = arguments("4");
    let last: Vec<&str> = last.iter().map(String::as_str).collect();
    let ended = zeroth(&last);
    assert_eq!((ended.code, saved(&run)), (0, vec![2, 4]), "{}", ended.stderr);
}

#[test]
fn a_rank_that_is_stopped_for_a_while_is_noted_and_the_run_goes_on() {
    let mut long = Long::start(2, &ON_REQUEST);
    let ranks = long.running.ranks();
    signal(ranks[1], "STOP");
    let note = format!("waits for rank 1 (pid {}), which has not responded for 3 s", ranks[1]);
    wait_for_words(&mut long.running, &note);
    // Longer than ranks waited before.
    std::thread::sleep(Duration::from_secs(3));
    signal(ranks[1], "CONT");
    let steps = last_step(&long.output) as usize;
    let output = long.output.clone();
    long.running.wait_for_steps(&output, steps + 2);
    let said = long.running.said();
    assert_eq!(said.matches("has not responded").count(), 1, "{said}");
    assert!(said.contains("After 30 s the run ends without a save"), "{said}");
}

fn wait_for_words(running: &mut Running, words: &str) {
    let begun = std::time::Instant::now();
    while !running.said().contains(words) {
        assert!(running.launcher.try_wait().unwrap().is_none(), "ended: {}", running.said());
        assert!(begun.elapsed() < Duration::from_secs(20), "{words}: {}", running.said());
        std::thread::sleep(Duration::from_millis(20));
    }
}
