//! Resident memory of ranks against the plan: arenas plus a stated overhead.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::{is_full, json, metrics, new_data, new_model, text};

/// Bytes of a rank beside its arena: 32 MiB. Measured: 17 to 30 MB, most of which are pages of the binary (counted by
/// their share, so a lone rank has the most), then rows, the lowered program, stacks of threads, the region through which
/// it sends, and, while weights are read or written, pieces of 2^19 elements: twice as f32 and once rounded.
const OVERHEAD: u64 = 32 << 20;
/// Shared memory through which a rank sends. All ranks hold all regions, so that each counts as one; once the others have
/// left, all of them count as the last one's.
const REGION: u64 = 8 << 20;

/// Memory of a process: its own, and its proportional share of pages that several may hold, of files and of shared memory.
#[derive(Clone, Copy)]
struct Resident {
    own: u64,
    share: u64,
}

fn resident(process: u32) -> Option<Resident> {
    let text = fs::read_to_string(format!("/proc/{process}/smaps_rollup")).ok()?;
    let bytes = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        Some(1024 * line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?)
    };
    let (all, own) = (bytes("Pss:")?, bytes("Pss_Anon:")?);
    Some(Resident { own, share: all - own })
}

/// What each of the ranks that are there holds. Pages that several may hold count for all of them alike: the system counts
/// them for whoever touched them first, and how many that is at one moment depends on which rank was let run.
fn held(ranks: &[(u32, Resident)]) -> Vec<(u32, u64)> {
    let share = ranks.iter().map(|(_, resident)| resident.share).sum::<u64>() / ranks.len().max(1) as u64;
    ranks.iter().map(|(process, resident)| (*process, resident.own + share)).collect()
}

/// The child processes of a process.
fn children(process: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap_or_default();
    text.split_whitespace().map(|child| child.parse().unwrap()).collect()
}

/// Peak memory of each rank, while all were alive and overall; and the peak of their sum.
#[derive(Default)]
struct Peaks {
    sum: u64,
    together: BTreeMap<u32, u64>,
    ever: BTreeMap<u32, u64>,
}

fn raise(peaks: &mut BTreeMap<u32, u64>, found: &[(u32, u64)]) {
    for (process, bytes) in found {
        let known = peaks.entry(*process).or_default();
        *known = (*known).max(*bytes);
    }
}

/// Trains, and samples the memory of the ranks.
fn watched(model: &Path, data: &Path, run: &Path, ranks: usize) -> Peaks {
    let mut launcher = Command::new(env!("CARGO_BIN_EXE_zeroth"))
        .args([
            "train",
            "--device",
            "cpu",
            "--model",
            text(model),
            "--data",
            text(data),
            "--output",
            text(run),
        ])
        .args([
            "--ranks",
            &ranks.to_string(),
            "--deepspeed",
            "zero3",
            "--max-steps",
            "3",
            "--logging-steps",
            "1",
        ])
        .args(["--per-device-train-batch-size", "2"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut peaks = Peaks::default();
    let status = loop {
        if let Some(status) = launcher.try_wait().unwrap() {
            break status;
        }
        let processes = if ranks == 1 { vec![launcher.id()] } else { children(launcher.id()) };
        let look = || -> Vec<(u32, Resident)> {
            processes.iter().filter_map(|process| Some((*process, resident(*process)?))).collect()
        };
        let found = held(&look());
        raise(&mut peaks.ever, &found);
        // Sample again: none exited during the first sampling.
        if look().len() == ranks && found.len() == ranks {
            raise(&mut peaks.together, &found);
            peaks.sum = peaks.sum.max(found.iter().map(|(_, bytes)| bytes).sum());
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert!(status.success());
    peaks
}

/// On 4 ranks with `ZEROTH_FULL=1`.
#[test]
fn resident_memory_matches_the_plan() {
    let folder = tempfile::tempdir().unwrap();
    let model = new_model(folder.path(), 512, 4, 2048, 16_000);
    let data = new_data(folder.path(), 24, 32, 16_000);
    for ranks in [1, 2, 4].into_iter().filter(|ranks| is_full() || *ranks < 4) {
        let run = folder.path().join(ranks.to_string());
        let peaks = watched(&model, &data, &run, ranks);
        let plan = json(&run.join("plan.json"))["device_bytes"]["total"].as_u64().unwrap();
        assert!(plan > 100_000_000, "{plan}");
        let said = metrics(&run)[2]["host_bytes_peak"].as_u64().unwrap();
        let over =
            |peaks: &BTreeMap<u32, u64>| peaks.values().map(|most| *most as i64 - plan as i64).collect();
        let (together, ever): (Vec<i64>, Vec<i64>) = (over(&peaks.together), over(&peaks.ever));
        let what = format!(
            "{ranks} ranks, plan {plan}; beside it {together:?}, ever {ever:?}, in all {}; metrics {said}",
            peaks.sum
        );
        println!("{what}");
        assert_eq!(together.len(), ranks, "{what}");
        let everything = OVERHEAD + (ranks as u64 - 1) * REGION;
        assert!(together.iter().all(|over| *over <= OVERHEAD as i64), "{what}");
        assert!(ever.iter().all(|over| *over <= everything as i64), "{what}");
        assert!(peaks.sum <= ranks as u64 * (plan + OVERHEAD), "{what}");
        assert!(said <= plan + OVERHEAD, "{what}");
        // The plan is not a overestimate: all of the arena but what padding and rare paths leave untouched.
        let least = plan as f64 * 0.95;
        assert!(peaks.together.into_values().chain([said]).all(|most| most as f64 >= least), "{what}");
    }
}
