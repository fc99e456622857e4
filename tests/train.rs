//! `zeroth train`, end to end: runs of the real binary, and the files they write.

mod accumulation;
mod adapter_bases;
mod adapters;
mod best_model;
mod best_records;
mod changed_inputs;
mod changed_models;
mod cluster_signals;
mod control_groups;
mod damaged_caches;
mod damaged_checkpoints;
mod damaged_tokenizer;
mod dead_ranks;
mod disk_space;
mod distillation;
mod early_stops;
mod encoder_decoder;
mod evaluation;
mod evaluation_data;
mod experts;
mod exports;
mod faults;
mod fit;
mod flag_combinations;
mod golden;
mod hangups;
mod hyperparameters;
mod launched_hosts;
mod launchers;
mod leftovers;
mod linked_folders;
mod live;
mod lora;
mod memory;
mod meshes;
mod model_weights;
mod mpi_bytes;
mod mpi_faults;
mod mpi_jobs;
mod new_weights;
mod not_finite;
mod not_finite_saves;
mod nothing_trained;
mod odd_data;
mod old_checkpoints;
mod over_mpi;
mod plan_agrees;
mod private_cache;
mod public_scripts;
mod refusals;
mod replaced_models;
mod resume;
mod resumed_settings;
mod routers;
mod run_files;
mod run_folder;
mod running;
mod same_bits;
mod same_folder;
mod save_dtypes;
mod start_up;
mod stopped_models;
mod stops;
mod strategies;
mod teacher_caches;
mod terminal_view;
mod trace;
mod trainer_flags;
mod unequal_machines;
mod unequal_ranks;
mod unread_output;

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::common::{Ended, cache, root, zeroth};

/// The folder of a golden model.
fn golden(name: &str) -> PathBuf {
    root().join("tests/golden").join(name)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("paths of these tests are UTF-8")
}

/// Trains a golden model on its own rows, in file order, on the CPU.
fn train(model: &str, output: &Path, more: &[&str]) -> Ended {
    let folder = golden(model);
    train_on(&folder, &folder.join("data.jsonl"), output, more)
}

fn train_on(model: &Path, data: &Path, output: &Path, more: &[&str]) -> Ended {
    let (model, data, output) = (text(model), text(data), text(output));
    let arguments = [
        "train",
        "--device",
        "cpu",
        "--model",
        model,
        "--data",
        data,
        "--shuffle",
        "false",
        "--output",
        output,
    ];
    let ended = zeroth(&[&arguments, more].concat());
    assert!(ended.is_orderly(), "{}", ended.stderr);
    ended
}

impl Ended {
    fn assert_done(&self) {
        assert_eq!(self.code, 0, "{}", self.stderr);
    }
}

/// The lines of a run's metrics.jsonl.
fn metrics(run: &Path) -> Vec<Value> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// A tensor of a safetensors file.
struct Tensor {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    /// Its byte range in the file.
    bytes: std::ops::Range<usize>,
}

fn tensors(file: &[u8]) -> Vec<Tensor> {
    let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let table: Value = serde_json::from_slice(&file[8..8 + header]).unwrap();
    let entries = table.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
    entries
        .map(|(name, entry)| {
            let whole = |key: &str| -> Vec<u64> {
                entry[key].as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
            };
            let place = |at: usize| 8 + header + whole("data_offsets")[at] as usize;
            Tensor {
                name: name.clone(),
                dtype: entry["dtype"].as_str().unwrap().to_owned(),
                shape: whole("shape"),
                bytes: place(0)..place(1),
            }
        })
        .collect()
}

/// Whether all of a large matrix of tests is run, and not only a diagonal.
fn is_full() -> bool {
    std::env::var_os("ZEROTH_FULL").is_some()
}

/// A new model with only a config.json, so that weights are random.
fn new_model(folder: &Path, hidden: u64, blocks: u64, feed_forward: u64, vocabulary: u64) -> PathBuf {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": blocks, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": feed_forward, "vocab_size": vocabulary,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    });
    let model = folder.join("new-model");
    fs::create_dir_all(&model).unwrap();
    fs::write(model.join("config.json"), config.to_string()).unwrap();
    model
}

/// Rows of `tokens` tokens, all trained.
fn new_data(folder: &Path, rows: u64, tokens: u64, vocabulary: u64) -> PathBuf {
    let row = |row: u64| {
        let ids: Vec<u64> = (0..tokens).map(|at| (row * 37 + at * 11 + at * at) % vocabulary).collect();
        serde_json::json!({ "input_ids": ids }).to_string()
    };
    let lines: Vec<String> = (0..rows).map(row).collect();
    written(folder, "rows.jsonl", &lines)
}

fn written(folder: &Path, name: &str, lines: &[impl AsRef<str>]) -> PathBuf {
    let path = folder.join(name);
    let mut lines: Vec<&str> = lines.iter().map(AsRef::as_ref).collect();
    lines.push("");
    fs::write(&path, lines.join("\n")).unwrap();
    path
}
