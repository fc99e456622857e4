//! kill -9 at any moment, of any process, the save included: what was saved is there, and a run that is gone on with each
//! time ends with the same bits as one that nobody disturbed.
//!
//! `ZEROTH_KILLS=50 cargo test -p zeroth-cli --test end_to_end kills` makes 50 of them; 10 are made otherwise.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::running::{Running, is_alive, signal};
use super::{metrics, new_data, new_model, text};
use crate::common::zeroth;

/// Numbers that look random and are the same in every run of the test: xorshift of Marsaglia.
struct Chance(u64);

impl Chance {
    fn below(&mut self, most: u64) -> u64 {
        for (shift, left) in [(13, true), (7, false), (17, true)] {
            self.0 ^= if left { self.0 << shift } else { self.0 >> shift };
        }
        self.0 % most
    }
}

struct Ground {
    folder: tempfile::TempDir,
    model: PathBuf,
    data: PathBuf,
}

impl Ground {
    fn arguments<'a>(&'a self, output: &'a Path) -> Vec<&'a str> {
        vec![
            "train",
            "--device",
            "cpu",
            "--model",
            text(&self.model),
            "--data",
            text(&self.data),
            "--output",
            text(output),
            "--ranks",
            "2",
            "--deepspeed",
            "zero3",
            "--max-steps",
            "40",
            "--save-steps",
            "3",
            "--save-total-limit",
            "2",
            "--per-device-train-batch-size",
            "2",
            "--threads-per-rank",
            "1",
            "--resume",
            "auto",
        ]
    }
}

/// Whether a save was cut off.
fn has_unfinished(run: &Path) -> bool {
    let entries = fs::read_dir(run.join("checkpoints")).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name()).any(|name| name.as_encoded_bytes().starts_with(b".step-"))
}

/// Losses and norms of every step, as they are written: each step once, in order.
fn steps(run: &Path) -> Vec<(u64, String, String)> {
    let lines = metrics(run);
    lines
        .iter()
        .map(|line| (line["step"].as_u64().unwrap(), line["loss"].to_string(), line["grad_norm"].to_string()))
        .collect()
}

/// The bytes that a run leaves for others: its model, and the state it could go on from.
fn left(run: &Path) -> Vec<Vec<u8>> {
    let parts = [0, 1].map(|rank| format!("checkpoints/step-40/rank-0000{rank}-of-00002.safetensors"));
    let files = std::iter::once("model/model.safetensors".to_owned()).chain(parts);
    files.map(|file| fs::read(run.join(file)).unwrap()).collect()
}

#[test]
fn a_run_that_is_killed_again_and_again_ends_with_the_same_bits() {
    let kills: u32 = std::env::var("ZEROTH_KILLS").map_or(10, |kills| kills.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let model = new_model(folder.path(), 64, 3, 128, 256);
    let data = new_data(folder.path(), 50, 24, 256);
    let ground = Ground { folder, model, data };
    let whole = ground.folder.path().join("whole");
    let begun = Instant::now();
    let ended = zeroth(&ground.arguments(&whole));
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let takes = begun.elapsed().as_millis() as u64;
    let (expected, bytes) = (steps(&whole), left(&whole));
    assert_eq!(expected.len(), 40);

    let mut chance = Chance(0x9E37_79B9_7F4A_7C15);
    let (mut killed, mut in_a_save, mut runs) = (0, 0, 0);
    while killed < kills {
        let run = ground.folder.path().join(format!("run-{runs}"));
        runs += 1;
        // Killed and gone on with until it gets to its end between two kills.
        loop {
            let mut running = Running::start(ground.folder.path(), &ground.arguments(&run));
            std::thread::sleep(Duration::from_millis(chance.below(takes)));
            let mut processes = vec![running.launcher.id()];
            processes.extend(running.ranks());
            let victim = processes[chance.below(processes.len() as u64) as usize];
            let was_running = running.launcher.try_wait().unwrap().is_none();
            if was_running && is_alive(victim) && killed < kills {
                signal(victim, "KILL");
                killed += 1;
            }
            let (status, _) = running.end(Duration::from_mins(1));
            let status = status.unwrap_or_else(|| panic!("it hangs: {}", running.said()));
            let begun = Instant::now();
            while processes.iter().any(|process| is_alive(*process)) {
                assert!(begun.elapsed() < Duration::from_secs(5), "a process is left: {}", running.said());
                std::thread::sleep(Duration::from_millis(5));
            }
            if status.code() == Some(0) {
                break;
            }
            in_a_save += u32::from(has_unfinished(&run));
            let said = running.said();
            assert!(!said.contains("panicked") && !said.contains("was passed over"), "{said}");
        }
        assert_eq!(steps(&run), expected, "after {killed} kills");
        assert!(left(&run) == bytes, "other bytes after {killed} kills");
        fs::remove_dir_all(run).unwrap();
    }
    println!("{killed} kills in {runs} runs, {in_a_save} of them in the middle of a save");
}
