//! Reads a value of the file as its key's kind, exactly as leniently as DeepSpeed.

use serde_json::Value as Json;
use zeroth_base::{Optimizer, nearest};

use crate::read::{JsonValue, Number};
use crate::schema::{self, Key, KeyType};

/// A value in its key's kind, and notes on its spelling.
#[derive(Debug, PartialEq)]
pub(super) struct Coerced {
    pub(super) value: Json,
    pub(super) notes: Vec<String>,
}

/// Reads a value; the error is one sentence with a remedy.
pub(super) fn coerce(key: &Key, value: &JsonValue) -> Result<Coerced, String> {
    if let JsonValue::Null = value {
        return Ok(Coerced { value: Json::Null, notes: Vec::new() });
    }
    if is_auto(value) && !matches!(key.kind, KeyType::OneOf(words) if words.contains(&"auto")) {
        let notes = if key.auto.is_some() || key.default.to_json() == Some("auto".into()) {
            Vec::new()
        } else {
            vec!["nothing fills \"auto\" here, so its default counts".to_owned()]
        };
        return Ok(Coerced { value: "auto".into(), notes });
    }
    let mut notes = Vec::new();
    let value = match key.kind {
        KeyType::Bool => truth(value, &mut notes)?,
        KeyType::Int => whole(key, value, &mut notes)?.into(),
        KeyType::Float => number(key, value, &mut notes)?.into(),
        KeyType::Text => match value {
            JsonValue::Text(text) => known_spelling(key, text).into(),
            other => return Err(format!("it holds {}, and must hold text", other.kind())),
        },
        KeyType::OneOf(words) => one_of(words, value)?.into(),
        KeyType::Floats(count) => {
            let list = list(value)?;
            if list.len() != count {
                return Err(format!("it holds a list of {}, and must hold {count} numbers", list.len()));
            }
            list.iter().map(|item| number(key, item, &mut notes)).collect::<Result<Vec<f64>, _>>()?.into()
        }
        KeyType::Ints => list(value)?
            .iter()
            .map(|item| whole(key, item, &mut notes))
            .collect::<Result<Vec<i64>, _>>()?
            .into(),
        KeyType::Texts => list(value)?
            .iter()
            .map(|item| match item {
                JsonValue::Text(text) => Ok(text.as_str()),
                other => Err(format!("it holds {} in its list, and must hold texts", other.kind())),
            })
            .collect::<Result<Vec<&str>, _>>()?
            .into(),
        KeyType::Section | KeyType::Opaque => value.to_json(),
    };
    Ok(Coerced { value, notes })
}

/// The name of an optimizer or scheduler as the table spells it, whatever its case in the file: who reads it compares it.
fn known_spelling<'a>(key: &Key, text: &'a str) -> &'a str {
    let known = match key.path {
        "optimizer.type" => Optimizer::NAMES,
        "scheduler.type" => schema::SCHEDULERS,
        _ => &[],
    };
    known.iter().find(|name| name.eq_ignore_ascii_case(text)).copied().unwrap_or(text)
}

fn is_auto(value: &JsonValue) -> bool {
    matches!(value, JsonValue::Text(text) if text == "auto")
}

fn list(value: &JsonValue) -> Result<Vec<&JsonValue>, String> {
    match value {
        JsonValue::List(nodes) => Ok(nodes.iter().map(|node| &node.value).collect()),
        other => Err(format!("it holds {}, and must hold a list […]", other.kind())),
    }
}

fn truth(value: &JsonValue, notes: &mut Vec<String>) -> Result<Json, String> {
    let truth = match value {
        JsonValue::Bool(truth) => return Ok((*truth).into()),
        // pydantic, which DeepSpeed uses, reads these too.
        JsonValue::Text(text) if text.eq_ignore_ascii_case("true") => true,
        JsonValue::Text(text) if text.eq_ignore_ascii_case("false") => false,
        JsonValue::Number(number) if number.as_whole() == Some(1) => true,
        JsonValue::Number(number) if number.as_whole() == Some(0) => false,
        other => return Err(format!("it holds {}, and must be true or false", shown(other))),
    };
    let without = if matches!(value, JsonValue::Text(_)) { " without quotes" } else { "" };
    notes.push(format!("read as {truth}; write {truth}{without}"));
    Ok(truth.into())
}

/// A number, or a numeric text with a note.
fn read_number(value: &JsonValue, wanted: &str, notes: &mut Vec<String>) -> Result<Number, String> {
    match value {
        JsonValue::Number(number) => Ok(number.clone()),
        JsonValue::Text(text) => match Number::from_text(text) {
            Some(number) => {
                notes.push(format!("the text \"{text}\" is read as the number {}", number.text()));
                Ok(number)
            }
            None => Err(format!("it holds the text \"{text}\", and must be {wanted}")),
        },
        other => Err(format!("it holds {}, and must be {wanted}", shown(other))),
    }
}

fn whole(key: &Key, value: &JsonValue, notes: &mut Vec<String>) -> Result<i64, String> {
    let number = read_number(value, "a whole number", notes)?;
    let Some(whole) = number.as_whole() else {
        let float = number.as_f64();
        return Err(if float.abs() >= 9e18 {
            format!("{} is beyond 2^63, the greatest number of {}", number.text(), unit(key))
        } else {
            format!("{} is not a whole number; write {:.0}", number.text(), float.floor())
        });
    };
    in_bounds(key, whole as f64, number.text())?;
    Ok(whole)
}

fn number(key: &Key, value: &JsonValue, notes: &mut Vec<String>) -> Result<f64, String> {
    let number = read_number(value, "a number", notes)?;
    in_bounds(key, number.as_f64(), number.text())?;
    Ok(number.as_f64())
}

fn unit(key: &Key) -> &str {
    if key.unit.is_empty() { "anything" } else { key.unit }
}

fn in_bounds(key: &Key, number: f64, text: &str) -> Result<(), String> {
    if key.bounds.allow(number) {
        return Ok(());
    }
    let bounds = key.bounds.in_words().unwrap_or_default();
    Err(format!("{text} is out of bounds: it must be {bounds}"))
}

fn one_of(words: &[&'static str], value: &JsonValue) -> Result<&'static str, String> {
    let JsonValue::Text(text) = value else {
        return Err(format!("it holds {}, and must be {}", shown(value), alternatives(words)));
    };
    if let Some(word) = words.iter().find(|word| word.eq_ignore_ascii_case(text)) {
        return Ok(word);
    }
    // One letter from "cpu", and the opposite of it.
    let on_the_gpu =
        words.contains(&"nvme") && ["gpu", "cuda"].iter().any(|gpu| text.eq_ignore_ascii_case(gpu));
    let hint = match nearest(text, words.iter().copied()) {
        _ if on_the_gpu => "; \"none\" leaves it on the device".to_owned(),
        Some(near) => format!("; did you mean \"{near}\"?"),
        None => String::new(),
    };
    Err(format!("\"{text}\" is not one of {}{hint}", alternatives(words)))
}

fn alternatives(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => quoted.join(""),
    }
}

fn shown(value: &JsonValue) -> String {
    match value {
        JsonValue::Number(number) => format!("the number {}", number.text()),
        JsonValue::Bool(truth) => truth.to_string(),
        JsonValue::Text(text) => format!("the text \"{text}\""),
        other => other.kind().to_owned(),
    }
}
