//! Golden runs against PyTorch at every stage, on 1, 2, 3 and 5 ranks, with and without accumulation.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::{golden, json, metrics, number, tensors, train, written};

/// Stage 3 without persistent parameters.
const PERSISTENCE_0: &str =
    r#"{"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "overlap_comm": true}}"#;

/// Trains a golden model with `ranks × accumulation × micro_batch` samples per step, and compares metrics and
/// weights.
fn trains_like_pytorch(
    model: &str,
    config: &str,
    [ranks, accumulation, micro_batch]: [u64; 3],
    schedule: &str,
) {
    let folder = tempfile::tempdir().unwrap();
    let config = match config {
        "persistence 0" => written(folder.path(), "ds.json", &[PERSISTENCE_0]).to_str().unwrap().to_owned(),
        preset => preset.to_owned(),
    };
    let steps = json(&golden(model).join("steps.json"));
    let batch = ranks * accumulation * micro_batch;
    let runs = steps["runs"].as_array().unwrap();
    let run = runs.iter().find(|run| run["batch"] == batch && run["schedule"] == schedule).unwrap();
    let [ranks, accumulation, micro_batch] =
        [ranks, accumulation, micro_batch].map(|number| number.to_string());
    let warm_up = run["warmup_steps"].to_string();
    let output = folder.path().join("run");
    let arguments = [
        ["--deepspeed", &config],
        ["--ranks", &ranks],
        ["--gradient-accumulation-steps", &accumulation],
        ["--per-device-train-batch-size", &micro_batch],
        ["--lr-scheduler-type", schedule],
        ["--warmup-steps", &warm_up],
        ["--max-steps", "20"],
        ["--learning-rate", "1e-3"],
        ["--max-length", "40"],
        ["--fp32", "true"],
    ];
    train(model, &output, &arguments.concat()).assert_done();
    let what = format!("{model}, {config}, {ranks} ranks, accumulation {accumulation}, {schedule}");
    assert_steps(&metrics(&output), run, batch, &what);
    assert_weights(&output.join("model"), run, &what);
}

fn assert_steps(lines: &[Value], run: &Value, batch: u64, what: &str) {
    assert_eq!(lines.len(), 20, "{what}");
    for (at, line) in lines.iter().enumerate() {
        let what = format!("{what}, step {}", at + 1);
        let of = |key: &str| (number(&line[key]), number(&run[key][at]));
        let (found, expected) = of("loss");
        assert!((found - expected).abs() < 1e-5, "{what}: loss {found} {expected}");
        let (found, expected) = of("grad_norm");
        assert!((found - expected).abs() < 5e-4 * expected, "{what}: norm {found} {expected}");
        let (found, expected) = of("lr");
        assert!((found - expected).abs() < 1e-12, "{what}: rate {found} {expected}");
        assert_eq!(line["tokens"], run["tokens"][at], "{what}");
        assert_eq!(line["samples_seen"], (at as u64 + 1) * batch, "{what}");
        assert_eq!((&line["skipped"], &line["step"]), (&false.into(), &(at + 1).into()), "{what}");
    }
}

/// Compares the norms of the exported weights with PyTorch's.
fn assert_weights(model: &Path, run: &Value, what: &str) {
    let file = fs::read(model.join("model.safetensors")).unwrap();
    let tensors = tensors(&file);
    assert_eq!(tensors.len(), run["final"].as_object().unwrap().len(), "{what}");
    for tensor in tensors {
        assert_eq!(tensor.dtype, "F32");
        let data = file[tensor.bytes].as_chunks::<4>().0;
        let squares = data.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes)).powi(2));
        let (found, expected) = (squares.sum::<f64>().sqrt(), number(&run["final"][&tensor.name]["norm"]));
        assert!((found - expected).abs() < 1e-5 * expected, "{what}, {}: {found} {expected}", tensor.name);
    }
}

#[test]
fn one_rank_trains_like_pytorch() {
    trains_like_pytorch("llama-one-kv-head", "zero0", [1, 1, 4], "cosine");
    trains_like_pytorch("qwen3-tied", "zero2", [1, 1, 4], "constant");
    trains_like_pytorch("llama-dynamic", "persistence 0", [1, 4, 1], "cosine");
    trains_like_pytorch("mistral-window", "zero1", [1, 4, 4], "cosine");
}

#[test]
fn two_ranks_train_like_pytorch() {
    trains_like_pytorch("mistral-no-window-tied", "zero0", [2, 1, 2], "cosine");
    trains_like_pytorch("llama-biases-tied", "zero1", [2, 4, 2], "cosine");
    trains_like_pytorch("qwen3-biases-yarn", "zero2", [2, 4, 2], "cosine");
    trains_like_pytorch("qwen2-yarn-tied", "zero3", [2, 1, 2], "constant");
    trains_like_pytorch("qwen3-tied", "persistence 0", [2, 4, 2], "cosine");
}

#[test]
fn three_ranks_train_like_pytorch() {
    trains_like_pytorch("qwen3-tied", "zero0", [3, 4, 1], "cosine");
    trains_like_pytorch("llama-dynamic", "zero2", [3, 1, 4], "cosine");
    trains_like_pytorch("llama-one-kv-head", "zero3", [3, 4, 1], "cosine");
    trains_like_pytorch("mistral-no-window-tied", "persistence 0", [3, 1, 4], "cosine");
}

#[test]
fn five_ranks_train_like_pytorch() {
    trains_like_pytorch("qwen3-tied", "zero1", [5, 1, 4], "cosine");
    trains_like_pytorch("qwen2-yarn-tied", "zero2", [5, 4, 1], "cosine");
    trains_like_pytorch("mistral-window", "zero3", [5, 4, 1], "cosine");
    trains_like_pytorch("qwen3-biases-yarn", "persistence 0", [5, 1, 4], "cosine");
}
