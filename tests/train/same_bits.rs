//! Stages and thread counts do not change arithmetic: metrics and model are bit-identical.

use std::fs;
use std::path::Path;

use super::{metrics, number, train};

/// Losses and norms as written, and the model's bytes.
fn outcome(run: &Path) -> (Vec<String>, Vec<u8>) {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let column = |line: &str| line.split(",\"lr\"").next().unwrap().to_owned();
    (text.lines().map(column).collect(), fs::read(run.join("model/model.safetensors")).unwrap())
}

#[test]
fn stages_and_threads_give_the_same_bits_in_bf16() {
    let folder = tempfile::tempdir().unwrap();
    let mut first = None;
    for (preset, threads) in [("zero0", "1"), ("zero1", "1"), ("zero2", "2"), ("zero3", "1"), ("zero3", "2")]
    {
        let run = folder.path().join(format!("{preset}-{threads}"));
        let flags = [
            ["--deepspeed", preset],
            ["--threads-per-rank", threads],
            ["--ranks", "3"],
            ["--per-device-train-batch-size", "2"],
            ["--learning-rate", "1e-3"],
            ["--max-steps", "8"],
        ];
        train("llama-biases-tied", &run, &flags.concat()).assert_done();
        let found = outcome(&run);
        assert_eq!(found.0.len(), 8);
        let expected = first.get_or_insert_with(|| found.clone());
        assert_eq!(found.0, expected.0, "{preset}, {threads} threads");
        assert!(found.1 == expected.1, "{preset}, {threads} threads: another model");
    }
}

#[test]
fn thread_count_does_not_change_bits() {
    let folder = tempfile::tempdir().unwrap();
    let of = |threads: &str| {
        let run = folder.path().join(threads);
        let flags = ["--threads-per-rank", threads, "--per-device-train-batch-size", "3", "--max-steps", "5"];
        train("qwen3-biases-yarn", &run, &flags).assert_done();
        outcome(&run)
    };
    let one = of("1");
    assert!(one == of("2") && one == of("3"));
}

#[test]
fn the_order_of_shuffled_samples_does_not_depend_on_ranks_or_accumulation() {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str, [ranks, accumulation, micro_batch]: [&str; 3], seed: &str| {
        let run = folder.path().join(name);
        let flags = [
            ["--shuffle", "true"],
            ["--seed", seed],
            ["--ranks", ranks],
            ["--gradient-accumulation-steps", accumulation],
            ["--per-device-train-batch-size", micro_batch],
            ["--fp32", "true"],
            ["--num-train-epochs", "1"],
        ];
        train("qwen3-tied", &run, &flags.concat()).assert_done();
        metrics(&run)
    };
    let alone = of("alone", ["1", "1", "6"], "1");
    assert_eq!(alone.len(), 83usize.div_ceil(6));
    for (name, split) in [("ranks", ["3", "1", "2"]), ("accumulation", ["2", "3", "1"])] {
        for (alone, split) in alone.iter().zip(of(name, split, "1")) {
            assert_eq!(alone["tokens"], split["tokens"], "{name}");
            assert!(
                (number(&alone["loss"]) - number(&split["loss"])).abs() < 1e-5,
                "{name}: {alone} {split}"
            );
        }
    }
    let other = of("seed", ["1", "1", "6"], "2");
    let tokens =
        |lines: &[serde_json::Value]| lines.iter().map(|line| line["tokens"].clone()).collect::<Vec<_>>();
    assert_ne!(tokens(&alone), tokens(&other), "another seed, another order");
}
