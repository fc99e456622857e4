//! Adapters as files: merged from a checkpoint and from the model folder, and generated with unmerged.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::{golden, tensors, text, train};
use crate::common::{Ended, zeroth, zeroth_json};

const BASE: &str = "qwen3-tied";

fn refused(ended: &Ended, code: i32, words: &[&str]) {
    assert_eq!(ended.code, code, "{}", ended.stderr);
    for word in words {
        assert!(ended.stderr.contains(word), "{word}: {}", ended.stderr);
    }
}

fn merge(dir: &Path, output: &Path, more: &[&str]) -> Ended {
    zeroth(&[&["checkpoint", "export", text(dir), "--merge", "--output", text(output)], more].concat())
}

fn logits(model: &Path, more: &[&str]) -> Vec<f64> {
    let flags =
        ["--prompt-ids", "1,2,3,4,5", "--max-new-tokens", "0", "--logits", "--device", "cpu", "--fp32"];
    let (code, found) = zeroth_json(&[&["generate", "--model", text(model)], &flags[..], more].concat());
    assert_eq!(code, 0);
    found["logits"].as_array().unwrap().iter().map(|logit| logit.as_f64().unwrap()).collect()
}

fn apart(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn a_trained_adapter_merges_and_generates_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (base, run) = (golden(BASE), at("run"));
    let flags =
        "--train-type lora --lora-rank 2 --max-steps 2 --save-steps 2 --learning-rate 1e-2 --fp32 true";
    train(BASE, &run, &flags.split_whitespace().collect::<Vec<_>>()).assert_done();

    // The run, its checkpoint and its model folder hold the same adapters, and name their base.
    merge(&run.join("model"), &at("of-model"), &[]).assert_done();
    merge(&run.join("checkpoints/step-2"), &at("of-step"), &["--model", text(&base)]).assert_done();
    let ended = merge(&run, &at("of-run"), &["--format", "json"]);
    let found: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(
        (&found["step"], &found["dtype"], &found["model_type"]),
        (&2.into(), &"fp32".into(), &"qwen3".into())
    );
    let merged = fs::read(at("of-model/model.safetensors")).unwrap();
    for other in ["of-step", "of-run"] {
        assert!(fs::read(at(other).join("model.safetensors")).unwrap() == merged, "{other}");
    }
    assert_eq!(tensors(&merged).len(), tensors(&fs::read(base.join("model.safetensors")).unwrap()).len());

    let (plain, whole) = (logits(&base, &[]), logits(&at("of-model"), &[]));
    let beside = logits(&base, &["--adapter", text(&run.join("model"))]);
    assert!(apart(&beside, &whole) < 1e-4, "{}", apart(&beside, &whole));
    assert!(apart(&plain, &whole) > 1e-3, "training moved nothing: {}", apart(&plain, &whole));

    // Another base, by one bit of one weight.
    let other = at("other");
    fs::create_dir(&other).unwrap();
    fs::copy(base.join("config.json"), other.join("config.json")).unwrap();
    let mut file = fs::read(base.join("model.safetensors")).unwrap();
    let last = file.len() - 4;
    file[last] ^= 1;
    fs::write(other.join("model.safetensors"), file).unwrap();
    let ended = merge(&run, &at("wrong"), &["--model", text(&other)]);
    refused(&ended, 2, &["nothing was written", "has other weights"]);
    assert!(!at("wrong").exists());
    // A folder of the user's stays, empty as it was.
    fs::create_dir(at("mine")).unwrap();
    refused(&merge(&run, &at("mine"), &["--model", text(&other)]), 2, &["nothing was written"]);
    assert!(fs::read_dir(at("mine")).unwrap().next().is_none());
    fs::remove_file(other.join("model.safetensors")).unwrap();
    refused(&merge(&run, &at("none"), &["--model", text(&other)]), 2, &["has no weights"]);
}

#[test]
fn folders_in_the_wrong_place_are_refused_with_the_right_one() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("to");
    let adapter = golden("lora").join("qwen3-tied-qv");
    let export = |more: &[&str]| {
        zeroth(&[&["checkpoint", "export", text(&adapter), "--output", text(&to)], more].concat())
    };
    refused(&export(&[]), 2, &["is the folder of an adapter", "--merge"]);
    refused(&export(&["--model", BASE]), 2, &["needs --merge"]);
    // The golden config names its base by a name that is no folder here.
    refused(&export(&["--merge"]), 2, &["`qwen3-tied`", "names it as its base", "--model"]);
    let other = golden("llama-dynamic");
    refused(
        &export(&["--merge", "--model", text(&other)]),
        2,
        &["does not fit the base", "[4, 24]", "[4, 30]"],
    );
    let inside = adapter.join("merged");
    let ended = merge(&adapter, &inside, &["--model", text(&golden(BASE))]);
    refused(&ended, 2, &["is in the folder of the adapter"]);
    assert!(!to.exists() && !inside.exists());

    let generate = |model: &Path, more: &[&str]| {
        zeroth(
            &[&["generate", "--model", text(model), "--prompt-ids", "1", "--device", "cpu"], more].concat(),
        )
    };
    refused(
        &generate(&adapter, &[]),
        2,
        &["is the folder of a PEFT adapter", "its base qwen3-tied", "--adapter"],
    );
    let base = golden(BASE);
    refused(&generate(&base, &["--adapter", text(&base)]), 2, &["has no adapter_config.json"]);
    refused(&generate(&base, &["--adapter", "nowhere"]), 2, &["there is no adapter folder nowhere"]);
    refused(&generate(&other, &["--adapter", text(&adapter)]), 2, &["--adapter: ", "[4, 24]"]);
}
