//! The second step of a check: the effect of a key, given the other values.

use serde_json::Value as Json;
use zeroth_base::Optimizer;

use super::finding::{KeyMatch, MatchOutcome};
use crate::read::{Location, TextSpan};
use crate::schema::{self, Effect, Key, KeyType, Support};
use crate::view::{ConfigView, Switch};

/// The effect of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum KeyStatus {
    /// It does what it says.
    Honoured,
    /// It is always so here.
    BuiltIn,
    /// Not implemented yet.
    Unsupported,
    /// It does nothing; the message says why.
    NoEffect,
    /// An old name; the message says the new one.
    Deprecated,
    /// No key of that name.
    Unknown,
    /// A wrong value, or one that contradicts another.
    Invalid,
}

impl KeyStatus {
    /// All of them, from best to worst.
    pub const ALL: [Self; 7] = [
        Self::Honoured,
        Self::BuiltIn,
        Self::Unsupported,
        Self::NoEffect,
        Self::Deprecated,
        Self::Unknown,
        Self::Invalid,
    ];

    /// The word in JSON.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Honoured => "honoured",
            Self::BuiltIn => "built_in",
            Self::Unsupported => "not_yet",
            Self::NoEffect => "no_effect",
            Self::Deprecated => "deprecated",
            Self::Unknown => "unknown",
            Self::Invalid => "invalid",
        }
    }

    /// The words of the human-readable output.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Honoured => "honoured",
            Self::BuiltIn => "built in",
            Self::Unsupported => "not yet",
            Self::NoEffect => "no effect here",
            Self::Deprecated => "deprecated",
            Self::Unknown => "unknown",
            Self::Invalid => "invalid",
        }
    }
}

/// The severity of a verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Nothing to do.
    Fine,
    /// It will not do what it seems to; a run goes on.
    Warning,
    /// A run would refuse the file.
    Error,
}

/// The verdict on one key of a file.
#[derive(Debug, Clone)]
pub struct Verdict {
    /// The path as the file spells it.
    pub path: String,
    /// The key of the table.
    pub key: Option<&'static Key>,
    /// What becomes of the key.
    pub status: KeyStatus,
    /// The value as the file has it.
    pub value: Json,
    /// The span to underline: the key, or the value where that is wrong.
    pub span: TextSpan,
    /// The location of its key.
    pub location: Location,
    /// The reason, and a remedy.
    pub message: String,
    /// Whether an unknown key is near a known one: then it is an error.
    near: bool,
}

impl Verdict {
    /// Its severity.
    pub fn severity(&self) -> Severity {
        match self.status {
            KeyStatus::Honoured | KeyStatus::BuiltIn => Severity::Fine,
            KeyStatus::Unsupported | KeyStatus::NoEffect | KeyStatus::Deprecated => Severity::Warning,
            KeyStatus::Unknown if !self.near => Severity::Warning,
            KeyStatus::Unknown | KeyStatus::Invalid => Severity::Error,
        }
    }

    /// Makes the verdict "invalid" for this reason.
    pub(super) fn refuse(&mut self, message: String) {
        self.status = KeyStatus::Invalid;
        self.message = message;
    }
}

pub(super) fn decide(finding: KeyMatch, view: ConfigView<'_>) -> Verdict {
    let KeyMatch { spelled, span, location, value, outcome } = finding;
    let mut verdict = Verdict {
        path: spelled,
        key: None,
        status: KeyStatus::Honoured,
        value,
        span,
        location,
        message: String::new(),
        near: false,
    };
    match outcome {
        MatchOutcome::Known { key, notes } => {
            verdict.key = Some(key);
            // As the key's kind reads it: "False" is false.
            let value = view.value(key.path).unwrap_or(&verdict.value);
            let (status, message) = effect(key, value, view);
            verdict.status = status;
            verdict.message = message;
            for note in notes {
                let separator = if verdict.message.is_empty() { "" } else { "; " };
                verdict.message.extend([separator, &note]);
            }
            // DeepSpeed's first form `"zero_optimization": true` still works.
            if key.path == "zero_optimization" && verdict.value.is_boolean() {
                verdict.status = KeyStatus::Deprecated;
            }
        }
        MatchOutcome::Wrong { key, message, at } => {
            verdict.key = key;
            verdict.span = at.unwrap_or(span);
            verdict.refuse(message);
        }
        MatchOutcome::Unknown { message, near } => {
            verdict.status = KeyStatus::Unknown;
            verdict.near = near;
            verdict.message = message;
        }
        MatchOutcome::OfForeignType { message } => {
            verdict.status = KeyStatus::Unsupported;
            verdict.message = message;
        }
    }
    verdict
}

/// The effect of a value, given the others, and the reason.
pub(crate) fn effect(key: &Key, value: &Json, view: ConfigView<'_>) -> (KeyStatus, String) {
    if let Some(decided) = foreign_type(key, value) {
        return decided;
    }
    if let Some(because) = key.idle.and_then(|idle| idle(view)) {
        return (KeyStatus::NoEffect, because);
    }
    match key.effect {
        Effect::Works => works(key, value, view),
        Effect::WhileEnabled => match view.switch(&format!("{}.enabled", key.parent())) {
            Switch::Off => (KeyStatus::NoEffect, format!("{}.enabled is false", key.parent())),
            Switch::On | Switch::Open => works(key, value, view),
        },
        Effect::BuiltIn(why) => match key.support {
            Support::None => {
                (KeyStatus::Unsupported, format!("not built yet, and always so once it is: {why}"))
            }
            Support::Full | Support::Only { .. } => match works(key, value, view) {
                (KeyStatus::Honoured, _) => (KeyStatus::BuiltIn, format!("always so here: {why}")),
                lacking => lacking,
            },
        },
        Effect::Nothing(because) => (KeyStatus::NoEffect, because.to_owned()),
        Effect::AsSection => match schema::find(key.parent()).next() {
            Some(section) => effect(section, value, view),
            None => works(key, value, view),
        },
        Effect::Unsupported(_) if is_off(key, value) => (KeyStatus::Honoured, "off, as asked".to_owned()),
        Effect::Unsupported(what) => (KeyStatus::Unsupported, what.to_owned()),
        Effect::Deprecated(instead) => (KeyStatus::Deprecated, format!("write {instead}")),
        Effect::Refused(instead) => (KeyStatus::Invalid, instead.to_owned()),
    }
}

fn is_off(key: &Key, value: &Json) -> bool {
    value.is_null() || value.as_str() == Some("auto") || key.is_default(value)
}

fn works(key: &Key, value: &Json, view: ConfigView<'_>) -> (KeyStatus, String) {
    // A section does what its switch does.
    if let Some(switch) = schema::switch_of(key).filter(|_| key.kind == KeyType::Section) {
        return effect(switch, view.value(switch.path).unwrap_or(&Json::Null), view);
    }
    if let Some(switch) = unsupported_switch(key, view) {
        return (KeyStatus::Unsupported, format!("it follows {switch}, which is not built yet"));
    }
    match key.support {
        _ if key.supports(value) => {
            (KeyStatus::Honoured, key.note.and_then(|note| note(view)).unwrap_or_default())
        }
        Support::Only { instead, .. } => (KeyStatus::Unsupported, format!("not built yet; {instead}")),
        Support::None | Support::Full => {
            (KeyStatus::Unsupported, format!("not built yet; it will be read by {}", key.reader.name()))
        }
    }
}

/// The switch of the key's section with its value, where a run does not do what it asks for and would read the key if
/// it did.
pub(crate) fn unsupported_switch(key: &Key, view: ConfigView<'_>) -> Option<String> {
    let section = schema::find(key.parent()).next().filter(|_| key.support == Support::Full)?;
    let switch = schema::switch_of(section).filter(|switch| switch.path != key.path)?;
    let value = view.value(switch.path).filter(|value| !switch.supports(value))?;
    Some(format!("{} {value}", switch.path))
}

/// The type of an optimizer or scheduler: one of ours, one that only DeepSpeed has, or a slip.
fn foreign_type(key: &Key, value: &Json) -> Option<(KeyStatus, String)> {
    let (ours, theirs) = match key.path {
        "optimizer.type" => (Optimizer::NAMES, schema::FOREIGN_OPTIMIZERS),
        "scheduler.type" => (schema::SCHEDULERS, schema::FOREIGN_SCHEDULERS),
        _ => return None,
    };
    let name = value.as_str().filter(|name| *name != "auto")?;
    let is = |list: &[&str]| list.iter().any(|known| known.eq_ignore_ascii_case(name));
    if is(ours) {
        return None;
    }
    if is(theirs) {
        let message = format!("DeepSpeed has {name}, zeroth does not: use one of {}", ours.join(", "));
        return Some((KeyStatus::Unsupported, message));
    }
    if key.path == "scheduler.type" && schema::HF_SCHEDULES.contains(&name.to_ascii_lowercase().as_str()) {
        let message = format!(
            "a schedule of Hugging Face: write \"zeroth\": {{\"lr_scheduler_type\": \"{name}\"}} or --lr-scheduler-type {name}"
        );
        return Some((KeyStatus::Invalid, message));
    }
    let near = zeroth_base::nearest(name, ours.iter().chain(theirs).copied());
    let hint = near.map_or_else(
        || format!("use one of {}", ours.join(", ")),
        |near| format!("did you mean \"{near}\"?"),
    );
    Some((KeyStatus::Invalid, format!("no {} is called \"{name}\"; {hint}", key.parent())))
}
