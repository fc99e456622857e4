//! The table as a JSON Schema (draft 2020-12), so that editors complete keys and underline errors.

use serde_json::{Map, Value, json};

use crate::explain;
use crate::schema::{self, Effect, Key, KeyType};

/// The schema of a config file.
pub fn json_schema() -> Value {
    let mut schema = section("");
    let head = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "DeepSpeed config, as zeroth reads it",
    });
    if let (Value::Object(schema), Value::Object(mut head)) = (&mut schema, head) {
        head.append(schema);
        *schema = head;
    }
    schema
}

fn section(path: &str) -> Value {
    let mut properties = Map::new();
    for key in schema::keys().filter(|key| !matches!(key.effect, Effect::Refused(_))) {
        for spelling in schema::spellings(key) {
            let (parent, name) = spelling.rsplit_once('.').unwrap_or(("", &spelling));
            if parent != path {
                continue;
            }
            // Types of optimizers share names: what any of them may hold is fine here, `check` looks closer.
            let entry = property(key);
            match properties.get_mut(name) {
                Some(existing) if existing != &entry => {
                    *existing = json!({"description": key.does, "anyOf": [existing.clone(), entry]});
                }
                Some(_) => {}
                None => {
                    properties.insert(name.to_owned(), entry);
                }
            }
        }
    }
    // A foreign optimizer's parameters are not in the table.
    let open = path.ends_with(".params");
    json!({
        "type": "object",
        "properties": properties,
        "patternProperties": {"^_": {"description": "a comment"}},
        "additionalProperties": open,
    })
}

fn property(key: &Key) -> Value {
    let mut property = match key.kind {
        KeyType::Section if key.path == "zero_optimization" => {
            json!({"anyOf": [section(key.path), {"type": "boolean", "deprecated": true}, {"type": "null"}]})
        }
        KeyType::Section => json!({"anyOf": [section(key.path), {"type": "null"}]}),
        KeyType::Opaque => json!({}),
        _ => json!({"anyOf": [value(key), {"const": "auto"}, {"type": "null"}]}),
    };
    if let Value::Object(fields) = &mut property {
        fields.insert("description".to_owned(), format!("{} Here: {}.", key.does, explain::here(key)).into());
        if let Some(default) = key.default.to_json() {
            fields.insert("default".to_owned(), default);
        }
        if let Effect::Deprecated(_) = key.effect {
            fields.insert("deprecated".to_owned(), true.into());
        }
    }
    property
}

fn value(key: &Key) -> Value {
    match key.kind {
        KeyType::Bool => json!({"type": "boolean"}),
        // JSON Schema counts 5e8 and 1.0 as integers, as we do.
        KeyType::Int => bounded(key, "integer"),
        KeyType::Float => bounded(key, "number"),
        KeyType::Text => json!({"type": "string"}),
        KeyType::OneOf(words) => {
            let cases: Vec<String> = words.iter().map(|word| any_case(word)).collect();
            json!({"type": "string", "pattern": format!("^({})$", cases.join("|")), "examples": words})
        }
        KeyType::Floats(count) => {
            json!({"type": "array", "items": bounded(key, "number"), "minItems": count, "maxItems": count})
        }
        KeyType::Ints => json!({"type": "array", "items": bounded(key, "integer")}),
        KeyType::Texts => json!({"type": "array", "items": {"type": "string"}}),
        KeyType::Section | KeyType::Opaque => json!({}),
    }
}

/// A pattern for a word in any case: words are read so.
fn any_case(word: &str) -> String {
    word.chars()
        .map(|c| {
            if c.is_ascii_alphabetic() {
                format!("[{}{}]", c.to_ascii_lowercase(), c.to_ascii_uppercase())
            } else {
                c.to_string()
            }
        })
        .collect()
}

fn bounded(key: &Key, kind: &str) -> Value {
    let mut number = Map::new();
    number.insert("type".to_owned(), kind.into());
    let bounds = [
        ("minimum", key.bounds.least),
        ("exclusiveMinimum", key.bounds.above),
        ("maximum", key.bounds.most),
        ("exclusiveMaximum", key.bounds.below),
    ];
    for (name, bound) in bounds {
        if let Some(bound) = bound {
            let whole = bound.fract() == 0.0;
            number.insert(name.to_owned(), if whole { (bound as i64).into() } else { bound.into() });
        }
    }
    Value::Object(number)
}
