//! One row of the schema.

use super::bounds::Bounds;
use super::support::Support;
use crate::view::ConfigView;

/// One key of the config: its names, its values, its effect, and the part that reads it.
///
/// Rows are built by the `const fn`s of `build_key.rs`.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// The canonical path, `zero_optimization.stage3_prefetch_bucket_size`.
    pub path: &'static str,
    /// Other names of the last part that DeepSpeed takes as well, such as `prefetch_bucket_size`.
    pub other_names: &'static [&'static str],
    /// Other full paths at which the key is accepted.
    pub other_paths: &'static [&'static str],
    /// The kind of its values.
    pub kind: KeyType,
    /// The range of its numbers.
    pub bounds: Bounds,
    /// The value of an absent key.
    pub default: DefaultValue,
    /// The unit of a number: elements, bytes, steps.
    pub unit: &'static str,
    /// What it does, in one sentence.
    pub does: &'static str,
    /// Advice on the value.
    pub set: &'static str,
    /// The pass or part that reads it.
    pub reader: ReadBy,
    /// Its effect in zeroth.
    pub effect: Effect,
    /// Which values a run implements.
    pub support: Support,
    /// The reason it has no effect with the other values, if any.
    pub idle: Option<Condition>,
    /// A remark that `check` adds where the key is honoured.
    pub note: Option<Condition>,
    /// The rule by which `"auto"` (or its absence) is filled.
    pub auto: Option<AutoRule>,
    /// The optimizer or scheduler types it belongs to; empty for every other key.
    pub types: &'static [&'static str],
}

/// The kind of a key's values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum KeyType {
    /// true or false.
    Bool,
    /// A whole number; `5e8` and `1.0` are whole.
    Int,
    /// Any finite number.
    Float,
    /// Text.
    Text,
    /// One of these words, whatever their case.
    OneOf(&'static [&'static str]),
    /// A list of this many numbers.
    Floats(usize),
    /// A list of whole numbers.
    Ints,
    /// A list of texts.
    Texts,
    /// An object whose keys are in this table.
    Section,
    /// An object (or anything else) of a part of DeepSpeed that has no counterpart here: not looked into.
    Opaque,
}

/// The value of an absent key.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum DefaultValue {
    /// Nothing.
    Absent,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(&'static str),
    Floats(&'static [f64]),
    /// A value that resolving derives from others; the text says how.
    Derived(Derivation, &'static str),
    /// Decided after resolving, by the model, the data or the machine; the text says how.
    Rule(&'static str),
}

/// How resolving derives the default of a key from other values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Derivation {
    /// true at stage 3.
    OverlapAtStage3,
    /// The precision of the run.
    RunPrecision,
    /// `block` where activation checkpointing is on, else `none`.
    Checkpointing,
    /// The optimizer's learning rate.
    LearningRate,
    /// `cycle_first_step_size`.
    FirstStepSize,
    /// `cycle_first_stair_count`.
    FirstStairCount,
}

/// The pass of the step program, or the part of the trainer, that reads a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadBy {
    /// Resolving of batch sizes and "auto".
    Resolve,
    /// The pass that lowers a micro-batch's operations.
    Lower,
    /// The pass of activation checkpointing.
    Checkpoint,
    /// The pass that gathers and releases parameters.
    Gather,
    /// The pass that reduces gradients to shards.
    Reduce,
    /// The pass that places state in host memory and stages it.
    Offload,
    /// The pass of gradient norm, clipping, loss scale and optimizer.
    Update,
    /// The pass that hoists transfers.
    Overlap,
    /// The trainer's learning-rate schedules.
    Schedule,
    /// The trainer's loop and what it prints.
    Loop,
    /// The trainer's metrics and monitors.
    Metrics,
    /// The trainer's checkpoints and exports.
    Save,
    /// The collectives between ranks.
    Collectives,
    /// Nobody: the key has no counterpart here.
    Nobody,
}

impl ReadBy {
    /// The name as `explain` prints it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Resolve => "resolving of the config",
            Self::Lower => "pass `lower`",
            Self::Checkpoint => "pass `checkpoint`",
            Self::Gather => "pass `gather`",
            Self::Reduce => "pass `reduce`",
            Self::Offload => "pass `offload`",
            Self::Update => "pass `update`",
            Self::Overlap => "pass `overlap`",
            Self::Schedule => "the trainer's schedule",
            Self::Loop => "the trainer's loop",
            Self::Metrics => "the trainer's reporting",
            Self::Save => "the trainer's saving",
            Self::Collectives => "communication between ranks",
            Self::Nobody => "nothing here",
        }
    }

    /// Whether it decides what is trained and where it lives; the others print, report and save.
    pub const fn decides_training(self) -> bool {
        !matches!(self, Self::Loop | Self::Metrics | Self::Save)
    }
}

/// A sentence from the other values: why a key has no effect, or what is worth saying about it; `None` where there is none.
pub type Condition = fn(ConfigView<'_>) -> Option<String>;

/// The effect of a key.
#[derive(Debug, Clone, Copy)]
pub enum Effect {
    /// The documented one.
    Works,
    /// Always on, whatever the value; the text says why.
    BuiltIn(&'static str),
    /// Nothing; the text says why.
    Nothing(&'static str),
    /// The documented one while its section's `enabled` is true.
    WhileEnabled,
    /// That of its section.
    AsSection,
    /// Not implemented: the default (off) is honoured, any other value is "not yet".
    Unsupported(&'static str),
    /// An old name. The text says what to write.
    Deprecated(&'static str),
    /// DeepSpeed refuses it and so do we; the text says what to write.
    Refused(&'static str),
}

/// The rules by which Hugging Face fills `"auto"`, one for each key that has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum AutoRule {
    /// per_device_train_batch_size.
    MicroBatch,
    /// gradient_accumulation_steps.
    Accumulation,
    /// ranks × micro-batch × accumulation.
    TrainBatch,
    /// max_grad_norm.
    Clipping,
    LearningRate,
    /// [adam_beta1, adam_beta2].
    Betas,
    /// adam_epsilon.
    Epsilon,
    WeightDecay,
    /// 0.
    WarmupMinLr,
    /// learning_rate.
    WarmupMaxLr,
    /// Whether the run is in fp16.
    Fp16,
    /// Whether the run is in bf16.
    Bf16,
    /// hidden_size².
    HiddenSquared,
    /// 0.9 · hidden_size², rounded down.
    NineTenthsHiddenSquared,
    /// 10 · hidden_size.
    TenHidden,
    /// The number of optimizer steps of the run.
    TotalSteps,
    /// Warm-up steps, or that fraction of all steps.
    WarmupSteps,
    /// The number of blocks of the model.
    Blocks,
    /// The ranks of a host where hosts have equally many, else 1.
    Group,
    /// true when every node saves on its own, whatever the file says.
    NodeLocal,
    /// true where the file has no optimizer section, whatever the file says.
    UntestedOptimizer,
}

impl Key {
    /// Whether a run does what this value asks for. What is left open counts as the default.
    pub fn supports(&self, value: &serde_json::Value) -> bool {
        let Support::Only { values, .. } = self.support else { return self.support == Support::Full };
        let is_open = value.is_null() || value.as_str() == Some("auto");
        let counts = if is_open { self.default.to_json() } else { Some(value.clone()) };
        counts.is_none_or(|value| {
            let written = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            values.iter().any(|built| built.eq_ignore_ascii_case(&written))
        })
    }

    /// The path of the section it lies in; empty at the top level.
    pub fn parent(&self) -> &'static str {
        self.path.rsplit_once('.').map_or("", |(parent, _)| parent)
    }

    /// The last part of its path.
    pub fn name(&self) -> &'static str {
        self.path.rsplit_once('.').map_or(self.path, |(_, name)| name)
    }

    /// Whether it belongs to this optimizer or scheduler type (every other key: always).
    pub fn is_of(&self, type_name: Option<&str>) -> bool {
        self.types.is_empty()
            || type_name.is_some_and(|name| self.types.iter().any(|known| known.eq_ignore_ascii_case(name)))
    }

    /// Whether the value is the key's default.
    pub fn is_default(&self, value: &serde_json::Value) -> bool {
        match self.default {
            DefaultValue::Absent | DefaultValue::Rule(_) | DefaultValue::Derived(..) => value.is_null(),
            DefaultValue::Bool(default) => value.as_bool() == Some(default),
            DefaultValue::Int(default) => value.as_i64() == Some(default),
            DefaultValue::Float(default) => value.as_f64() == Some(default),
            DefaultValue::Text(default) => {
                value.as_str().is_some_and(|text| text.eq_ignore_ascii_case(default))
            }
            DefaultValue::Floats(default) => value.as_array().is_some_and(|list| {
                list.len() == default.len() && list.iter().zip(default).all(|(a, b)| a.as_f64() == Some(*b))
            }),
        }
    }
}

impl DefaultValue {
    /// The value as JSON; `None` where there is none, or a rule gives it.
    pub fn to_json(self) -> Option<serde_json::Value> {
        match self {
            Self::Absent | Self::Rule(_) | Self::Derived(..) => None,
            Self::Bool(value) => Some(value.into()),
            Self::Int(value) => Some(value.into()),
            Self::Float(value) => Some(value.into()),
            Self::Text(value) => Some(value.into()),
            Self::Floats(values) => Some(values.to_vec().into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::schema;

    fn key(path: &str) -> &'static Key {
        schema::find(path).next().unwrap_or_else(|| panic!("no key {path}"))
    }

    #[test]
    fn what_is_left_open_counts_as_its_default() {
        for open in [json!("auto"), serde_json::Value::Null] {
            assert!(key("zero_optimization.offload_param.device").supports(&open), "its default is none");
            assert!(!key("scheduler.params.cycle_momentum").supports(&open), "DeepSpeed's default is true");
        }
    }

    #[test]
    fn words_are_built_in_any_case_and_numbers_by_value() {
        let device = key("zero_optimization.offload_optimizer.device");
        assert!(device.supports(&json!("None")) && !device.supports(&json!("nvme")));
        let start = key("scheduler.params.last_batch_iteration");
        assert!(start.supports(&json!(-1)) && !start.supports(&json!(10)));
    }

    #[test]
    fn only_names_values_that_the_key_may_hold() {
        for key in schema::keys() {
            let Support::Only { values, instead } = key.support else { continue };
            assert!(!values.is_empty() && !instead.is_empty(), "{}", key.path);
            for value in values {
                let holds = match key.kind {
                    KeyType::Bool => ["true", "false"].contains(value),
                    KeyType::OneOf(words) => words.contains(value),
                    KeyType::Int | KeyType::Float => {
                        value.parse().is_ok_and(|number| key.bounds.allow(number))
                    }
                    _ => false,
                };
                assert!(holds, "{} cannot hold {value}", key.path);
            }
        }
    }
}
