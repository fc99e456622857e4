//! Merging adapters into their base: PEFT's results, and folders that are only read.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde_json::Value;
use zeroth_base::DType;
use zeroth_model::{
    Adapter, DEFAULT_SHARD_BYTES, ModelConfig, NewTensor, ParameterTable, WeightFiles, WeightWriter,
    read_header, stored_to_f32, table,
};
use zeroth_train::checkpoint::Checkpoint;
use zeroth_train::{ExportDestination, ExportError, MergeBase, MergeOutput};

use super::sample::{Model, names_in};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

fn output(folder: &Path) -> MergeOutput<'_> {
    MergeOutput {
        folder,
        destination: ExportDestination::New,
        dtype: None,
        shard_bytes: DEFAULT_SHARD_BYTES,
        allows_other_base: false,
    }
}

fn merge(base: &Path, adapter: &Path, to: MergeOutput<'_>) -> Result<(), ExportError> {
    let base = MergeBase::open(base)?;
    let opened = Adapter::open(adapter, base.table()).unwrap();
    base.merge_adapter(&opened, adapter, to).map(drop)
}

fn weights(folder: &Path) -> (WeightFiles, ParameterTable) {
    let table = table(&ModelConfig::from_folder(folder).unwrap());
    (WeightFiles::open(folder, &table).unwrap(), table)
}

fn read(files: &WeightFiles, table: &ParameterTable, name: &str) -> Vec<f32> {
    let mut elements = vec![0.0; table.by_name()[name].elements() as usize];
    files.read_f32(name, 0..elements.len() as u64, &mut elements).unwrap();
    elements
}

/// The tensors of a safetensors file by name, as f32.
fn tensors(path: &Path) -> Vec<(String, Vec<f32>)> {
    let (header, bytes) =
        (read_header(&fs::File::open(path).unwrap()).unwrap().unwrap(), fs::read(path).unwrap());
    let tensor = |entry: zeroth_model::TensorEntry| {
        let mut values = vec![0.0; entry.shape.iter().product::<u64>() as usize];
        let range = entry.bytes.start as usize..entry.bytes.end as usize;
        stored_to_f32(entry.dtype.unwrap(), &bytes[range], &mut values);
        (entry.name, values)
    };
    header.into_iter().map(tensor).collect()
}

#[test]
fn merged_weights_are_those_of_peft() {
    let text = fs::read_to_string(golden().join("lora/adapters.json")).unwrap();
    let cases: Value = serde_json::from_str(&text).unwrap();
    for (name, case) in cases.as_object().unwrap() {
        let folder = tempfile::tempdir().unwrap();
        let (base, adapter) =
            (golden().join(case["base"].as_str().unwrap()), golden().join("lora").join(name));
        merge(&base, &adapter, output(folder.path())).unwrap();
        let ((merged, table), (before, _)) = (weights(folder.path()), weights(&base));
        let targets = case["merged"].as_object().unwrap();
        for parameter in table.iter() {
            let found = read(&merged, &table, &parameter.name);
            let Some(expected) = targets.get(&parameter.name) else {
                assert_eq!(found, read(&before, &table, &parameter.name), "{name}: {}", parameter.name);
                continue;
            };
            let norm = found.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
            let sum: f64 = found.iter().map(|value| f64::from(*value)).sum();
            let apart = |found: f64, key: &str| (found - expected[key].as_f64().unwrap()).abs();
            let room = 1e-7 * found.len() as f64;
            assert!(apart(norm, "norm") < room && apart(sum, "sum") < room, "{name}: {}", parameter.name);
        }
        assert_eq!(targets.len(), Adapter::open(&adapter, &table).unwrap().table().iter().count() / 2);
    }
}

/// The golden model in bf16.
fn in_bf16(base: &Path, to: &Path) {
    let (files, table) = weights(base);
    let stored: Vec<NewTensor> = table.iter().flat_map(|p| NewTensor::all_of(p, DType::Bf16)).collect();
    let mut writer = WeightWriter::create(to, stored, DEFAULT_SHARD_BYTES).unwrap();
    for parameter in table.iter() {
        writer.append_f32(&parameter.name, &read(&files, &table, &parameter.name)).unwrap();
    }
    writer.finish().unwrap();
    fs::copy(base.join("config.json"), to.join("config.json")).unwrap();
}

/// The distance from a bf16 number to the next.
fn step_of_bf16(value: f32) -> f32 {
    value.abs().max(f32::MIN_POSITIVE).log2().floor().exp2() / 128.0
}

#[test]
fn every_element_is_within_1e_6_in_fp32_and_one_step_in_bf16() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (base, adapter) = (golden().join("qwen3-tied"), golden().join("lora/qwen3-tied-all-rslora"));
    fs::create_dir(at("bf16")).unwrap();
    in_bf16(&base, &at("bf16"));
    // Shards and pieces change no bit.
    let sharded = at("fp32-merged");
    merge(&base, &adapter, MergeOutput { shard_bytes: 4_000, ..output(&sharded) }).unwrap();
    merge(&at("bf16"), &adapter, output(&at("bf16-merged"))).unwrap();
    let (fp32, table) = weights(&at("fp32-merged"));
    for (name, expected) in tensors(&adapter.join("merged-fp32.safetensors")) {
        let found = read(&fp32, &table, &name);
        let apart = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(apart < 1e-6, "{name}: {apart}");
    }
    let ((bf16, _), (before, _)) = (weights(&at("bf16-merged")), weights(&at("bf16")));
    let (mut moved, mut compared) = (0, 0);
    for (name, expected) in tensors(&adapter.join("merged-bf16.safetensors")) {
        assert_eq!(bf16.dtype(&name).unwrap(), DType::Bf16);
        let (found, before) = (read(&bf16, &table, &name), read(&before, &table, &name));
        for ((found, expected), before) in found.iter().zip(&expected).zip(&before) {
            let largest = before.abs().max(expected.abs()).max((expected - before).abs());
            assert!((found - expected).abs() <= step_of_bf16(largest), "{name}: {found} {expected} {before}");
            moved += usize::from(found != before);
            compared += 1;
        }
    }
    assert!(moved * 2 > compared, "{moved} of {compared}");
    let config: Value = serde_json::from_slice(&fs::read(at("bf16-merged/config.json")).unwrap()).unwrap();
    assert_eq!(config.get("dtype").or_else(|| config.get("torch_dtype")).unwrap(), "bfloat16");
}

#[test]
fn folders_that_are_read_are_never_written_to() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for (from, to, files) in [
        ("qwen3-tied", "base", ["config.json", "model.safetensors"]),
        ("lora/qwen3-tied-qv", "adapter", ["adapter_config.json", "adapter_model.safetensors"]),
    ] {
        fs::create_dir(at(to)).unwrap();
        for name in files {
            fs::copy(golden().join(from).join(name), at(to).join(name)).unwrap();
        }
    }
    fs::write(at("base/tokenizer.json"), "{}").unwrap();
    symlink(at("adapter"), at("link")).unwrap();
    let before = (names_in(&at("base")), names_in(&at("adapter")));
    for to in ["base", "base/merged", "adapter", "adapter/merged/here", "link", "link/merged"] {
        for destination in [ExportDestination::New, ExportDestination::Overwrite] {
            let folder = at(to);
            let to = MergeOutput { destination, ..output(&folder) };
            let error = merge(&at("base"), &at("adapter"), to).unwrap_err();
            assert!(matches!(error, ExportError::InsideInput { .. }), "{folder:?}: {error}");
        }
    }
    assert_eq!((names_in(&at("base")), names_in(&at("adapter"))), before);

    merge(&at("base"), &at("adapter"), output(&at("merged"))).unwrap();
    assert_eq!(
        names_in(&at("merged")),
        ["config.json", "export.json", "model.safetensors", "tokenizer.json"]
    );
    let error = merge(&at("base"), &at("adapter"), output(&at("merged"))).unwrap_err();
    assert!(matches!(error, ExportError::NotEmpty { .. }), "{error}");
    // The merged model is a base like any other.
    merge(&at("merged"), &at("adapter"), output(&at("twice"))).unwrap();

    // A weight that fp16 cannot hold, or that is not finite, leaves nothing that looks like a model.
    let path = at("adapter/adapter_model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 4;
    bytes[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&path, &bytes).unwrap();
    let error = merge(&at("base"), &at("adapter"), output(&at("nan"))).unwrap_err();
    assert!(matches!(error, ExportError::NotFinite { .. }), "{error}");
    assert!(!at("nan").exists());
    fs::remove_file(at("base/model.safetensors")).unwrap();
    let error = merge(&at("base"), &at("adapter"), output(&at("none"))).unwrap_err();
    assert!(matches!(error, ExportError::NoBase { .. }), "{error}");
}

#[test]
fn a_checkpoint_of_full_training_has_nothing_to_merge() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    let checkpoint = Checkpoint::open(&model.save(&folder.path().join("checkpoints"), 3)).unwrap();
    let base = MergeBase::open(model.folder.path()).unwrap();
    let error = base.merge_checkpoint(&checkpoint, output(&folder.path().join("to"))).unwrap_err();
    assert!(matches!(error, ExportError::NoAdapters { .. }), "{error}");
    assert!(!folder.path().join("to").exists());
}
