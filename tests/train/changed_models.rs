//! A config.json that changes between two starts of a run: what the model computes is kept, field by field.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json as value};

use super::damaged_checkpoints::forge;
use super::distillation::{copied, data, distil, teacher};
use super::{golden, json, metrics, text, train_on};
use crate::common::{Ended, zeroth};

/// A field, its new value, and what is said of it; nothing where it does not count.
type Change = (&'static str, Value, &'static str);

fn set(model: &Path, field: &str, value: Value) {
    let path = model.join("config.json");
    let mut config = json(&path);
    config[field] = value;
    fs::write(path, config.to_string()).unwrap();
}

fn refused(ended: &Ended, parts: &[&str]) {
    assert_eq!(ended.code, 2, "{parts:?}: {}", ended.stderr);
    assert!(parts.iter().all(|part| ended.stderr.contains(part)), "{parts:?}: {}", ended.stderr);
}

/// A run of a copy of a golden model that was saved after two steps.
fn started(folder: &Path, name: &str) -> (PathBuf, PathBuf, PathBuf) {
    let (model, run) = (copied(&golden(name), &folder.join("model")), folder.join("run"));
    let data = golden(name).join("data.jsonl");
    train_on(&model, &data, &run, &["--max-steps", "2", "--fp32"]).assert_done();
    (model, data, run)
}

#[test]
fn a_changed_function_of_the_model_is_refused_by_its_fields() {
    let moe: [Change; 5] = [
        ("num_experts_per_tok", value!(1), "num_experts_per_tok is 1, that of the checkpoint 2"),
        ("rms_norm_eps", value!(1e-6), "rms_norm_eps is 1e-6, that of the checkpoint 0.00001"),
        ("hidden_act", value!("gelu"), "hidden_act is \"gelu\", that of the checkpoint \"silu\""),
        ("norm_topk_prob", value!(false), "norm_topk_prob is false, that of the checkpoint true"),
        ("router_aux_loss_coef", value!(0.5), ""),
    ];
    let t5: [Change; 3] = [
        ("dropout_rate", value!(0.1), "dropout_rate is 0.1, that of the checkpoint 0.0"),
        ("decoder_start_token_id", value!(5), "decoder_start_token_id is 5, that of the checkpoint "),
        (
            "feed_forward_proj",
            value!("gated-silu"),
            "feed_forward_proj is \"gated-silu\", that of the checkpoint ",
        ),
    ];
    for (name, changes) in [("moe/qwen3-moe-normalized", &moe[..]), ("t5/t5-v1_1", &t5)] {
        let folder = tempfile::tempdir().unwrap();
        let (model, data, run) = started(folder.path(), name);
        let resume = ["--max-steps", "3", "--fp32", "--resume", "auto"];
        let before = fs::read(model.join("config.json")).unwrap();
        for (field, changed, why) in changes.iter().filter(|(_, _, why)| !why.is_empty()) {
            set(&model, field, changed.clone());
            refused(&train_on(&model, &data, &run, &resume), &["was trained as another model", why]);
            fs::write(model.join("config.json"), &before).unwrap();
        }
        assert_eq!(metrics(&run).len(), 2);
        // Fields that change nothing: its writer, initial weights, a coefficient that is not used.
        set(&model, "initializer_range", value!(0.5));
        set(&model, "transformers_version", value!("9.0.0"));
        for (field, changed, _) in changes.iter().filter(|(_, _, why)| why.is_empty()) {
            set(&model, field, changed.clone());
        }
        train_on(&model, &data, &run, &resume).assert_done();
        // A checkpoint of an earlier version does not say what it computes.
        let step = run.join("checkpoints/step-3");
        forge(&step, |manifest| {
            manifest["model"].as_object_mut().unwrap().remove("function").unwrap();
        });
        let (field, changed, _) = &changes[0];
        set(&model, field, changed.clone());
        train_on(&model, &data, &run, &["--max-steps", "4", "--fp32", "--resume", "auto"]).assert_done();
    }
}

#[test]
fn the_base_of_adapters_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let (model, data) = (copied(&golden("qwen3-tied"), &folder.path().join("model")), golden("qwen3-tied"));
    let (data, run) = (data.join("data.jsonl"), folder.path().join("run"));
    let train = |more: &[&str]| train_on(&model, &data, &run, &[&["--train-type", "lora"], more].concat());
    train(&["--max-steps", "2"]).assert_done();
    set(&model, "rms_norm_eps", value!(0.25));
    refused(
        &train(&["--max-steps", "3", "--resume", "auto"]),
        &["rms_norm_eps is 0.25, that of the checkpoint "],
    );
}

#[test]
fn a_changed_function_of_the_teacher_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (own, run, cached, cache) =
        (copied(&teacher(), &at("teacher")), at("run"), at("cached"), at("cache"));
    let making = |more: &[&str]| {
        let (own, data, cache) = (text(&own).to_owned(), data(), text(&cache).to_owned());
        let flags =
            ["distill", "cache", "--teacher", &own, "--data", text(&data), "--max-length", "40", "--fp32"];
        zeroth(&[&flags[..], &["--device", "cpu", "--output", &cache], more].concat())
    };
    let (with_teacher, with_cache) = (["--teacher", text(&own)], ["--kd-cache", text(&cache)]);
    making(&[]).assert_done();
    distil(&run, &[&with_teacher[..], &["--max-steps", "2"]].concat()).assert_done();
    distil(&cached, &[&with_cache[..], &["--max-steps", "2"]].concat()).assert_done();
    let before = json(&own.join("config.json"))["rms_norm_eps"].clone();
    set(&own, "rms_norm_eps", value!(0.125));
    let resume = ["--max-steps", "3", "--resume", "auto"];
    let why = "the teacher's rms_norm_eps is 0.125, that of the";
    refused(&distil(&run, &[&with_teacher[..], &resume].concat()), &["another loss", why]);
    // A cache is continued by the same function only, and stands for no other teacher.
    refused(&making(&[]), &["is a cache of something else", why]);
    refused(&distil(&at("new"), &[&with_cache[..], &with_teacher, &["--max-steps", "1"]].concat()), &[why]);
    // Another teacher's cache of equal weights.
    let other = at("other-cache");
    let (own_text, data) = (text(&own), data());
    let flags =
        ["distill", "cache", "--teacher", own_text, "--data", text(&data), "--max-length", "40", "--fp32"];
    zeroth(&[&flags[..], &["--device", "cpu", "--output", text(&other)]].concat()).assert_done();
    refused(&distil(&cached, &[&["--kd-cache", text(&other)][..], &resume].concat()), &["another loss", why]);
    set(&own, "rms_norm_eps", before);
    distil(&run, &[&with_teacher[..], &resume].concat()).assert_done();
    distil(&cached, &[&with_cache[..], &resume].concat()).assert_done();
}
