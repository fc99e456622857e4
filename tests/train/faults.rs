//! Full and read-only disks, and restarted ranks: clear errors, and no saved state is lost.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::running::{Long, Running, signal};
use super::teacher_caches::{done, long_cache, many_rows};
use super::{golden, metrics, new_data, new_model, text, train, train_on};
use crate::common::zeroth;

/// A filesystem of its own, in memory; `None` where this user may not mount one.
struct Small {
    folder: tempfile::TempDir,
}

impl Small {
    fn mount(bytes: u64) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let size = format!("size={bytes}");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs", text(folder.path())]).output();
        if mounted.is_ok_and(|output| output.status.success()) {
            return Some(Self { folder });
        }
        println!("skipped: mounting a small filesystem needs root (sudo -E cargo test -p zeroth-cli faults)");
        None
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn again(&self, options: &str) {
        let done = Command::new("mount").args(["-o", options, text(self.path())]).status().unwrap();
        assert!(done.success());
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l", text(self.path())]).status();
    }
}

/// Starts a run whose checkpoints take about 1.4 MB each.
fn start(folder: &Path, output: &Path, more: &[&str]) -> Running {
    let model = new_model(folder, 64, 3, 128, 256);
    let data = new_data(folder, 50, 24, 256);
    let arguments = [
        "train",
        "--device",
        "cpu",
        "--model",
        text(&model),
        "--data",
        text(&data),
        "--output",
        text(output),
        "--ranks",
        "2",
        "--deepspeed",
        "zero3",
        "--max-steps",
        "4000",
        "--save-steps",
        "4000",
        "--threads-per-rank",
        "1",
    ];
    Running::start(folder, &[&arguments, more].concat())
}

/// Asks for a save and waits for it.
fn save(run: &mut Running, output: &Path) -> PathBuf {
    fs::write(output.join("save-now"), "").unwrap();
    let latest = output.join("checkpoints/latest");
    run.wait_until(Duration::from_secs(30), "it has saved", || latest.exists());
    output.join("checkpoints").join(fs::read_to_string(latest).unwrap().trim())
}

#[test]
fn a_full_disk_keeps_the_last_checkpoint() {
    let Some(small) = Small::mount(8 << 20) else { return };
    let folder = tempfile::tempdir().unwrap();
    let output = small.path().join("run");
    let mut run = start(folder.path(), &output, &[]);
    run.wait_for_steps(&output, 2);
    let kept = save(&mut run, &output);
    // Somebody else fills the disk: all but 600 kB.
    let free: u64 = {
        let told = Command::new("df").args(["--output=avail", "-B1", text(small.path())]).output().unwrap();
        String::from_utf8(told.stdout).unwrap().lines().nth(1).unwrap().trim().parse().unwrap()
    };
    fs::write(small.path().join("other"), vec![1; free as usize - 600_000]).unwrap();
    fs::write(output.join("save-now"), "").unwrap();
    assert_eq!(run.code(), Some(1), "{}", run.said());
    let said = run.said();
    for words in ["cannot save step", "disk full", "needs", "--resume auto"] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let verified = zeroth(&["checkpoint", "verify", text(&kept)]);
    assert_eq!(verified.code, 0, "{}", verified.stderr);
    let names: Vec<String> = fs::read_dir(output.join("checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(names.len(), 2, "nothing half-written is left: {names:?}");
    // With room again, the run goes on.
    fs::remove_file(small.path().join("other")).unwrap();
    let mut run = start(folder.path(), &output, &["--resume", "auto"]);
    let step: usize = kept.file_name().unwrap().to_str().unwrap()["step-".len()..].parse().unwrap();
    let said = folder.path().join("said");
    run.wait_until(Duration::from_secs(30), "it goes on", || {
        fs::read_to_string(&said).unwrap().contains(&format!("after {step} of 4000 steps"))
    });
}

#[test]
fn a_read_only_filesystem_is_reported() {
    let Some(small) = Small::mount(8 << 20) else { return };
    let output = small.path().join("run");
    train_on(&golden("qwen3-tied"), &golden("qwen3-tied").join("data.jsonl"), &output, &["--max-steps", "2"])
        .assert_done();
    small.again("remount,ro");
    let again = train_on(
        &golden("qwen3-tied"),
        &golden("qwen3-tied").join("data.jsonl"),
        &small.path().join("new"),
        &["--max-steps", "2"],
    );
    assert_eq!(again.code, 2, "{}", again.stderr);
    assert!(again.stderr.contains("Read-only file system"), "{}", again.stderr);
}

/// Takes all that is left of the disk.
fn fill(small: &Small) -> PathBuf {
    let path = small.path().join("other");
    let mut file = fs::File::create(&path).unwrap();
    for size in [1 << 20, 1 << 12] {
        while std::io::Write::write_all(&mut file, &vec![1; size]).is_ok() {}
    }
    path
}

#[test]
fn a_full_disk_holds_up_metrics_and_not_the_run() {
    let Some(small) = Small::mount(8 << 20) else { return };
    let folder = tempfile::tempdir().unwrap();
    let output = small.path().join("run");
    let mut run = start(folder.path(), &output, &["--report-to", "csv"]);
    run.wait_for_steps(&output, 2);
    let other = fill(&small);
    let said = folder.path().join("said");
    let notes = || fs::read_to_string(&said).unwrap().matches("cannot be written: No space left").count();
    run.wait_until(Duration::from_mins(1), "it cannot write metrics", || notes() > 0);
    fs::remove_file(other).unwrap();
    let lines = || fs::read_to_string(output.join("metrics.jsonl")).unwrap().lines().count();
    let before = lines();
    run.wait_for_steps(&output, before + 20);
    signal(run.launcher.id(), "TERM");
    assert_eq!(run.code(), Some(143), "{}", run.said());
    let steps: Vec<u64> = metrics(&output).iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=steps.len() as u64).collect::<Vec<_>>(), "each step once");
    assert_eq!(notes(), 1, "{}", run.said());
}

#[test]
fn a_run_that_a_full_disk_ends_says_that_it_has_failed() {
    let Some(small) = Small::mount(8 << 20) else { return };
    let folder = tempfile::tempdir().unwrap();
    let output = small.path().join("run");
    let mut run = start(folder.path(), &output, &[]);
    run.wait_for_steps(&output, 2);
    let status = output.join("status.json");
    run.wait_until(Duration::from_secs(30), "it is training", || {
        fs::read_to_string(&status).is_ok_and(|text| text.contains("\"state\":\"training\""))
    });
    fill(&small);
    fs::write(output.join("save-now"), "").unwrap();
    assert_eq!(run.code(), Some(1), "{}", run.said());
    assert!(run.said().contains("disk full") && run.said().contains("--resume auto"), "{}", run.said());
    assert_eq!(super::json(&status)["state"], "failed");
}

#[test]
fn a_curve_that_cannot_be_written_is_a_note() {
    let Some(small) = Small::mount(8 << 20) else { return };
    let folder = tempfile::tempdir().unwrap();
    let output = small.path().join("run");
    let config = r#"{"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": false}}"#;
    let config = super::written(folder.path(), "ds.json", &[config]);
    let flags = ["--deepspeed", text(&config), "--save-steps", "0", "--max-steps", "200"];
    let mut run = start(folder.path(), &output, &flags);
    run.wait_for_steps(&output, 2);
    fill(&small);
    assert_eq!(run.code(), Some(0), "{}", run.said());
    assert!(run.said().contains("note: the loss curve was not written: "), "{}", run.said());
}

#[test]
fn an_unwritable_output_is_named() {
    let Some(small) = Small::mount(1 << 20) else { return };
    small.again("remount,ro");
    let (model, to) = (golden("qwen3-tied"), small.path().join("new"));
    let data = model.join("data.jsonl");
    let refused = |ended: &crate::common::Ended| {
        let words =
            format!("cannot write to --output {}: {}: Read-only", to.display(), small.path().display());
        assert!(ended.code == 2 && ended.stderr.contains(&words), "{}", ended.stderr);
        assert!(!ended.stderr.contains("cache in"), "{}", ended.stderr);
    };
    refused(&train_on(&model, &data, &to, &["--max-steps", "1"]));
    let cache = ["distill", "cache", "--device", "cpu", "--teacher", text(&model), "--data", text(&data)];
    refused(&zeroth(&[&cache[..], &["--top-k", "4", "--output", text(&to)]].concat()));
}

#[test]
fn a_model_that_does_not_fit_the_disk_is_refused() {
    let Some(small) = Small::mount(1 << 20) else { return };
    let to = small.path().join("a/new");
    let sizes = ["--hidden", "64", "--layers", "2", "--heads", "4", "--intermediate-size", "128"];
    let rest = ["--family", "llama", "--vocab-size", "20000", "--output", text(&to)];
    let ended = zeroth(&[&["init"], &sizes[..], &rest].concat());
    assert_eq!(ended.code, 3, "{}", ended.stderr);
    for words in ["needs 5.", "but the disk has 1", "--output on a larger disk"] {
        assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
    }
    assert_eq!(fs::read_dir(small.path()).unwrap().count(), 0, "no empty folder is left");
}

#[test]
fn a_limit_of_open_files_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    let model = golden("qwen3-tied");
    let ended = Command::new("sh")
        .args([
            "-c",
            "ulimit -n 16; exec \"$0\" \"$@\"",
            env!("CARGO_BIN_EXE_zeroth"),
            "train",
            "--device",
            "cpu",
        ])
        .args(["--model", text(&model), "--data", text(&model.join("data.jsonl")), "--ranks", "2"])
        .args(["--max-steps", "1", "--output", text(&folder.path().join("run"))])
        .env("ZEROTH_CACHE", super::cache())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success() && !said.contains("panicked"), "{said}");
    assert!(said.contains("Too many open files"), "{said}");
    assert!(said.contains("open files of a process to 16") && said.contains("`ulimit -n 4096`"), "{said}");
}

#[test]
fn fifos_with_the_names_of_a_runs_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let resumed = |steps| train("qwen3-tied", &run, &["--max-steps", steps, "--resume", "auto"]);
    resumed("1").assert_done();
    for name in ["metrics.jsonl", ".lock", "logs/rank-0.log", "status.json", "events.jsonl"] {
        let (path, aside) = (run.join(name), folder.path().join("aside"));
        let is_there = path.exists();
        if is_there {
            fs::rename(&path, &aside).unwrap();
        }
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let ended = resumed("2");
        let words = format!("{} is a FIFO, but a run creates a file of that name", path.display());
        assert!(ended.code == 2 && ended.stderr.contains(&words), "{}", ended.stderr);
        fs::remove_file(&path).unwrap();
        if is_there {
            fs::rename(&aside, &path).unwrap();
        }
    }
    resumed("2").assert_done();
}

#[test]
fn a_small_disk_is_refused_before_training() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--max-steps", "40", "--save-steps", "1", "--disk-space", "1MB"];
    let ended = train("qwen3-tied", &folder.path().join("run"), &flags);
    assert_eq!(ended.code, 3, "{}", ended.stderr);
    for words in ["40 checkpoints", "--disk-space gives 1 MB", "--save-total-limit 2"] {
        assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
    }
    assert!(!folder.path().join("run").exists());
}

#[test]
fn missing_or_mismatched_weights_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("model");
    fs::create_dir(&broken).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(golden("qwen3-tied").join(name), broken.join(name)).unwrap();
    }
    let data = golden("qwen3-tied").join("data.jsonl");
    let config = fs::read_to_string(broken.join("config.json")).unwrap();
    let mut wider: serde_json::Value = serde_json::from_str(&config).unwrap();
    wider["intermediate_size"] = (wider["intermediate_size"].as_u64().unwrap() + 8).into();
    fs::write(broken.join("config.json"), wider.to_string()).unwrap();
    let ended = train_on(&broken, &data, &folder.path().join("run"), &[]);
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    assert!(ended.stderr.contains("mlp.down_proj.weight"), "{}", ended.stderr);
    fs::write(broken.join("config.json"), config).unwrap();
    let index =
        r#"{"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}"#;
    fs::remove_file(broken.join("model.safetensors")).unwrap();
    fs::write(broken.join("model.safetensors.index.json"), index).unwrap();
    let ended = train_on(&broken, &data, &folder.path().join("run"), &[]);
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    assert!(ended.stderr.contains("model-00001-of-00002.safetensors"), "{}", ended.stderr);
}

#[test]
fn a_dead_rank_is_restarted_from_the_newest_checkpoint() {
    let mut long = Long::start(2, &["--max-steps", "60", "--save-steps", "5", "--max-restarts", "2"]);
    long.running.wait_for_steps(&long.output, 8);
    signal(long.running.ranks()[1], "KILL");
    assert_eq!(long.running.code(), Some(0), "{}", long.running.said());
    let said = long.running.said();
    assert!(said.contains("restarting (1 of 2) from step "), "{said}");
    let steps: Vec<u64> = metrics(&long.output).iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=60).collect::<Vec<u64>>(), "each step appears once");
    assert!(long.output.join("model/model.safetensors").exists());
}

#[test]
fn restarts_are_limited() {
    let mut long = Long::start(2, &["--save-steps", "1", "--save-total-limit", "2", "--max-restarts", "1"]);
    let run = &mut long.running;
    let before = run.ranks();
    signal(before[0], "KILL");
    let begun = Instant::now();
    while run.ranks().len() < 2 || run.ranks().iter().any(|rank| before.contains(rank)) {
        assert!(begun.elapsed() < Duration::from_secs(30), "{}", run.said());
        std::thread::sleep(Duration::from_millis(20));
    }
    signal(run.ranks()[0], "KILL");
    assert_eq!(run.code(), Some(1), "{}", run.said());
    assert_eq!(run.said().matches("restarting").count(), 1, "{}", run.said());
}

#[test]
fn a_full_disk_leaves_what_is_cached_of_a_teacher() {
    let Some(small) = Small::mount(16 << 20) else { return };
    let folder = tempfile::tempdir().unwrap();
    let (teacher, rows) = (super::distillation::teacher(), many_rows(folder.path(), 6_000));
    let cache = small.path().join("cache");
    let command = long_cache(&teacher, &rows, &cache);
    let mut running = Running::start(folder.path(), &command);
    running.wait_until(Duration::from_mins(1), "some tokens are done", || done(&cache) > 0);
    let used = fs::metadata(cache.join("records.bin")).unwrap().len();
    small.again(&format!("remount,size={}", used + (64 << 10)));
    assert_eq!(running.launcher.wait().unwrap().code(), Some(1), "{}", running.said());
    assert!(running.said().contains("the same command continues"), "{}", running.said());
    let tokens = done(&cache);
    assert!(tokens > 0 && tokens < 180_000, "{tokens}");
    // Too small for the rest: refused before anything is computed.
    let ended = zeroth(&command);
    assert!(ended.code == 3 && ended.stderr.contains("are free on the disk"), "{}", ended.stderr);
    small.again("remount,size=16m");
    let ended = zeroth(&command);
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert_eq!(done(&cache), 180_000);
}
