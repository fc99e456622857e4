//! Signals before the first step: a run exits at once and leaves a folder that the same command can use again.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::running::{Long, Running, is_alive, ranks_of, signal};
use super::{metrics, new_data, new_model, text, written};

/// Time limit from the signal to the exit.
const AT_ONCE: Duration = Duration::from_secs(2);
const SIGNALS: [(&str, i32); 2] = [("INT", 130), ("TERM", 143)];

struct Ground {
    folder: tempfile::TempDir,
    output: PathBuf,
}

impl Ground {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("runs/first");
        Self { folder, output }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn start(&self, model: &Path, data: &Path, more: &[&str]) -> Running {
        self.start_with(model, data, more, &[])
    }

    fn start_with(&self, model: &Path, data: &Path, more: &[&str], variables: &[(&str, &str)]) -> Running {
        let given = ["--model", text(model), "--data", text(data), "--output", text(&self.output)];
        let given = [&["train", "--device", "cpu", "--max-steps", "2"][..], &given, more].concat();
        let cache = self.path().join("cache");
        let variables = [&[("ZEROTH_CACHE", text(&cache))], variables].concat();
        Running::start_with(self.path(), &given, &variables)
    }

    /// One of two ranks of an external launcher; the other never starts.
    fn start_one_of_two(&self, rank: &str, model: &Path, data: &Path, more: &[&str]) -> Running {
        let id = format!("{}-{}", std::process::id(), self.path().display());
        let variables = [
            ("RANK", rank),
            ("LOCAL_RANK", rank),
            ("WORLD_SIZE", "2"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "29400"),
            ("TORCHELASTIC_RUN_ID", &id),
        ];
        self.start_with(model, data, more, &variables)
    }

    /// Runs the same command to its end.
    fn completes(&self, model: &Path, data: &Path, more: &[&str]) {
        let mut run = self.start(model, data, more);
        assert_eq!(run.code(), Some(0), "{}", run.said());
        assert_eq!(metrics(&self.output).len(), 2, "{}", run.said());
        assert!(self.output.join("model/config.json").is_file());
    }

    /// Unfinished files of the token cache.
    fn unfinished(&self) -> Vec<PathBuf> {
        let tokens = fs::read_dir(self.path().join("cache/tokens")).into_iter().flatten().flatten();
        let is_unfinished = |path: &PathBuf| path.to_string_lossy().contains(".unfinished-");
        tokens.map(|entry| entry.path()).filter(is_unfinished).collect()
    }
}

/// Sends a signal, and expects the run to exit.
fn stops(run: &mut Running, (name, code): (&str, i32)) {
    signal(run.launcher.id(), name);
    let (status, took) = run.end(Duration::from_secs(20));
    let said = run.said();
    assert_eq!(status.and_then(|status| status.code()), Some(code), "after {took:?}: {said}");
    assert!(took <= AT_ONCE, "{took:?}: {said}");
    let told: Vec<&str> = said.lines().filter(|line| line.contains("before the first step")).collect();
    assert_eq!(told.len(), 1, "{said}");
    assert!(told[0].starts_with(&format!("stopped by SIG{name} before the first step")), "{said}");
}

fn fifo(path: &Path) {
    let made = Command::new("mkfifo").arg(path).status().unwrap();
    assert!(made.success());
}

/// Whether a run has written its plan, the last file before loading.
fn is_planned(output: &Path) -> bool {
    output.join("plan.json").is_file()
}

#[test]
fn a_signal_during_tokenisation_removes_the_run() {
    for signal in SIGNALS {
        let ground = Ground::new();
        let model = super::root().join("examples/gsm8k/tiny-qwen3");
        let row = |row: u64| {
            let text = "The quick brown fox jumps over the lazy dog. ".repeat(4);
            serde_json::json!({ "text": format!("{row}: {text}") }).to_string()
        };
        let data = written(ground.path(), "rows.jsonl", &(0..300_000).map(row).collect::<Vec<_>>());
        let mut run = ground.start(&model, &data, &[]);
        run.wait_until(Duration::from_mins(1), "rows are tokenised", || !ground.unfinished().is_empty());
        stops(&mut run, signal);
        assert_eq!(ground.unfinished(), Vec::<PathBuf>::new());
        assert!(!ground.output.exists() && !ground.output.parent().unwrap().exists());
        // Fewer rows under the same name, so the command is the same.
        let data = written(ground.path(), "rows.jsonl", &(0..8).map(row).collect::<Vec<_>>());
        ground.completes(&model, &data, &[]);
    }
}

#[test]
fn a_signal_interrupts_a_blocked_read() {
    for signal in SIGNALS {
        let ground = Ground::new();
        let model = small_model(ground.path());
        let data = new_data(ground.path(), 8, 8, 64);
        // Like a file on an unreachable network: opening it blocks.
        let stalled = model.join("model.safetensors");
        fifo(&stalled);
        let mut run = ground.start(&model, &data, &[]);
        run.wait_until(Duration::from_mins(1), "rows are read", || {
            fs::read_dir(ground.path().join("cache/tokens")).is_ok_and(|mut files| {
                files.any(|file| file.unwrap().path().extension() == Some(OsStr::new("tokens")))
            })
        });
        std::thread::sleep(Duration::from_millis(100));
        stops(&mut run, signal);
        fs::remove_file(stalled).unwrap();
        ground.completes(&model, &data, &[]);
    }
}

#[test]
fn pipes_are_refused_as_data() {
    let ground = Ground::new();
    let model = small_model(ground.path());
    let pipe = ground.path().join("rows.jsonl");
    fifo(&pipe);
    let mut run = ground.start(&model, &pipe, &[]);
    assert_eq!(run.code(), Some(2), "{}", run.said());
    assert!(run.said().contains("rows.jsonl") && run.said().contains("file"), "{}", run.said());
}

#[test]
fn a_signal_during_loading_removes_the_run() {
    for signal in SIGNALS {
        let ground = Ground::new();
        let model = slow_model(ground.path());
        let data = new_data(ground.path(), 8, 8, 64);
        let output = ground.output.clone();
        let mut run = ground.start(&model, &data, &[]);
        run.wait_until(Duration::from_mins(1), "it is planned", || is_planned(&output));
        stops(&mut run, signal);
        assert!(!output.exists(), "{}", run.said());
        ground.completes(&small_model(ground.path()), &data, &[]);
    }
}

/// A model that takes a while to load in debug builds: weights are random.
fn slow_model(folder: &Path) -> PathBuf {
    new_model(folder, 512, 16, 2048, 32_000)
}

fn small_model(folder: &Path) -> PathBuf {
    new_model(folder, 64, 1, 64, 64)
}

/// A run of two ranks, one of which hangs while loading.
fn halted(ground: &Ground, model: &Path, data: &Path, more: &[&str]) -> (Running, Vec<u32>) {
    let mut run = ground.start(model, data, &[&["--ranks", "2"], more].concat());
    let launcher = run.launcher.id();
    run.wait_until(Duration::from_mins(1), "ranks start", || ranks_of(launcher).len() == 2);
    let ranks = run.ranks();
    signal(ranks[1], "STOP");
    (run, ranks)
}

#[test]
fn a_signal_during_loading_ends_all_ranks() {
    for sent in SIGNALS {
        let ground = Ground::new();
        let data = new_data(ground.path(), 8, 8, 64);
        let (mut run, ranks) = halted(&ground, &slow_model(ground.path()), &data, &[]);
        stops(&mut run, sent);
        assert!(!ranks.iter().any(|rank| is_alive(*rank)), "{}", run.said());
        assert!(!ground.output.exists(), "{}", run.said());
        // Another model in the same folder, so the command is the same.
        ground.completes(&small_model(ground.path()), &data, &["--ranks", "2"]);
    }
}

#[test]
fn a_run_killed_before_its_first_step_is_replaced() {
    let ground = Ground::new();
    let data = new_data(ground.path(), 8, 8, 64);
    let reports = ["--report-to", "tensorboard,csv"];
    let more = [&["--ranks", "2"], &reports[..]].concat();
    let mut run = ground.start(&slow_model(ground.path()), &data, &more);
    let metrics = ground.output.join("metrics.csv");
    run.wait_until(Duration::from_mins(1), "its files are there", || metrics.is_file());
    // Without this rank there is no first step.
    signal(run.ranks()[1], "STOP");
    signal(run.launcher.id(), "KILL");
    assert_eq!(run.end(Duration::from_secs(10)).0.and_then(|status| status.code()), None);
    assert!(is_planned(&ground.output), "{}", run.said());
    ground.completes(&small_model(ground.path()), &data, &more);
}

#[test]
fn a_signal_during_rendezvous_ends_external_ranks() {
    for sent in SIGNALS {
        let ground = Ground::new();
        let model = small_model(ground.path());
        let data = new_data(ground.path(), 8, 8, 64);
        let output = ground.output.clone();
        let mut first = ground.start_one_of_two("0", &model, &data, &[]);
        first.wait_until(Duration::from_mins(1), "it is planned", || is_planned(&output));
        std::thread::sleep(Duration::from_millis(100));
        stops(&mut first, sent);
        assert!(!output.exists(), "{}", first.said());
        // Rank 0 prints for the others.
        let mut second = ground.start_one_of_two("1", &model, &data, &[]);
        std::thread::sleep(Duration::from_millis(500));
        signal(second.launcher.id(), sent.0);
        let (status, took) = second.end(Duration::from_secs(20));
        assert_eq!(status.and_then(|status| status.code()), Some(sent.1), "{}", second.said());
        assert!(took <= AT_ONCE && second.said().is_empty(), "{took:?}: {}", second.said());
        ground.completes(&model, &data, &[]);
    }
}

#[test]
fn a_signal_before_resuming_keeps_checkpoints() {
    let ground = Ground::new();
    let model = small_model(ground.path());
    let data = new_data(ground.path(), 8, 8, 64);
    ground.completes(&model, &data, &["--ranks", "2"]);
    let kept = || {
        ["metrics.jsonl", "checkpoints/latest", "checkpoints/step-2/manifest.json", "model/config.json"]
            .map(|name| fs::read(ground.output.join(name)).unwrap())
    };
    let before = kept();
    let planned = || fs::metadata(ground.output.join("plan.json")).unwrap().modified().unwrap();
    let first_plan = planned();
    // The last of repeated flags wins.
    let more = ["--resume", "auto", "--max-steps", "4"];
    let mut run = ground.start_one_of_two("0", &model, &data, &more);
    run.wait_until(Duration::from_mins(1), "it is planned", || planned() > first_plan);
    std::thread::sleep(Duration::from_millis(100));
    stops(&mut run, ("TERM", 143));
    assert!(!run.said().contains("nothing was written"), "{}", run.said());
    assert!(before == kept());
    let mut run = ground.start(&model, &data, &[&["--ranks", "2"], &more[..]].concat());
    assert_eq!(run.code(), Some(0), "{}", run.said());
    assert_eq!(metrics(&ground.output).len(), 4);
}

#[test]
fn the_first_sigint_is_acknowledged() {
    let mut long = Long::start(1, &[]);
    signal(long.running.launcher.id(), "INT");
    assert_eq!(long.running.code(), Some(130), "{}", long.running.said());
    let said = long.running.said();
    assert_eq!(
        said.matches("finishing the step and saving a checkpoint; press Ctrl-C again to stop").count(),
        1,
        "{said}"
    );
}
