//! Several hosts over MPI give the bits of one host with the same groups: golden models, stages and layouts of ranks.
//!
//! `ZEROTH_FULL=1` runs every model at every stage over both libraries.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::mpi_jobs::{LAUNCHERS, command, of_golden, outcome, run};
use super::{is_full, json, text, train, written};
use crate::namespaces::Hosts;

/// A golden model and how it is trained.
struct Kind {
    model: &'static str,
    flags: &'static [&'static str],
    /// The file of its exported weights.
    weights: &'static str,
}

const DENSE: Kind = Kind { model: "llama-one-kv-head", flags: &[], weights: "model.safetensors" };
const LORA: Kind =
    Kind { model: "qwen3-tied", flags: &["--train-type", "lora"], weights: "adapter_model.safetensors" };
const MOE: Kind = Kind { model: "moe/qwen3-moe-normalized", flags: &[], weights: "model.safetensors" };
const T5: Kind = Kind { model: "t5/t5-gated-silu", flags: &[], weights: "model.safetensors" };

/// Flags of all runs. In fp32 the order of sums shows in every step.
const FLAGS: [&str; 10] = [
    "--fp32",
    "true",
    "--learning-rate",
    "3e-3",
    "--max-steps",
    "4",
    "--per-device-train-batch-size",
    "2",
    "--gradient-accumulation-steps",
    "2",
];

/// Where ranks are, and the groups that follow: a host's ranks, or single ones where hosts differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Layout {
    slots: &'static str,
    hosts: usize,
    ranks: u64,
    group: u64,
}

const TWO_BY_TWO: Layout = Layout { slots: "2,2", hosts: 2, ranks: 4, group: 2 };
const TWO_BY_ONE: Layout = Layout { slots: "1,1", hosts: 2, ranks: 2, group: 1 };
const THREE_BY_ONE: Layout = Layout { slots: "1,1,1", hosts: 3, ranks: 3, group: 1 };
const UNEQUAL: Layout = Layout { slots: "2,1", hosts: 2, ranks: 3, group: 1 };

/// A config of a stage. Small parameters are sharded too.
fn config(folder: &Path, stage: u64, group: Option<u64>) -> PathBuf {
    let mut config = serde_json::json!({
        "zero_optimization": { "stage": stage, "stage3_param_persistence_threshold": 0 },
    });
    if let Some(group) = group {
        config["zeroth"] = serde_json::json!({ "sum_group": group });
    }
    let name = format!("stage-{stage}-{}.json", group.unwrap_or(0));
    written(folder, &name, &[config.to_string()])
}

type Outcome = (Vec<String>, Vec<u8>);

/// Runs on one host, each done once.
struct OneHost {
    folder: tempfile::TempDir,
    done: BTreeMap<(&'static str, u64, u64, u64), Outcome>,
}

impl OneHost {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), done: BTreeMap::new() }
    }

    fn outcome(&mut self, kind: &Kind, stage: u64, ranks: u64, group: u64) -> &Outcome {
        let folder = self.folder.path();
        self.done.entry((kind.model, stage, ranks, group)).or_insert_with(|| {
            let output = folder.join(format!("{}-{stage}-{ranks}-{group}", kind.model.replace('/', "-")));
            let config = config(folder, stage, Some(group));
            let ranks = ranks.to_string();
            let flags = ["--ranks", &ranks, "--threads-per-rank", "1", "--deepspeed", text(&config)];
            train(kind.model, &output, &[&flags[..], kind.flags, &FLAGS].concat()).assert_done();
            outcome(&output, kind.weights)
        })
    }
}

/// Trains on hosts and compares with one host.
fn compare(one: &mut OneHost, hosts: &Hosts, launcher: &str, layout: Layout, kind: &Kind, stage: u64) {
    let what = format!("{launcher}, {}, {}, stage {stage}", layout.slots, kind.model);
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    let config = config(folder.path(), stage, None);
    let flags = [&["--deepspeed", text(&config)][..], kind.flags, &FLAGS].concat();
    let said =
        run(folder.path(), command(hosts, launcher, layout.slots, &of_golden(kind.model, &output, &flags)));
    assert!(!said.contains("panicked"), "{what}: {said}");
    let found = outcome(&output, kind.weights);
    let expected = one.outcome(kind, stage, layout.ranks, layout.group);
    assert_eq!(found.0, expected.0, "{what}");
    assert!(found.1 == expected.1, "{what}: other weights");
}

#[test]
fn hosts_over_mpi_give_the_bits_of_one_host() {
    let kinds = [DENSE, LORA, MOE, T5];
    let mut one = OneHost::new();
    let mut done = 0;
    for (number, launcher) in LAUNCHERS.iter().enumerate() {
        let Some(hosts) = Hosts::up(2, &[launcher]) else { continue };
        for (kind, stage) in kinds.iter().zip([3, 2, 1, 0]).enumerate().flat_map(|(at, (kind, stage))| {
            let stages = if is_full() { vec![0, 1, 2, 3] } else { vec![stage] };
            let here = is_full() || at % 2 == number;
            stages.into_iter().filter(move |_| here).map(move |stage| (kind, stage))
        }) {
            compare(&mut one, &hosts, launcher, TWO_BY_TWO, kind, stage);
            done += 1;
        }
    }
    println!("{done} runs on two hosts of two ranks have the bits of one host");
}

#[test]
fn other_layouts_of_ranks_give_the_bits_of_one_host() {
    let mut one = OneHost::new();
    for launcher in LAUNCHERS {
        let Some(hosts) = Hosts::up(3, &[launcher]) else { continue };
        for layout in [TWO_BY_ONE, THREE_BY_ONE, UNEQUAL] {
            assert!(layout.hosts <= 3);
            let stages = if is_full() { 0..4 } else { 3..4 };
            for stage in stages {
                compare(&mut one, &hosts, launcher, layout, &DENSE, stage);
            }
        }
    }
}

#[test]
fn srun_gives_the_bits_of_one_host() {
    let Some(hosts) = Hosts::up(2, &["mpich", "slurm"]) else { return };
    hosts.run("slurm", &[]);
    let srun = Layout { slots: "-N2 -n4 --ntasks-per-node=2 --mpi=pmi2", ..TWO_BY_TWO };
    let stages = if is_full() { 0..4 } else { 3..4 };
    let mut one = OneHost::new();
    for stage in stages {
        compare(&mut one, &hosts, "srun", srun, &DENSE, stage);
    }
}

#[test]
fn the_golden_runs_tell_groups_apart() {
    let mut one = OneHost::new();
    for kind in [DENSE, LORA, MOE, T5] {
        let [pairs, all] = [2, 4].map(|group| one.outcome(&kind, 2, 4, group).clone());
        assert!(pairs.1 != all.1, "{}: another order of sums gives the same bits", kind.model);
        assert_eq!(pairs.0.len(), 4, "{}", json(&one.folder.path().join("stage-2-2.json")));
    }
}
