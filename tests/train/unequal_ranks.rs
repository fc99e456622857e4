//! Ranks that another launcher has started: with flags that differ they do not train, and a signal to one ends all of them.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use super::running::signal;
use super::{cache, metrics, new_data, new_model, text};

/// Two ranks with the variables that torchrun gives them.
pub(super) struct Ranks {
    folder: tempfile::TempDir,
    pub(super) ranks: [Child; 2],
}

impl Ranks {
    /// Starts them with flags of all, and others of rank 1.
    pub(super) fn start(job: &str, flags: &[&str], of_rank_1: &[&str]) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), job, flags, of_rank_1)
    }

    /// The same in a folder.
    pub(super) fn start_in(folder: tempfile::TempDir, job: &str, flags: &[&str], of_rank_1: &[&str]) -> Self {
        let flags = [&["--device", "cpu", "--threads-per-rank", "1"], flags].concat();
        Self::start_each(folder, job, &flags, |rank, command| {
            command.args(if rank == 1 { of_rank_1 } else { &[] });
        })
    }

    /// Ranks that differ in more than flags: `differ` gets the number of a rank and its command.
    pub(super) fn start_each(
        folder: tempfile::TempDir,
        job: &str,
        flags: &[&str],
        differ: impl Fn(usize, &mut Command),
    ) -> Self {
        let model = new_model(folder.path(), 64, 2, 128, 256);
        let data = new_data(folder.path(), 50, 24, 256);
        let output = folder.path().join("run");
        let job = format!("unequal-{job}-{}", std::process::id());
        let ranks = [0, 1].map(|rank: usize| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_zeroth"));
            command
                .arg("train")
                .args(["--model", text(&model), "--data", text(&data), "--output", text(&output)])
                .args(flags)
                .envs([("RANK", rank), ("LOCAL_RANK", rank)].map(|(name, rank)| (name, rank.to_string())))
                .envs([("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")])
                .envs([("TORCHELASTIC_RUN_ID", &job)])
                .env("ZEROTH_CACHE", cache())
                .env("NO_COLOR", "1")
                .stdout(File::create(folder.path().join(format!("out-{rank}"))).unwrap())
                .stderr(File::create(folder.path().join(format!("said-{rank}"))).unwrap());
            differ(rank, &mut command);
            command.spawn().unwrap()
        });
        Self { folder, ranks }
    }

    pub(super) fn output(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    /// What both have said, on both streams.
    pub(super) fn said(&self) -> String {
        let files = ["said-0", "out-0", "said-1", "out-1"];
        files.map(|file| fs::read_to_string(self.folder.path().join(file)).unwrap()).concat()
    }

    /// Their exit codes, which they must have within a minute.
    pub(super) fn codes(&mut self) -> [Option<i32>; 2] {
        let begun = Instant::now();
        while self.ranks.iter_mut().any(|rank| rank.try_wait().unwrap().is_none()) {
            assert!(begun.elapsed() < Duration::from_mins(1), "{}", self.said());
            std::thread::sleep(Duration::from_millis(10));
        }
        self.ranks.each_mut().map(|rank| rank.wait().unwrap().code())
    }

    pub(super) fn wait_for_steps(&mut self, steps: usize) {
        let (begun, path) = (Instant::now(), self.output().join("metrics.jsonl"));
        while fs::read_to_string(&path).map_or(0, |text| text.lines().count()) < steps {
            let ended = self.ranks.iter_mut().any(|rank| rank.try_wait().unwrap().is_some());
            assert!(!ended && begun.elapsed() < Duration::from_mins(1), "{}", self.said());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

#[test]
fn flags_that_differ_are_named_with_both_values_before_the_first_step() {
    let flags = ["--max-steps", "4", "--seed", "42", "--learning-rate", "0.001", "--weight-decay", "0"];
    for (number, (of_rank_1, named)) in [
        (["--seed", "7"], "--seed is 42 on rank 0 and 7 on rank 1"),
        (["--learning-rate", "0.5"], "lr is 0.001 on rank 0 and 0.5 on rank 1"),
        (["--weight-decay", "0.25"], "weight_decay is 0.0 on rank 0 and 0.25 on rank 1"),
        (["--max-length", "32"], "--max-length is 256 on rank 0 and 32 on rank 1"),
        (["--per-device-train-batch-size", "2"], "config.train_batch_size is 2 on rank 0 and 4 on rank 1"),
        (["--max-steps", "5"], "(--max-steps, --num-train-epochs) is 4 on rank 0 and 5 on rank 1"),
        (["--save-steps", "2"], "--save-steps is 500 on rank 0 and 2 on rank 1"),
        (["--deepspeed", "zero3"], "on rank 0 and "),
    ]
    .into_iter()
    .enumerate()
    {
        let mut ranks = Ranks::start(&number.to_string(), &flags, &of_rank_1);
        assert_eq!(ranks.codes(), [Some(2), Some(2)], "{of_rank_1:?}: {}", ranks.said());
        assert!(ranks.said().contains(named), "{of_rank_1:?}: {}", ranks.said());
        assert!(is_without_steps(&ranks.output()), "{of_rank_1:?}");
    }
}

#[test]
fn a_rank_that_cannot_read_its_own_flags_ends_all_with_its_reason() {
    let flags = ["--max-steps", "4"];
    let mut ranks = Ranks::start("config", &flags, &["--deepspeed", "there-is-none.json"]);
    assert_eq!(ranks.codes(), [Some(2), Some(2)], "{}", ranks.said());
    assert!(ranks.said().contains("there-is-none.json"), "{}", ranks.said());
    assert!(is_without_steps(&ranks.output()));
}

fn is_without_steps(run: &Path) -> bool {
    !run.join("metrics.jsonl").exists() || metrics(run).is_empty()
}

#[test]
fn sigterm_to_either_rank_saves_and_ends_both_with_its_code() {
    for (at, job) in [(0, "term-0"), (1, "term-1")] {
        let flags = ["--max-steps", "1000000", "--save-steps", "0", "--shuffle", "false"];
        let mut ranks = Ranks::start(job, &flags, &[]);
        ranks.wait_for_steps(3);
        signal(ranks.ranks[at].id(), "TERM");
        assert_eq!(ranks.codes(), [Some(143), Some(143)], "{}", ranks.said());
        let said = ranks.said();
        assert!(!said.contains("model in "), "there is none: {said}");
        let step = metrics(&ranks.output()).len();
        let checkpoint = ranks.output().join(format!("checkpoints/step-{step}/manifest.json"));
        assert!(checkpoint.is_file(), "{}", checkpoint.display());
    }
}
