//! What the values of a file say together: the view that conditions and rules ask.

use serde_json::Value;

use crate::asked::Asked;
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

/// The values of a file seen together.
#[derive(Debug, Clone, Copy)]
pub struct Facts<'a> {
    asked: &'a Asked,
}

impl<'a> Facts<'a> {
    /// The view of these values.
    pub fn new(asked: &'a Asked) -> Self {
        Self { asked }
    }

    /// The value given in the file; `None` where it is absent or `"auto"`.
    pub fn given(&self, path: &str) -> Option<&'a Value> {
        self.asked.get(path).map(|value| &value.value).filter(|value| value.as_str() != Some("auto"))
    }

    /// Whether the file names the key at all, `"auto"` included.
    pub fn names(&self, path: &str) -> bool {
        self.asked.get(path).is_some()
    }

    /// Whether the file has this section, empty or not.
    pub fn has_section(&self, section: &str) -> bool {
        self.asked.has_section(section)
    }

    /// The stage; 0 where it is absent or unreadable.
    pub fn stage(&self) -> i64 {
        self.given("zero_optimization.stage").and_then(Value::as_i64).unwrap_or(0)
    }

    /// The device of an offload section: `none`, `cpu` or `nvme`.
    pub fn device(&self, section: &str) -> &'a str {
        self.text(&format!("{section}.device")).unwrap_or("none")
    }

    /// A number given in the file.
    pub fn number(&self, path: &str) -> Option<f64> {
        self.given(path).and_then(Value::as_f64)
    }

    /// A whole number given in the file.
    pub fn whole(&self, path: &str) -> Option<i64> {
        self.given(path).and_then(Value::as_i64)
    }

    /// A text given in the file.
    pub fn text(&self, path: &str) -> Option<&'a str> {
        self.given(path).and_then(Value::as_str)
    }

    /// A switch, absent ones by their default.
    pub fn switch(&self, path: &str) -> Switch {
        match self.asked.get(path).map(|value| &value.value) {
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
