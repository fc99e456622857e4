//! Problems with single rows.

use serde_json::Value;
use zeroth_base::{counted, format_bytes, grouped, nearest};

use super::IGNORED;
use super::row_format::known_formats;
use super::row_limits::{MAX_ROW_VALUES, MAX_TEXT_BYTES};

/// A problem with a row.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each message names its fields")]
pub enum RowProblem {
    #[error("not JSON: {message}, column {column}; a row is one JSON object on one line")]
    NotJson {
        message: String,
        /// Column in the line, from 1.
        column: usize,
    },
    #[error(
        "the row has more than {} values, counting list entries, fields and cells: is it several rows? A row is one sample",
        grouped(MAX_ROW_VALUES)
    )]
    TooManyValues,
    #[error(
        "the row has {} of text: at most {} are tokenised; split it into several rows",
        format_bytes(*bytes), format_bytes(MAX_TEXT_BYTES as u64)
    )]
    TextTooLong { bytes: u64 },
    #[error("not JSON: {message}, line {line}, column {column} of the row")]
    NotJsonElement {
        message: String,
        /// Line in the row, from 1.
        line: usize,
        /// Column in that line, from 1.
        column: usize,
    },
    #[error("no row follows the comma: remove it")]
    NoElement,
    #[error(
        "the row has {}, but the header names {}: fields with a delimiter, a quote or a line end must be quoted",
        counted(*found as u64, "field"), counted(*expected as u64, "column")
    )]
    Ragged { found: usize, expected: usize },
    #[error("`{key}` is not UTF-8 text")]
    CellNotText { key: String },
    #[error("`{key}` must be JSON, as json.dumps of Python writes it: {message}")]
    CellNotJson { key: String, message: String },
    #[error("a row must be a JSON object, as in {{\"input_ids\": [1, 2, 3]}}: found {found}")]
    NotAnObject { found: &'static str },
    #[error(
        "no row format has these columns: {}{}; known formats are {}; --columns maps other names, as in --columns \
         question=problem,answer=solution",
        listed(found),
        near.as_ref().map(|(theirs, ours)| format!(" (`{theirs}` is similar to `{ours}`)")).unwrap_or_default(),
        known_formats()
    )]
    UnknownFormat { found: Vec<String>, near: Option<(String, &'static str)> },
    #[error("`{key}` is null: the format {format} requires it; fill it in, or remove the row")]
    NullColumn { key: String, format: &'static str },
    #[error(
        "--columns {ours}={theirs}: the row has no column `{theirs}`{}; it has {}",
        nearest(theirs, found.iter().map(String::as_str)).map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default(),
        listed(found)
    )]
    NoSuchColumn { ours: &'static str, theirs: String, found: Vec<String> },
    #[error(
        "the columns `{source_column}` and `{target}` are no row format: source and target name the languages of a column \
         `translation`; for texts in two columns give --columns prompt={source_column},completion={target}"
    )]
    SourceAndTarget { source_column: String, target: String },
    #[error(
        "the row matches {}: select one with its columns, as in --columns {example}={example}",
        formats.join(" or ")
    )]
    Ambiguous { formats: Vec<&'static str>, example: &'static str },
    #[error("`{key}` must be a string: found {found}")]
    NotText { key: String, found: &'static str },
    #[error(
        "`{key}` must be a list of messages, as in [{{\"role\": \"user\", \"content\": \"Hi\"}}]: found {found}"
    )]
    NotMessages { key: String, found: &'static str },
    #[error("message {number} of `{key}`: {problem}")]
    Message { key: String, number: usize, problem: Box<MessageProblem> },
    #[error("`{key}` must be a list of [question, answer] pairs: found {found}")]
    History { key: String, found: String },
    #[error("`{key}` must be a list of tools, or a JSON string of such a list: found {found}")]
    Tools { key: String, found: String },
    #[error(
        "`{key}` must be an object with a source and a target text, as in {{\"en\": \"Hello\", \"de\": \"Hallo\"}}: \
         found {found}; --columns source=en,target=de selects two of several"
    )]
    Translation { key: String, found: String },
    #[error("`{key}` must be a list of integers: found {found}")]
    NotAList { key: &'static str, found: &'static str },
    #[error("{key}[{place}] must be an integer: found {found}")]
    NotAnInteger { key: &'static str, place: usize, found: String },
    #[error("`{key}` has {} but `input_ids` has {expected}: they must have the same length", entries(*found))]
    Lengths { key: &'static str, found: usize, expected: usize },
    #[error("the row has no tokens; remove it")]
    Empty,
    #[error(
        "the row has no prompt: all of it is trained, so there is nothing to answer; rows such as {{\"question\", \"answer\"}} \
         have one"
    )]
    NoPrompt,
    #[error("the row has no answer to compare with: none of its tokens is trained")]
    NoAnswer,
    #[error(
        "input_ids[{place}] is {id}: the model's vocabulary has {} tokens, 0 to {}; was the data made with another \
         tokenizer?", grouped(*vocabulary), vocabulary.saturating_sub(1)
    )]
    Token { place: usize, id: i64, vocabulary: u64 },
    #[error(
        "labels[{place}] is {label}: a label must be a token id, 0 to {}, or {IGNORED} for untrained tokens",
        vocabulary.saturating_sub(1)
    )]
    Label { place: usize, label: i64, vocabulary: u64 },
    #[error("attention_mask[{place}] is {found}: it must be 0 (padding) or 1")]
    Mask { place: usize, found: i64 },
    #[error(
        "attention_mask[{place}] is 0 but tokens follow: only padding at the end of a row is supported; write the row \
         without padding"
    )]
    PaddingInside { place: usize },
    #[error(
        "the format {format} needs a tokenizer, but {folder} has no tokenizer.json: {}",
        tokenizer_remedy(folder, *sentencepiece)
    )]
    NoTokenizer {
        format: &'static str,
        folder: String,
        /// A SentencePiece model there, which can be converted.
        sentencepiece: Option<&'static str>,
    },
    #[error(
        "the format {format} needs a chat template: {folder} has none in chat_template.jinja, \
         chat_template.json, or as `chat_template` in tokenizer_config.json; copy the model's there, or use \
         {{\"prompt\", \"completion\"}} rows"
    )]
    NoChatTemplate { format: &'static str, folder: String },
    #[error("the chat template in {file} cannot be used: {message}")]
    BadTemplate { file: String, message: String },
    #[error("the chat template rejects the conversation at message {number}: {message}")]
    Template {
        /// The first message it rejects, from 1.
        number: usize,
        message: String,
    },
    #[error(
        "the chat template in {file} was stopped: it {what}, which no conversation needs; use the template of the model's \
         authors"
    )]
    TemplateStopped { file: String, what: String },
    #[error(
        "the chat template renders other text once a message changes, so each of the {} is looked for by rendering \
         the conversation again: that takes too long for so many; split the conversation, or mark the trained text with \
         {{% generation %}} in the template",
        counted(*messages as u64, "message")
    )]
    TooManyRenders { messages: usize },
    #[error(
        "message {number} ({role}) should be trained, but the chat template does not render it: its content \
         is null, or the template does not support tool calls or this role; remove the message, or set its \"loss\" to \
         false"
    )]
    NoTrace { number: usize, role: String },
    #[error("the row contains U+{code:04X}, a Unicode noncharacter; remove it")]
    Reserved { code: u32 },
    #[error(
        "no end-of-text token is defined: set `eos_token` in tokenizer_config.json, or `eos_token_id` in \
         config.json"
    )]
    NoEndOfText,
    #[error(
        "the format {format} has no source: an encoder-decoder model reads one text and writes another, as in \
         {{\"translation\": {{\"en\": ..., \"de\": ...}}}}, {{\"prompt\", \"completion\"}} or {{\"question\", \"answer\"}}"
    )]
    NoSource { format: &'static str },
    #[error(
        "`{key}` has {} with {}: for an encoder-decoder model a row is one text and its answer, which comes last and is \
         trained; write a row for each answer, without tools",
        counted(*messages as u64, "message"), counted(*answers as u64, "answer")
    )]
    NotAPair { key: String, messages: usize, answers: usize },
    #[error("`{key}` is empty: there is nothing to train; fill it in, or remove the row")]
    EmptyTarget { key: String },
    #[error(
        "{flag} is missing: the row has the languages {}; name the one that is read and the one that is written, as in \
         --source-lang {} --target-lang {}",
        present.join(", "),
        present.first().map_or("en", String::as_str),
        present.get(1).map_or("de", String::as_str)
    )]
    LanguageNotGiven { flag: &'static str, present: Vec<String> },
    #[error(
        "{flag} {asked}: the row has no such language{}; it has {}",
        nearest(asked, present.iter().map(String::as_str)).map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default(),
        listed(present)
    )]
    NoLanguage { flag: &'static str, asked: String, present: Vec<String> },
    #[error(
        "the row has no `labels`: for an encoder-decoder model they are the decoder's targets, beside the source in \
         `input_ids`"
    )]
    NoLabels,
    #[error(
        "labels[{place}] is {IGNORED} and labels follow: the decoder reads pad_token_id in its place, which config.json does \
         not have"
    )]
    NoPadding { place: usize },
    #[error("the tokenizer failed on the text: {message}")]
    Tokenizer { message: String },
    #[error(
        "token {place} of the row is {id} (`{text}`): the model's vocabulary has {} tokens, 0 to {}; does tokenizer.json \
         belong to another model?", grouped(*vocabulary), vocabulary.saturating_sub(1)
    )]
    TextToken { place: usize, id: u32, text: String, vocabulary: u64 },
}

/// A problem with a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each message names its fields")]
pub enum MessageProblem {
    #[error("a message must be an object with `role` and `content`: found {found}")]
    NotAnObject { found: &'static str },
    #[error("`{key}` must be a string: found {found}")]
    Role { key: &'static str, found: &'static str },
    #[error(
        "`from` is `{from}`{}; known speakers are {known}",
        near.map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default()
    )]
    Speaker { from: String, near: Option<&'static str>, known: String },
    #[error("`{key}` must be a string or a list of {{\"type\": \"text\", \"text\": ...}}: found {found}")]
    Content { key: &'static str, found: String },
    #[error(
        "`value` must be a tool call as JSON, as in {{\"name\": \"f\", \"arguments\": {{}}}}: found {found}"
    )]
    Call { found: String },
    #[error("`loss` must be true or false: found {found}")]
    Loss { found: &'static str },
}

fn entries(count: usize) -> String {
    if count == 1 { "1 entry".to_owned() } else { format!("{count} entries") }
}

fn tokenizer_remedy(folder: &str, sentencepiece: Option<&str>) -> String {
    match sentencepiece {
        Some(file) => format!(
            "it has {file}, which transformers converts: python -c \"from transformers import AutoTokenizer; \
             AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')\" (pip install transformers sentencepiece protobuf)"
        ),
        None => "copy the model's there, or use ready tokens, {\"input_ids\": [...], \"labels\": [...]}"
            .to_owned(),
    }
}

fn listed(keys: &[String]) -> String {
    const SHOWN: usize = 8;
    if keys.is_empty() {
        return "no keys".to_owned();
    }
    let mut text: Vec<String> = keys.iter().take(SHOWN).map(|key| format!("`{key}`")).collect();
    if keys.len() > SHOWN {
        text.push(format!("and {} more", keys.len() - SHOWN));
    }
    text.join(", ")
}

/// A JSON value's type, for messages.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// A JSON value, shortened for messages.
pub(super) fn shortened(value: &Value) -> String {
    const SHOWN: usize = 40;
    let text = value.to_string();
    if text.chars().count() <= SHOWN { text } else { text.chars().take(SHOWN).chain(['…']).collect() }
}
