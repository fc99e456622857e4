//! `plan` and `train` answer the same under a budget: equal programs, bytes, verdicts and exit codes.
//!
//! Budgets lie between the least that fits and what fits without recomputation, and one lies below. The default is a
//! diagonal of models × presets × ranks; `ZEROTH_FULL=1` runs all.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{golden, is_full, new_data, text, written};
use crate::common::{zeroth, zeroth_json};

const PRESETS: [&str; 6] = ["zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"];
/// Tokens of every row: those of a plan are all of the longest.
const TOKENS: u64 = 32;
const MICRO_BATCH: u64 = 4;
/// Tokens that all of these models know.
const VOCABULARY: u64 = 40;

/// Decoder models with weights.
const DENSE: [&str; 13] = [
    "llama-biases-half-frozen",
    "llama-biases-tied",
    "llama-dynamic",
    "llama-gelu-tanh",
    "llama-one-kv-head",
    "ministral-layer-types",
    "mistral-no-window-tied",
    "mistral-window",
    "qwen2-yarn-tied",
    "qwen3-biases-yarn",
    "qwen3-gelu-tied",
    "qwen3-half-frozen",
    "qwen3-tied",
];
const EXPERTS: [&str; 10] = [
    "moe/mixtral-aux-3-layers",
    "moe/mixtral-no-window",
    "moe/mixtral-no-window-fused",
    "moe/mixtral-window-tied",
    "moe/qwen3-moe-aux-1-layer",
    "moe/qwen3-moe-mlp-only",
    "moe/qwen3-moe-normalized",
    "moe/qwen3-moe-normalized-fused",
    "moe/qwen3-moe-sparse-step",
    "moe/qwen3-moe-unnormalized-tied",
];
const T5: [&str; 5] =
    ["t5/mt5", "t5/t5-gated-silu", "t5/t5-gelu-half-frozen", "t5/t5-relu-tied", "t5/t5-v1_1"];

/// What was compared.
#[derive(Default)]
struct Counts {
    budgets: usize,
    fit: usize,
    /// Budgets of just the least that was found, in which nothing fits.
    least_misfits: usize,
    programs: std::collections::BTreeSet<String>,
}

/// Models × presets × ranks, or their diagonal with one of `step` models, from `first` on.
fn matrix<'a>(models: &[&'a str], [first, step]: [usize; 2]) -> Vec<(&'a str, &'static str, &'static str)> {
    let ranks = ["1", "2", "3"];
    if is_full() {
        let of = |model: &&'a str| {
            let model = *model;
            PRESETS.into_iter().flat_map(move |preset| ranks.map(|ranks| (model, preset, ranks)))
        };
        return models.iter().flat_map(of).collect();
    }
    let diagonal = |(at, model): (usize, &&'a str)| (*model, PRESETS[at % 6], ranks[(at + at / 6) % 3]);
    models.iter().enumerate().skip(first).step_by(step).map(diagonal).collect()
}

/// Rows of sources and targets of the longest lengths.
fn pairs(folder: &Path) -> PathBuf {
    let row = |row: u64| {
        let ids = |many: u64| -> Vec<u64> { (0..many).map(|at| 2 + (row * 7 + at * 3) % 40).collect() };
        json!({ "input_ids": ids(TOKENS), "labels": ids(TOKENS / 2) }).to_string()
    };
    written(folder, "pairs.jsonl", &(0..24).map(row).collect::<Vec<_>>())
}

/// Compares both under five budgets; `shared` are flags of both, `own` those of the training.
fn compare(job: [&str; 3], shared: &[&str], own: &[&str], data: &Path, counts: &mut Counts) {
    let [model, preset, ranks] = job;
    let model = golden(model);
    let micro_batch = MICRO_BATCH.to_string();
    let job = [
        ["--model", text(&model)],
        ["--ranks", ranks],
        ["--deepspeed", preset],
        ["--device", "cpu"],
        ["--per-device-train-batch-size", &micro_batch],
    ]
    .concat();
    let job = [&job[..], shared].concat();
    let row = |budget: &str| -> Value {
        zeroth_json(&[&["plan"], &job[..], &["--device-memory", budget]].concat()).1["rows"][0].take()
    };
    let total = |row: &Value| row["device_bytes"]["total"].as_u64().unwrap();
    let what = format!("{} {preset} {ranks} {shared:?}", model.display());
    let free = total(&row("1TB"));
    // What is nearest to a budget of nothing, and then what still fits below.
    let mut least = total(&row("1B"));
    loop {
        let below = row(&(least - 1).to_string());
        if below["fits"] == false {
            break;
        }
        least = total(&below);
    }
    assert!(least <= free, "{what}: {least} {free}");
    let between = |thirds: u64| least + (free - least) * thirds / 3;
    let output = data.parent().unwrap().join("run");
    for bytes in [least - 1, least, between(1), between(2), free] {
        let budget = bytes.to_string();
        let with = ["--device-memory", &budget, "--dump-program"];
        let planned = zeroth(&[&["plan"], &job[..], &with].concat());
        let run = ["train", "--data", text(data), "--output", text(&output), "--max-steps", "2"];
        let trained = zeroth(&[&run[..], &job, own, &with].concat());
        assert_eq!(planned.code, trained.code, "{what} in {budget}: {}{}", planned.stderr, trained.stderr);
        counts.budgets += 1;
        if trained.code == 3 {
            assert!(bytes <= least, "{what} in {budget}: more than the least, {least}");
            counts.least_misfits += usize::from(bytes == least);
            continue;
        }
        assert_eq!(trained.code, 0, "{what} in {budget}: {}", trained.stderr);
        assert!(trained.stdout.contains("\nmemory: device "), "{}", trained.stdout);
        assert!(planned.stdout == trained.stdout, "{what} in {budget}: other programs{}", trained.stderr);
        counts.fit += 1;
        counts.programs.insert(format!("{what}{}", trained.stdout));
    }
}

impl Counts {
    /// What just misses fits neither, and budgets change programs. A tiny model may need less with two blocks recomputed
    /// than with all, which is found only where all fit: then just the least does not fit either, but that is rare.
    fn assert(&self, what: &str) {
        println!("{what}: {} budgets, {} fit, {} programs", self.budgets, self.fit, self.programs.len());
        assert_eq!((self.fit + self.least_misfits) * 5, self.budgets * 4, "{what}");
        assert!(100 * self.least_misfits <= self.budgets, "{what}: {}", self.least_misfits);
        assert!(2 * self.programs.len() >= self.fit, "{what}: {} programs", self.programs.len());
    }
}

fn decoders(models: &[&str], sample: [usize; 2], more: &[&str], what: &str) {
    let folder = tempfile::tempdir().unwrap();
    let data = new_data(folder.path(), 24, TOKENS, VOCABULARY);
    let tokens = TOKENS.to_string();
    let shared = [&["--max-length", &tokens], more].concat();
    let mut counts = Counts::default();
    for (model, preset, ranks) in matrix(models, sample) {
        compare([model, preset, ranks], &shared, &[], &data, &mut counts);
    }
    counts.assert(what);
}

#[test]
fn full_training() {
    decoders(&DENSE, [0, 1], &[], "full");
}

#[test]
fn lora() {
    decoders(&DENSE, [0, 2], &["--train-type", "lora"], "LoRA");
}

#[test]
fn qlora() {
    decoders(&DENSE, [1, 2], &["--train-type", "lora", "--quantize", "nf4"], "QLoRA");
}

#[test]
fn experts() {
    decoders(&EXPERTS, [0, 2], &[], "experts");
}

#[test]
fn distillation() {
    let teacher = golden("kd/teacher");
    let teachers =
        [&["--teacher", text(&teacher)][..], &["--teacher", text(&teacher), "--teacher-quantize", "nf4"]];
    for teacher in teachers {
        decoders(&["kd/student"], [0, 1], teacher, "distillation");
    }
}

#[test]
fn encoder_decoders() {
    let folder = tempfile::tempdir().unwrap();
    let data = pairs(folder.path());
    let [sources, targets] = [TOKENS, TOKENS / 2].map(|tokens| tokens.to_string());
    let shared = ["--max-source-length", &sources, "--max-target-length", &targets];
    let mut counts = Counts::default();
    for (model, preset, ranks) in matrix(&T5, [0, 1]) {
        compare([model, preset, ranks], &shared, &[], &data, &mut counts);
    }
    counts.assert("T5");
}

/// Packs are as long as the longest row, so that a plan of that length is the run's.
#[test]
fn packed_rows() {
    let folder = tempfile::tempdir().unwrap();
    let data = new_data(folder.path(), 96, TOKENS / 4, VOCABULARY);
    let tokens = TOKENS.to_string();
    let mut counts = Counts::default();
    for preset in ["zero1", "zero3"] {
        let shared = ["--max-length", &tokens];
        compare(["qwen3-tied", preset, "2"], &shared, &["--packing"], &data, &mut counts);
    }
    counts.assert("packing");
}

/// An open micro-batch is split by both in the same way.
#[test]
fn open_micro_batches() {
    let folder = tempfile::tempdir().unwrap();
    let data = new_data(folder.path(), 24, TOKENS, VOCABULARY);
    let config = folder.path().join("config.json");
    fs::write(&config, r#"{"train_batch_size": 8, "zeroth": {"recompute": "none"}}"#).unwrap();
    let (model, tokens) = (golden("qwen3-tied"), TOKENS.to_string());
    let job =
        ["--model", text(&model), "--device", "cpu", "--deepspeed", text(&config), "--max-length", &tokens];
    let plan = |budget: &str| {
        let (code, plan) = zeroth_json(&[&["plan"], &job[..], &["--device-memory", budget]].concat());
        (code, plan["rows"][0].clone())
    };
    let total = |row: &Value| row["device_bytes"]["total"].as_u64().unwrap();
    let (least, free) = (total(&plan("1B").1), total(&plan("1TB").1));
    let budget = least.midpoint(free).to_string();
    let (code, row) = plan(&budget);
    assert_eq!((code, &row["chosen"][0]["key"]), (0, &"train_micro_batch_size_per_gpu".into()), "{row}");
    let output = folder.path().join("run");
    let run = ["train", "--data", text(&data), "--output", text(&output), "--max-steps", "1"];
    let with = ["--device-memory", &budget];
    let trained = zeroth(&[&run[..], &job, &with].concat());
    assert_eq!(trained.code, 0, "{}", trained.stderr);
    let allocated = super::json(&output.join("plan.json"));
    assert_eq!(row["device_bytes"], allocated["device_bytes"]);
    let config = super::json(&output.join("config.json"));
    assert_eq!(config["train_micro_batch_size_per_gpu"], row["chosen"][0]["value"]);
}
