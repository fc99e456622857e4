//! Keys of a config that no run implements yet: those that `zeroth train` refuses, and those that it notes and ignores.

use std::fmt;

use crate::check::{KeyStatus, effect, unsupported_switch};
use crate::read::Location;
use crate::resolve::{Origin, Resolved, ResolvedSetting};
use crate::schema::{DefaultValue, Effect, Support};
use crate::view::ConfigView;

/// The keys of a config that are "not yet", by how a run treats them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnsupportedKeys {
    /// They would change what is trained or how memory is used, so a run refuses them.
    pub refused: Vec<UnsupportedKey>,
    /// They tune, report or save: a run without them trains the same, and notes them.
    pub noted: Vec<UnsupportedKey>,
}

/// A key whose value is not implemented.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnsupportedKey {
    /// The canonical path of its key.
    pub path: &'static str,
    /// The value as JSON writes it.
    pub value: String,
    /// The origin of the value.
    pub origin: Origin,
    /// What is missing, and what to write instead.
    pub instead: String,
}

impl UnsupportedKey {
    /// Its location in the file.
    pub const fn location(&self) -> Option<Location> {
        match self.origin {
            Origin::File(location) => Some(location),
            _ => None,
        }
    }
}

impl fmt::Display for UnsupportedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({}): {}", self.path, self.value, self.origin, self.instead)
    }
}

/// The keys of a resolved config that no run implements yet, in schema order.
pub fn unsupported_keys(config: &Resolved) -> UnsupportedKeys {
    let view = ConfigView::new(config);
    let mut found = UnsupportedKeys { refused: Vec::new(), noted: Vec::new() };
    for setting in config.settings() {
        let (status, message) = effect(setting.key, &setting.value, view);
        // Keys below a switch that is not implemented: the switch itself is named.
        if status != KeyStatus::Unsupported || unsupported_switch(setting.key, view).is_some() {
            continue;
        }
        let list = match weight(setting) {
            Weight::Nothing => continue,
            Weight::Note => &mut found.noted,
            Weight::Refusal => &mut found.refused,
        };
        let instead = match setting.key.effect {
            Effect::Unsupported(_) => format!("not yet: {message}; leave it out"),
            _ => message,
        };
        list.push(UnsupportedKey {
            path: setting.key.path,
            value: setting.value.to_string(),
            origin: setting.origin.clone(),
            instead,
        });
    }
    found
}

enum Weight {
    Nothing,
    Note,
    Refusal,
}

fn weight(setting: &ResolvedSetting) -> Weight {
    let key = setting.key;
    let is_default = setting.origin == Origin::Default;
    match key.support {
        // At its default, and nothing trained depends on it.
        Support::None if is_default => Weight::Nothing,
        Support::None => Weight::Note,
        // Derived from another key, which is named.
        _ if is_default && matches!(key.default, DefaultValue::Rule(_) | DefaultValue::Derived(..)) => {
            Weight::Nothing
        }
        _ if key.reader.decides_training() => Weight::Refusal,
        _ => Weight::Note,
    }
}
