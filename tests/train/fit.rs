//! Memory budgets: a run chooses open settings to fit, or is refused with a change that fits.

use std::path::Path;

use serde_json::Value;

use super::{golden, json, metrics, new_data, new_model, text, train_on, written};
use crate::common::Ended;

const FLAGS: [&str; 6] =
    ["--max-steps", "3", "--per-device-train-batch-size", "4", "--learning-rate", "1e-3"];

/// Trains a small model with this config.
fn run(folder: &Path, name: &str, config: &Value, more: &[&str]) -> Ended {
    let model = new_model(folder, 64, 6, 192, 300);
    let data = new_data(folder, 24, 60, 300);
    let config = config.to_string();
    let flags = [&FLAGS[..], &["--deepspeed", &config], more].concat();
    train_on(&model, &data, &folder.join(name), &flags)
}

fn bytes(folder: &Path, run: &str) -> u64 {
    json(&folder.join(run).join("plan.json"))["device_bytes"]["total"].as_u64().unwrap()
}

fn losses(folder: &Path, run: &str) -> Vec<Value> {
    metrics(&folder.join(run)).iter().map(|line| line["loss"].clone()).collect()
}

#[test]
fn a_smaller_budget_recomputes_more_and_trains_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let stage = serde_json::json!({"zero_optimization": {"stage": 2}});
    run(folder, "free", &stage, &[]).assert_done();
    let free = bytes(folder, "free");
    let mut policies = Vec::new();
    for percent in [99, 80, 60] {
        let name = format!("held-{percent}");
        let budget = (free * percent / 100).to_string();
        let ended = run(folder, &name, &stage, &["--device-memory", &budget]);
        if ended.code == 3 {
            break;
        }
        ended.assert_done();
        assert!(bytes(folder, &name) <= free * percent / 100, "the plan holds to the byte");
        assert_eq!(losses(folder, &name), losses(folder, "free"), "and not one bit of a loss changes");
        let config = json(&folder.join(&name).join("config.json"));
        let chosen = config["zeroth"]["recompute"].as_str().unwrap().to_owned();
        assert!(
            ended.stderr.contains(&format!("zeroth.recompute is \"{chosen}\": chosen to fit")),
            "{}",
            ended.stderr
        );
        policies.push(chosen);
    }
    assert!(policies.len() >= 2 && policies[0] != "none", "{policies:?}");
    assert!(policies.windows(2).all(|pair| pair[0] <= pair[1] || pair[1] == "block"), "{policies:?}");
}

#[test]
fn an_open_micro_batch_is_chosen_to_fit() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = new_model(folder, 64, 4, 192, 300);
    let data = new_data(folder, 32, 60, 300);
    // Evaluation rows are longer than training rows, and the micro-batch must fit them too.
    let long: Vec<u64> = (0..120).map(|at| at * 7 % 300).collect();
    let rows = vec![serde_json::json!({ "input_ids": long }).to_string(); 20];
    let measured = written(folder, "measured.jsonl", &rows);
    let config = serde_json::json!({"train_batch_size": 16, "zero_optimization": {"stage": 1},
                                    "zeroth": {"recompute": "none"}})
    .to_string();
    let train = |name: &str, more: &[&str]| {
        let measured = ["--eval-data", text(&measured)];
        let flags = [&["--max-steps", "2", "--fp32", "--deepspeed", &config], &measured[..], more].concat();
        train_on(&model, &data, &folder.join(name), &flags)
    };
    train("free", &[]).assert_done();
    let budget = (bytes(folder, "free") * 2 / 3).to_string();
    let ended = train("held", &["--device-memory", &budget]);
    ended.assert_done();
    let config = json(&folder.join("held/config.json"));
    let size = |key: &str| config[key].as_u64().unwrap();
    assert!(size("train_micro_batch_size_per_gpu") < 16, "{}", ended.stderr);
    assert_eq!(size("train_micro_batch_size_per_gpu") * size("gradient_accumulation_steps"), 16);
    for (free, held) in metrics(&folder.join("free")).iter().zip(metrics(&folder.join("held"))) {
        let key = if free["loss"].is_null() { "eval_loss" } else { "loss" };
        let [free, held] = [&free[key], &held[key]].map(|loss| loss.as_f64().unwrap());
        assert!((free - held).abs() < 1e-5, "{free} {held}");
    }
}

#[test]
fn all_ranks_choose_what_the_launcher_chose() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let stage = serde_json::json!({"zero_optimization": {"stage": 3}});
    run(folder, "free", &stage, &["--ranks", "3"]).assert_done();
    let budget = (bytes(folder, "free") * 9 / 10).to_string();
    let ended = run(folder, "held", &stage, &["--ranks", "3", "--device-memory", &budget]);
    ended.assert_done();
    assert!(ended.stderr.contains("chosen to fit the memory"), "{}", ended.stderr);
    assert_eq!(losses(folder, "held"), losses(folder, "free"));
}

#[test]
fn mismatched_weights_are_refused_before_ranks_start() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let model = new_model(folder, 64, 6, 192, 300);
    std::fs::copy(golden("qwen3-tied").join("model.safetensors"), model.join("model.safetensors")).unwrap();
    let data = new_data(folder, 4, 20, 300);
    let refused = train_on(&model, &data, &folder.join("run"), &["--ranks", "2"]);
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    assert!(refused.stderr.contains("model.safetensors"), "{}", refused.stderr);
    assert!(!folder.join("run").exists(), "nothing is written");
    let refused = train_on(&model, &data, &folder.join("run"), &["--do-train", "false"]);
    assert_eq!(refused.code, 2);
    assert!(refused.stderr.contains("--do-train false"), "{}", refused.stderr);
}

#[test]
fn misfits_suggest_a_change_that_fits() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let stage = serde_json::json!({"zero_optimization": {"stage": 1}, "zeroth": {"recompute": "block"}});
    run(folder, "free", &stage, &[]).assert_done();
    let budget = (bytes(folder, "free") / 2).to_string();
    let limits = ["--device-memory", &budget, "--host-memory", "1GB"];
    let refused = run(folder, "refused", &stage, &limits);
    assert_eq!(refused.code, 3, "{}", refused.stderr);
    assert!(refused.stderr.contains("are missing"), "{}", refused.stderr);
    assert!(
        refused.stderr.contains("offload_optimizer and offload_param to cpu (stage 3)"),
        "{}",
        refused.stderr
    );
    assert!(!folder.join("refused").exists(), "nothing is written");
    // Apply the suggested change.
    let offloaded = serde_json::json!({
        "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
        },
        "zeroth": {"recompute": "block"},
    });
    run(folder, "offloaded", &offloaded, &limits).assert_done();
    assert_eq!(losses(folder, "offloaded"), losses(folder, "free"), "the same bits, elsewhere");
    let plan = json(&folder.join("offloaded/plan.json"));
    assert!(
        plan["host_bytes"]["optimizer"].as_u64().unwrap()
            > plan["device_bytes"]["optimizer"].as_u64().unwrap()
    );
    // Nothing helps here: activations alone exceed the budget.
    let refused = run(folder, "nowhere", &stage, &["--device-memory", "10kB"]);
    assert_eq!(refused.code, 3);
    assert!(refused.stderr.contains("no single change fits"), "{}", refused.stderr);
}
