//! Memory cgroups: a run fits into plan plus overhead, and is refused below.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use super::{is_full, json, new_data, new_model, text, train_on};
use crate::common::zeroth;

/// A cgroup with a memory limit; removed on drop.
struct Group(PathBuf);

impl Group {
    /// `None` if it cannot be created here.
    fn limited(bytes: u64) -> Option<Self> {
        Self::make(bytes)
            .map_err(|why| println!("skipped: {why} (root may: systemd-run --scope -p Delegate=yes)"))
            .ok()
    }

    fn make(bytes: u64) -> Result<Self, String> {
        let membership = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        // Version 1 names the controller, version 2 does not.
        let path = |controller: &str| {
            membership.lines().find_map(|line| {
                let (names, path) = line.split_once(':')?.1.split_once(':')?;
                names.split(',').any(|name| name == controller).then_some(path.trim_start_matches('/'))
            })
        };
        let mounted = Path::new("/sys/fs/cgroup");
        let (parent, limit) = match (path("memory"), path("")) {
            (Some(path), _) => (mounted.join("memory").join(path), "memory.limit_in_bytes"),
            (None, Some(path)) => (mounted.join(path), "memory.max"),
            (None, None) => return Err("there is no control group for memory".to_owned()),
        };
        let name = format!("zeroth-train-{}-{bytes}", std::process::id());
        let group = Self(parent.join(name));
        fs::create_dir(&group.0).map_err(|error| format!("cannot make a control group: {error}"))?;
        fs::write(group.0.join(limit), bytes.to_string())
            .map_err(|error| format!("cannot limit a control group: {error}"))?;
        // Disable swap; a machine without it has no such file.
        let _ = fs::write(group.0.join("memory.swap.max"), "0");
        let _ = fs::write(group.0.join("memory.memsw.limit_in_bytes"), bytes.to_string());
        Ok(group)
    }

    /// Trains inside the cgroup.
    fn train(&self, model: &Path, data: &Path, run: &Path, more: &[&str]) -> Output {
        let train = ["train", "--device", "cpu", "--shuffle", "false", "--model", text(model)];
        self.zeroth(&[&train[..], &["--data", text(data), "--output", text(run)], more].concat())
    }

    /// Runs a command inside the cgroup.
    fn zeroth(&self, arguments: &[&str]) -> Output {
        Command::new("/bin/sh")
            .args(["-c", "echo $$ > \"$GROUP/cgroup.procs\" && exec \"$0\" \"$@\""])
            .arg(env!("CARGO_BIN_EXE_zeroth"))
            .args(arguments)
            .env("GROUP", &self.0)
            .env("ZEROTH_CACHE", super::cache())
            .output()
            .unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The kernel takes a moment to release exited processes.
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Planned bytes of all ranks: arenas and overhead.
fn planned(run: &Path) -> [u64; 2] {
    let plan = json(&run.join("plan.json"));
    let ranks = plan["ranks"].as_u64().unwrap();
    let total = |kind: &str| plan[kind]["total"].as_u64().unwrap();
    [ranks * (total("device_bytes") + total("host_bytes")), ranks * total("overhead_bytes")]
}

/// Every second split of a model, the others of the next; all of them with `ZEROTH_FULL=1`.
#[test]
fn runs_fit_into_a_cgroup_of_plan_plus_overhead() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let models = [(64, 2, 128, 256), (512, 2, 1024, 8000), (128, 24, 256, 512)];
    for (number, (hidden, blocks, feed_forward, vocabulary)) in models.into_iter().enumerate() {
        let folder = folder.join(number.to_string());
        fs::create_dir(&folder).unwrap();
        let model = new_model(&folder, hidden, blocks, feed_forward, vocabulary);
        let data = new_data(&folder, 24, 64, vocabulary);
        let splits = [("1", "1"), ("1", "8"), ("2", "1"), ("4", "1")].into_iter().enumerate();
        let due = splits.filter(|(at, _)| is_full() || (number + at).is_multiple_of(2));
        for (_, (ranks, threads)) in due {
            let flags = ["--ranks", ranks, "--threads-per-rank", threads, "--deepspeed", "zero3"];
            let flags = [&flags[..], &["--max-steps", "3"]].concat();
            let run = |name: &str| folder.join(format!("{name}-{ranks}-{threads}"));
            train_on(&model, &data, &run("free"), &flags).assert_done();
            let [arenas, overhead] = planned(&run("free"));
            let what = format!("model {number}, {ranks} ranks, {arenas} bytes and {overhead}");
            // The available memory is less by what the first process holds when it probes.
            let Some(group) = Group::limited(arenas + overhead + (4 << 20)) else { return };
            let ended = group.train(&model, &data, &run("limited"), &flags);
            let said = String::from_utf8_lossy(&ended.stderr);
            assert_eq!(ended.status.code(), Some(0), "{what}: {said}");
            let Some(group) = Group::limited(arenas + overhead / 2) else { return };
            let ended = group.train(&model, &data, &run("refused"), &flags);
            let said = String::from_utf8_lossy(&ended.stderr);
            // Choices may fit where the earlier plan does not; then the plan is smaller.
            if ended.status.code() == Some(0) {
                let [smaller, beside] = planned(&run("refused"));
                assert!(smaller + beside <= arenas + overhead / 2, "{what}: {said}");
            } else {
                assert_eq!(ended.status.code(), Some(3), "{what}: {said}");
                assert!(said.contains("are missing"), "{what}: {said}");
            }
        }
    }
}

#[test]
fn host_memory_budgets_include_overhead() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = new_model(folder, 64, 2, 128, 256);
    let data = new_data(folder, 24, 32, 256);
    let config = r#"{"zero_optimization": {"stage": 2}, "zeroth": {"recompute": "none"}}"#;
    let flags = ["--max-steps", "2", "--deepspeed", config, "--per-device-train-batch-size", "1"];
    let train =
        |name: &str, more: &[&str]| train_on(&model, &data, &folder.join(name), &[&flags[..], more].concat());
    let free = train("free", &[]);
    free.assert_done();
    assert!(free.stderr.lines().any(|line| line.starts_with("overhead ")), "{}", free.stderr);
    let [arena, overhead] = planned(&folder.join("free"));
    assert!(overhead > 4_000_000, "{overhead}");
    train("held", &["--host-memory", &(arena + overhead).to_string()]).assert_done();
    let refused = train("refused", &["--host-memory", &(arena + overhead - 1).to_string()]);
    assert_eq!(refused.code, 3, "{}", refused.stderr);
    assert!(refused.stderr.contains("beside the plan"), "{}", refused.stderr);
}

/// Runs a command under ever higher limits: it is refused with the process named, until it fits; it is never killed.
fn is_refused_until_it_fits(what: &str, command: &dyn Fn(u64) -> Vec<String>) {
    let mut codes = Vec::new();
    // The model takes 29 MiB; far below that, the process itself does not begin.
    for mebibytes in (28..=64).step_by(if is_full() { 1 } else { 6 }) {
        let Some(group) = Group::limited(mebibytes << 20) else { return };
        let arguments = command(mebibytes);
        let ended = group.zeroth(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        let said = String::from_utf8_lossy(&ended.stderr);
        let code = ended.status.code();
        assert!(matches!(code, Some(0 | 3)), "{what} in {mebibytes} MiB: {:?}: {said}", ended.status);
        if code == Some(3) {
            assert!(said.contains("the process itself"), "{what} in {mebibytes} MiB: {said}");
        }
        codes.extend(code);
    }
    assert!(
        codes.first() == Some(&3) && codes.last() == Some(&0) && codes.is_sorted_by(|a, b| a >= b),
        "{what}: {codes:?}"
    );
}

#[test]
fn generate_and_distill_cache_count_the_process_itself() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    let shape = [
        "--hidden",
        "512",
        "--layers",
        "2",
        "--heads",
        "4",
        "--intermediate-size",
        "1024",
        "--vocab-size",
        "8000",
    ];
    let made = zeroth(&[&["init", "--family", "llama", "--output", text(&model)], &shape[..]].concat());
    made.assert_done();
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    is_refused_until_it_fits("generate", &|_| {
        let generate = ["generate", "--device", "cpu", "--model", text(&model), "--prompt-ids", "1,2,3"];
        words(&[&generate[..], &["--max-new-tokens", "8"]].concat())
    });
    let data = new_data(folder.path(), 24, 64, 8000);
    is_refused_until_it_fits("distill cache", &|mebibytes| {
        let output = folder.path().join(mebibytes.to_string());
        let teacher =
            ["distill", "cache", "--device", "cpu", "--teacher", text(&model), "--data", text(&data)];
        words(&[&teacher[..], &["--top-k", "4", "--output", text(&output)]].concat())
    });
}
