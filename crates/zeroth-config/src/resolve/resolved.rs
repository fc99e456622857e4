//! The result of resolving: every value, the origin of each, and the typed sections that passes read.

use std::fmt;

use serde_json::{Map, Value};

use super::choice::Choice;
use crate::read::Location;
use crate::schema::{self, Effect, Key, Values};
use crate::view::{ConfigView, Lookup, Switch};

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The file, at this location.
    File(Location),
    /// This flag.
    Flag(&'static str),
    /// A rule; the text says which.
    Auto(String),
    /// The key's default.
    Default,
}

impl Origin {
    /// The word in origin.json.
    pub const fn word(&self) -> &'static str {
        match self {
            Self::File(_) => "file",
            Self::Flag(_) => "command line",
            Self::Auto(_) => "auto",
            Self::Default => "default",
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(location) => write!(f, "file, {location}"),
            Self::Flag(flag) => write!(f, "command line, {flag}"),
            Self::Auto(rule) => write!(f, "auto, {rule}"),
            Self::Default => f.write_str("default"),
        }
    }
}

/// One resolved value.
#[derive(Debug, Clone)]
#[allow(missing_docs, reason = "the names say it")]
pub struct ResolvedSetting {
    pub key: &'static Key,
    pub value: Value,
    /// Where it comes from.
    pub origin: Origin,
}

/// A config with every value resolved.
#[derive(Debug, Clone)]
pub struct Resolved {
    /// The values that passes read, typed, by section: `values.zero.stage`.
    pub values: Values,
    /// Remarks made while resolving.
    pub notes: Vec<String>,
    settings: Vec<ResolvedSetting>,
}

impl Resolved {
    pub(super) fn new(settings: Vec<ResolvedSetting>, notes: Vec<String>) -> Self {
        Self { values: read_values(&settings), notes, settings }
    }

    /// All values with their origins, in the order of the schema.
    pub fn settings(&self) -> &[ResolvedSetting] {
        &self.settings
    }

    /// The setting of a canonical path.
    pub fn get(&self, path: &str) -> Option<&ResolvedSetting> {
        self.settings.iter().find(|setting| setting.key.path == path)
    }

    /// Whether a key decides what a run with these values trains. One that prints, reports or saves does not, nor one of a section
    /// that is off, or that the other values leave without effect.
    pub fn decides_training(&self, path: &str) -> bool {
        let Some(key) = self.get(path).map(|setting| setting.key).or_else(|| schema::find(path).next())
        else {
            return false;
        };
        let view = ConfigView::new(self);
        let works = match key.effect {
            Effect::Works => true,
            Effect::WhileEnabled => view.switch(&format!("{}.enabled", key.parent())) == Switch::On,
            _ => false,
        };
        works && key.reader.decides_training() && key.idle.is_none_or(|idle| idle(view).is_none())
    }

    /// Replaces a value that has a setting, with its origin.
    pub fn set(&mut self, path: &str, value: Value, origin: Origin) {
        if let Some(setting) = self.settings.iter_mut().find(|setting| setting.key.path == path) {
            (setting.value, setting.origin) = (value, origin);
            self.values = read_values(&self.settings);
        }
    }

    /// Takes over a choice that was made for a reason.
    pub fn choose(&mut self, choice: Choice, why: &str) {
        for (key, value) in choice.settings() {
            self.set(key, value, Origin::Auto(why.to_owned()));
        }
    }

    /// The config as DeepSpeed writes it: nested objects, defaults included.
    pub fn to_json(&self) -> Value {
        let mut root = Map::new();
        for setting in &self.settings {
            let mut section = &mut root;
            let mut parts = setting.key.path.split('.').peekable();
            while let Some(part) = parts.next() {
                if parts.peek().is_none() {
                    section.insert(part.to_owned(), setting.value.clone());
                    break;
                }
                let slot = section.entry(part).or_insert_with(|| Value::Object(Map::new()));
                let Value::Object(inner) = slot else { break };
                section = inner;
            }
        }
        Value::Object(root)
    }
}

fn read_values(settings: &[ResolvedSetting]) -> Values {
    Values::read(&|path| {
        settings.iter().find(|setting| setting.key.path == path).map(|setting| &setting.value)
    })
}

impl Lookup for Resolved {
    fn value(&self, path: &str) -> Option<&Value> {
        debug_assert!(schema::has(path), "no key of the schema is called {path}");
        self.get(path).map(|setting| &setting.value)
    }

    fn has_section(&self, section: &str) -> bool {
        let is_inside = |path: &str| path.strip_prefix(section).is_some_and(|rest| rest.starts_with('.'));
        self.settings.iter().any(|setting| is_inside(setting.key.path))
    }

    fn absent_switch(&self, path: &str) -> Switch {
        schema::absent_switch(path)
    }
}
