//! Long runs with saves: memory and file descriptors do not grow.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::cases;
use super::job::Job;

/// Memory and descriptors of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    /// Resident bytes, and the proportional share.
    rss: u64,
    pss: u64,
    descriptors: usize,
}

/// Allowed growth in bytes.
const GROWTH: u64 = 4 << 20;

fn held(process: u32) -> Option<Held> {
    let rollup = fs::read_to_string(format!("/proc/{process}/smaps_rollup")).ok()?;
    let bytes = |name: &str| -> Option<u64> {
        let line = rollup.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
    };
    let descriptors = fs::read_dir(format!("/proc/{process}/fd")).ok()?.count();
    Some(Held { rss: bytes("Rss:")?, pss: bytes("Pss:")?, descriptors })
}

fn processes(launcher: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).unwrap_or_default();
    std::iter::once(launcher).chain(list.split_whitespace().filter_map(|child| child.parse().ok())).collect()
}

fn steps_done(run: &Path) -> u64 {
    fs::read_to_string(run.join("metrics.jsonl")).map_or(0, |text| text.lines().count() as u64)
}

fn long_run(ranks: u32) {
    let last = u64::from(cases(600, 20_000));
    let (early, save) = (last / 20 + last / 20 % 2, last / 40);
    let job = Job::new();
    let run = job.path("long");
    let [steps, saves, ranks_typed] = [last, save, u64::from(ranks)].map(|number| number.to_string());
    let more =
        ["--max-steps", &steps, "--save-steps", &saves, "--ranks", &ranks_typed, "--logging-steps", "1000"];
    let mut launcher = Command::new(env!("CARGO_BIN_EXE_zeroth"))
        .args(job.arguments(&run, &more))
        .env("ZEROTH_CACHE", job.cache("long"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(fs::File::create(job.path("said")).unwrap())
        .spawn()
        .unwrap();
    let (mut first, mut latest): (Vec<Option<Held>>, Vec<Option<Held>>) = (Vec::new(), Vec::new());
    let mut measured = [0, 0];
    let status = loop {
        if let Some(status) = launcher.try_wait().unwrap() {
            break status;
        }
        let done = steps_done(&run);
        if done >= early && done < last {
            let now: Vec<Option<Held>> = processes(launcher.id()).into_iter().map(held).collect();
            // Exiting processes are ignored.
            if now.len() == if ranks == 1 { 1 } else { ranks as usize + 1 } && now.iter().all(Option::is_some)
            {
                measured[1] = done;
                latest.clone_from(&now);
                if first.is_empty() {
                    (first, measured[0]) = (now, done);
                }
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    assert!(status.success(), "{}", fs::read_to_string(job.path("said")).unwrap());
    assert_eq!(steps_done(&run), last);
    assert!(measured[1] > measured[0] && measured[1] > last / 2, "measured at {measured:?}");
    println!(
        "{last} steps on {ranks} rank(s), saved every {save}; measured after {} and {} steps",
        measured[0], measured[1]
    );
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    for (process, (first, latest)) in first.iter().flatten().zip(latest.iter().flatten()).enumerate() {
        let name = if ranks == 1 || process > 0 { "rank" } else { "launcher" };
        println!(
            "  {name:<8} RSS {:.2} -> {:.2} MiB, PSS {:.2} -> {:.2} MiB, descriptors {} -> {}",
            mib(first.rss),
            mib(latest.rss),
            mib(first.pss),
            mib(latest.pss),
            first.descriptors,
            latest.descriptors
        );
        // Not PSS, which also grows when another process sharing pages exits.
        assert!(latest.rss < first.rss + GROWTH, "RSS grows: {first:?} {latest:?}");
        // A save may be in progress at either time, with its file and folder open.
        assert!(latest.descriptors <= first.descriptors + 3, "descriptors grow: {first:?} {latest:?}");
    }
}

#[test]
fn a_long_run_on_one_rank_does_not_grow() {
    long_run(1);
}

#[test]
fn a_long_run_on_two_ranks_does_not_grow() {
    long_run(2);
}
