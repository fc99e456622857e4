//! Detects the format of a row and reads its columns.

use super::RowProblem;
use super::columns::{Columns, NAMES};
use super::conversation::{ASSISTANT, Conversation};
use super::row_problem::{kind, shortened};
use serde_json::{Map, Value};
use zeroth_base::nearest;

use super::row_format::{FORMATS, RowFormat};

impl RowFormat {
    /// Detects the format of a row.
    pub(super) fn of(row: &Map<String, Value>, columns: &Columns) -> Result<Self, RowProblem> {
        // `input_ids: null` is reported as such, not taken for another format.
        if row.contains_key(columns.theirs("input_ids")) {
            return Ok(Self::Tokens);
        }
        let fits = |keys: &[&str]| keys.iter().all(|key| columns.get(row, key).is_some());
        let mut fitting: Vec<Self> =
            FORMATS.iter().filter(|(_, keys, _)| fits(keys)).map(|(format, ..)| *format).collect();
        if fitting.len() > 1 {
            let chosen: Vec<Self> = fitting
                .iter()
                .copied()
                .filter(|format| format.columns().iter().any(|name| columns.names(name)))
                .collect();
            if chosen.is_empty() {
                fitting.retain(|format| *format != Self::Text);
            } else {
                fitting = chosen;
            }
        }
        match fitting[..] {
            [format] => Ok(format),
            [] => Err(unknown(row, columns)),
            [first, ..] => Err(RowProblem::Ambiguous {
                formats: fitting.iter().map(|format| format.shown()).collect(),
                example: first.columns().first().copied().unwrap_or_default(),
            }),
        }
    }
}

fn unknown(row: &Map<String, Value>, columns: &Columns) -> RowProblem {
    // A format whose columns all exist, one of them null.
    let null = FORMATS.iter().find_map(|(_, keys, shown)| {
        let theirs = || keys.iter().map(|key| columns.theirs(key));
        theirs().all(|key| row.contains_key(key)).then_some(())?;
        Some((theirs().find(|key| row[*key].is_null())?.to_owned(), *shown))
    });
    if let Some((key, format)) = null {
        return RowProblem::NullColumn { key, format };
    }
    if let Some((ours, theirs)) = columns.pairs().iter().find(|(_, theirs)| !row.contains_key(theirs)) {
        let found = row.keys().cloned().collect();
        return RowProblem::NoSuchColumn { ours, theirs: theirs.clone(), found };
    }
    let side = |name: &'static str| Some(columns.theirs(name)).filter(|theirs| row.contains_key(*theirs));
    if let (Some(source), Some(target)) = (side("source"), side("target")) {
        return RowProblem::SourceAndTarget { source_column: source.to_owned(), target: target.to_owned() };
    }
    let near = row.keys().find_map(|key| {
        let near = nearest(key, NAMES)?;
        let ours = NAMES.into_iter().find(|name| *name == near)?;
        (ours != key && columns.theirs(ours) != key).then(|| (key.clone(), ours))
    });
    RowProblem::UnknownFormat { found: row.keys().cloned().collect(), near }
}

/// The columns of one row.
pub(super) struct RowFields<'a> {
    pub(super) row: &'a Map<String, Value>,
    pub(super) columns: &'a Columns,
}

/// A prompt and its completion.
pub(super) enum Pair<'a> {
    /// Plain texts.
    Texts(&'a str, &'a str),
    /// Messages; those of the completion are trained.
    Messages(Conversation),
}

impl<'a> RowFields<'a> {
    fn value(&self, name: &str) -> Option<&'a Value> {
        self.columns.get(self.row, name)
    }

    /// An optional text.
    fn text(&self, name: &str) -> Result<Option<&'a str>, RowProblem> {
        let key = self.columns.theirs(name);
        match self.value(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(RowProblem::NotText { key: key.to_owned(), found: kind(other) }),
        }
    }

    /// A required text.
    pub(super) fn required(&self, name: &str) -> Result<&'a str, RowProblem> {
        let absent = || RowProblem::NotText { key: self.columns.theirs(name).to_owned(), found: "null" };
        self.text(name)?.ok_or_else(absent)
    }

    /// The conversation in `messages` or `conversations`.
    pub(super) fn conversation(&self, name: &str) -> Result<Conversation, RowProblem> {
        let mut conversation = Conversation::default();
        let key = self.columns.theirs(name);
        conversation.take(key, self.value(name).unwrap_or(&Value::Null), true)?;
        self.add_system_and_tools(&mut conversation)?;
        Ok(conversation)
    }

    fn add_system_and_tools(&self, conversation: &mut Conversation) -> Result<(), RowProblem> {
        if let Some(system) = self.text("system")?.filter(|text| !text.is_empty()) {
            conversation.begin_with_system(system);
        }
        if let Some(tools) = self.value("tools") {
            conversation.take_tools(self.columns.theirs("tools"), tools)?;
        }
        Ok(())
    }

    /// A conversation from single columns: history, question, answer.
    pub(super) fn turns(&self, format: RowFormat) -> Result<Conversation, RowProblem> {
        let mut conversation = Conversation::default();
        if let Some(system) = self.text("system")?.filter(|text| !text.is_empty()) {
            conversation.say("system", system);
        }
        self.add_history(&mut conversation)?;
        let (question, answer) = match format {
            RowFormat::Alpaca => {
                let instruction = self.required("instruction")?;
                let question = match self.text("input")?.filter(|input| !input.is_empty()) {
                    Some(input) => format!("{instruction}\n{input}"),
                    None => instruction.to_owned(),
                };
                (question, self.required("output")?)
            }
            RowFormat::Translation => {
                let (source, target) = self.translation()?;
                (source.to_owned(), target)
            }
            RowFormat::QueryResponse => (self.required("query")?.to_owned(), self.required("response")?),
            _ => (self.required("question")?.to_owned(), self.required("answer")?),
        };
        conversation.say("user", &question);
        conversation.say(ASSISTANT, answer);
        Ok(conversation)
    }

    fn add_history(&self, conversation: &mut Conversation) -> Result<(), RowProblem> {
        let Some(history) = self.value("history") else { return Ok(()) };
        let wrong = |found: &Value| RowProblem::History {
            key: self.columns.theirs("history").to_owned(),
            found: shortened(found),
        };
        for pair in history.as_array().ok_or_else(|| wrong(history))? {
            let Some([Value::String(question), Value::String(answer)]) = pair.as_array().map(Vec::as_slice)
            else {
                return Err(wrong(pair));
            };
            conversation.say("user", question);
            conversation.say(ASSISTANT, answer);
        }
        Ok(())
    }

    /// Source and target text: the languages that `--columns` selects, else the first two.
    fn translation(&self) -> Result<(&'a str, &'a str), RowProblem> {
        let value = self.value("translation").unwrap_or(&Value::Null);
        let texts = || {
            let object = value.as_object()?;
            let side = |name: &str, place: usize| {
                let by_name = self.columns.names(name).then(|| object.get(self.columns.theirs(name)));
                by_name.unwrap_or_else(|| object.values().nth(place))?.as_str()
            };
            Some((side("source", 0)?, side("target", 1)?))
        };
        texts().ok_or_else(|| RowProblem::Translation {
            key: self.columns.theirs("translation").to_owned(),
            found: shortened(value),
        })
    }

    /// A prompt and its completion: two texts, or two lists of messages.
    pub(super) fn pair(&self) -> Result<Pair<'a>, RowProblem> {
        if !matches!(self.value("prompt"), Some(Value::Array(_))) {
            return Ok(Pair::Texts(self.required("prompt")?, self.required("completion")?));
        }
        let mut conversation = Conversation::default();
        for (name, trains) in [("prompt", false), ("completion", true)] {
            conversation.take(self.columns.theirs(name), self.value(name).unwrap_or(&Value::Null), trains)?;
        }
        self.add_system_and_tools(&mut conversation)?;
        Ok(Pair::Messages(conversation))
    }
}
