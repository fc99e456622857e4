//! What a config asks for that no run does yet: what `zeroth train` refuses, and what it names and goes on without.

use std::fmt;

use crate::check::{Status, effect, unbuilt_switch};
use crate::read::Location;
use crate::resolve::{Origin, Resolved, Setting};
use crate::schema::{DefaultValue, Effect, Support};
use crate::view::ConfigView;

/// The keys of a config that are "not yet", by what a run has to make of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unbuilt {
    /// They would change what is trained or how memory is used: a run without them is another run.
    pub refused: Vec<Lack>,
    /// They print, report, save, refine something or group transfers: a run without them trains the same.
    pub noted: Vec<Lack>,
}

/// One key whose value asks for something that is not built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lack {
    /// Its canonical path.
    pub path: &'static str,
    /// The value as JSON writes it.
    pub value: String,
    /// Where the value comes from: the file, a flag, a rule or the default.
    pub origin: Origin,
    /// What is missing, and what to write instead.
    pub instead: String,
}

impl Lack {
    /// Where the file has it.
    pub const fn location(&self) -> Option<Location> {
        match self.origin {
            Origin::File(location) => Some(location),
            _ => None,
        }
    }
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({}): {}", self.path, self.value, self.origin, self.instead)
    }
}

/// What of a settled config no run does yet, each list in the order of the table.
pub fn unbuilt(config: &Resolved) -> Unbuilt {
    let view = ConfigView::new(config);
    let mut found = Unbuilt { refused: Vec::new(), noted: Vec::new() };
    for setting in config.settings() {
        let (status, message) = effect(setting.key, &setting.value, view);
        // What follows a switch that is not built: the switch itself is named.
        if status != Status::NotYet || unbuilt_switch(setting.key, view).is_some() {
            continue;
        }
        let list = match weight(setting) {
            Weight::Nothing => continue,
            Weight::Note => &mut found.noted,
            Weight::Refusal => &mut found.refused,
        };
        let instead = match setting.key.effect {
            Effect::Lacking(_) => format!("not yet: {message}; leave it out"),
            _ => message,
        };
        list.push(Lack {
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

fn weight(setting: &Setting) -> Weight {
    let key = setting.key;
    let is_default = setting.origin == Origin::Default;
    match key.support {
        // Nobody asked for it, and nothing trained depends on it.
        Support::None if is_default => Weight::Nothing,
        Support::None => Weight::Note,
        // It follows another key, and that one is named.
        _ if is_default && matches!(key.default, DefaultValue::Rule(_) | DefaultValue::Derived(..)) => {
            Weight::Nothing
        }
        _ if key.reader.decides_training() => Weight::Refusal,
        _ => Weight::Note,
    }
}
