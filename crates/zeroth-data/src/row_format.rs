//! Row formats, distinguished by their columns.
//!
//! | columns | becomes |
//! |---|---|
//! | `messages` (`tools`) | a conversation; assistant messages are trained |
//! | `conversations` (`system`, `tools`) | the same in sharegpt's format |
//! | `instruction`, `output` (`input`, `system`, `history`) | turns; the input follows the instruction on a new line |
//! | `question`, `answer`, or `query`, `response` (`system`, `history`) | turns |
//! | `translation` | turns: the first language is the user's, the second the assistant's |
//! | `prompt`, `completion` | two texts, concatenated, or messages; the completion is trained |
//! | `text` | plain text, all trained |
//! | `input_ids` (`labels`, `attention_mask`) | ready tokens |
//!
//! Ready tokens take precedence over any other format in the same row, and any other format over `text`: tools leave
//! both beside the columns they were made from. Other combinations are refused until `--columns` selects one.

/// A row format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowFormat {
    Tokens,
    Messages,
    Sharegpt,
    Alpaca,
    PromptCompletion,
    QuestionAnswer,
    QueryResponse,
    Translation,
    Text,
}

/// The formats, with their required columns and their representation in messages.
pub(super) const FORMATS: [(RowFormat, &[&str], &str); 9] = [
    (RowFormat::Tokens, &["input_ids"], "{\"input_ids\": [...], \"labels\": [...]}"),
    (RowFormat::Messages, &["messages"], "{\"messages\": [...]}"),
    (RowFormat::Sharegpt, &["conversations"], "{\"conversations\": [...]}"),
    (RowFormat::Alpaca, &["instruction", "output"], "{\"instruction\", \"input\", \"output\"}"),
    (RowFormat::PromptCompletion, &["prompt", "completion"], "{\"prompt\", \"completion\"}"),
    (RowFormat::QuestionAnswer, &["question", "answer"], "{\"question\", \"answer\"}"),
    (RowFormat::QueryResponse, &["query", "response"], "{\"query\", \"response\"}"),
    (RowFormat::Translation, &["translation"], "{\"translation\": {...}}"),
    (RowFormat::Text, &["text"], "{\"text\"}"),
];

impl RowFormat {
    /// Its representation in messages.
    pub(super) fn shown(self) -> &'static str {
        FORMATS.iter().find(|(format, ..)| *format == self).map_or("", |(.., shown)| shown)
    }

    pub(super) fn columns(self) -> &'static [&'static str] {
        FORMATS.iter().find(|(format, ..)| *format == self).map_or(&[], |(_, columns, _)| columns)
    }
}

/// All formats, for messages.
pub(super) fn known_formats() -> String {
    FORMATS.map(|(.., shown)| shown).join(", ")
}
