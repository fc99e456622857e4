//! manifest.json: what a checkpoint is, and the checksum of every file in it.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use zeroth_base::DType;
use zeroth_engine::State;
use zeroth_model::ParameterTable;

/// The format that this version writes and reads. Fields may be added within it; a change that an older version would
/// misread counts it up.
pub const FORMAT_VERSION: u64 = 1;
/// The version of zeroth that writes.
pub const ZEROTH_VERSION: &str = env!("CARGO_PKG_VERSION");

/// What a checkpoint is: where the run stood, what of, and in which files.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT_VERSION`].
    pub format_version: u64,
    /// [`ZEROTH_VERSION`] of the writer.
    pub zeroth_version: String,
    /// Seconds since 1970, UTC.
    pub created: u64,
    /// Steps that were made; skipped ones count.
    pub step: u64,
    /// The position in the data.
    pub samples_seen: u64,
    /// The loss of the last step, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// What the device carries from step to step.
    pub control: ControlState,
    /// Where all chance comes from.
    pub seed: u64,
    /// The data and its order.
    pub data: DataEntry,
    /// How a step was cut.
    pub batch: BatchEntry,
    /// Ranks that wrote it.
    pub ranks: u64,
    /// The ZeRO stage that it was written under.
    pub stage: u8,
    /// The type that was computed in.
    #[serde(with = "dtype_name")]
    pub dtype: DType,
    /// The optimizer's name.
    pub optimizer: String,
    /// The type of its moments.
    #[serde(with = "dtype_name")]
    pub moments: DType,
    /// The model.
    pub model: ModelEntry,
    /// The states in its files: weights, and those the optimizer has.
    #[serde(with = "state_names")]
    pub states: Vec<State>,
    /// The resolved config of the run.
    pub config: Value,
    /// Every file but the manifest itself.
    pub files: Vec<FileEntry>,
}

/// What of the device's control lives on between steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ControlState {
    /// Steps whose update was applied.
    pub applied: u64,
    /// Steps that were skipped.
    pub skipped: u64,
    /// What losses are multiplied with, as a text that reads back to the same bits.
    #[serde(with = "exact")]
    pub loss_scale: f64,
    /// Steps that a moving loss scale has seen.
    pub iteration: u64,
    /// The last of them that overflowed, or -1.
    pub last_overflow: i64,
    /// A moving loss scale halves at the overflow that finds 1 here.
    pub hysteresis_left: u32,
}

/// The data of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataEntry {
    /// A checksum of all samples, in hexadecimal digits.
    pub hash: String,
    /// Samples of an epoch.
    pub samples: u64,
    /// Whether every epoch has a new order.
    pub shuffle: bool,
}

/// How a step was cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchEntry {
    /// Samples of a step.
    pub train_batch_size: u64,
    /// Samples that a rank computes at a time.
    pub micro_batch: u64,
    /// Micro-batches of a step.
    pub accumulation: u64,
}

/// The model of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelEntry {
    /// As its config.json says.
    pub model_type: String,
    /// Elements of all parameters.
    pub total: u64,
    /// All parameters, in the order of the model's table.
    pub parameters: Vec<ParameterEntry>,
}

/// A parameter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParameterEntry {
    /// Its name on disk.
    pub name: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Whether it is trained: one that is not has weights only.
    pub trained: bool,
}

/// A file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Its name inside the checkpoint's folder, with `/` between folders.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// Its SHA-256 in hexadecimal digits.
    pub sha256: String,
}

impl ModelEntry {
    /// The model of a table; `is_trained` says by name which parameters are.
    pub fn of(model_type: &str, table: &ParameterTable, is_trained: impl Fn(&str) -> bool) -> Self {
        let parameters = table
            .iter()
            .map(|parameter| ParameterEntry {
                name: parameter.name.clone(),
                shape: parameter.shape.clone(),
                trained: is_trained(&parameter.name),
            })
            .collect();
        Self { model_type: model_type.to_owned(), total: table.total(), parameters }
    }
}

impl ParameterEntry {
    /// How many numbers it holds; `None` where they cannot be counted, which only a forged shape has.
    pub fn elements(&self) -> Option<u64> {
        self.shape.iter().try_fold(1_u64, |elements, side| elements.checked_mul(*side))
    }

    /// Whether its part of a state is saved.
    pub fn has(&self, state: State) -> bool {
        self.trained || state == State::Weights
    }
}

impl Manifest {
    /// Bytes of all files that it lists.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

/// Seconds since 1970, for [`Manifest::created`].
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |passed| passed.as_secs())
}

/// A type by the name that DeepSpeed's keys use.
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
        DType::from_name(&name).ok_or_else(|| D::Error::custom(format!("`{name}` is no type of numbers")))
    }
}

/// States by name.
mod state_names {
    use serde::de::{Deserialize, Deserializer, Error as _};
    use serde::ser::Serializer;
    use zeroth_engine::State;

    use crate::checkpoint::{state_name, state_named};

    pub(super) fn serialize<S: Serializer>(states: &[State], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(states.iter().filter_map(|state| state_name(*state)))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<State>, D::Error> {
        let names = Vec::<String>::deserialize(deserializer)?;
        let state = |name: &String| {
            state_named(name).ok_or_else(|| D::Error::custom(format!("`{name}` is no state of an optimizer")))
        };
        names.iter().map(state).collect()
    }
}

/// A number as the shortest text that reads back to the same bits. JSON's own numbers pass through readers that round.
mod exact {
    use serde::de::{Deserialize, Deserializer, Error as _};
    use serde::ser::Serializer;

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
    pub(super) fn serialize<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(number)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|_| D::Error::custom(format!("`{text}` is no number")))
    }
}
