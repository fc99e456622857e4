//! Exporting checkpoints to folders that other readers accept.

use std::fs;

use half::{bf16, f16};
use serde_json::Value;
use zeroth_base::DType;
use zeroth_engine::StateKind;
use zeroth_model::{DEFAULT_SHARD_BYTES, WeightFiles};
use zeroth_train::checkpoint::{Checkpoint, SAVED_STATES, ShardWriter, UnfinishedCheckpoint};
use zeroth_train::{ExportDestination, ExportError, export_checkpoint};

use super::sample::{Model, names_in, number};

#[test]
fn exports_round_trip_in_every_dtype() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    let checkpoint =
        Checkpoint::open(&model.save_cut(&folder.path().join("checkpoints"), 3, &[333], 77).unwrap())
            .unwrap();
    for (dtype, name) in [(DType::F32, "float32"), (DType::Bf16, "bfloat16"), (DType::F16, "float16")] {
        for shard_bytes in [DEFAULT_SHARD_BYTES, 600] {
            let to = folder.path().join(format!("{dtype}-{shard_bytes}"));
            let written =
                export_checkpoint(&checkpoint, &to, ExportDestination::New, dtype, shard_bytes).unwrap();
            assert_eq!(written.bytes, model.table.total() * dtype.bytes());
            assert_eq!(to.join("model.safetensors.index.json").exists(), shard_bytes == 600);

            let files = WeightFiles::open(&to, &model.table).unwrap();
            assert!(files.warnings().is_empty());
            for parameter in model.table.iter() {
                assert_eq!(files.dtype(&parameter.name).unwrap(), dtype);
                let mut found = vec![0.0; parameter.elements() as usize];
                files.read_f32(&parameter.name, 0..parameter.elements(), &mut found).unwrap();
                for (element, found) in found.into_iter().enumerate() {
                    let exact = number(3, StateKind::Weights, &parameter.name, element as u64);
                    let expected = match dtype {
                        DType::F32 => exact,
                        DType::Bf16 => bf16::from_f32(exact).to_f32(),
                        DType::F16 => f16::from_f32(exact).to_f32(),
                    };
                    assert_eq!(found.to_bits(), expected.to_bits());
                }
            }
            let config: Value = serde_json::from_slice(&fs::read(to.join("config.json")).unwrap()).unwrap();
            let key = if config.get("torch_dtype").is_some() { "torch_dtype" } else { "dtype" };
            assert_eq!(config[key], name);
            assert_eq!(config["model_type"], "qwen3");
            for carried in ["tokenizer.json", "chat_template.jinja"] {
                assert_eq!(
                    fs::read(to.join(carried)).unwrap(),
                    fs::read(model.folder.path().join(carried)).unwrap()
                );
            }
        }
    }
}

#[test]
fn non_empty_folders_need_overwrite() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    let checkpoint = Checkpoint::open(&model.save(&folder.path().join("checkpoints"), 3)).unwrap();
    let to = folder.path().join("to");
    let export =
        |destination, shard_bytes| export_checkpoint(&checkpoint, &to, destination, DType::F32, shard_bytes);
    fs::create_dir(&to).unwrap();
    export(ExportDestination::New, 600).unwrap();
    fs::write(to.join("notes.txt"), "mine").unwrap();
    let error = export(ExportDestination::New, 600).unwrap_err();
    assert!(error.to_string().contains("is not empty"), "{error}");
    export(ExportDestination::Overwrite, DEFAULT_SHARD_BYTES).unwrap();
    assert_eq!(
        names_in(&to),
        [
            "chat_template.jinja",
            "config.json",
            "export.json",
            "model.safetensors",
            "notes.txt",
            "tokenizer.json"
        ]
    );
    fs::write(to.join("metrics.jsonl"), "").unwrap();
    let error = export(ExportDestination::Overwrite, DEFAULT_SHARD_BYTES).unwrap_err();
    assert!(matches!(error, ExportError::HoldsARun { .. }), "{error}");
}

#[test]
fn fp16_overflow_is_refused() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    let checkpoints = folder.path().join("checkpoints");
    let unfinished = UnfinishedCheckpoint::begin(&checkpoints, 1).unwrap();
    let total = model.table.total();
    let mut part = ShardWriter::create(unfinished.path(), 0, 1, model.pieces(0..total)).unwrap();
    let mut numbers = vec![0.0; SAVED_STATES.len() * total as usize];
    numbers[1] = 70_000.0;
    part.append_f32(&numbers).unwrap();
    let mut manifest = model.manifest(1, 1);
    manifest.files.push(part.finish().unwrap().entry().clone());
    let checkpoint = Checkpoint::open(&unfinished.commit(manifest, &model.files()).unwrap()).unwrap();
    let to = folder.path().join("to");
    let error = export_checkpoint(&checkpoint, &to, ExportDestination::New, DType::F16, DEFAULT_SHARD_BYTES)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "`model.embed_tokens.weight` holds 70000, beyond fp16's maximum of 65504: export the model in bf16 or fp32 (--dtype bf16)"
    );
    assert!(!to.exists());
    export_checkpoint(&checkpoint, &to, ExportDestination::New, DType::Bf16, DEFAULT_SHARD_BYTES).unwrap();
}

#[test]
fn exports_into_checkpoints_are_refused() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    let checkpoints = folder.path().join("checkpoints");
    let (step, other) = (model.save(&checkpoints, 3), model.save(&checkpoints, 4));
    let checkpoint = Checkpoint::open(&step).unwrap();
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(step.join("model"), &link).unwrap();
    // A copied checkpoint under any name.
    let kept = folder.path().join("kept");
    fs::rename(&other, &kept).unwrap();
    for to in [step.join("model"), step.clone(), step.join("new/model"), link, kept.join("new")] {
        let error = export_checkpoint(
            &checkpoint,
            &to,
            ExportDestination::Overwrite,
            DType::F32,
            DEFAULT_SHARD_BYTES,
        )
        .unwrap_err();
        assert!(matches!(error, ExportError::InsideCheckpoint { .. }), "{}: {error}", to.display());
    }
    for whole in [&step, &kept] {
        Checkpoint::open(whole).unwrap().verify().unwrap();
        assert!(!whole.join("new").exists());
    }
    // Beside the checkpoints it is allowed.
    let to = folder.path().join("model");
    export_checkpoint(&checkpoint, &to, ExportDestination::New, DType::F32, DEFAULT_SHARD_BYTES).unwrap();
}

#[test]
fn failed_exports_keep_the_old_model() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    let step = model.save(&folder.path().join("checkpoints"), 3);
    let checkpoint = Checkpoint::open(&step).unwrap();
    let to = folder.path().join("to");
    let export =
        |dtype| export_checkpoint(&checkpoint, &to, ExportDestination::Overwrite, dtype, DEFAULT_SHARD_BYTES);
    export(DType::F32).unwrap();
    let files = |folder: &std::path::Path| -> Vec<(String, Vec<u8>)> {
        names_in(folder)
            .into_iter()
            .map(|name| (name.clone(), fs::read(folder.join(&name)).unwrap()))
            .collect()
    };
    let before = files(&to);
    // The weights are truncated while being read.
    let part = step.join("rank-00000-of-00001.safetensors");
    let bytes = fs::read(&part).unwrap();
    fs::OpenOptions::new().write(true).open(&part).unwrap().set_len(bytes.len() as u64 / 3).unwrap();
    export(DType::Bf16).unwrap_err();
    assert_eq!(files(&to), before);
    fs::write(&part, bytes).unwrap();
    // A tokenizer file has become a folder.
    let config = step.join("model/config.json");
    fs::rename(&config, step.join("model/gone")).unwrap();
    export(DType::Bf16).unwrap_err();
    assert_eq!(files(&to), before);
}
