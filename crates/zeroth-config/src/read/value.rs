//! The parsed values of a config, with their spans.

use super::location::TextSpan;
use super::number::Number;

/// A value and its span.
#[derive(Debug, Clone, PartialEq)]
pub struct JsonNode {
    /// Its piece of the text, brackets and quotes included.
    pub span: TextSpan,
    /// The value.
    pub value: JsonValue,
}

/// A value of a config.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum JsonValue {
    Null,
    /// `true` or `false`
    Bool(bool),
    Number(Number),
    /// Text, with escapes resolved.
    Text(String),
    List(Vec<JsonNode>),
    /// Members in the order of the file, duplicate keys included.
    Object(Vec<Entry>),
}

/// A member of an object.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// The key, with escapes resolved.
    pub key: String,
    /// The key's piece of the text, quotes included.
    pub key_span: TextSpan,
    /// The value.
    pub node: JsonNode,
}

impl JsonValue {
    /// What it is, for a message: `a number`, `text`, ….
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Number(_) => "a number",
            Self::Text(_) => "text",
            Self::List(_) => "a list",
            Self::Object(_) => "an object",
        }
    }

    /// The value as plain JSON. A whole number becomes an integer however it was written (`5e8`), every other one a
    /// float; of duplicate keys the last one counts.
    pub fn to_json(&self) -> serde_json::Value {
        match self {
            Self::Null => serde_json::Value::Null,
            Self::Bool(flag) => (*flag).into(),
            Self::Number(number) => match number.as_whole() {
                Some(whole) => whole.into(),
                None => number.as_f64().into(),
            },
            Self::Text(text) => text.as_str().into(),
            Self::List(nodes) => nodes.iter().map(|node| node.value.to_json()).collect(),
            Self::Object(entries) => {
                let members = entries.iter().map(|entry| (entry.key.clone(), entry.node.value.to_json()));
                serde_json::Value::Object(members.collect())
            }
        }
    }
}
