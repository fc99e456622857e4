//! One row of the schema.

use super::support::Support;
use crate::view::ConfigView;

/// One key of the config: its names, its values, its effect, and the part that reads it.
///
/// Rows are built by the `const fn`s below.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// The canonical path, `zero_optimization.stage3_prefetch_bucket_size`.
    pub path: &'static str,
    /// Other names of the last part that DeepSpeed takes as well, such as `prefetch_bucket_size`.
    pub other_names: &'static [&'static str],
    /// Other full paths at which the key is accepted.
    pub other_paths: &'static [&'static str],
    /// The kind of its values.
    pub kind: Kind,
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
    pub reader: Reader,
    /// Its effect in zeroth.
    pub effect: Effect,
    /// Which values a run implements.
    pub support: Support,
    /// The reason it has no effect beside the other values, if any.
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
pub enum Kind {
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

/// The range of a key's numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounds {
    /// Inclusive minimum.
    pub least: Option<f64>,
    /// Exclusive minimum.
    pub above: Option<f64>,
    /// Inclusive maximum.
    pub most: Option<f64>,
    /// Exclusive maximum.
    pub below: Option<f64>,
}

/// The value of an absent key.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum DefaultValue {
    /// Nothing.
    Absent,
    /// This truth value.
    Bool(bool),
    /// This whole number.
    Int(i64),
    /// This number.
    Float(f64),
    /// This text.
    Text(&'static str),
    /// These numbers.
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
pub enum Reader {
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

impl Reader {
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
    Lacking(&'static str),
    /// An old name. The text says what to write.
    Deprecated(&'static str),
    /// DeepSpeed refuses it and so do we; the text says what to write.
    Refused(&'static str),
}

/// The rules by which Hugging Face fills `"auto"`, one for each key that has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AutoRule {
    /// per_device_train_batch_size.
    MicroBatch,
    /// gradient_accumulation_steps.
    Accumulation,
    /// ranks × micro-batch × accumulation.
    TrainBatch,
    /// max_grad_norm.
    Clipping,
    /// learning_rate.
    LearningRate,
    /// [adam_beta1, adam_beta2].
    Betas,
    /// adam_epsilon.
    Epsilon,
    /// weight_decay.
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
    /// true when every node saves on its own, whatever the file says.
    NodeLocal,
    /// true where the file has no optimizer section, whatever the file says.
    UntestedOptimizer,
}

/// Bounds of numbers that stay positive and finite in fp32.
const FP32_LEAST: f64 = 1e-37;
const FP32_MOST: f64 = 1e38;

const NO_BOUNDS: Bounds = Bounds { least: None, above: None, most: None, below: None };

impl Key {
    /// A key of this path and kind; everything else is filled by the calls that follow.
    pub(super) const fn new(path: &'static str, kind: Kind) -> Self {
        Self {
            path,
            other_names: &[],
            other_paths: &[],
            kind,
            bounds: NO_BOUNDS,
            default: DefaultValue::Absent,
            unit: "",
            does: "",
            set: "",
            reader: Reader::Nobody,
            effect: Effect::Works,
            support: Support::Full,
            idle: None,
            note: None,
            auto: None,
            types: &[],
        }
    }

    /// A whole number of at least `least`.
    pub(super) const fn int(path: &'static str, least: i64) -> Self {
        let mut key = Self::new(path, Kind::Int);
        key.bounds.least = Some(least as f64);
        key
    }

    /// A number of at least `least`.
    pub(super) const fn float(path: &'static str, least: f64) -> Self {
        let mut key = Self::new(path, Kind::Float);
        key.bounds.least = Some(least);
        key
    }

    /// true or false.
    pub(super) const fn bool(path: &'static str, default: bool) -> Self {
        Self::new(path, Kind::Bool).or(DefaultValue::Bool(default))
    }

    /// A section of keys.
    pub(super) const fn section(path: &'static str) -> Self {
        Self::new(path, Kind::Section)
    }

    /// A part of DeepSpeed without counterpart here; `because` says why nothing is missed.
    pub(super) const fn unsupported(path: &'static str, does: &'static str, because: &'static str) -> Self {
        let mut key = Self::new(path, Kind::Opaque).does(does);
        key.effect = Effect::Nothing(because);
        key
    }

    /// A number that fp32 can hold.
    pub(super) const fn in_fp32(mut self) -> Self {
        self.bounds.most = Some(FP32_MOST);
        self
    }

    /// A number above 0 that is above 0 in fp32 too.
    pub(super) const fn positive_in_fp32(mut self) -> Self {
        self.bounds.least = Some(FP32_LEAST);
        self.in_fp32()
    }

    pub(super) const fn named(mut self, names: &'static [&'static str]) -> Self {
        self.other_names = names;
        self
    }

    pub(super) const fn also_at(mut self, places: &'static [&'static str]) -> Self {
        self.other_paths = places;
        self
    }

    pub(super) const fn at_least(mut self, bound: f64) -> Self {
        self.bounds.least = Some(bound);
        self
    }

    pub(super) const fn above(mut self, bound: f64) -> Self {
        self.bounds.above = Some(bound);
        self
    }

    pub(super) const fn at_most(mut self, bound: f64) -> Self {
        self.bounds.most = Some(bound);
        self
    }

    pub(super) const fn below(mut self, bound: f64) -> Self {
        self.bounds.below = Some(bound);
        self
    }

    pub(super) const fn or(mut self, default: DefaultValue) -> Self {
        self.default = default;
        self
    }

    pub(super) const fn or_int(self, default: i64) -> Self {
        self.or(DefaultValue::Int(default))
    }

    pub(super) const fn or_float(self, default: f64) -> Self {
        self.or(DefaultValue::Float(default))
    }

    pub(super) const fn or_text(self, default: &'static str) -> Self {
        self.or(DefaultValue::Text(default))
    }

    pub(super) const fn or_rule(self, rule: &'static str) -> Self {
        self.or(DefaultValue::Rule(rule))
    }

    pub(super) const fn or_derived(self, derivation: Derivation, rule: &'static str) -> Self {
        self.or(DefaultValue::Derived(derivation, rule))
    }

    pub(super) const fn in_(mut self, unit: &'static str) -> Self {
        self.unit = unit;
        self
    }

    pub(super) const fn does(mut self, sentence: &'static str) -> Self {
        self.does = sentence;
        self
    }

    pub(super) const fn set(mut self, advice: &'static str) -> Self {
        self.set = advice;
        self
    }

    pub(super) const fn read_by(mut self, reader: Reader) -> Self {
        self.reader = reader;
        self
    }

    pub(super) const fn auto(mut self, rule: AutoRule) -> Self {
        self.auto = Some(rule);
        self
    }

    pub(super) const fn built_in(mut self, why: &'static str) -> Self {
        self.effect = Effect::BuiltIn(why);
        self
    }

    pub(super) const fn nothing(mut self, because: &'static str) -> Self {
        self.effect = Effect::Nothing(because);
        self
    }

    pub(super) const fn unless(mut self, reason: Condition) -> Self {
        self.idle = Some(reason);
        self
    }

    pub(super) const fn noting(mut self, note: Condition) -> Self {
        self.note = Some(note);
        self
    }

    pub(super) const fn while_enabled(mut self) -> Self {
        self.effect = Effect::WhileEnabled;
        self
    }

    pub(super) const fn as_section(mut self) -> Self {
        self.effect = Effect::AsSection;
        self
    }

    pub(super) const fn lacking(mut self, what: &'static str) -> Self {
        self.effect = Effect::Lacking(what);
        self
    }

    pub(super) const fn deprecated(mut self, instead: &'static str) -> Self {
        self.effect = Effect::Deprecated(instead);
        self
    }

    /// A key that DeepSpeed refuses, known only to say where it belongs.
    pub(super) const fn refused(path: &'static str, does: &'static str, instead: &'static str) -> Self {
        let mut key = Self::new(path, Kind::Opaque).does(does);
        key.effect = Effect::Refused(instead);
        key
    }

    pub(super) const fn of(mut self, types: &'static [&'static str]) -> Self {
        self.types = types;
        self
    }

    /// No part reads it yet, and nothing trained depends on it.
    pub(super) const fn not_yet(mut self) -> Self {
        self.support = Support::None;
        self
    }

    /// Only these values are built; `instead` says what to write for another.
    pub(super) const fn only(mut self, values: &'static [&'static str], instead: &'static str) -> Self {
        self.support = Support::Only { values, instead };
        self
    }

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

impl Bounds {
    /// Whether the number is within.
    pub fn allow(&self, number: f64) -> bool {
        self.least.is_none_or(|least| number >= least)
            && self.above.is_none_or(|above| number > above)
            && self.most.is_none_or(|most| number <= most)
            && self.below.is_none_or(|below| number < below)
    }

    /// The bounds in words: `at least 1`, `above 0`, `at least 0 and at most 3`.
    pub fn in_words(&self) -> Option<String> {
        let shown = |bound: f64| match bound.abs() {
            size if size > 0.0 && !(1e-6..1e16).contains(&size) => format!("{bound:e}"),
            _ => bound.to_string(),
        };
        // "above 0" says more than "at least 0", and both come from the same number line.
        let low = match (self.above, self.least) {
            (Some(above), _) => Some(format!("above {}", shown(above))),
            (None, Some(least)) => Some(format!("at least {}", shown(least))),
            (None, None) => None,
        };
        let high = match (self.below, self.most) {
            (Some(below), _) => Some(format!("below {}", shown(below))),
            (None, Some(most)) => Some(format!("at most {}", shown(most))),
            (None, None) => None,
        };
        match (low, high) {
            (Some(low), Some(high)) => Some(format!("{low} and {high}")),
            (low, high) => low.or(high),
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
                    Kind::Bool => ["true", "false"].contains(value),
                    Kind::OneOf(words) => words.contains(value),
                    Kind::Int | Kind::Float => value.parse().is_ok_and(|number| key.bounds.allow(number)),
                    _ => false,
                };
                assert!(holds, "{} cannot hold {value}", key.path);
            }
        }
    }
}
