//! Rows of every format to tokens and labels, with what a model's folder holds: tokenizer.json, the files beside it,
//! and the chat template.
//!
//! Ready tokens need none of them, so each may be absent; what a row then misses is told with that row.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::assistant;
use super::chat_template::{Sources, Surroundings};
use super::columns::Columns;
use super::conversation::Conversation;
use super::day::Day;
use super::ready_row::Lists;
use super::renderer::ChatTemplate;
use super::row::{Format, Pair, Row};
use super::template_process::Worker;
use super::tokenizer::{SpecialFiles, TextTokenizer, Token};
use super::{Encode, Encoded, IGNORED, RowProblem};

/// Raised whenever a row of text would become other tokens or labels than before.
const VERSION: u32 = 1;

/// How rows are read.
#[derive(Debug, Clone, PartialEq)]
pub struct EncoderOptions {
    /// Tokens of the model's vocabulary; what lies beyond is refused.
    pub vocabulary: u64,
    /// Other names of columns (`--columns`).
    pub columns: Columns,
    /// Variables for the chat template, as `date_string` or `enable_thinking`.
    pub variables: Map<String, Value>,
    /// The day that a template sees which asks for today.
    pub day: Day,
}

impl EncoderOptions {
    /// Columns by their own names, no variables, today.
    pub fn new(vocabulary: u64) -> Self {
        Self { vocabulary, columns: Columns::default(), variables: Map::new(), day: Day::today() }
    }
}

/// A folder whose tokenizer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum EncoderError {
    /// The system refused to read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file that should hold a JSON object.
    #[error("{} must hold a JSON object: {message}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        message: String,
    },
    /// A tokenizer that cannot be loaded.
    #[error("{} is no tokenizer that can be loaded: {message}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What the loader said.
        message: String,
    },
}

/// Turns rows into tokens and labels.
pub struct Encoder {
    folder: String,
    options: EncoderOptions,
    tokenizer: Option<TextTokenizer>,
    /// The file that holds chat templates, and their sources.
    sources: Option<(String, Sources)>,
    /// Compiled with the first row that needs it: rows of ready tokens, or a token cache, need none.
    template: OnceLock<Result<ChatTemplate, RowProblem>>,
    worker: Option<Worker>,
    fingerprint: [u8; 32],
}

impl Encoder {
    /// Reads what the model's folder has of tokenizer.json, tokenizer_config.json, special_tokens_map.json, config.json
    /// and a chat template.
    pub fn open(folder: &Path, options: EncoderOptions) -> Result<Self, EncoderError> {
        let files = SpecialFiles {
            tokenizer_config: read_object(&folder.join("tokenizer_config.json"))?,
            map: read_object(&folder.join("special_tokens_map.json"))?,
            config: read_object(&folder.join("config.json"))?,
        };
        let text = read(&folder.join("tokenizer.json"))?;
        let tokenizer = text.as_ref().map(|text| TextTokenizer::new(folder, text, &files)).transpose()?;
        let sources = find_template(folder, &files.tokenizer_config)?;

        let special = tokenizer.as_ref().map_or(&[][..], TextTokenizer::named);
        let named = sources.as_ref().map(|(_, sources)| &sources[..]).unwrap_or_default();
        let fingerprint = fingerprint(text.as_deref(), &files, special, named, &options);
        Ok(Self {
            folder: folder.display().to_string(),
            options,
            tokenizer,
            sources,
            template: OnceLock::new(),
            worker: None,
            fingerprint,
        })
    }

    /// Renders chat templates in processes of their own: `program` with `arguments`, which must call
    /// [`render_templates`](super::render_templates). A template that takes too much memory or time, by design or by
    /// mistake, then ends such a process and is told as a problem of its row. Without it, steps and output are bounded and
    /// memory is not.
    #[must_use]
    pub fn rendering_in(mut self, program: PathBuf, arguments: &[&str]) -> Self {
        let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        self.worker = Some(Worker { program, arguments });
        self
    }

    /// Tokens that the tokenizer has, added ones included.
    pub fn tokenizer_vocabulary(&self) -> Option<u64> {
        self.tokenizer.as_ref().map(TextTokenizer::size)
    }

    /// The token that ends a text.
    pub fn eos(&self) -> Option<i32> {
        self.tokenizer.as_ref()?.named_id("eos_token").map(|id| id as i32)
    }

    /// Whether the folder has a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.sources.is_some()
    }

    /// What one token stands for; part of a character is shown as the vocabulary has it.
    pub fn token_text(&self, id: i32) -> Option<String> {
        self.tokenizer.as_ref()?.token_text(u32::try_from(id).ok()?)
    }

    /// Whether a token is one of those that shape a text and are no part of it.
    pub fn is_special(&self, id: i32) -> bool {
        let special = |tokenizer: &TextTokenizer| u32::try_from(id).is_ok_and(|id| tokenizer.is_special(id));
        self.tokenizer.as_ref().is_some_and(special)
    }

    /// The text of tokens, without special ones; without a tokenizer, their numbers.
    pub fn decode(&self, ids: &[i32]) -> String {
        let known: Vec<u32> = ids.iter().filter_map(|id| u32::try_from(*id).ok()).collect();
        let text = self.tokenizer.as_ref().and_then(|tokenizer| tokenizer.decode(&known));
        text.unwrap_or_else(|| ids.iter().map(i32::to_string).collect::<Vec<_>>().join(" "))
    }

    /// The tokens of a prompt that a model goes on from: with `chat`, a conversation up to where the assistant begins;
    /// else the text itself, with what the tokenizer puts before one. An empty text may have none.
    pub fn prompt(&self, text: &str, system: Option<&str>, chat: bool) -> Result<Vec<i32>, RowProblem> {
        let tokenizer = self.tokenizer(Format::PromptCompletion)?;
        let tokens = if chat {
            let mut conversation = Conversation::default();
            if let Some(system) = system {
                conversation.say("system", system);
            }
            conversation.say("user", text);
            let template = self.template(Format::Messages)?;
            tokenizer.tokens(&assistant::render(&conversation, template, true)?.text, false)?
        } else {
            let whole = system.map_or_else(|| text.to_owned(), |system| format!("{system}\n{text}"));
            let mut tokens = tokenizer.tokens(&whole, true)?;
            // What ends a text would end it before the model has said anything.
            let end = tokenizer.named_id("eos_token");
            tokens.pop_if(|last| last.from == last.to && Some(last.id) == end);
            tokens
        };
        let ids: Vec<i32> = tokens.iter().map(|token| token.id as i32).collect();
        if !ids.is_empty() {
            self.check(tokenizer, &ids)?;
        }
        Ok(ids)
    }

    /// The text that the chat template makes of a row with messages; with `add_generation_prompt`, up to where the
    /// assistant goes on.
    pub fn render(
        &self,
        row: &Map<String, Value>,
        add_generation_prompt: bool,
    ) -> Result<String, RowProblem> {
        let fields = Row { row, columns: &self.options.columns };
        let (said, template) = self.prepared(Format::Messages, fields.conversation("messages")?)?;
        Ok(assistant::render(&said, template, add_generation_prompt)?.text)
    }

    fn tokenizer(&self, format: Format) -> Result<&TextTokenizer, RowProblem> {
        let missing = || RowProblem::NoTokenizer { format: format.shown(), folder: self.folder.clone() };
        self.tokenizer.as_ref().ok_or_else(missing)
    }

    fn template(&self, format: Format) -> Result<&ChatTemplate, RowProblem> {
        let Some((file, sources)) = &self.sources else {
            return Err(RowProblem::NoChatTemplate { format: format.shown(), folder: self.folder.clone() });
        };
        let compile = || {
            let special = self.tokenizer.as_ref().map_or(&[][..], TextTokenizer::named);
            let EncoderOptions { variables, day, .. } = &self.options;
            let around = Surroundings { special, variables, day: *day };
            ChatTemplate::new(file, sources, &around, self.worker.as_ref())
        };
        self.template.get_or_init(compile).as_ref().map_err(Clone::clone)
    }

    /// A conversation as the chat template can take it.
    fn prepared(
        &self,
        format: Format,
        mut said: Conversation,
    ) -> Result<(Conversation, &ChatTemplate), RowProblem> {
        let template = self.template(format)?;
        if !template.facts().takes_lists(said.tools.is_some()) {
            said.join_parts();
        }
        Ok((said, template))
    }

    /// A conversation by the chat template.
    fn converse(&self, format: Format, said: Conversation, into: &mut Encoded) -> Result<(), RowProblem> {
        let tokenizer = self.tokenizer(format)?;
        let (said, template) = self.prepared(format, said)?;
        assistant::encode(&said, template, tokenizer, into)
    }

    /// A text of which the part from `trained_from` on is trained, and the end of text after it.
    fn plain(
        &self,
        format: Format,
        text: &str,
        trained_from: usize,
        into: &mut Encoded,
    ) -> Result<(), RowProblem> {
        let tokenizer = self.tokenizer(format)?;
        let end = tokenizer.named_id("eos_token").ok_or(RowProblem::NoEndOfText)?;
        let mut tokens = tokenizer.tokens(text, true)?;
        // Tokenizers that put one there themselves give it no text of its own.
        tokens.pop_if(|last| last.id == end && last.from == last.to);
        into.ids.clear();
        into.labels.clear();
        for Token { id, to, .. } in tokens {
            let trained = to > trained_from || trained_from == 0;
            into.ids.push(id as i32);
            into.labels.push(if trained { id as i32 } else { IGNORED });
        }
        into.ids.push(end as i32);
        into.labels.push(end as i32);
        Ok(())
    }

    /// Turns, by the chat template; in a folder without one, as texts on lines of their own.
    fn turns(&self, format: Format, said: Conversation, into: &mut Encoded) -> Result<(), RowProblem> {
        if self.has_chat_template() {
            return self.converse(format, said, into);
        }
        let texts: Vec<&str> =
            said.messages.iter().filter_map(|message| message.get("content")?.as_str()).collect();
        let text = texts.join("\n");
        let answer = texts.last().map_or(0, |answer| answer.len());
        self.plain(format, &text, text.len() - answer, into)
    }

    fn check(&self, tokenizer: &TextTokenizer, ids: &[i32]) -> Result<(), RowProblem> {
        let vocabulary = self.options.vocabulary;
        if ids.is_empty() {
            return Err(RowProblem::Empty);
        }
        match ids.iter().position(|id| *id as u64 >= vocabulary) {
            None => Ok(()),
            Some(place) => {
                let id = ids[place] as u32;
                let text = tokenizer.token_text(id).unwrap_or_default();
                Err(RowProblem::TextToken { place, id, text, vocabulary })
            }
        }
    }
}

impl Encode for Encoder {
    fn encode(&self, row: &Map<String, Value>, into: &mut Encoded) -> Result<(), RowProblem> {
        let columns = &self.options.columns;
        let format = Format::of(row, columns)?;
        let fields = Row { row, columns };
        match format {
            Format::Ready => return Lists::of(row, columns)?.take(self.options.vocabulary, into),
            Format::Messages => self.converse(format, fields.conversation("messages")?, into)?,
            Format::Sharegpt => self.converse(format, fields.conversation("conversations")?, into)?,
            Format::Alpaca | Format::QuestionAnswer | Format::QueryResponse | Format::Translation => {
                self.turns(format, fields.turns(format)?, into)?;
            }
            Format::PromptCompletion => match fields.pair()? {
                Pair::Texts(prompt, completion) => {
                    self.plain(format, &[prompt, completion].concat(), prompt.len(), into)?;
                }
                Pair::Messages(said) => self.converse(format, said, into)?,
            },
            Format::Text => self.plain(format, fields.required("text")?, 0, into)?,
        }
        self.check(self.tokenizer(format)?, &into.ids)
    }

    fn trained_part(&self, row: &Map<String, Value>) -> &'static str {
        match Format::of(row, &self.options.columns) {
            Ok(Format::Ready) => "the labels of a row are trained that are not -100, from the second on",
            Ok(Format::Messages | Format::Sharegpt) => {
                "what assistants say is trained, unless the \"loss\" of a message is false"
            }
            Ok(Format::PromptCompletion) => "the completion is trained",
            Ok(Format::Text) => "every token after the first is trained",
            Ok(_) => "the answer is trained",
            Err(_) => "no format of rows has these columns",
        }
    }

    fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }
}

/// The file that holds the chat template, and the templates in it.
fn find_template(
    folder: &Path,
    tokenizer_config: &Map<String, Value>,
) -> Result<Option<(String, Sources)>, EncoderError> {
    let path = folder.join("chat_template.jinja");
    if let Some(bytes) = read(&path)? {
        let mut sources = vec![("default".to_owned(), text_of(&path, bytes)?)];
        let path = folder.join("additional_chat_templates").join("tool_use.jinja");
        if let Some(bytes) = read(&path)? {
            sources.push(("tool_use".to_owned(), text_of(&path, bytes)?));
        }
        return Ok(Some(("chat_template.jinja".to_owned(), sources)));
    }
    let json = read_object(&folder.join("chat_template.json"))?;
    let places = [("chat_template.json", &json), ("tokenizer_config.json", tokenizer_config)];
    let found = places.into_iter().find_map(|(file, object)| {
        let sources = match object.get("chat_template")? {
            Value::String(source) => vec![("default".to_owned(), source.clone())],
            Value::Array(named) => {
                let text = |entry: &Value, key: &str| entry.get(key)?.as_str().map(str::to_owned);
                named
                    .iter()
                    .filter_map(|entry| Some((text(entry, "name")?, text(entry, "template")?)))
                    .collect()
            }
            _ => return None,
        };
        Some((file.to_owned(), sources))
    });
    Ok(found)
}

fn text_of(path: &Path, bytes: Vec<u8>) -> Result<String, EncoderError> {
    let not_text = |error| EncoderError::Read { path: path.to_owned(), source: io::Error::other(error) };
    String::from_utf8(bytes).map_err(not_text)
}

/// The file's bytes; `None` where there is no such file.
fn read(path: &Path) -> Result<Option<Vec<u8>>, EncoderError> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(EncoderError::Read { path: path.to_owned(), source }),
    }
}

/// The file's JSON object; an empty one where there is no such file.
fn read_object(path: &Path) -> Result<Map<String, Value>, EncoderError> {
    let Some(bytes) = read(path)? else { return Ok(Map::new()) };
    serde_json::from_slice(&bytes)
        .map_err(|error| EncoderError::Json { path: path.to_owned(), message: error.to_string() })
}

fn fingerprint(
    tokenizer: Option<&[u8]>,
    files: &SpecialFiles,
    special: &[(&'static str, String)],
    sources: &[(String, String)],
    options: &EncoderOptions,
) -> [u8; 32] {
    let mut hash = Sha256::new();
    let mut part = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    part(&VERSION.to_le_bytes());
    part(tokenizer.unwrap_or_default());
    for name in ["add_bos_token", "add_eos_token"] {
        part(files.tokenizer_config.get(name).map(Value::to_string).unwrap_or_default().as_bytes());
    }
    for (name, text) in special {
        part(name.as_bytes());
        part(text.as_bytes());
    }
    for (name, source) in sources {
        part(name.as_bytes());
        part(source.as_bytes());
    }
    let EncoderOptions { vocabulary, columns, variables, day } = options;
    part(&vocabulary.to_le_bytes());
    for (ours, theirs) in columns.pairs() {
        part(ours.as_bytes());
        part(theirs.as_bytes());
    }
    part(Value::Object(variables.clone()).to_string().as_bytes());
    // Only a template that asks for the day depends on it.
    if sources.iter().any(|(_, source)| source.contains("strftime_now")) {
        part(day.strftime("%F").as_bytes());
    }
    hash.finalize().into()
}
