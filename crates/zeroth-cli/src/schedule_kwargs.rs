//! `--lr-scheduler-kwargs`: a JSON object, checked like the section `zeroth.lr_scheduler_kwargs` of a config.

use serde_json::{Map, Value};
use zeroth::config::check::{Severity, check};
use zeroth::config::read::{ConfigSource, parse};

const SECTION: &str = "zeroth.lr_scheduler_kwargs.";

/// Parses the object. The error names the parameter and what it must be.
pub(crate) fn schedule_kwargs(text: &str) -> Result<Map<String, Value>, String> {
    // Parsed alone first, so that what follows the object is an error.
    let alone = parse(ConfigSource::from_text("--lr-scheduler-kwargs", text))
        .map_err(|error| format!("{}: give a JSON object, as in '{{\"min_lr\": 1e-6}}'", error.message))?;
    let config = serde_json::json!({ "zeroth": { "lr_scheduler_kwargs": alone.root.value.to_json() } });
    let document = parse(ConfigSource::from_text("--lr-scheduler-kwargs", config.to_string()))
        .map_err(|error| error.message.clone())?;
    let report = check(&document);
    if let Some(verdict) = report.at_least(Severity::Warning).next() {
        let name = verdict.path.strip_prefix(SECTION).unwrap_or(&verdict.path);
        return Err(format!("{name}: {}", verdict.message));
    }
    let members = report.values.iter();
    let members = members.filter_map(|(path, found)| Some((path.strip_prefix(SECTION)?, &found.value)));
    Ok(members.map(|(name, value)| (name.to_owned(), value.clone())).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn objects_are_checked_like_the_section_of_a_config() {
        let kwargs =
            schedule_kwargs(r#"{"min_lr": 1e-6, "num_decay_steps": 10, "decay_type": "1-sqrt"}"#).unwrap();
        assert_eq!(
            Value::Object(kwargs),
            json!({"decay_type": "1-sqrt", "min_lr": 1e-6, "num_decay_steps": 10})
        );
        assert!(schedule_kwargs("{}").unwrap().is_empty());
        for (text, word) in [
            (r#"{"min_rl": 1e-6}"#, "min_lr"),
            (r#"{"min_lr": "small"}"#, "min_lr"),
            (r#"{"min_lr": -1}"#, "min_lr"),
            (r#"{"min_lr_rate": 2}"#, "min_lr_rate"),
            ("[1]", "JSON object"),
            ("1e-6", "JSON object"),
            (r#"{"min_lr": 1} }"#, "JSON object"),
        ] {
            let error = schedule_kwargs(text).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
