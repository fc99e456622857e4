//! A conversation as input of a chat template: messages, tools, and which messages are trained.
//!
//! Messages are in OpenAI's format, normalised before rendering: ms-swift's `loss`, which overrides whether a message
//! is trained, is removed; so are `null` fields, which Parquet adds wherever another message has a value; reasoning,
//! which has three names, is provided under each, as in transformers.

use serde_json::{Map, Value};
use zeroth_base::nearest;

use super::row_problem::{kind, shortened};
use super::{MessageProblem, RowProblem};

/// The role that is trained by default.
pub(super) const ASSISTANT: &str = "assistant";

/// Keys of a message's reasoning; templates read the first.
pub(super) const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// sharegpt's speakers and their roles.
const SPEAKERS: [(&str, &str); 13] = [
    ("human", "user"),
    ("user", "user"),
    ("gpt", ASSISTANT),
    ("assistant", ASSISTANT),
    ("chatgpt", ASSISTANT),
    ("bot", ASSISTANT),
    ("model", ASSISTANT),
    ("system", "system"),
    ("tool", "tool"),
    ("function", "tool"),
    ("observation", "tool"),
    ("function_response", "tool"),
    ("function_call", ASSISTANT),
];

/// Messages, tools, and what is trained.
#[derive(Debug, Default)]
pub(super) struct Conversation {
    pub(super) messages: Vec<Map<String, Value>>,
    /// Whether each message is trained.
    pub(super) trained: Vec<bool>,
    pub(super) tools: Option<Value>,
}

impl Conversation {
    /// Appends a message.
    pub(super) fn say(&mut self, role: &str, text: &str) {
        let message = [("role", role), ("content", text)];
        self.messages.push(message.into_iter().map(|(key, text)| (key.to_owned(), text.into())).collect());
        self.trained.push(role == ASSISTANT);
    }

    /// Appends the messages of a column, in OpenAI's or sharegpt's format. `trains` says whether assistant messages
    /// are trained.
    pub(super) fn take(&mut self, key: &str, value: &Value, trains: bool) -> Result<(), RowProblem> {
        let not_messages = |found| RowProblem::NotMessages { key: key.to_owned(), found };
        let Value::Array(list) = value else { return Err(not_messages(kind(value))) };
        if list.is_empty() {
            return Err(not_messages("an empty list"));
        }
        for (index, entry) in list.iter().enumerate() {
            let (message, trained) = read_message(entry).map_err(|problem| RowProblem::Message {
                key: key.to_owned(),
                number: index + 1,
                problem: Box::new(problem),
            })?;
            let role = message.get("role").and_then(Value::as_str);
            self.trained.push(trained.unwrap_or(trains && role == Some(ASSISTANT)));
            self.messages.push(message);
        }
        Ok(())
    }

    /// Prepends a system message unless there is one.
    pub(super) fn begin_with_system(&mut self, text: &str) {
        if self.messages.first().is_some_and(|first| role(first) == "system") {
            return;
        }
        let mut whole = Self::default();
        whole.say("system", text);
        whole.messages.append(&mut self.messages);
        whole.trained.append(&mut self.trained);
        (self.messages, self.trained) = (whole.messages, whole.trained);
    }

    /// Sets the tools from a column: a list, or JSON text of one.
    pub(super) fn take_tools(&mut self, key: &str, value: &Value) -> Result<(), RowProblem> {
        let failed = || RowProblem::Tools { key: key.to_owned(), found: shortened(value) };
        let tools = match value {
            Value::String(text) if text.trim().is_empty() => return Ok(()),
            Value::String(text) => serde_json::from_str(text).map_err(|_| failed())?,
            other => other.clone(),
        };
        match tools {
            Value::Array(list) if list.is_empty() => Ok(()),
            Value::Array(_) => {
                self.tools = Some(tools);
                Ok(())
            }
            _ => Err(failed()),
        }
    }

    /// Whether the trained messages differ from the assistant's.
    pub(super) fn is_overridden(&self) -> bool {
        self.messages
            .iter()
            .zip(&self.trained)
            .any(|(message, trained)| *trained != (role(message) == ASSISTANT))
    }

    /// Joins lists of parts into one text, for templates that do not support lists.
    pub(super) fn join_parts(&mut self) {
        for message in &mut self.messages {
            if let Some(content) = message.get_mut("content")
                && let Value::Array(parts) = content
            {
                let texts = parts.iter().filter_map(|part| part.get("text").and_then(Value::as_str));
                *content = texts.collect::<String>().into();
            }
        }
    }
}

/// The role of a message.
pub(super) fn role(message: &Map<String, Value>) -> &str {
    message.get("role").and_then(Value::as_str).unwrap_or_default()
}

/// Reads a message, and its `loss` override.
fn read_message(entry: &Value) -> Result<(Map<String, Value>, Option<bool>), MessageProblem> {
    let Value::Object(given) = entry else { return Err(MessageProblem::NotAnObject { found: kind(entry) }) };
    let trained = match given.get("loss") {
        None | Some(Value::Null) => None,
        Some(Value::Bool(trained)) => Some(*trained),
        Some(other) => return Err(MessageProblem::Loss { found: kind(other) }),
    };
    let message = if given.contains_key("from") { from_sharegpt(given)? } else { from_openai(given)? };
    Ok((message, trained))
}

fn from_openai(given: &Map<String, Value>) -> Result<Map<String, Value>, MessageProblem> {
    let role = given.get("role").unwrap_or(&Value::Null);
    if !role.is_string() {
        let found = if given.contains_key("role") { kind(role) } else { "no such key" };
        return Err(MessageProblem::Role { key: "role", found });
    }
    check_content("content", given.get("content"), role == "tool")?;
    let kept = given.iter().filter(|(key, value)| *key != "loss" && (*key == "content" || !value.is_null()));
    let mut message: Map<String, Value> = kept.map(|(key, value)| (key.clone(), value.clone())).collect();
    if let Some(reasoning) = REASONING.iter().find_map(|name| message.get(*name)).cloned() {
        message.entry("thinking").or_insert_with(|| reasoning.clone());
        message.insert("reasoning_content".to_owned(), reasoning);
    }
    Ok(message)
}

/// Validates a content: text, a list of text parts, or nothing; tools may return any object, which templates render
/// as JSON.
fn check_content(key: &'static str, content: Option<&Value>, tool: bool) -> Result<(), MessageProblem> {
    let wrong = |found| Err(MessageProblem::Content { key, found });
    match content {
        None | Some(Value::Null | Value::String(_)) => Ok(()),
        Some(Value::Object(_)) if tool => Ok(()),
        Some(Value::Array(parts)) => {
            let text = |part: &Value| part.get("text").is_some_and(Value::is_string);
            match parts.iter().find(|part| !text(part)) {
                Some(part) => wrong(shortened(part)),
                None => Ok(()),
            }
        }
        Some(other) => wrong(kind(other).to_owned()),
    }
}

fn from_sharegpt(given: &Map<String, Value>) -> Result<Map<String, Value>, MessageProblem> {
    let from = match given.get("from") {
        Some(Value::String(from)) => from,
        other => return Err(MessageProblem::Role { key: "from", found: other.map_or("no such key", kind) }),
    };
    let names = || SPEAKERS.iter().map(|(name, _)| *name);
    let Some((speaker, role)) = SPEAKERS.iter().find(|(name, _)| name == from) else {
        let known = names().collect::<Vec<_>>().join(", ");
        return Err(MessageProblem::Speaker { from: from.clone(), near: nearest(from, names()), known });
    };
    let value = given.get("value").unwrap_or(&Value::Null);
    if !value.is_string() {
        check_content("value", Some(value), false)?;
    }
    let mut message = Map::new();
    message.insert("role".to_owned(), (*role).into());
    if *speaker == "function_call" {
        message.insert("content".to_owned(), "".into());
        message.insert("tool_calls".to_owned(), read_calls(value)?);
    } else {
        message.insert("content".to_owned(), value.clone());
    }
    Ok(message)
}

/// sharegpt writes calls as JSON text: {"name", "arguments"}, or a list of these.
fn read_calls(value: &Value) -> Result<Value, MessageProblem> {
    let failed = || MessageProblem::Call { found: shortened(value) };
    let parsed: Value = serde_json::from_str(value.as_str().ok_or_else(failed)?).map_err(|_| failed())?;
    let calls = if let Value::Array(calls) = parsed { calls } else { vec![parsed] };
    if calls.is_empty() || !calls.iter().all(|call| call.get("name").is_some_and(Value::is_string)) {
        return Err(failed());
    }
    Ok(calls.into_iter().map(|call| serde_json::json!({"type": "function", "function": call})).collect())
}
