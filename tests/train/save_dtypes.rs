//! The dtype of the exported model: that of the run, or of --save-dtype.

use std::fs;
use std::path::{Path, PathBuf};

use super::{golden, json, tensors, text, train_on};
use crate::common::{zeroth, zeroth_json};

/// The dtypes of a model's weights, and the one that its config.json names.
fn dtypes(model: &Path, weights: &str) -> (Vec<String>, Option<String>) {
    let mut stored: Vec<String> =
        tensors(&fs::read(model.join(weights)).unwrap()).into_iter().map(|tensor| tensor.dtype).collect();
    stored.sort();
    stored.dedup();
    let config = model.join("config.json");
    let named = config.is_file().then(|| {
        let config = json(&config);
        assert_eq!(config["torch_dtype"], config["dtype"], "both names have it");
        config["torch_dtype"].as_str().unwrap().to_owned()
    });
    (stored, named)
}

/// The golden model with both names of its dtype, as `zeroth init` writes them.
fn base(folder: &Path) -> PathBuf {
    let (golden, base) = (golden("qwen3-tied"), folder.join("base"));
    fs::create_dir(&base).unwrap();
    fs::copy(golden.join("model.safetensors"), base.join("model.safetensors")).unwrap();
    let mut config = json(&golden.join("config.json"));
    config["torch_dtype"] = config["dtype"].clone();
    fs::write(base.join("config.json"), config.to_string()).unwrap();
    base
}

#[test]
fn models_are_written_in_the_dtype_of_the_run_or_of_save_dtype() {
    let folder = tempfile::tempdir().unwrap();
    let base = base(folder.path());
    let data = golden("qwen3-tied").join("data.jsonl");
    let cases: [(&str, &[&str], &str, &str); 7] = [
        ("fp16", &["--fp16"], "F16", "float16"),
        ("bf16", &["--bf16"], "BF16", "bfloat16"),
        ("fp32", &["--fp32"], "F32", "float32"),
        ("fp16-as-bf16", &["--fp16", "--save-dtype", "bf16"], "BF16", "bfloat16"),
        ("fp16-as-fp32", &["--fp16", "--save_dtype", "fp32"], "F32", "float32"),
        ("bf16-as-fp16", &["--bf16", "--save-dtype", "fp16"], "F16", "float16"),
        (
            "best-as-fp16",
            &[
                "--save-dtype",
                "fp16",
                "--split-dataset-ratio",
                "0.2",
                "--eval-steps",
                "1",
                "--load-best-model-at-end",
            ],
            "F16",
            "float16",
        ),
    ];
    for (name, flags, stored, named) in cases {
        let run = folder.path().join(name);
        let ended =
            train_on(&base, &data, &run, &[&["--max-steps", "2", "--save-steps", "1"], flags].concat());
        ended.assert_done();
        let expected = (vec![stored.to_owned()], Some(named.to_owned()));
        assert_eq!(dtypes(&run.join("model"), "model.safetensors"), expected, "{name}");
        let model = run.join("model");
        let answer = ["generate", "--model", text(&model), "--prompt-ids", "1,2,3", "--max-new-tokens", "2"];
        let (code, _) = zeroth_json(&[&answer[..], &["--device", "cpu"]].concat());
        assert_eq!(code, 0, "{name}");
    }
    // An export of the checkpoint follows the run, too.
    let (step, exported) = (folder.path().join("fp16/checkpoints/step-2"), folder.path().join("exported"));
    let ended = zeroth(&["checkpoint", "export", text(&step), "--output", text(&exported)]);
    ended.assert_done();
    let expected = (vec!["F16".to_owned()], Some("float16".to_owned()));
    assert_eq!(dtypes(&exported, "model.safetensors"), expected);
    let own = folder.path().join("fp16/model/model.safetensors");
    assert!(fs::read(exported.join("model.safetensors")).unwrap() == fs::read(own).unwrap());
    // Adapters are those of the master weights unless a dtype is asked for.
    for (name, flags, stored) in
        [("lora", &[][..], "F32"), ("lora-as-bf16", &["--save-dtype", "bf16"], "BF16")]
    {
        let run = folder.path().join(name);
        let flags = [&["--train-type", "lora", "--max-steps", "1", "--fp16"], flags].concat();
        train_on(&base, &data, &run, &flags).assert_done();
        assert_eq!(dtypes(&run.join("model"), "adapter_model.safetensors").0, [stored], "{name}");
    }
}
