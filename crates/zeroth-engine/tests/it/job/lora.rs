//! Golden models with LoRA adapters.

use std::path::Path;

use serde_json::Value;
use zeroth_engine::StreamRows;
use zeroth_model::{Adapter, Lora, LoraTargets, add_adapters};

use super::{Golden, golden_folder, tensor};

/// What PEFT writes before the names of a model's parameters.
const PREFIX: &str = "base_model.model.";

/// The names of all golden LoRA runs.
pub(crate) fn lora_goldens() -> Vec<String> {
    let folders = std::fs::read_dir(golden_folder().join("lora")).unwrap();
    let mut names: Vec<String> = folders
        .map(Result::unwrap)
        .filter(|entry| entry.path().is_dir())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert!(names.len() >= 12, "{names:?}");
    names
}

/// A parameter's name in `steps.json`.
pub(crate) fn name_in_steps(name: &str) -> &str {
    name.strip_prefix(PREFIX).unwrap_or(name)
}

fn json(file: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

impl Golden {
    /// A golden LoRA run, with another dropout than its own of 0.
    pub(crate) fn lora(name: &str, dropout: f64) -> Self {
        let folder = golden_folder().join("lora").join(name);
        let (steps, config) = (json(&folder.join("steps.json")), json(&folder.join("adapter_config.json")));
        let base = Self::named(steps["base"].as_str().unwrap());
        let targets = config["target_modules"].as_array().unwrap().iter();
        let lora = Lora {
            rank: config["r"].as_u64().unwrap(),
            alpha: config["lora_alpha"].as_f64().unwrap(),
            rslora: config["use_rslora"].as_bool().unwrap(),
            dropout,
            targets: LoraTargets::Named(targets.map(|name| name.as_str().unwrap().to_owned()).collect()),
        };
        let table = add_adapters(&base.table, &lora).unwrap();
        let mut of_base = base.weights.iter();
        let weights = table.iter().map(|parameter| {
            if parameter.trained {
                tensor(&folder.join("adapter_model.safetensors"), &parameter.name)
            } else {
                of_base.next().unwrap().clone()
            }
        });
        let (weights, name) = (weights.collect(), name.to_owned());
        let frozen = table.iter().filter(|parameter| !parameter.trained);
        let frozen = frozen.map(|parameter| parameter.name.clone()).collect();
        Self {
            name,
            folder,
            table,
            weights,
            steps,
            frozen,
            config: base.config,
            rows: base.rows,
            teacher: None,
        }
    }

    /// A golden LoRA run of a model of another kind: with experts (`moe`), or an encoder-decoder (`t5`).
    pub(crate) fn lora_of(kind: &str, name: &str) -> Self {
        let folder = golden_folder().join(kind).join("lora").join(name);
        let steps = json(&folder.join("steps.json"));
        let base = Self::named(steps["base"].as_str().unwrap());
        let adapter = Adapter::open(&folder, &base.table).unwrap();
        let table = add_adapters(&base.table, adapter.lora()).unwrap();
        let mut of_base = base.weights.iter();
        let weights = table.iter().map(|parameter| {
            if !parameter.trained {
                return of_base.next().unwrap().clone();
            }
            let mut elements = vec![0f32; parameter.elements() as usize];
            adapter.read_f32(&parameter.name, 0..parameter.elements(), &mut elements).unwrap();
            elements
        });
        let (weights, name) = (weights.collect(), name.to_owned());
        let frozen = table.iter().filter(|parameter| !parameter.trained);
        let frozen = frozen.map(|parameter| parameter.name.clone()).collect();
        Self {
            name,
            folder,
            table,
            weights,
            steps,
            frozen,
            config: base.config,
            rows: base.rows,
            teacher: None,
        }
    }

    /// Calls `of` with `count` rows from `first` on as one micro-batch.
    pub(crate) fn with_rows<T>(&self, first: u64, count: u64, of: impl FnOnce(&StreamRows<'_>) -> T) -> T {
        of(&self.packed(first, count).view())
    }

    /// Calls `of` with the first `count` rows as one micro-batch.
    pub(crate) fn with_batch<T>(&self, count: u64, of: impl FnOnce(&StreamRows<'_>) -> T) -> T {
        of(&self.packed(0, count).view())
    }
}
