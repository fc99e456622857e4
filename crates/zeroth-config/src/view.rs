//! The values of a config seen together: what conditions of the schema and rules of the check read.

use std::fmt;

use serde_json::Value;

/// A boolean key: on, off, or left to the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Switch {
    /// true.
    On,
    /// false, or absent where the default is false.
    Off,
    /// `"auto"`, or absent where the command line decides.
    Open,
}

/// Values by canonical path: those of a file, or those of the resolved config.
pub trait Lookup: fmt::Debug {
    /// The value at a path, the word `"auto"` included.
    fn value(&self, path: &str) -> Option<&Value>;

    /// Whether there is such a section.
    fn has_section(&self, section: &str) -> bool;

    /// The state of a boolean key that is absent.
    fn absent_switch(&self, path: &str) -> Switch;
}

/// A view of a file's values, or of a resolved config's, with typed access.
#[derive(Debug, Clone, Copy)]
pub struct ConfigView<'a>(&'a dyn Lookup);

impl<'a> ConfigView<'a> {
    /// The view of these values.
    pub fn new(values: &'a dyn Lookup) -> Self {
        Self(values)
    }

    /// The value, `"auto"` included.
    pub fn value(&self, path: &str) -> Option<&'a Value> {
        self.0.value(path)
    }

    /// The value given; `None` where it is absent or `"auto"`.
    pub fn given(&self, path: &str) -> Option<&'a Value> {
        self.value(path).filter(|value| value.as_str() != Some("auto"))
    }

    /// Whether the key has a value at all, `"auto"` included.
    pub fn contains(&self, path: &str) -> bool {
        self.value(path).is_some()
    }

    /// Whether there is such a section: in a file empty or not, in a resolved config with a value.
    pub fn has_section(&self, section: &str) -> bool {
        self.0.has_section(section)
    }

    /// The ZeRO stage; 0 where it is absent or unreadable.
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

    /// An integer given.
    pub fn integer(&self, path: &str) -> Option<i64> {
        self.given(path).and_then(Value::as_i64)
    }

    /// A text given.
    pub fn text(&self, path: &str) -> Option<&'a str> {
        self.given(path).and_then(Value::as_str)
    }

    /// A boolean key, absent ones by their default.
    pub fn switch(&self, path: &str) -> Switch {
        match self.value(path) {
            Some(Value::Bool(true)) => Switch::On,
            Some(Value::Bool(false)) => Switch::Off,
            Some(_) => Switch::Open,
            None => self.0.absent_switch(path),
        }
    }
}
