//! What the values of a file say together: the view that conditions and rules ask.

use serde_json::Value;

use crate::file_values::FileValues;
use crate::resolve::Resolved;
use crate::schema;

/// A switch of a file: on, off, or left to the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Switch {
    /// true.
    On,
    /// false, or absent where the default is false.
    Off,
    /// `"auto"`, or absent where the command line decides.
    Open,
}

/// The values of a file, or of the config it became, seen together.
#[derive(Debug, Clone, Copy)]
pub struct ConfigView<'a> {
    values: Values<'a>,
}

#[derive(Debug, Clone, Copy)]
enum Values<'a> {
    File(&'a FileValues),
    Resolved(&'a Resolved),
}

impl<'a> ConfigView<'a> {
    /// The view of a file.
    pub fn new(values: &'a FileValues) -> Self {
        Self { values: Values::File(values) }
    }

    /// The view of a config with every value settled.
    pub fn settled(resolved: &'a Resolved) -> Self {
        Self { values: Values::Resolved(resolved) }
    }

    /// The value, `"auto"` included.
    pub fn value(&self, path: &str) -> Option<&'a Value> {
        match self.values {
            Values::File(values) => values.get(path).map(|found| &found.value),
            Values::Resolved(resolved) => resolved.get(path).map(|setting| &setting.value),
        }
    }

    /// The value given; `None` where it is absent or `"auto"`.
    pub fn given(&self, path: &str) -> Option<&'a Value> {
        self.value(path).filter(|value| value.as_str() != Some("auto"))
    }

    /// Whether the key has a value at all, `"auto"` included.
    pub fn names(&self, path: &str) -> bool {
        self.value(path).is_some()
    }

    /// Whether there is such a section: in a file empty or not, in a settled config with a value.
    pub fn has_section(&self, section: &str) -> bool {
        match self.values {
            Values::File(values) => values.has_section(section),
            Values::Resolved(resolved) => resolved.settings.iter().any(|setting| {
                setting.key.path.strip_prefix(section).is_some_and(|rest| rest.starts_with('.'))
            }),
        }
    }

    /// The stage; 0 where it is absent or unreadable.
    pub fn stage(&self) -> i64 {
        self.given("zero_optimization.stage").and_then(Value::as_i64).unwrap_or(0)
    }

    /// The device of an offload section: `none`, `cpu` or `nvme`.
    pub fn device(&self, section: &str) -> &'a str {
        self.text(&format!("{section}.device")).unwrap_or("none")
    }

    /// A number given.
    pub fn number(&self, path: &str) -> Option<f64> {
        self.given(path).and_then(Value::as_f64)
    }

    /// A whole number given.
    pub fn whole(&self, path: &str) -> Option<i64> {
        self.given(path).and_then(Value::as_i64)
    }

    /// A text given.
    pub fn text(&self, path: &str) -> Option<&'a str> {
        self.given(path).and_then(Value::as_str)
    }

    /// A switch, absent ones by their default.
    pub fn switch(&self, path: &str) -> Switch {
        match self.value(path) {
            Some(Value::Bool(true)) => Switch::On,
            Some(Value::Bool(false)) => Switch::Off,
            Some(_) => Switch::Open,
            None => {
                let key = schema::find(path).next();
                match key.map(|key| (key.auto, key.default)) {
                    Some((None, schema::DefaultValue::Bool(true))) => Switch::On,
                    Some((None, schema::DefaultValue::Bool(false))) => Switch::Off,
                    _ => Switch::Open,
                }
            }
        }
    }
}
