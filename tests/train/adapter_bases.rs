//! Adapters over another base of equal shapes: refused where zeroth recorded the base, said where only its name is known.

use std::fs;
use std::path::{Path, PathBuf};

use super::{golden, json, tensors, text, train_on};
use crate::common::{Ended, zeroth};

/// A copy of the golden base with one bit of its largest matrix changed: of the first element, or of the last.
fn other_base(folder: &Path, name: &str, is_last: bool) -> PathBuf {
    let (from, to) = (golden("qwen3-tied"), folder.join(name));
    fs::create_dir(&to).unwrap();
    fs::copy(from.join("config.json"), to.join("config.json")).unwrap();
    let mut file = fs::read(from.join("model.safetensors")).unwrap();
    let largest = tensors(&file).into_iter().max_by_key(|tensor| tensor.bytes.len()).unwrap();
    assert!(largest.bytes.len() > 4 * 256, "the last element is beyond those that are compared first");
    file[if is_last { largest.bytes.end - 4 } else { largest.bytes.start }] ^= 1;
    fs::write(to.join("model.safetensors"), file).unwrap();
    to
}

fn generate(base: &Path, adapter: &Path, more: &[&str]) -> Ended {
    let flags = ["--prompt-ids", "1,2,3", "--max-new-tokens", "2", "--device", "cpu", "--fp32"];
    let with = ["generate", "--model", text(base), "--adapter", text(adapter)];
    zeroth(&[&with[..], &flags, more].concat())
}

fn train(base: &Path, adapter: &Path, output: &Path, more: &[&str]) -> Ended {
    let data = golden("qwen3-tied").join("data.jsonl");
    let flags = ["--train-type", "lora", "--max-steps", "1", "--adapter", text(adapter)];
    train_on(base, &data, output, &[&flags[..], more].concat())
}

fn merge(base: &Path, adapter: &Path, output: &Path, more: &[&str]) -> Ended {
    let with = ["checkpoint", "export", text(adapter), "--merge", "--model", text(base)];
    zeroth(&[&with[..], &["--output", text(output)], more].concat())
}

fn refused(ended: &Ended, parts: &[&str]) {
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    assert!(parts.iter().all(|part| ended.stderr.contains(part)), "{parts:?}: {}", ended.stderr);
}

#[test]
fn an_adapter_of_ours_is_refused_over_another_base_unless_it_is_allowed() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let base = golden("qwen3-tied").canonicalize().unwrap();
    let start = ["--train-type", "lora", "--max-steps", "2", "--learning-rate", "1e-2"];
    train_on(&base, &base.join("data.jsonl"), &at("run"), &start).assert_done();
    let adapter = at("run/model");
    assert_eq!(json(&adapter.join("export.json"))["base"]["sample"].as_str().unwrap().len(), 16);
    let moved = at("moved");
    fs::create_dir(&moved).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(base.join(name), moved.join(name)).unwrap();
    }
    // The same weights, wherever they are.
    for (number, own) in [&base, &moved].into_iter().enumerate() {
        let ended =
            [generate(own, &adapter, &[]), merge(own, &adapter, &at(&format!("merged-{number}")), &[])];
        for ended in ended {
            ended.assert_done();
            assert!(!ended.stderr.contains("as its base"), "{}", ended.stderr);
        }
        train(own, &adapter, &at(&format!("continued-{number}")), &[]).assert_done();
    }
    let other = other_base(folder.path(), "other", false);
    let named = ["is an adapter of another base", text(&other), text(&base), "--allow-other-base"];
    refused(&generate(&other, &adapter, &[]), &named);
    refused(&train(&other, &adapter, &at("no-run"), &[]), &named);
    refused(&merge(&other, &adapter, &at("no-model"), &[]), &named);
    assert!(!at("no-run").exists() && !at("no-model").exists());
    let allow = ["--allow-other-base"];
    for ended in [
        generate(&other, &adapter, &allow),
        train(&other, &adapter, &at("allowed-run"), &allow),
        merge(&other, &adapter, &at("allowed-model"), &allow),
    ] {
        ended.assert_done();
        assert!(ended.stderr.contains("note: --allow-other-base: "), "{}", ended.stderr);
    }
    // What is beyond the first weights of each tensor is known where all of them are read.
    let late = other_base(folder.path(), "late", true);
    refused(&train(&late, &adapter, &at("late-run"), &[]), &["is an adapter of another base", text(&late)]);
    refused(&merge(&late, &adapter, &at("late-model"), &[]), &["nothing was written", "--allow-other-base"]);
    train(&late, &adapter, &at("late-run"), &["--allow-other-base", "--overwrite-output-dir"]).assert_done();
    merge(&late, &adapter, &at("late-model"), &allow).assert_done();
    // A checkpoint knows its base, too.
    let step = at("run/checkpoints/step-2");
    refused(&merge(&other, &step, &at("no-model"), &[]), &["nothing was written"]);
    merge(&other, &step, &at("of-step"), &allow).assert_done();
}

#[test]
fn an_adapter_that_only_names_its_base_is_used_with_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let base = golden("qwen3-tied").canonicalize().unwrap();
    let start = ["--train-type", "lora", "--max-steps", "1"];
    train_on(&base, &base.join("data.jsonl"), &at("run"), &start).assert_done();
    // As PEFT writes it.
    let adapter = at("adapter");
    fs::create_dir(&adapter).unwrap();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(at("run/model").join(name), adapter.join(name)).unwrap();
    }
    let other = other_base(folder.path(), "other", false);
    for (base, is_named) in [(&base, true), (&other, false)] {
        let output = |kind: &str| at(&format!("{kind}-{is_named}"));
        for ended in [
            generate(base, &adapter, &[]),
            train(base, &adapter, &output("run"), &[]),
            merge(base, &adapter, &output("model"), &[]),
        ] {
            ended.assert_done();
            let warning = "as its base (base_model_name_or_path), and is used over";
            assert_eq!(ended.stderr.contains(warning), !is_named, "{}", ended.stderr);
            assert!(is_named || ended.stderr.contains(text(base)), "{}", ended.stderr);
        }
    }
}
