//! How much of what a key says a run carries out today. What is built next loses its word here, and nothing else changes.

use serde_json::Value as Json;

use super::key::Key;

/// Which values of a key a run carries out today.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Built {
    /// Every value.
    Whole,
    /// None. Such a key refines something or groups transfers: a run without it trains the same.
    Not,
    /// These alone. Any other asks for something that a run would not do.
    Only {
        /// The values, as a file writes them, texts without quotes.
        values: &'static [&'static str],
        /// What to write instead of another.
        instead: &'static str,
    },
}

impl Key {
    /// No part reads it yet, and nothing trained depends on it.
    pub(super) const fn not_yet(mut self) -> Self {
        self.built = Built::Not;
        self
    }

    /// Only these values are built; `instead` says what to write for another.
    pub(super) const fn only(mut self, values: &'static [&'static str], instead: &'static str) -> Self {
        self.built = Built::Only { values, instead };
        self
    }

    /// Whether a run does what this value asks for. What is left open counts as the default.
    pub fn is_built_for(&self, value: &Json) -> bool {
        let Built::Only { values, .. } = self.built else { return self.built == Built::Whole };
        let is_open = value.is_null() || value.as_str() == Some("auto");
        let counts = if is_open { self.default.to_json() } else { Some(value.clone()) };
        counts.is_none_or(|value| {
            let written = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            values.iter().any(|built| built.eq_ignore_ascii_case(&written))
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::schema::{self, Kind};

    fn key(path: &str) -> &'static Key {
        schema::find(path).next().unwrap_or_else(|| panic!("no key {path}"))
    }

    #[test]
    fn what_is_left_open_counts_as_its_default() {
        for open in [json!("auto"), Json::Null] {
            assert!(key("zero_optimization.offload_param.device").is_built_for(&open), "its default is none");
            assert!(
                !key("scheduler.params.cycle_momentum").is_built_for(&open),
                "DeepSpeed's default is true"
            );
        }
    }

    #[test]
    fn words_are_built_in_any_case_and_numbers_by_value() {
        let device = key("zero_optimization.offload_optimizer.device");
        assert!(device.is_built_for(&json!("None")) && !device.is_built_for(&json!("nvme")));
        let start = key("scheduler.params.last_batch_iteration");
        assert!(start.is_built_for(&json!(-1)) && !start.is_built_for(&json!(10)));
    }

    #[test]
    fn only_names_values_that_the_key_may_hold() {
        for key in schema::keys() {
            let Built::Only { values, instead } = key.built else { continue };
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
