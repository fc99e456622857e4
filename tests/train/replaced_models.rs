//! Models and adapters that replace each other: no file of what was there before lies beside the new one.

use std::fs;
use std::path::Path;

use super::{golden, text, train};
use crate::common::{Ended, zeroth};

const LORA: [&str; 4] = ["--train-type", "lora", "--max-steps", "1"];
const FULL: [&str; 2] = ["--max-steps", "1"];

fn names(folder: &Path) -> Vec<String> {
    let entries =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = entries.collect();
    names.sort_unstable();
    names
}

const OF_ADAPTERS: [&str; 3] = ["adapter_config.json", "adapter_model.safetensors", "export.json"];
const OF_A_MODEL: [&str; 3] = ["config.json", "export.json", "model.safetensors"];

fn export(from: &Path, to: &Path) -> Ended {
    zeroth(&["checkpoint", "export", text(from), "--output", text(to), "--overwrite"])
}

#[test]
fn overwriting_runs_leave_no_other_kind_of_model() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let overwrites = |flags: &[&str]| {
        train("qwen3-tied", &run, &[flags, &["--overwrite-output-dir"]].concat()).assert_done();
        names(&run.join("model"))
    };
    assert_eq!(overwrites(&LORA), OF_ADAPTERS);
    assert_eq!(overwrites(&FULL), OF_A_MODEL);
    assert_eq!(overwrites(&LORA), OF_ADAPTERS);
}

#[test]
fn overwriting_exports_leave_no_other_kind_of_model() {
    let folder = tempfile::tempdir().unwrap();
    let [lora, full, to, theirs] = ["lora", "full", "to", "theirs"].map(|name| folder.path().join(name));
    train("qwen3-tied", &lora, &LORA).assert_done();
    train("qwen3-tied", &full, &FULL).assert_done();
    for (from, expected) in [(&lora, OF_ADAPTERS), (&full, OF_A_MODEL), (&lora, OF_ADAPTERS)] {
        let ended = export(from, &to);
        assert_eq!(ended.code, 0, "{}", ended.stderr);
        assert_eq!(names(&to), expected);
    }
    // An adapter that PEFT wrote goes too; what no tool loads stays.
    fs::remove_file(to.join("export.json")).unwrap();
    fs::write(to.join("README.md"), "mine").unwrap();
    let ended = export(&full, &to);
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert_eq!(names(&to), ["README.md", "config.json", "export.json", "model.safetensors"]);
    // The base of adapters is not removed for them.
    fs::create_dir(&theirs).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(golden("qwen3-tied").join(name), theirs.join(name)).unwrap();
    }
    let ended = export(&lora, &theirs);
    assert!(
        ended.code == 2 && ended.stderr.contains("holds config.json, which no export"),
        "{}",
        ended.stderr
    );
    assert_eq!(names(&theirs), ["config.json", "model.safetensors"]);
}

#[test]
fn a_new_model_replaces_an_adapter() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("lora");
    train("qwen3-tied", &run, &LORA).assert_done();
    let sizes = [
        "--hidden",
        "16",
        "--layers",
        "1",
        "--heads",
        "2",
        "--intermediate-size",
        "24",
        "--vocab-size",
        "40",
    ];
    let model = run.join("model");
    let rest = ["--family", "llama", "--output", text(&model), "--overwrite-output-dir"];
    let ended = zeroth(&[&["init"], &sizes[..], &rest].concat());
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert_eq!(names(&model), ["config.json", "model.safetensors"]);
}
