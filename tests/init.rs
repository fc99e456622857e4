//! `zeroth init` writes model folders that the other commands read.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::common::{Ended, zeroth, zeroth_in};

const SIZES: [&str; 15] = [
    "init",
    "--family",
    "qwen3",
    "--hidden",
    "64",
    "--layers",
    "2",
    "--heads",
    "4",
    "--kv-heads",
    "2",
    "--intermediate-size",
    "128",
    "--vocab-size",
    "512",
];

fn init(folder: &Path, more: &[&str]) -> Ended {
    zeroth_in(folder, &[&SIZES[..], more].concat())
}

/// Parameters of the model above: two blocks, an embedding and a head of 512 × 64, and a norm.
const BLOCK: u64 = 64 + 64 * 64 + 2 * 32 * 64 + 2 * 16 + 64 * 64 + 64 + 3 * 128 * 64;
const EMBEDDING: u64 = 512 * 64;

#[test]
fn init_creates_a_plannable_model() {
    let folder = tempfile::tempdir().unwrap();
    let ended =
        init(folder.path(), &["--head-dim", "16", "--seed", "7", "--output", "new", "--format", "json"]);
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let result: Value = serde_json::from_str(&ended.stdout).unwrap();
    let params = 2 * BLOCK + 2 * EMBEDDING + 64;
    assert_eq!(result["params"], params);
    assert_eq!(result["bytes"], 2 * params, "bf16 is the default");
    assert_eq!(
        (&result["family"], &result["dtype"], &result["seed"]),
        (&"qwen3".into(), &"bf16".into(), &7.into())
    );
    assert_eq!(result["files"].as_array().unwrap().len(), 2);

    let ended = zeroth_in(folder.path(), &["plan", "--model", "new", "--ranks", "2", "--format", "json"]);
    let plan: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(plan["params"], params);
}

#[test]
fn init_creates_mixtures_of_experts() {
    let folder = tempfile::tempdir().unwrap();
    let init = |more: &[&str]| {
        let sizes = ["--hidden", "16", "--layers", "2", "--heads", "2", "--intermediate-size", "24"];
        let rest = ["--vocab-size", "40", "--format", "json"];
        zeroth_in(folder.path(), &[&["init"], &sizes[..], &rest, more].concat())
    };
    let experts = ["--num-experts", "4", "--num-experts-per-tok", "2"];
    for (family, width, expert) in [
        ("qwen3_moe", 12, "model.layers.1.mlp.experts.3.up_proj.weight"),
        ("mixtral", 24, "model.layers.1.block_sparse_moe.experts.3.w3.weight"),
    ] {
        let own: &[&str] = if width == 12 { &["--moe-intermediate-size", "12"] } else { &[] };
        let ended = init(&[&["--family", family, "--output", family], &experts[..], own].concat());
        assert_eq!(ended.code, 0, "{}", ended.stderr);
        let result: Value = serde_json::from_str(&ended.stdout).unwrap();
        let norms = if family == "qwen3_moe" { 2 * 8 } else { 0 };
        let block = 4 * 16 * 16 + norms + 2 * 16 + 4 * 16 + 4 * 3 * width * 16;
        assert_eq!(result["params"], 2 * 40 * 16 + 16 + 2 * block, "{family}");
        let file = fs::read(folder.path().join(family).join("model.safetensors")).unwrap();
        assert!(file.windows(expert.len()).any(|name| name == expert.as_bytes()), "{family}");
        let ended = zeroth_in(folder.path(), &["plan", "--model", family, "--format", "json"]);
        let plan: Value = serde_json::from_str(&ended.stdout).unwrap();
        assert_eq!(plan["params"], result["params"], "{family}");
    }
    let with = |own: &[&'static str], more: &[&'static str]| [own, more].concat();
    for (flags, words) in [
        (with(&["--family", "mixtral", "--output", "a"], &[]), "say how many"),
        (with(&["--family", "qwen3", "--output", "b"], &experts), "have no experts"),
        (
            with(
                &["--family", "mixtral", "--output", "c"],
                &["--num-experts", "2", "--num-experts-per-tok", "3"],
            ),
            "at most all of them",
        ),
        (
            with(&["--family", "mixtral", "--output", "d", "--moe-intermediate-size", "8"], &experts),
            "leave it out",
        ),
    ] {
        let ended = init(&flags);
        assert!(ended.code == 2 && ended.stderr.contains(words), "{words}: {} {}", ended.code, ended.stderr);
    }
}

#[test]
fn init_honours_tied_dtype_and_seed() {
    let folder = tempfile::tempdir().unwrap();
    let weights = |name: &str, more: &[&str]| {
        let ended = init(folder.path(), &[&["--tied", "--dtype", "fp32", "--output", name], more].concat());
        assert_eq!(ended.code, 0, "{}", ended.stderr);
        assert!(ended.stdout.contains("qwen3 with 106,880 parameters"), "{}", ended.stdout);
        fs::read(folder.path().join(name).join("model.safetensors")).unwrap()
    };
    let first = weights("a", &[]);
    assert!(first.len() as u64 > 4 * (2 * BLOCK + EMBEDDING + 64));
    assert!(first == weights("b", &["--seed", "42"]), "42 is the default");
    assert!(first != weights("c", &["--seed", "43"]));
}

#[test]
fn init_overwrites_only_on_request() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(init(folder.path(), &["--output", "m"]).code, 0);
    let config = folder.path().join("m/config.json");
    fs::write(&config, "{}").unwrap();
    let ended = init(folder.path(), &["--output", "m"]);
    assert_eq!(ended.code, 2);
    assert!(ended.stderr.contains("m is not empty") && ended.stderr.contains("--overwrite-output-dir"));
    assert_eq!(fs::read(&config).unwrap(), b"{}", "nothing was touched");

    let ended =
        init(folder.path(), &["--output", "m", "--overwrite_output_dir", "--max-shard-size", "100KB"]);
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert!(folder.path().join("m/model.safetensors.index.json").exists());
    assert!(!folder.path().join("m/model.safetensors").exists(), "the old weights are gone");
}

#[test]
fn invalid_sizes_are_refused_without_output() {
    let folder = tempfile::tempdir().unwrap();
    for (more, phrase) in [
        (vec!["--kv-heads", "3"], "is not a multiple of `num_key_value_heads` (3)"),
        (vec!["--head-dim", "7"], "must be even"),
        (vec!["--hidden", "0"], "`hidden_size` is 0"),
        (vec!["--hidden", "3000000"], "`hidden_size` is 3000000"),
        (vec!["--heads", "6"], "how wide a head is"),
        (vec!["--rope-theta", "nan"], "`rope_theta` is NaN"),
        (vec!["--family", "bert"], "invalid value 'bert'"),
        (vec!["--family", "t5"], "`num_key_value_heads` is 2: models of the family t5 have none"),
        (vec!["--dtype", "int8"], "invalid value 'int8'"),
    ] {
        let ended = init(folder.path(), &[&more[..], &["--output", "m"]].concat());
        assert_eq!(ended.code, 2, "{more:?}\n{}", ended.stdout);
        assert!(ended.stderr.contains(phrase) && ended.is_orderly(), "{more:?}: {}", ended.stderr);
        assert!(!folder.path().join("m").exists(), "{more:?}");
    }
    let ended = zeroth(&["init", "--family", "llama"]);
    assert_eq!(ended.code, 2);
    assert!(ended.stderr.contains("--output") && ended.stderr.contains("--vocab-size"), "{}", ended.stderr);
}

#[test]
fn help_has_an_example() {
    let ended = zeroth(&["init", "--help"]);
    assert!(
        ended.code == 0 && ended.stdout.contains("Example: zeroth init --family qwen3"),
        "{}",
        ended.stdout
    );
}
