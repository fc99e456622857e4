//! `adapter_config.json`, typed.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use serde_json::{Map, Value};

use super::error::AdapterError;
use super::write::{CAUSAL_LM, FUSED, FUSED_PATTERN, SEQ_2_SEQ_LM};
use super::{ADAPTER_CONFIG, ADAPTER_WEIGHTS};
use crate::error::FieldError;
use crate::fields::{Fields, described, kind};
use crate::limits::MAX_WIDTH;
use crate::lora::{Lora, LoraTargets, last};

/// The largest file that is read, in bytes. A list of every module of a large model has some hundred kB.
const LARGEST: u64 = 16 << 20;

/// Keys that change what the matrices mean unless they are off (null, false or empty), with what they stand for.
const NOT_YET: [(&str, &str); 15] = [
    ("use_dora", "DoRA"),
    ("modules_to_save", "training modules whole beside the adapters"),
    ("lora_bias", "a bias of the adapters"),
    ("layers_to_transform", "adapters in some layers only"),
    ("layer_replication", "layer replication"),
    ("fan_in_fan_out", "transposed weights (Conv1D)"),
    ("exclude_modules", "excluding modules"),
    ("trainable_token_indices", "training rows of the embedding"),
    ("use_qalora", "QALoRA"),
    ("use_bdlora", "BD-LoRA"),
    ("alora_invocation_tokens", "activated LoRA"),
    ("arrow_config", "Arrow routing"),
    ("kasa_config", "KaSA"),
    ("monteclora_config", "MonteCLoRA"),
    ("velora_config", "VeLoRA"),
];
/// Keys that say nothing about the matrices of a trained adapter.
const WITHOUT_EFFECT: [&str; 14] = [
    "auto_mapping",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "layers_pattern",
    "loftq_config",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
];
/// Keys that have a field below.
const READ: [&str; 13] = [
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "lora_dropout",
    "target_modules",
    "target_parameters",
    "rank_pattern",
    "alpha_pattern",
    "base_model_name_or_path",
    "bias",
    "task_type",
    "init_lora_weights",
];
/// Initialisations that subtract the first product of the matrices from the base's weights.
const CHANGES_BASE: [&str; 5] = ["pissa", "olora", "loftq", "corda", "lora_ga"];

/// An `adapter_config.json` that is read here.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterConfig {
    /// `r`.
    pub rank: u64,
    /// `lora_alpha`.
    pub alpha: f64,
    /// `use_rslora`.
    pub rslora: bool,
    /// `lora_dropout`.
    pub dropout: f64,
    /// `target_modules`: a list of names, `all-linear`, or a regular expression; with the names of `target_parameters`.
    pub targets: LoraTargets,
    /// `base_model_name_or_path`: a folder or a Hub name, where it is given.
    pub base: Option<String>,
    /// `task_type`, such as `CAUSAL_LM`.
    pub task_type: Option<String>,
    /// What was passed over, one sentence each.
    pub notes: Vec<String>,
}

impl AdapterConfig {
    /// Reads the `adapter_config.json` in a folder.
    pub fn read(folder: &Path) -> Result<Self, AdapterError> {
        let path = folder.join(ADAPTER_CONFIG);
        let unreadable = |source| AdapterError::Read { path: path.clone(), source };
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if is_absent(&error) => return Err(AdapterError::no_config(folder)),
            Err(error) => return Err(unreadable(error)),
        };
        let mut text = Vec::new();
        file.take(LARGEST + 1).read_to_end(&mut text).map_err(unreadable)?;
        if text.len() as u64 > LARGEST {
            return Err(unreadable(io::Error::new(io::ErrorKind::FileTooLarge, "it is larger than 16 MiB")));
        }
        let json = |problem: String| AdapterError::Json { path: path.clone(), problem };
        match serde_json::from_slice(&text) {
            Ok(Value::Object(map)) => {
                Self::from_map(&map).map_err(|source| AdapterError::Field { path: path.clone(), source })
            }
            Ok(other) => Err(json(format!("an adapter's config is a JSON object, this is {}", kind(&other)))),
            Err(error) => Err(json(error.to_string())),
        }
    }

    /// Reads a config that is parsed already.
    pub fn from_map(map: &Map<String, Value>) -> Result<Self, FieldError> {
        let fields = Fields::new(map);
        let unsupported = |field: &str, why: String| {
            let found = map.get(field).map(described).unwrap_or_default();
            FieldError::Unsupported { field: field.to_owned(), found, why }
        };
        match fields.text("peft_type")? {
            Some("LORA") => {}
            Some(_) => {
                return Err(unsupported("peft_type", "adapters other than LORA are not yet read".to_owned()));
            }
            None => return Err(fields.missing("peft_type")),
        }
        if let Some((field, what)) = NOT_YET.into_iter().find(|(field, _)| map.get(*field).is_some_and(is_on))
        {
            return Err(unsupported(field, format!("{what} is not yet built")));
        }
        if fields.text("bias")?.is_some_and(|bias| bias != "none") {
            let why = "training the base's biases beside the adapters is not yet built, only \"none\"";
            return Err(unsupported("bias", why.to_owned()));
        }
        let init = map.get("init_lora_weights").and_then(Value::as_str).unwrap_or_default().to_lowercase();
        if CHANGES_BASE.iter().any(|name| init.starts_with(name)) {
            let why = "this initialisation changes the base's weights and is not yet read: save the adapter again with \
                       PEFT's `save_pretrained(NEW_DIR, path_initial_model_for_weight_conversion=...)`";
            return Err(unsupported("init_lora_weights", why.to_owned()));
        }
        let dropout = fields.not_negative("lora_dropout")?.unwrap_or(0.0);
        if dropout >= 1.0 {
            return Err(unsupported("lora_dropout", "it must be 0 or more and below 1".to_owned()));
        }
        let task_type = fields.text("task_type")?.map(str::to_owned);
        let mut notes = Vec::new();
        if let Some(other) = task_type.as_deref().filter(|task| ![CAUSAL_LM, SEQ_2_SEQ_LM].contains(task)) {
            notes.push(format!("`task_type` is {other}: the adapter is read as one of a language model"));
        }
        for (key, value) in map {
            let known = READ.iter().chain(&WITHOUT_EFFECT).chain(NOT_YET.iter().map(|(key, _)| key));
            if is_on(value) && !known.into_iter().any(|known| known == key) {
                notes.push(format!("`{key}` in {ADAPTER_CONFIG} is not known here and has no effect"));
            }
        }
        let (rank, alpha) = (fields.size("r", MAX_WIDTH)?, fields.required_positive("lora_alpha")?);
        let parameters = fields.list("target_parameters", "a list of parameter names", Value::as_str)?;
        let parameters = parameters.unwrap_or_default();
        let has_fused = parameters.iter().any(|name| last(name) == FUSED);
        check_pattern(map, "rank_pattern", has_fused.then_some(2.0 * rank as f64))?;
        check_pattern(map, "alpha_pattern", has_fused.then_some(2.0 * alpha))?;
        Ok(Self {
            rank,
            alpha,
            rslora: fields.flag("use_rslora")?.unwrap_or(false),
            dropout,
            targets: targets(&fields, map, &parameters)?,
            base: fields.text("base_model_name_or_path")?.filter(|name| !name.is_empty()).map(str::to_owned),
            task_type,
            notes,
        })
    }

    /// The adapters that it describes.
    pub fn lora(&self) -> Lora {
        Lora {
            rank: self.rank,
            alpha: self.alpha,
            rslora: self.rslora,
            dropout: self.dropout,
            targets: self.targets.clone(),
        }
    }
}

/// Ranks and alphas by module are read where they are PEFT's own: `expected` for an adapter of gate and up of experts.
fn check_pattern(
    map: &Map<String, Value>,
    field: &'static str,
    expected: Option<f64>,
) -> Result<(), FieldError> {
    let given = map.get(field).filter(|value| is_on(value));
    let is_expected = match (given.map(Value::as_object), expected) {
        (None, None) => true,
        (Some(Some(given)), Some(expected)) => {
            given.len() == 1 && given.get(FUSED_PATTERN).and_then(Value::as_f64) == Some(expected)
        }
        _ => false,
    };
    if is_expected {
        return Ok(());
    }
    let what = if field == "rank_pattern" { "ranks" } else { "alphas" };
    let why = match expected {
        Some(expected) => format!(
            "the adapter of {FUSED} has gate and up of all experts and is read with twice the value of the others: \
             {{\"{FUSED_PATTERN}\": {expected}}}; other {what} by module are not yet built"
        ),
        None => format!("{what} by module are not yet built"),
    };
    let found = given.map_or_else(|| "not given".to_owned(), described);
    Err(FieldError::Unsupported { field: field.to_owned(), found, why })
}

fn targets(
    fields: &Fields<'_>,
    map: &Map<String, Value>,
    parameters: &[&str],
) -> Result<LoraTargets, FieldError> {
    match map.get("target_modules") {
        Some(Value::String(text)) if !parameters.is_empty() => {
            let why =
                "one expression for modules beside `target_parameters` is not yet read: list the modules";
            let (field, found) = ("target_modules".to_owned(), text.clone());
            Err(FieldError::Unsupported { field, found, why: why.to_owned() })
        }
        Some(Value::String(name)) if name.eq_ignore_ascii_case("all-linear") => Ok(LoraTargets::AllLinear),
        Some(Value::String(pattern)) => Ok(LoraTargets::Pattern(pattern.clone())),
        _ => {
            let expected = "a list of module names, or one text";
            let names = fields.list("target_modules", expected, Value::as_str)?;
            let names = names.or_else(|| (!parameters.is_empty()).then(Vec::new));
            let mut names = names.ok_or_else(|| fields.missing("target_modules"))?;
            names.extend(parameters);
            if names.is_empty() {
                let why = format!("the modules that {ADAPTER_WEIGHTS} adapts must be named");
                let (field, found) = ("target_modules".to_owned(), "empty".to_owned());
                return Err(FieldError::Unsupported { field, found, why });
            }
            Ok(LoraTargets::Named(names.into_iter().map(str::to_owned).collect()))
        }
    }
}

/// Whether a value turns something on.
fn is_on(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(entries) => !entries.is_empty(),
        Value::Bool(true) | Value::Number(_) => true,
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}
