//! What can be wrong with one row, each with its own sentence.

use zeroth_base::{grouped, nearest};

use super::IGNORED;
use super::row::known_formats;

/// What is wrong with a row.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RowProblem {
    /// Not JSON, or cut off.
    #[error("not JSON: {message}, column {column}; a row is one JSON object on one line")]
    NotJson {
        /// What the parser said.
        message: String,
        /// Where in the line, counted from 1.
        column: usize,
    },
    /// JSON, but no object.
    #[error("a row is a JSON object, as in {{\"input_ids\": [1, 2, 3]}}: found {found}")]
    NotAnObject {
        /// What it is.
        found: &'static str,
    },
    /// No format has these keys.
    #[error(
        "no format of rows has these columns: {}{}; known are {}; --columns maps other names, as in --columns \
         question=problem,answer=solution",
        listed(found),
        near.as_ref().map(|(theirs, ours)| format!(" (`{theirs}` is near `{ours}`)")).unwrap_or_default(),
        known_formats()
    )]
    UnknownFormat {
        /// The keys that it has.
        found: Vec<String>,
        /// One of them and the name that may be meant.
        near: Option<(String, &'static str)>,
    },
    /// A column that a format needs is there and holds nothing.
    #[error("`{key}` is null: a row of the format {format} needs it; fill it in, or remove the row")]
    NullColumn {
        /// The key, as in the row.
        key: String,
        /// The format, as a message shows it.
        format: &'static str,
    },
    /// `--columns` names a column that is not there.
    #[error(
        "--columns {ours}={theirs}: the row has no column `{theirs}`{}; it has {}",
        nearest(theirs, found.iter().map(String::as_str)).map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default(),
        listed(found)
    )]
    NoSuchColumn {
        /// Our name.
        ours: &'static str,
        /// The name that was given for it.
        theirs: String,
        /// The keys that the row has.
        found: Vec<String>,
    },
    /// Several formats have these keys.
    #[error(
        "the row could be {}: choose one by naming its columns, as in --columns {example}={example}",
        formats.join(" or ")
    )]
    Ambiguous {
        /// The formats, as a message shows them.
        formats: Vec<&'static str>,
        /// A column of the first.
        example: &'static str,
    },
    /// A column that must hold a text.
    #[error("`{key}` must be a text: found {found}")]
    NotText {
        /// The key, as in the row.
        key: String,
        /// What it holds.
        found: &'static str,
    },
    /// A column that must hold messages.
    #[error(
        "`{key}` must be a list of messages, as in [{{\"role\": \"user\", \"content\": \"Hi\"}}]: found {found}"
    )]
    NotMessages {
        /// The key, as in the row.
        key: String,
        /// What it holds.
        found: &'static str,
    },
    /// An entry of a list of messages that is none.
    #[error("message {number} of `{key}`: {problem}")]
    Message {
        /// The key, as in the row.
        key: String,
        /// The message, counted from 1.
        number: usize,
        /// What is wrong with it.
        problem: Box<MessageProblem>,
    },
    /// Something else than pairs of texts.
    #[error("`{key}` must be a list of [question, answer] pairs: found {found}")]
    History {
        /// The key, as in the row.
        key: String,
        /// What stands there.
        found: String,
    },
    /// Tools that are no list.
    #[error("`{key}` must be a list of tools, or a text that holds such a list as JSON: found {found}")]
    Tools {
        /// The key, as in the row.
        key: String,
        /// What it holds.
        found: String,
    },
    /// A translation that is no pair of texts.
    #[error(
        "`{key}` must be an object of a source and a target text, as in {{\"en\": \"Hello\", \"de\": \"Hallo\"}}: \
         found {found}; --columns source=en,target=de chooses two of several"
    )]
    Translation {
        /// The key, as in the row.
        key: String,
        /// What it holds.
        found: String,
    },
    /// A key that must hold a list.
    #[error("`{key}` must be a list of whole numbers: found {found}")]
    NotAList {
        /// The key.
        key: &'static str,
        /// What it holds.
        found: &'static str,
    },
    /// An entry that is no whole number.
    #[error("{key}[{place}] must be a whole number: found {found}")]
    NotAnInteger {
        /// The key.
        key: &'static str,
        /// The place in the list, counted from 0.
        place: usize,
        /// What stands there.
        found: String,
    },
    /// Lists of different lengths.
    #[error("`{key}` has {} and `input_ids` {expected}: they must be equally many, one a token", entries(*found))]
    Lengths {
        /// The other list.
        key: &'static str,
        /// Its length.
        found: usize,
        /// The number of tokens.
        expected: usize,
    },
    /// No token.
    #[error("the row has no tokens; remove it")]
    Empty,
    /// A row to answer that is all answer.
    #[error(
        "the row has no prompt: all of it is trained, so there is nothing to answer; rows such as {{\"question\", \"answer\"}} \
         have one"
    )]
    NoPrompt,
    /// A row to answer that has no answer.
    #[error("the row has no answer to compare with: nothing of it is trained")]
    NoAnswer,
    /// A token beyond the vocabulary.
    #[error(
        "input_ids[{place}] is {id}: the model's vocabulary has {} tokens, 0 to {}; was the data made with another \
         tokenizer?", grouped(*vocabulary), vocabulary.saturating_sub(1)
    )]
    Token {
        /// The place in the list, counted from 0.
        place: usize,
        /// The token.
        id: i64,
        /// Tokens of the vocabulary.
        vocabulary: u64,
    },
    /// A label beyond the vocabulary.
    #[error(
        "labels[{place}] is {label}: a label is a token, 0 to {}, or {IGNORED} for one that is not trained",
        vocabulary.saturating_sub(1)
    )]
    Label {
        /// The place in the list, counted from 0.
        place: usize,
        /// The label.
        label: i64,
        /// Tokens of the vocabulary.
        vocabulary: u64,
    },
    /// A mask of something else than 0 and 1.
    #[error("attention_mask[{place}] is {found}: it must be 0 (padding) or 1")]
    Mask {
        /// The place in the list, counted from 0.
        place: usize,
        /// What stands there.
        found: i64,
    },
    /// Padding before or between tokens.
    #[error(
        "attention_mask[{place}] is 0 and tokens follow: only padding at the end of a row can be cut; write the row \
         without padding"
    )]
    PaddingInside {
        /// The place in the list, counted from 0.
        place: usize,
    },
    /// Text, and nothing to make tokens of it.
    #[error(
        "a row of the format {format} needs a tokenizer, and {folder} has no tokenizer.json: put the model's there, or \
         give ready tokens, {{\"input_ids\": [...], \"labels\": [...]}}"
    )]
    NoTokenizer {
        /// The format, as a message shows it.
        format: &'static str,
        /// The model's folder.
        folder: String,
    },
    /// Turns, and no template to write them with.
    #[error(
        "a row of the format {format} needs a chat template: {folder} has none in chat_template.jinja, \
         chat_template.json, or as `chat_template` in tokenizer_config.json; put the model's there, or give \
         {{\"prompt\", \"completion\"}} rows"
    )]
    NoChatTemplate {
        /// The format, as a message shows it.
        format: &'static str,
        /// The model's folder.
        folder: String,
    },
    /// A template that cannot be compiled.
    #[error("the chat template in {file} cannot be used: {message}")]
    BadTemplate {
        /// Where it was found.
        file: String,
        /// What the compiler said.
        message: String,
    },
    /// The template refused the conversation.
    #[error("the chat template refuses the conversation at message {number}: {message}")]
    Template {
        /// The first message with which it does, counted from 1.
        number: usize,
        /// What it said.
        message: String,
    },
    /// A bound of rendering was reached.
    #[error(
        "the chat template in {file} was stopped: it {what}, which no conversation needs; take the template of the model's \
         authors"
    )]
    TemplateStopped {
        /// Where the template was found.
        file: String,
        /// What it did.
        what: String,
    },
    /// A message of which the template writes nothing.
    #[error(
        "message {number} ({role}) should be trained, and the chat template writes nothing of what it says: its content \
         is null, or the template knows no tool calls, or drops this role; remove the message, or set its \"loss\" to \
         false"
    )]
    NoTrace {
        /// The message, counted from 1.
        number: usize,
        /// Its role.
        role: String,
    },
    /// A character that marks trained text inside.
    #[error("the row holds U+{code:04X}, a noncharacter of Unicode that is no text; remove it")]
    Reserved {
        /// The character.
        code: u32,
    },
    /// Nothing to end a text with.
    #[error(
        "no end-of-text token is known: name one as `eos_token` in tokenizer_config.json, or as `eos_token_id` in \
         config.json"
    )]
    NoEndOfText,
    /// The tokenizer failed.
    #[error("the tokenizer cannot take the text: {message}")]
    Tokenizer {
        /// What it said.
        message: String,
    },
    /// A token of the tokenizer that the model does not have.
    #[error(
        "token {place} of the row is {id} (`{text}`): the model's vocabulary has {} tokens, 0 to {}; is tokenizer.json \
         another model's?", grouped(*vocabulary), vocabulary.saturating_sub(1)
    )]
    TextToken {
        /// Its place in the row, counted from 0.
        place: usize,
        /// The token.
        id: u32,
        /// What it stands for.
        text: String,
        /// Tokens of the vocabulary.
        vocabulary: u64,
    },
}

/// What is wrong with a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MessageProblem {
    /// Not even an object.
    #[error("a message is an object with `role` and `content`: found {found}")]
    NotAnObject {
        /// What it is.
        found: &'static str,
    },
    /// No role, or one that is no text.
    #[error("`{key}` must be a text: found {found}")]
    Role {
        /// `role` or `from`.
        key: &'static str,
        /// What it holds.
        found: &'static str,
    },
    /// A speaker that sharegpt does not know.
    #[error(
        "`from` is `{from}`{}; known are {known}",
        near.map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default()
    )]
    Speaker {
        /// As given.
        from: String,
        /// One that may be meant.
        near: Option<&'static str>,
        /// All of them.
        known: String,
    },
    /// A content that is neither text nor a list of texts.
    #[error("`{key}` must be a text or a list of {{\"type\": \"text\", \"text\": ...}}: found {found}")]
    Content {
        /// `content` or `value`.
        key: &'static str,
        /// What it holds.
        found: String,
    },
    /// A tool call that is no JSON.
    #[error("`value` must be a call as JSON, as in {{\"name\": \"f\", \"arguments\": {{}}}}: found {found}")]
    Call {
        /// What it holds.
        found: String,
    },
    /// An override that is no truth value.
    #[error("`loss` must be true or false: found {found}")]
    Loss {
        /// What it holds.
        found: &'static str,
    },
}

fn entries(count: usize) -> String {
    if count == 1 { "1 entry".to_owned() } else { format!("{count} entries") }
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
