//! Mixtures of experts: golden runs of transformers and PEFT, both layouts of folders, exports, generation, refusals.

use std::fs;
use std::path::Path;

use super::{golden, json, metrics, number, tensors, text, train, train_on};
use crate::common::zeroth;

/// The recipe of the golden runs.
const RECIPE: [&str; 11] = [
    "--warmup-steps",
    "3",
    "--max-steps",
    "20",
    "--learning-rate",
    "1e-3",
    "--max-length",
    "40",
    "--fp32",
    "true",
    "--deepspeed",
];

fn compare(case: &str, run: &Path, steps: &Path, batch: u64) {
    let steps = json(steps);
    let expected = steps["runs"].as_array().unwrap().iter().find(|run| run["batch"] == batch).unwrap();
    let lines = metrics(run);
    assert_eq!(lines.len(), 20, "{case}");
    for (line, at) in lines.iter().zip(0..) {
        for (key, bound) in [("loss", 1e-5), ("grad_norm", 5e-4 * number(&expected["grad_norm"][at]))] {
            let (found, expected) = (number(&line[key]), number(&expected[key][at]));
            assert!((found - expected).abs() < bound, "{case}, step {at}: {key} {found} {expected}");
        }
        if let Some(aux) = expected["aux_loss"][at].as_f64() {
            let found = number(&line["aux_loss"]);
            assert!((found - aux).abs() < 1e-5, "{case}, step {at}: aux_loss {found} {aux}");
        }
    }
}

fn names(file: &Path) -> Vec<String> {
    tensors(&fs::read(file).unwrap()).into_iter().map(|tensor| tensor.name).collect()
}

#[test]
fn fused_and_single_experts_train_alike_and_are_exported_one_by_one() {
    let folder = tempfile::tempdir().unwrap();
    let data = golden("moe/qwen3-moe-normalized/data.jsonl");
    let flags = ["zero3", "--ranks", "2", "--per-device-train-batch-size", "2", "--save-steps", "20"];
    let model = |layout: &str| {
        let run = folder.path().join(layout);
        let from = golden(&format!("moe/qwen3-moe-normalized{layout}"));
        train_on(&from, &data, &run, &[&RECIPE[..], &flags].concat()).assert_done();
        run
    };
    let (single, fused) = (model(""), model("-fused"));
    compare("per expert", &single, &golden("moe/qwen3-moe-normalized/steps.json"), 4);
    let file = |run: &Path| run.join("model/model.safetensors");
    assert!(fs::read(file(&single)).unwrap() == fs::read(file(&fused)).unwrap(), "other bits");
    let mut expected = names(&golden("moe/qwen3-moe-normalized/model.safetensors"));
    let mut found = names(&file(&single));
    expected.sort();
    found.sort();
    assert_eq!(found, expected);
    // The checkpoint is exported as the end of the run is.
    let exported = folder.path().join("exported");
    let step = single.join("checkpoints/step-20");
    zeroth(&["checkpoint", "export", text(&step), "--dtype", "fp32", "--output", text(&exported)])
        .assert_done();
    assert!(fs::read(exported.join("model.safetensors")).unwrap() == fs::read(file(&single)).unwrap());
    let generate = |model: &Path| {
        let flags = ["--prompt-ids", "3,14,15,9", "--max-new-tokens", "6", "--device", "cpu", "--fp32"];
        let ended =
            zeroth(&[&["generate", "--model", text(model)], &flags[..], &["--format", "json"]].concat());
        ended.assert_done();
        ended.stdout
    };
    assert_eq!(generate(&exported), generate(&single.join("model")));
}

#[test]
fn the_auxiliary_loss_is_that_of_transformers() {
    let folder = tempfile::tempdir().unwrap();
    for case in ["qwen3-moe-aux-1-layer", "mixtral-aux-3-layers"] {
        let run = folder.path().join(case);
        let flags = ["zero1", "--per-device-train-batch-size", "4"];
        train(&format!("moe/{case}"), &run, &[&RECIPE[..], &flags].concat()).assert_done();
        compare(case, &run, &golden(&format!("moe/{case}/steps.json")), 4);
    }
}

#[test]
fn adapters_of_experts_train_like_peft_and_are_merged() {
    let folder = tempfile::tempdir().unwrap();
    for (base, case) in [
        ("mixtral-no-window", "mixtral-no-window-all"),
        ("qwen3-moe-normalized", "qwen3-moe-normalized-qv-experts"),
    ] {
        let (start, run) = (golden("moe/lora").join(case), folder.path().join(case));
        let flags =
            ["zero3", "--ranks", "2", "--per-device-train-batch-size", "2", "--adapter", text(&start)];
        let lora = ["--train-type", "lora"];
        train(&format!("moe/{base}"), &run, &[&RECIPE[..], &flags, &lora].concat()).assert_done();
        compare(case, &run, &start.join("steps.json"), 4);
        let adapter = "adapter_model.safetensors";
        assert_eq!(names(&run.join("model").join(adapter)), names(&start.join(adapter)), "{case}");
        // Merged into the base, they give the logits that they give beside it.
        let (base, merged) = (golden("moe").join(base), folder.path().join(format!("{case}-merged")));
        let model = run.join("model");
        let export = ["checkpoint", "export", text(&model), "--merge", "--model", text(&base), "--output"];
        zeroth(&[&export[..], &[text(&merged)]].concat()).assert_done();
        let logits = |more: &[&str]| -> Vec<f64> {
            let flags = ["--prompt-ids", "3,14,15,9,2", "--max-new-tokens", "0", "--device", "cpu", "--fp32"];
            let ended = zeroth(&[&["generate", "--logits", "--format", "json"], &flags[..], more].concat());
            ended.assert_done();
            let found: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
            found["logits"].as_array().unwrap().iter().map(number).collect()
        };
        let beside = logits(&["--model", text(&base), "--adapter", text(&model)]);
        let inside = logits(&["--model", text(&merged)]);
        let plain = logits(&["--model", text(&base)]);
        let apart = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(apart(&beside, &inside) < 1e-5, "{case}: {}", apart(&beside, &inside));
        assert!(apart(&beside, &plain) > 1e-2, "{case}: the adapters change nothing");
    }
}

#[test]
fn what_adapters_of_experts_cannot_have_is_refused_or_said() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, model: &str, more: &[&str]| {
        let flags = ["--train-type", "lora", "--max-steps", "1", "--lora-rank", "2"];
        train(model, &folder.path().join(name), &[&flags[..], more].concat())
    };
    let refused = |ended: &crate::common::Ended, words: &str| {
        assert!(ended.code == 2 && ended.stderr.contains(words), "{words}: {} {}", ended.code, ended.stderr);
    };
    let dropout = run("dropout", "moe/mixtral-no-window", &["--lora-dropout", "0.1"]);
    refused(&dropout, "a LoRA dropout of 0.1 is not possible on experts and routers");
    let half = run("half", "moe/mixtral-no-window", &["--target-modules", "w1,w2"]);
    refused(&half, "`w1` of experts is one matrix with w3");
    let frozen = run("frozen", "moe/mixtral-aux-3-layers", &["--target-modules", "q_proj"]);
    refused(&frozen, "the routers are frozen: add `gate` to the target modules");
    let all = run("all", "moe/mixtral-no-window", &[]);
    all.assert_done();
    assert!(
        all.stderr.contains("LoRA dropout is 0: adapters of experts and routers have none"),
        "{}",
        all.stderr
    );
    assert!(
        all.stderr.contains("LoRA r 2 on q_proj, k_proj, v_proj, o_proj, gate, gate_up_proj, down_proj"),
        "{}",
        all.stderr
    );
}
