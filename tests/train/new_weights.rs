//! Random weights follow the model's config; unsupported settings are noted.

use std::fs;
use std::path::Path;

use serde_json::json;

use super::{golden, new_data, new_model, tensors, train_on};

/// The root mean square of an exported f32 tensor.
fn deviation(run: &Path, name: &str) -> f64 {
    let file = fs::read(run.join("model/model.safetensors")).unwrap();
    let all = tensors(&file);
    let tensor = all.iter().find(|tensor| tensor.name == name).unwrap();
    assert_eq!(tensor.dtype, "F32");
    let values =
        file[tensor.bytes.clone()].chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
    let squares: Vec<f64> = values.map(|value| f64::from(value).powi(2)).collect();
    (squares.iter().sum::<f64>() / squares.len() as f64).sqrt()
}

#[test]
fn random_weights_follow_initializer_range() {
    let folder = tempfile::tempdir().unwrap();
    let data = new_data(folder.path(), 4, 8, 64);
    let model = new_model(folder.path(), 64, 1, 128, 64);
    let path = model.join("config.json");
    let config: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    for (range, expected) in [(json!(0.5), 0.5), (json!(0.001), 0.001), (json!(null), 0.02)] {
        let mut config = config.clone();
        config["initializer_range"] = range;
        fs::write(&path, config.to_string()).unwrap();
        let run = folder.path().join(format!("run-{expected}"));
        let flags = ["--fp32", "--max-steps", "1", "--learning-rate", "0"];
        train_on(&model, &data, &run, &flags).assert_done();
        for name in ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"] {
            let found = deviation(&run, name);
            assert!((found / expected - 1.0).abs() < 0.05, "{name}: {found}, not {expected}");
        }
        assert!((deviation(&run, "model.norm.weight") - 1.0).abs() < 1e-6);
    }
    for wrong in [json!(-0.02), json!(1e300), json!("wide")] {
        let mut config = config.clone();
        config["initializer_range"] = wrong.clone();
        fs::write(&path, config.to_string()).unwrap();
        let ended = train_on(&model, &data, &folder.path().join("wrong"), &["--max-steps", "1"]);
        assert_eq!(ended.code, 2, "{wrong}: {}", ended.stderr);
        assert!(ended.stderr.contains("initializer_range"), "{}", ended.stderr);
    }
}

#[test]
fn unsupported_dropout_is_noted() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    fs::create_dir(&model).unwrap();
    fs::copy(golden("qwen3-tied").join("model.safetensors"), model.join("model.safetensors")).unwrap();
    let text = fs::read_to_string(golden("qwen3-tied").join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&text).unwrap();
    let data = golden("qwen3-tied").join("data.jsonl");
    for (dropout, is_said) in [(0.1, true), (0.0, false)] {
        let mut config = config.clone();
        config["attention_dropout"] = json!(dropout);
        fs::write(model.join("config.json"), config.to_string()).unwrap();
        let ended = train_on(&model, &data, &folder.path().join("run"), &["--dry-run"]);
        ended.assert_done();
        let words = "note: attention_dropout 0.1 has no effect";
        assert_eq!(ended.stderr.contains(words), is_said, "{}", ended.stderr);
    }
}
