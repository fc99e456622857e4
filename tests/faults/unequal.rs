//! Ranks of another launcher that differ in threads, CPUs, environment or instructions, in every kind of run and at every stage:
//! they end with the bits of equal ranks. With other instructions they say so once, and stay close.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use super::cases;
use super::inject::LIMIT;
use super::job::{Job, Left};
use super::kinds::Kind;

/// Kinds that train.
const KINDS: [Kind; 9] = [
    Kind::Full,
    Kind::Lora,
    Kind::QLora,
    Kind::Experts,
    Kind::Distillation,
    Kind::FromCache,
    Kind::EncoderDecoder,
    Kind::BestModel,
    Kind::EarlyStopping,
];
const STAGES: [&str; 4] = ["zero0", "zero1", "zero2", "zero3"];

/// In what two ranks differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Difference {
    /// Rank 1 has more threads than rank 0.
    MoreThreads,
    /// Rank 1 has fewer.
    FewerThreads,
    /// Rank 1 may use one CPU, and each counts its own.
    Cpus,
    /// Variables that launchers, containers and users set.
    Environment,
    /// Rank 1 computes with other instructions.
    Instructions,
}

const DIFFERENCES: [Difference; 5] = [
    Difference::MoreThreads,
    Difference::Cpus,
    Difference::Environment,
    Difference::Instructions,
    Difference::FewerThreads,
];

impl Difference {
    /// The command of a rank; `None` where this machine cannot make the difference.
    fn command(self, rank: usize, arguments: &[String]) -> Option<Command> {
        let program = env!("CARGO_BIN_EXE_zeroth");
        let mut command = if self == Self::Cpus && rank == 1 {
            Command::new("taskset").arg("--version").output().ok()?;
            let mut command = Command::new("taskset");
            command.args(["-c", "0", program]);
            command
        } else {
            Command::new(program)
        };
        let threads = arguments.iter().position(|word| word == "--threads-per-rank");
        match threads.filter(|_| self == Self::Cpus) {
            Some(at) => command.args(&arguments[..at]).args(&arguments[at + 2..]),
            None => command.args(arguments),
        };
        match (self, rank) {
            (Self::MoreThreads, 1) | (Self::FewerThreads, 0) => command.args(["--threads-per-rank", "3"]),
            (Self::MoreThreads | Self::FewerThreads, _) => command.args(["--threads-per-rank", "1"]),
            (Self::Environment, 1) => command
                .envs([("RAYON_NUM_THREADS", "1"), ("OMP_NUM_THREADS", "7"), ("CUDA_VISIBLE_DEVICES", "")])
                .envs([("LANG", "tr_TR.UTF-8"), ("TZ", "Asia/Tokyo"), ("COLUMNS", "40")]),
            (Self::Instructions, 1) => command.env("ZEROTH_CPU", "portable"),
            _ => &mut command,
        };
        Some(command)
    }
}

struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

/// Runs both ranks, and returns their codes and what they said; `None` where this machine cannot make the difference.
fn run(
    job: &Job,
    name: &str,
    arguments: &[String],
    difference: Option<Difference>,
) -> Option<([Option<i32>; 2], String)> {
    let cache = job.cache(name);
    fs::create_dir_all(&cache).unwrap();
    let said = |rank: usize| cache.join(format!("said-{rank}"));
    let mut ranks = Ranks(Vec::new());
    for rank in 0..2 {
        let mut command = if let Some(difference) = difference {
            difference.command(rank, arguments)?
        } else {
            let mut command = Command::new(env!("CARGO_BIN_EXE_zeroth"));
            command.args(arguments).args(["--threads-per-rank", "1"]);
            command
        };
        let number = rank.to_string();
        command
            .envs([("RANK", &number), ("LOCAL_RANK", &number)])
            .envs([("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("NO_COLOR", "1")])
            .env("TORCHELASTIC_RUN_ID", format!("audit-{name}-{}", std::process::id()))
            .env("ZEROTH_CACHE", &cache)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(said(rank)).unwrap());
        ranks.0.push(command.spawn().unwrap());
    }
    let begun = Instant::now();
    while ranks.0.iter_mut().any(|rank| rank.try_wait().unwrap().is_none()) {
        assert!(begun.elapsed() < LIMIT, "{name} hangs");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let codes = [0, 1].map(|rank: usize| ranks.0[rank].wait().unwrap().code());
    Some((codes, [0, 1].map(|rank| fs::read_to_string(said(rank)).unwrap()).concat()))
}

/// The losses of a run.
fn losses(run: &Path) -> Vec<f64> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines.filter_map(|line| line["loss"].as_f64()).collect()
}

#[test]
fn unequal_ranks_train_what_equal_ranks_train() {
    let (mut runs, mut skipped, mut wrong) = (0, 0, Vec::new());
    let mut equal: BTreeMap<(usize, usize), (Job, Left, Vec<f64>)> = BTreeMap::new();
    let all = KINDS.len() * STAGES.len() * DIFFERENCES.len();
    for case in 0..cases(7, all as u32) as usize {
        // Each case has another kind, stage and difference than the one before, and all of them are every combination.
        let turn = KINDS.len() * DIFFERENCES.len();
        let (kind, difference) = (case % KINDS.len(), DIFFERENCES[case % DIFFERENCES.len()]);
        let stage = (case % turn + case / turn) % STAGES.len();
        let arguments = |job: &Job, folder: &str| {
            let flags = ["--deepspeed".to_owned(), STAGES[stage].to_owned()];
            [KINDS[kind].arguments(job, &job.path(folder)), flags.to_vec()].concat()
        };
        let (job, expected, expected_losses) = equal.entry((kind, stage)).or_insert_with(|| {
            let job = KINDS[kind].job();
            let (codes, said) = run(&job, "equal", &arguments(&job, "equal"), None).expect("nothing differs");
            assert_eq!(codes, [Some(0); 2], "{:?} {}: {said}", KINDS[kind], STAGES[stage]);
            assert!(!said.contains("ranks differ"), "{said}");
            let left = KINDS[kind].left(&job.path("equal")).unwrap();
            let losses = losses(&job.path("equal"));
            (job, left, losses)
        });
        let name = format!("unequal-{case}");
        let what = format!("case {case}: {:?}, {}, {difference:?}", KINDS[kind], STAGES[stage]);
        let Some((codes, said)) = run(job, &name, &arguments(job, &name), Some(difference)) else {
            skipped += 1;
            continue;
        };
        runs += 1;
        let found = job.path(&name);
        if codes != [Some(0); 2] {
            wrong.push(format!("{what}: {codes:?}: {said}"));
            continue;
        }
        let notes = said.matches("ranks differ in").count();
        if difference == Difference::Instructions {
            let losses = losses(&found);
            let is_close = |(found, expected): (&f64, &f64)| (found / expected - 1.0).abs() < 0.05;
            if notes > 1 || losses.is_empty() || !losses.iter().zip(&*expected_losses).all(is_close) {
                wrong.push(format!("{what}: {notes} notes, losses {losses:?} and not {expected_losses:?}"));
            }
            continue;
        }
        let is_noted = matches!(difference, Difference::MoreThreads | Difference::FewerThreads);
        if notes != usize::from(is_noted) && difference != Difference::Cpus {
            wrong.push(format!("{what}: {notes} notes: {said}"));
        }
        match KINDS[kind].left(&found) {
            Ok(left) => wrong.extend(left.difference(expected).map(|how| format!("{what}: {how}"))),
            Err(problem) => wrong.push(format!("{what}: {problem}")),
        }
        fs::remove_dir_all(found).unwrap();
    }
    println!("unequal ranks: {runs} runs, {skipped} skipped, {} trained something else", wrong.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
