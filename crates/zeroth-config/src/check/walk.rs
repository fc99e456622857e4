//! The first step of a check: matches the file's keys against the schema and reads their values.

use serde_json::Value as Json;

use super::coerce::{self, Coerced};
use super::finding::{KeyMatch, MatchOutcome};
use super::unknown;
use crate::file_values::{FileValue, FileValues};
use crate::read::{ConfigSource, Document, Entry, JsonNode, JsonValue, TextSpan};
use crate::schema::{self, Effect, Key, KeyType};

pub(super) fn walk(document: &Document) -> (Vec<KeyMatch>, FileValues) {
    let mut walker = Walker { source: &document.source, findings: Vec::new(), values: FileValues::default() };
    let JsonValue::Object(entries) = &document.root.value else {
        // `parse` gives an object always; an empty file has no keys to judge.
        return (Vec::new(), FileValues::default());
    };
    walker.section("", "", entries);
    walker.move_deprecated();
    walker.findings.sort_by_key(|finding| finding.span.start);
    (walker.findings, walker.values)
}

struct Walker<'a> {
    source: &'a ConfigSource,
    findings: Vec<KeyMatch>,
    values: FileValues,
}

impl Walker<'_> {
    /// `canonical` and `spelled` are the section's path as the table and as the file name it.
    fn section(&mut self, canonical: &str, spelled: &str, entries: &[Entry]) {
        let type_name = type_of_params(canonical, &self.values);
        // `type` first: the parameters beside it are read by it.
        let named_type = |entry: &Entry| entry.key == "type";
        let types = entries.iter().enumerate().filter(|(_, entry)| named_type(entry));
        let others = entries.iter().enumerate().filter(|(_, entry)| !named_type(entry));
        for (index, entry) in types.chain(others) {
            if is_comment(entry) {
                continue;
            }
            if let Some(outcome) = self.given_twice(entries, index) {
                self.push(spelled, entry, outcome);
                self.unseen(spelled, entry);
                continue;
            }
            self.entry(canonical, spelled, entry, type_name.as_deref());
        }
    }

    fn entry(&mut self, section: &str, spelled: &str, entry: &Entry, type_name: Option<&str>) {
        let path = join(section, &entry.key);
        // A path written as one key would be found in the table; DeepSpeed does not see it.
        let known = schema::find(&path).find(|key| key.is_of(type_name)).filter(|_| !entry.key.contains('.'));
        let Some(key) = known else {
            let outcome = unknown::explain(section, &entry.key, type_name);
            let foreign = matches!(outcome, MatchOutcome::OfForeignType { .. }).then(|| outcome.clone());
            self.push(spelled, entry, outcome);
            match foreign {
                Some(outcome) => self.inside(&join(spelled, &entry.key), &entry.node, &outcome),
                None => self.unseen(spelled, entry),
            }
            return;
        };
        match (key.kind, &entry.node.value) {
            // `bf16` and `bfloat16` are one section under two names.
            (KeyType::Section, JsonValue::Object(_)) if self.values.has_section(key.path) => {
                let message = format!("the same section as `{}`, which is given too. Keep one", key.path);
                self.push(
                    spelled,
                    entry,
                    MatchOutcome::Wrong { key: Some(key), message, at: Some(entry.key_span) },
                );
                self.unseen(spelled, entry);
            }
            (KeyType::Section, JsonValue::Object(entries)) => {
                self.push(spelled, entry, MatchOutcome::Known { key, notes: Vec::new() });
                self.values.insert_section(key.path);
                self.section(key.path, &join(spelled, &entry.key), entries);
            }
            // DeepSpeed's first form of the section: a switch for stage 1.
            (KeyType::Section, JsonValue::Bool(on)) if key.path == "zero_optimization" => {
                let stage = i64::from(*on);
                let message = format!("the old form; write {{\"stage\": {stage}}}");
                self.push(spelled, entry, MatchOutcome::Known { key, notes: vec![message] });
                self.ask("zero_optimization.stage", stage.into(), join(spelled, &entry.key), entry.key_span);
            }
            (KeyType::Section, JsonValue::Null) => {
                let notes = vec!["null counts as absent".to_owned()];
                self.push(spelled, entry, MatchOutcome::Known { key, notes });
            }
            (KeyType::Section, other) => {
                let message = format!("it holds {}, and must hold an object {{…}}", other.kind());
                self.push(
                    spelled,
                    entry,
                    MatchOutcome::Wrong { key: Some(key), message, at: Some(entry.node.span) },
                );
            }
            (KeyType::Opaque, _) => {
                let outcome = MatchOutcome::Known { key, notes: Vec::new() };
                self.push(spelled, entry, outcome.clone());
                self.inside(&join(spelled, &entry.key), &entry.node, &outcome);
            }
            _ => self.leaf(key, spelled, entry),
        }
    }

    fn leaf(&mut self, key: &'static Key, spelled: &str, entry: &Entry) {
        let Coerced { value, mut notes } = match coerce::coerce(key, &entry.node.value) {
            Ok(coerced) => coerced,
            Err(message) => {
                self.push(
                    spelled,
                    entry,
                    MatchOutcome::Wrong { key: Some(key), message, at: Some(entry.node.span) },
                );
                self.unseen(spelled, entry);
                return;
            }
        };
        let path = join(spelled, &entry.key);
        if let Some(earlier) = self.values.get(key.path) {
            let message = format!(
                "the same key as `{}` at {}; only one of the two can count. Keep one",
                earlier.spelled, earlier.location
            );
            self.push(
                spelled,
                entry,
                MatchOutcome::Wrong { key: Some(key), message, at: Some(entry.key_span) },
            );
            return;
        }
        if value.is_null() {
            notes.push("null counts as absent".to_owned());
        } else {
            self.ask(key.path, value, path, entry.key_span);
        }
        self.push(spelled, entry, MatchOutcome::Known { key, notes });
    }

    /// Keys inside an opaque value share one outcome; a duplicate is an error there too.
    fn inside(&mut self, spelled: &str, node: &JsonNode, outcome: &MatchOutcome) {
        let JsonValue::Object(entries) = &node.value else { return };
        for (index, entry) in entries.iter().enumerate().filter(|(_, entry)| !is_comment(entry)) {
            let outcome_here = self.given_twice(entries, index).unwrap_or_else(|| outcome.clone());
            self.push(spelled, entry, outcome_here);
            self.inside(&join(spelled, &entry.key), &entry.node, outcome);
        }
    }

    /// Keys inside a key that is itself wrong: the error is reported once, at that key.
    fn unseen(&mut self, section: &str, entry: &Entry) {
        let path = join(section, &entry.key);
        let message = format!("it lies in `{path}`, which is wrong itself, so it is not looked at");
        self.inside(&path, &entry.node, &MatchOutcome::Unknown { message, near: false });
    }

    fn given_twice(&self, entries: &[Entry], index: usize) -> Option<MatchOutcome> {
        let entry = &entries[index];
        let first = entries[..index].iter().find(|earlier| earlier.key == entry.key)?;
        let location = self.source.location(first.key_span.start);
        let message =
            format!("the key is given twice, first at {location}; DeepSpeed refuses that. Keep one");
        Some(MatchOutcome::Wrong { key: None, message, at: Some(entry.key_span) })
    }

    fn ask(&mut self, path: &'static str, value: Json, spelled: String, span: TextSpan) {
        self.values.insert(path, FileValue { value, spelled, location: self.source.location(span.start) });
    }

    fn push(&mut self, section: &str, entry: &Entry, outcome: MatchOutcome) {
        let span = entry.key_span;
        self.findings.push(KeyMatch {
            spelled: join(section, &entry.key),
            span,
            location: self.source.location(span.start),
            value: entry.node.value.to_json(),
            outcome,
        });
    }

    /// Moves the values of deprecated keys to their replacements; giving both is an error, as in DeepSpeed.
    fn move_deprecated(&mut self) {
        for finding in &mut self.findings {
            let MatchOutcome::Known { key, .. } = finding.outcome else { continue };
            let Effect::Deprecated(_) = key.effect else { continue };
            let Some(old) = self.values.get(key.path).cloned() else { continue };
            let Some((path, value)) = replacement(key.path, &old.value) else { continue };
            if let Some(new) = self.values.get(path) {
                let message = format!(
                    "the old name of `{}`, which is given too ({}). Keep the new one",
                    new.spelled, new.location
                );
                finding.outcome = MatchOutcome::Wrong { key: Some(key), message, at: None };
            } else {
                self.values.insert(path, FileValue { value, ..old });
            }
            self.values.remove(key.path);
        }
    }
}

/// The new key and value for an old one; `None` where the old one has no effect in DeepSpeed either.
fn replacement(path: &str, value: &Json) -> Option<(&'static str, Json)> {
    let device = || Json::from(if value == &Json::Bool(true) { "cpu" } else { "none" });
    match path {
        "zero_optimization.cpu_offload" => Some(("zero_optimization.offload_optimizer.device", device())),
        "zero_optimization.cpu_offload_params" => Some(("zero_optimization.offload_param.device", device())),
        "zero_optimization.stage3_gather_fp16_weights_on_model_save" => {
            Some(("zero_optimization.stage3_gather_16bit_weights_on_model_save", value.clone()))
        }
        "zero_optimization.allgather_size" => {
            Some(("zero_optimization.allgather_bucket_size", value.clone()))
        }
        "aio.thread_count" => Some(("aio.intra_op_parallelism", value.clone())),
        _ => None,
    }
}

/// A name that begins with `_` is a comment, and so is all inside it.
fn is_comment(entry: &Entry) -> bool {
    entry.key.starts_with('_')
}

/// The optimizer's or scheduler's type while inside its `params`.
fn type_of_params(section: &str, values: &FileValues) -> Option<String> {
    let owner = section.strip_suffix(".params")?;
    let default = if owner == "optimizer" { Some("AdamW".to_owned()) } else { None };
    values
        .get(&format!("{owner}.type"))
        .and_then(|values| values.value.as_str().map(str::to_owned))
        .or(default)
}

/// `section.name`, in one allocation: this runs for every key of a file.
fn join(section: &str, name: &str) -> String {
    if section.is_empty() { name.to_owned() } else { [section, ".", name].concat() }
}
