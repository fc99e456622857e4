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
    /// Invalid or truncated JSON.
    #[error("not JSON: {message}, column {column}; a row is one JSON object on one line")]
    NotJson {
        message: String,
        /// Column in the line, from 1.
        column: usize,
    },
    /// More values than a row may have.
    #[error(
        "the row has more than {} values, counting list entries, fields and cells: is it several rows? A row is one sample",
        grouped(MAX_ROW_VALUES)
    )]
    TooManyValues,
    /// A text beyond what is tokenised, which may still be within the maximum length.
    #[error(
        "the row has {} of text: at most {} are tokenised; split it into several rows",
        format_bytes(*bytes), format_bytes(MAX_TEXT_BYTES as u64)
    )]
    TextTooLong { bytes: u64 },
    /// An element of an array that is not JSON.
    #[error("not JSON: {message}, line {line}, column {column} of the row")]
    NotJsonElement {
        message: String,
        /// Line in the row, from 1.
        line: usize,
        /// Column in that line, from 1.
        column: usize,
    },
    /// A comma of an array without an element.
    #[error("no row follows the comma: remove it")]
    NoElement,
    /// A record of a table with more or fewer fields than columns.
    #[error(
        "the row has {}, but the header names {}: fields with a delimiter, a quote or a line end must be quoted",
        counted(*found as u64, "field"), counted(*expected as u64, "column")
    )]
    Ragged {
        /// Fields of the record.
        found: usize,
        /// Columns of the header.
        expected: usize,
    },
    /// A cell that is not UTF-8.
    #[error("`{key}` is not UTF-8 text")]
    CellNotText { key: String },
    /// A cell that should be JSON.
    #[error("`{key}` must be JSON, as json.dumps of Python writes it: {message}")]
    CellNotJson { key: String, message: String },
    /// JSON, but not an object.
    #[error("a row must be a JSON object, as in {{\"input_ids\": [1, 2, 3]}}: found {found}")]
    NotAnObject { found: &'static str },
    #[error(
        "no row format has these columns: {}{}; known formats are {}; --columns maps other names, as in --columns \
         question=problem,answer=solution",
        listed(found),
        near.as_ref().map(|(theirs, ours)| format!(" (`{theirs}` is similar to `{ours}`)")).unwrap_or_default(),
        known_formats()
    )]
    UnknownFormat {
        found: Vec<String>,
        /// A key, and the similar known name.
        near: Option<(String, &'static str)>,
    },
    /// A required column is null.
    #[error("`{key}` is null: the format {format} requires it; fill it in, or remove the row")]
    NullColumn { key: String, format: &'static str },
    /// `--columns` maps to a column that does not exist.
    #[error(
        "--columns {ours}={theirs}: the row has no column `{theirs}`{}; it has {}",
        nearest(theirs, found.iter().map(String::as_str)).map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default(),
        listed(found)
    )]
    NoSuchColumn {
        /// zeroth's name.
        ours: &'static str,
        theirs: String,
        found: Vec<String>,
    },
    /// A source and a target in columns of their own.
    #[error(
        "the columns `{source_column}` and `{target}` are no row format: source and target name the languages of a column \
         `translation`; for texts in two columns give --columns prompt={source_column},completion={target}"
    )]
    SourceAndTarget {
        /// The column of the source.
        source_column: String,
        /// The column of the target.
        target: String,
    },
    #[error(
        "the row matches {}: select one with its columns, as in --columns {example}={example}",
        formats.join(" or ")
    )]
    Ambiguous {
        formats: Vec<&'static str>,
        /// A column of the first.
        example: &'static str,
    },
    /// A column that must be a string.
    #[error("`{key}` must be a string: found {found}")]
    NotText { key: String, found: &'static str },
    /// A column that must be a list of messages.
    #[error(
        "`{key}` must be a list of messages, as in [{{\"role\": \"user\", \"content\": \"Hi\"}}]: found {found}"
    )]
    NotMessages { key: String, found: &'static str },
    #[error("message {number} of `{key}`: {problem}")]
    Message {
        key: String,
        /// The message's number, from 1.
        number: usize,
        problem: Box<MessageProblem>,
    },
    #[error("`{key}` must be a list of [question, answer] pairs: found {found}")]
    History { key: String, found: String },
    /// Tools that are not a list.
    #[error("`{key}` must be a list of tools, or a JSON string of such a list: found {found}")]
    Tools { key: String, found: String },
    #[error(
        "`{key}` must be an object with a source and a target text, as in {{\"en\": \"Hello\", \"de\": \"Hallo\"}}: \
         found {found}; --columns source=en,target=de selects two of several"
    )]
    Translation { key: String, found: String },
    /// A key that must be a list.
    #[error("`{key}` must be a list of integers: found {found}")]
    NotAList { key: &'static str, found: &'static str },
    /// An entry that is not an integer.
    #[error("{key}[{place}] must be an integer: found {found}")]
    NotAnInteger { key: &'static str, place: usize, found: String },
    /// Lists of different lengths.
    #[error("`{key}` has {} but `input_ids` has {expected}: they must have the same length", entries(*found))]
    Lengths {
        key: &'static str,
        found: usize,
        /// The number of tokens.
        expected: usize,
    },
    /// A row without tokens.
    #[error("the row has no tokens; remove it")]
    Empty,
    /// A row to answer without a prompt.
    #[error(
        "the row has no prompt: all of it is trained, so there is nothing to answer; rows such as {{\"question\", \"answer\"}} \
         have one"
    )]
    NoPrompt,
    /// A row to answer without an answer.
    #[error("the row has no answer to compare with: none of its tokens is trained")]
    NoAnswer,
    /// A token outside the vocabulary.
    #[error(
        "input_ids[{place}] is {id}: the model's vocabulary has {} tokens, 0 to {}; was the data made with another \
         tokenizer?", grouped(*vocabulary), vocabulary.saturating_sub(1)
    )]
    Token { place: usize, id: i64, vocabulary: u64 },
    /// A label outside the vocabulary.
    #[error(
        "labels[{place}] is {label}: a label must be a token id, 0 to {}, or {IGNORED} for untrained tokens",
        vocabulary.saturating_sub(1)
    )]
    Label { place: usize, label: i64, vocabulary: u64 },
    /// A mask value other than 0 and 1.
    #[error("attention_mask[{place}] is {found}: it must be 0 (padding) or 1")]
    Mask { place: usize, found: i64 },
    /// Padding before or between tokens.
    #[error(
        "attention_mask[{place}] is 0 but tokens follow: only padding at the end of a row is supported; write the row \
         without padding"
    )]
    PaddingInside { place: usize },
    /// A text row without a tokenizer.
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
    /// A conversation without a chat template.
    #[error(
        "the format {format} needs a chat template: {folder} has none in chat_template.jinja, \
         chat_template.json, or as `chat_template` in tokenizer_config.json; copy the model's there, or use \
         {{\"prompt\", \"completion\"}} rows"
    )]
    NoChatTemplate { format: &'static str, folder: String },
    #[error("the chat template in {file} cannot be used: {message}")]
    BadTemplate { file: String, message: String },
    /// The template rejected the conversation.
    #[error("the chat template rejects the conversation at message {number}: {message}")]
    Template {
        /// The first message it rejects, from 1.
        number: usize,
        message: String,
    },
    /// The template exceeded a limit.
    #[error(
        "the chat template in {file} was stopped: it {what}, which no conversation needs; use the template of the model's \
         authors"
    )]
    TemplateStopped { file: String, what: String },
    /// A template that has to be rendered once for each message, and a conversation with many.
    #[error(
        "the chat template renders other text once a message changes, so each of the {} is looked for by rendering \
         the conversation again: that takes too long for so many; split the conversation, or mark the trained text with \
         {{% generation %}} in the template",
        counted(*messages as u64, "message")
    )]
    TooManyRenders { messages: usize },
    /// A trained message that the template does not render.
    #[error(
        "message {number} ({role}) should be trained, but the chat template does not render it: its content \
         is null, or the template does not support tool calls or this role; remove the message, or set its \"loss\" to \
         false"
    )]
    NoTrace {
        /// The message's number, from 1.
        number: usize,
        role: String,
    },
    /// A reserved sentinel character.
    #[error("the row contains U+{code:04X}, a Unicode noncharacter; remove it")]
    Reserved { code: u32 },
    #[error(
        "no end-of-text token is defined: set `eos_token` in tokenizer_config.json, or `eos_token_id` in \
         config.json"
    )]
    NoEndOfText,
    /// A row without a source, for an encoder-decoder model.
    #[error(
        "the format {format} has no source: an encoder-decoder model reads one text and writes another, as in \
         {{\"translation\": {{\"en\": ..., \"de\": ...}}}}, {{\"prompt\", \"completion\"}} or {{\"question\", \"answer\"}}"
    )]
    NoSource { format: &'static str },
    /// A conversation that is not a source and its target.
    #[error(
        "`{key}` has {} with {}: for an encoder-decoder model a row is one text and its answer, which comes last and is \
         trained; write a row for each answer, without tools",
        counted(*messages as u64, "message"), counted(*answers as u64, "answer")
    )]
    NotAPair {
        key: String,
        messages: usize,
        /// Those of the assistant.
        answers: usize,
    },
    /// A target without text or labels.
    #[error("`{key}` is empty: there is nothing to train; fill it in, or remove the row")]
    EmptyTarget { key: String },
    /// A translation whose languages are not named.
    #[error(
        "{flag} is missing: the row has the languages {}; name the one that is read and the one that is written, as in \
         --source-lang {} --target-lang {}",
        present.join(", "),
        present.first().map_or("en", String::as_str),
        present.get(1).map_or("de", String::as_str)
    )]
    LanguageNotGiven { flag: &'static str, present: Vec<String> },
    /// A translation without a language that was asked for.
    #[error(
        "{flag} {asked}: the row has no such language{}; it has {}",
        nearest(asked, present.iter().map(String::as_str)).map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default(),
        listed(present)
    )]
    NoLanguage {
        flag: &'static str,
        /// The language asked for.
        asked: String,
        present: Vec<String>,
    },
    /// Ready tokens without labels, for an encoder-decoder model.
    #[error(
        "the row has no `labels`: for an encoder-decoder model they are the decoder's targets, beside the source in \
         `input_ids`"
    )]
    NoLabels,
    /// An untrained label before others, and no token to feed in its place.
    #[error(
        "labels[{place}] is {IGNORED} and labels follow: the decoder reads pad_token_id in its place, which config.json does \
         not have"
    )]
    NoPadding { place: usize },
    #[error("the tokenizer failed on the text: {message}")]
    Tokenizer { message: String },
    /// A token of the tokenizer outside the model's vocabulary.
    #[error(
        "token {place} of the row is {id} (`{text}`): the model's vocabulary has {} tokens, 0 to {}; does tokenizer.json \
         belong to another model?", grouped(*vocabulary), vocabulary.saturating_sub(1)
    )]
    TextToken {
        /// Its index in the row.
        place: usize,
        id: u32,
        text: String,
        vocabulary: u64,
    },
}

/// A problem with a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each message names its fields")]
pub enum MessageProblem {
    #[error("a message must be an object with `role` and `content`: found {found}")]
    NotAnObject { found: &'static str },
    /// A missing or invalid role.
    #[error("`{key}` must be a string: found {found}")]
    Role {
        /// `role` or `from`.
        key: &'static str,
        found: &'static str,
    },
    /// An unknown sharegpt speaker.
    #[error(
        "`from` is `{from}`{}; known speakers are {known}",
        near.map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default()
    )]
    Speaker { from: String, near: Option<&'static str>, known: String },
    #[error("`{key}` must be a string or a list of {{\"type\": \"text\", \"text\": ...}}: found {found}")]
    Content {
        /// `content` or `value`.
        key: &'static str,
        found: String,
    },
    /// An invalid tool call.
    #[error(
        "`value` must be a tool call as JSON, as in {{\"name\": \"f\", \"arguments\": {{}}}}: found {found}"
    )]
    Call { found: String },
    /// An invalid `loss` override.
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
