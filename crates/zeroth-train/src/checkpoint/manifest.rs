//! manifest.json: a checkpoint's metadata, and the checksum of every file in it.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use zeroth_base::DType;
use zeroth_engine::StateKind;
use zeroth_model::{ModelFunction, ParameterTable};

use super::distill_entry::DistillEntry;
use super::exact;
use super::lora_entry::LoraEntry;

/// The format version that this version reads and writes. Adding fields keeps it; a change that an older version
/// would misread increments it.
pub const FORMAT_VERSION: u64 = 1;
/// The version of zeroth.
pub const ZEROTH_VERSION: &str = env!("CARGO_PKG_VERSION");

/// A checkpoint's metadata.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Manifest {
    pub format_version: u64,
    /// [`ZEROTH_VERSION`] of the writer.
    pub zeroth_version: String,
    /// Seconds since 1970, UTC.
    pub created: u64,
    /// Steps completed, skipped ones included.
    pub step: u64,
    /// Position in the data, in samples.
    pub samples_seen: u64,
    /// Loss of the last step, for display.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// Loss scaler and step counters, carried across steps on the device.
    pub control: ControlState,
    /// Seed of all random numbers.
    pub seed: u64,
    /// The data and its order.
    pub data: DataEntry,
    /// The batch decomposition.
    pub batch: BatchEntry,
    /// Number of ranks that wrote it.
    pub ranks: u64,
    /// Ranks of a group, where they were several groups: the order in which gradients were added up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u64>,
    /// ZeRO stage of the run.
    pub stage: u8,
    /// Compute dtype.
    #[serde(with = "dtype_name")]
    pub dtype: DType,
    /// The optimizer's name.
    pub optimizer: String,
    /// Dtype of the optimizer's moments.
    #[serde(with = "dtype_name")]
    pub moments: DType,
    pub model: ModelEntry,
    /// States in its files: weights, and those the optimizer keeps.
    #[serde(with = "state_names")]
    pub states: Vec<StateKind>,
    /// Whether it has weights only (`--save-only-model`), and training cannot be resumed from it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub weights_only: bool,
    /// The best evaluation so far, where evaluations are compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<BestEntry>,
    /// The adapters and their base, where LoRA is trained: the model's parameters are then those of the adapters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraEntry>,
    /// The teacher, of which nothing is saved, and how the model is distilled from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub distillation: Option<DistillEntry>,
    /// The resolved config of the run.
    pub config: Value,
    /// Flags of the run that no key of the config has, and that decide what its steps do; checkpoints of earlier versions have
    /// none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub flags: BTreeMap<String, String>,
    /// Every file except the manifest.
    pub files: Vec<FileEntry>,
}

/// The part of the device's control block that persists across steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ControlState {
    /// Steps whose update was applied.
    pub applied: u64,
    /// Steps that were skipped.
    pub skipped: u64,
    /// Loss scale, as text that parses to the same bits.
    #[serde(with = "exact")]
    pub loss_scale: f64,
    /// Steps seen by the dynamic loss scaler.
    pub iteration: u64,
    /// The last step that overflowed, or -1.
    pub last_overflow: i64,
    /// Overflows left before the dynamic loss scaler halves the scale.
    pub hysteresis_left: u32,
}

/// The state of comparing evaluations: the best model, and early stopping.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BestEntry {
    /// The metric's name in metrics.jsonl.
    pub metric: String,
    /// Whether a larger value is better.
    pub greater_is_better: bool,
    /// The best evaluation.
    pub evaluated: Option<Evaluated>,
    /// The best evaluation of a step that was saved.
    pub saved: Option<Evaluated>,
    /// Evaluations since the last improvement.
    pub stale: u64,
    /// Hash of the evaluation data; checkpoints of earlier versions do not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
}

/// The result of an evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Evaluated {
    /// Completed steps.
    pub step: u64,
    /// The metric, as text that parses to the same bits.
    #[serde(with = "exact")]
    pub value: f64,
}

/// The training data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataEntry {
    /// Hash of all samples, in hexadecimal.
    pub hash: String,
    /// Samples per epoch.
    pub samples: u64,
    /// Whether every epoch is reshuffled.
    pub shuffle: bool,
    /// Seed of the order and of what is held out, if it is not [`Manifest::seed`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
}

/// The batch decomposition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchEntry {
    /// Samples per step.
    pub train_batch_size: u64,
    /// Samples per micro-batch.
    pub micro_batch: u64,
    /// Micro-batches per rank and step.
    pub accumulation: u64,
}

/// The model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelEntry {
    /// `model_type` of its config.json.
    pub model_type: String,
    /// Total number of parameters.
    pub total: u64,
    /// All parameters in table order.
    pub parameters: Vec<ParameterEntry>,
    /// What the model computes from them, a base of adapters included; checkpoints of earlier versions do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub function: Option<ModelFunction>,
}

/// A parameter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParameterEntry {
    /// Its name in safetensors files.
    pub name: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Whether it is trained. Frozen parameters have weights only.
    pub trained: bool,
}

/// A file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Its path in the checkpoint's folder, separated by `/`.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// Its SHA-256 in hexadecimal.
    pub sha256: String,
}

impl ModelEntry {
    /// Describes the model of a parameter table; `is_trained` decides by name.
    pub fn of(model_type: &str, table: &ParameterTable, is_trained: impl Fn(&str) -> bool) -> Self {
        let parameters = table
            .iter()
            .map(|parameter| ParameterEntry {
                name: parameter.name.clone(),
                shape: parameter.shape.clone(),
                trained: is_trained(&parameter.name),
            })
            .collect();
        Self { model_type: model_type.to_owned(), total: table.total(), parameters, function: None }
    }
}

impl ParameterEntry {
    /// Its element count; `None` on overflow, which only a forged shape causes.
    pub fn elements(&self) -> Option<u64> {
        self.shape.iter().try_fold(1_u64, |elements, side| elements.checked_mul(*side))
    }

    /// Whether this parameter has the state.
    pub fn has(&self, state: StateKind) -> bool {
        self.trained || state == StateKind::Weights
    }
}

impl Manifest {
    /// Total size of all listed files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

/// Seconds since 1970, for [`Manifest::created`].
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |passed| passed.as_secs())
}

/// Serialises a dtype by DeepSpeed's name for it.
mod dtype_name {
    use serde::de::{Deserialize, Deserializer, Error as _};
    use serde::ser::Serializer;
    use zeroth_base::DType;

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
    pub(super) fn serialize<S: Serializer>(dtype: &DType, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(dtype)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DType, D::Error> {
        let name = String::deserialize(deserializer)?;
        DType::from_name(&name).ok_or_else(|| D::Error::custom(format!("`{name}` is not a dtype")))
    }
}

/// Serialises states by name.
mod state_names {
    use serde::de::{Deserialize, Deserializer, Error as _};
    use serde::ser::Serializer;
    use zeroth_engine::StateKind;

    use crate::checkpoint::{state_from_name, state_name};

    pub(super) fn serialize<S: Serializer>(states: &[StateKind], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(states.iter().filter_map(|state| state_name(*state)))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<StateKind>, D::Error> {
        let names = Vec::<String>::deserialize(deserializer)?;
        let state = |name: &String| {
            state_from_name(name)
                .ok_or_else(|| D::Error::custom(format!("`{name}` is not an optimizer state")))
        };
        names.iter().map(state).collect()
    }
}
