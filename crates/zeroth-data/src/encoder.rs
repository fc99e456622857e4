//! Encodes rows of every format, with the tokenizer and chat template of a model folder.
//!
//! All of its files are optional, since ready tokens need none; a row that needs a missing one is reported with that
//! row.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::assistant;
use super::chat_template::{Sources, TemplateContext};
use super::columns::Columns;
use super::conversation::{Conversation, role};
use super::date::Date;
use super::folder_file::{read, read_object};
use super::pair_rows;
use super::pairs::{PairOptions, Pairs};
use super::renderer::ChatTemplate;
use super::row_fields::{Pair, RowFields};
use super::row_format::RowFormat;
use super::template_process::Worker;
use super::token_row::TokenLists;
use super::tokenizer::{SpannedToken, SpecialFiles, TextTokenizer};
use super::{Encode, Encoded, EncoderError, IGNORED, RowProblem};

/// Incremented whenever a row of text would encode differently than before.
const VERSION: u32 = 1;

/// Encoder settings.
#[derive(Debug, Clone, PartialEq)]
pub struct EncoderOptions {
    /// Vocabulary size of the model; larger ids are rejected.
    pub vocabulary: u64,
    /// Names of the data's columns for those of row formats (`--columns`).
    pub columns: Columns,
    /// Variables for the chat template, such as `date_string` or `enable_thinking`.
    pub variables: Map<String, Value>,
    /// The system message of conversations that have none (`--system`).
    pub system: Option<String>,
    /// The date for templates that use `strftime_now`.
    pub date: Date,
    /// Set for encoder-decoder models: rows are pairs.
    pub pairs: Option<PairOptions>,
}

impl EncoderOptions {
    /// Default columns, no variables, today's date.
    pub fn new(vocabulary: u64) -> Self {
        Self {
            vocabulary,
            columns: Columns::default(),
            variables: Map::new(),
            system: None,
            date: Date::today(),
            pairs: None,
        }
    }
}

/// Encodes rows as tokens and labels.
pub struct Encoder {
    folder: String,
    options: EncoderOptions,
    tokenizer: Option<TextTokenizer>,
    /// The file with the chat templates, and their sources.
    sources: Option<(String, Sources)>,
    /// Compiled on first use: ready tokens and cached data do not need it.
    template: OnceLock<Result<ChatTemplate, RowProblem>>,
    worker: Option<Worker>,
    fingerprint: [u8; 32],
}

impl Encoder {
    /// Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json, config.json and the chat template of a
    /// model folder, as far as they exist.
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

    /// Renders chat templates in worker processes: `program` with `arguments`, which must call
    /// [`render_templates`](super::render_templates). A template that exceeds its memory or time limit then only ends
    /// a worker, and is reported with its row. Without this, steps and output are limited but memory is not.
    #[must_use]
    pub fn rendering_in(mut self, program: PathBuf, arguments: &[&str]) -> Self {
        let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        self.worker = Some(Worker { program, arguments });
        self
    }

    /// Size of the tokenizer's vocabulary, including added tokens.
    pub fn tokenizer_vocabulary(&self) -> Option<u64> {
        self.tokenizer.as_ref().map(TextTokenizer::size)
    }

    /// The end-of-text token.
    pub fn eos(&self) -> Option<i32> {
        self.tokenizer.as_ref()?.named_id("eos_token").map(|id| id as i32)
    }

    /// Whether the folder has a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.sources.is_some()
    }

    /// The text of one token; partial characters are shown as in the vocabulary.
    pub fn token_text(&self, id: i32) -> Option<String> {
        self.tokenizer.as_ref()?.token_text(u32::try_from(id).ok()?)
    }

    /// The special token with this text.
    pub fn special_token(&self, text: &str) -> Option<i32> {
        let id = self.tokenizer.as_ref()?.token_id(text)?;
        Some(id as i32).filter(|id| self.is_special(*id))
    }

    /// Whether a token is a special token.
    pub fn is_special(&self, id: i32) -> bool {
        let special = |tokenizer: &TextTokenizer| u32::try_from(id).is_ok_and(|id| tokenizer.is_special(id));
        self.tokenizer.as_ref().is_some_and(special)
    }

    /// Decodes tokens without special ones; without a tokenizer, prints their ids.
    pub fn decode(&self, ids: &[i32]) -> String {
        let known: Vec<u32> = ids.iter().filter_map(|id| u32::try_from(*id).ok()).collect();
        let text = self.tokenizer.as_ref().and_then(|tokenizer| tokenizer.decode(&known));
        text.unwrap_or_else(|| ids.iter().map(i32::to_string).collect::<Vec<_>>().join(" "))
    }

    /// Tokenises a prompt: with `chat`, as a conversation up to the generation prompt; else as plain text with the
    /// tokenizer's prefix. An empty text may have no tokens.
    pub fn prompt(&self, text: &str, system: Option<&str>, chat: bool) -> Result<Vec<i32>, RowProblem> {
        let tokenizer = self.tokenizer(RowFormat::PromptCompletion)?;
        if chat {
            let system = system.map(|system| ("system", system));
            return self.chat(&system.into_iter().chain([("user", text)]).collect::<Vec<_>>());
        }
        let whole = system.map_or_else(|| text.to_owned(), |system| format!("{system}\n{text}"));
        let mut tokens = tokenizer.tokens(&whole, true)?;
        // An end-of-text token would end the text before the model generates anything.
        let end = tokenizer.named_id("eos_token");
        tokens.pop_if(|last| last.from == last.to && Some(last.id) == end);
        self.prompt_ids(tokenizer, &tokens)
    }

    /// Tokenises a source of an encoder-decoder, with the prefix and up to the maximum length of [`EncoderOptions::pairs`].
    /// Returns its tokens, and how many were truncated.
    pub fn source(&self, text: &str) -> Result<(Vec<i32>, usize), RowProblem> {
        let tokenizer = self.tokenizer(RowFormat::PromptCompletion)?;
        let end = tokenizer.named_id("eos_token").ok_or(RowProblem::NoEndOfText)?;
        let (prefix, most) = match &self.options.pairs {
            Some(options) => (&options.prefix[..], options.pairs.limits.source),
            None => ("", u64::MAX),
        };
        let mut ids = Vec::new();
        let whole = pair_rows::with_end(tokenizer, &[prefix, text].concat(), end)?;
        let truncated = pair_rows::truncate(whole, most, tokenizer.truncation_side(), end as i32, &mut ids);
        self.check(tokenizer, &ids)?;
        Ok((ids, truncated))
    }

    /// Tokenises a conversation of roles and texts up to the generation prompt.
    pub fn chat(&self, messages: &[(&str, &str)]) -> Result<Vec<i32>, RowProblem> {
        let tokenizer = self.tokenizer(RowFormat::PromptCompletion)?;
        let mut conversation = Conversation::default();
        for (role, text) in messages {
            conversation.say(role, text);
        }
        let template = self.template(RowFormat::Messages)?;
        let text = assistant::render(&conversation, template, true)?.text;
        self.prompt_ids(tokenizer, &tokenizer.tokens(&text, false)?)
    }

    fn prompt_ids(&self, tokenizer: &TextTokenizer, tokens: &[SpannedToken]) -> Result<Vec<i32>, RowProblem> {
        let ids: Vec<i32> = tokens.iter().map(|token| token.id as i32).collect();
        if !ids.is_empty() {
            self.check(tokenizer, &ids)?;
        }
        Ok(ids)
    }

    /// Renders a row with messages; with `add_generation_prompt`, up to where the assistant continues.
    pub fn render(
        &self,
        row: &Map<String, Value>,
        add_generation_prompt: bool,
    ) -> Result<String, RowProblem> {
        let fields = RowFields { row, columns: &self.options.columns };
        let (said, template) = self.prepared(RowFormat::Messages, fields.conversation("messages")?)?;
        Ok(assistant::render(&said, template, add_generation_prompt)?.text)
    }

    fn tokenizer(&self, format: RowFormat) -> Result<&TextTokenizer, RowProblem> {
        let missing = || RowProblem::NoTokenizer {
            format: format.shown(),
            folder: self.folder.clone(),
            sentencepiece: sentencepiece_file(Path::new(&self.folder)),
        };
        self.tokenizer.as_ref().ok_or_else(missing)
    }

    fn template(&self, format: RowFormat) -> Result<&ChatTemplate, RowProblem> {
        let Some((file, sources)) = &self.sources else {
            return Err(RowProblem::NoChatTemplate { format: format.shown(), folder: self.folder.clone() });
        };
        let compile = || {
            let special = self.tokenizer.as_ref().map_or(&[][..], TextTokenizer::named);
            let EncoderOptions { variables, date, .. } = &self.options;
            let context = TemplateContext { special, variables, date: *date };
            ChatTemplate::new(file, sources, &context, self.worker.as_ref())
        };
        self.template.get_or_init(compile).as_ref().map_err(Clone::clone)
    }

    /// Adapts a conversation to the chat template.
    fn prepared(
        &self,
        format: RowFormat,
        mut said: Conversation,
    ) -> Result<(Conversation, &ChatTemplate), RowProblem> {
        let template = self.template(format)?;
        self.add_system(&mut said);
        if !template.properties().takes_lists(said.tools.is_some()) {
            said.join_parts();
        }
        Ok((said, template))
    }

    fn add_system(&self, said: &mut Conversation) {
        let is_own = said.messages.first().is_some_and(|first| role(first) == "developer");
        if let Some(system) = self.options.system.as_ref().filter(|_| !is_own) {
            said.begin_with_system(system);
        }
    }

    /// Encodes a conversation with the chat template.
    fn converse(&self, format: RowFormat, said: Conversation, into: &mut Encoded) -> Result<(), RowProblem> {
        let tokenizer = self.tokenizer(format)?;
        let (said, template) = self.prepared(format, said)?;
        assistant::encode(&said, template, tokenizer, into)
    }

    /// Encodes a text that is trained from byte `trained_from` on, followed by an end-of-text token.
    fn plain(
        &self,
        format: RowFormat,
        text: &str,
        trained_from: usize,
        into: &mut Encoded,
    ) -> Result<(), RowProblem> {
        let tokenizer = self.tokenizer(format)?;
        let end = tokenizer.named_id("eos_token").ok_or(RowProblem::NoEndOfText)?;
        if into.skip(text, || tokenizer.least_tokens(text)) {
            return Ok(());
        }
        let mut tokens = tokenizer.tokens(text, true)?;
        // Tokenizers that append one themselves give it an empty span.
        tokens.pop_if(|last| last.id == end && last.from == last.to);
        into.ids.clear();
        into.labels.clear();
        for SpannedToken { id, to, .. } in tokens {
            let trained = to > trained_from || trained_from == 0;
            into.ids.push(id as i32);
            into.labels.push(if trained { id as i32 } else { IGNORED });
        }
        into.ids.push(end as i32);
        into.labels.push(end as i32);
        Ok(())
    }

    /// Encodes turns with the chat template or, without one, as lines of text.
    fn turns(&self, format: RowFormat, mut said: Conversation, into: &mut Encoded) -> Result<(), RowProblem> {
        if self.has_chat_template() {
            return self.converse(format, said, into);
        }
        self.add_system(&mut said);
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
        let EncoderOptions { columns, pairs, vocabulary, .. } = &self.options;
        if let Some(pairs) = pairs {
            let tokenizer = |format| self.tokenizer(format);
            let used = pair_rows::encode(row, columns, pairs, *vocabulary, tokenizer, into)?;
            return used.map_or(Ok(()), |tokenizer| {
                self.check(tokenizer, &into.ids)?;
                self.check(tokenizer, &into.labels)
            });
        }
        let format = RowFormat::of(row, columns)?;
        let fields = RowFields { row, columns };
        match format {
            RowFormat::Tokens => return TokenLists::of(row, columns)?.take(*vocabulary, into),
            RowFormat::Messages => self.converse(format, fields.conversation("messages")?, into)?,
            RowFormat::Sharegpt => self.converse(format, fields.conversation("conversations")?, into)?,
            RowFormat::Alpaca
            | RowFormat::QuestionAnswer
            | RowFormat::QueryResponse
            | RowFormat::Translation => {
                self.turns(format, fields.turns(format)?, into)?;
            }
            RowFormat::PromptCompletion => match fields.pair()? {
                Pair::Texts(prompt, completion) => {
                    self.plain(format, &[prompt, completion].concat(), prompt.len(), into)?;
                }
                Pair::Messages(said) => self.converse(format, said, into)?,
            },
            RowFormat::Text => self.plain(format, fields.required("text")?, 0, into)?,
        }
        if into.skipped.is_some() {
            return Ok(());
        }
        self.check(self.tokenizer(format)?, &into.ids)
    }

    fn pairs(&self) -> Option<Pairs> {
        self.options.pairs.as_ref().map(|options| options.pairs)
    }

    fn columns(&self) -> Option<&Columns> {
        Some(&self.options.columns)
    }

    fn trained_part(&self, row: &Map<String, Value>) -> &'static str {
        match RowFormat::of(row, &self.options.columns) {
            Ok(_) if self.options.pairs.is_some() => "labels other than -100 are trained",
            Ok(RowFormat::Tokens) => "labels other than -100 are trained, from the second on",
            Ok(RowFormat::Messages | RowFormat::Sharegpt) => {
                "assistant messages are trained, unless their \"loss\" is false"
            }
            Ok(RowFormat::PromptCompletion) => "the completion is trained",
            Ok(RowFormat::Text) => "every token after the first is trained",
            Ok(_) => "the answer is trained",
            Err(_) => "no row format has these columns",
        }
    }

    fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }
}

/// The chat templates of a folder, and the file they are in.
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

/// A SentencePiece model that transformers would convert to tokenizer.json.
fn sentencepiece_file(folder: &Path) -> Option<&'static str> {
    const NAMES: [&str; 3] = ["spiece.model", "sentencepiece.bpe.model", "tokenizer.model"];
    NAMES.into_iter().find(|name| folder.join(name).is_file())
}

fn text_of(path: &Path, bytes: Vec<u8>) -> Result<String, EncoderError> {
    let not_text = |error| EncoderError::Read { path: path.to_owned(), source: io::Error::other(error) };
    String::from_utf8(bytes).map_err(not_text)
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
    for name in ["add_bos_token", "add_eos_token", "truncation_side"] {
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
    let EncoderOptions { vocabulary, columns, variables, system, date, pairs } = options;
    part(&vocabulary.to_le_bytes());
    for (ours, theirs) in columns.pairs() {
        part(ours.as_bytes());
        part(theirs.as_bytes());
    }
    part(Value::Object(variables.clone()).to_string().as_bytes());
    // Only templates that use the date depend on it.
    if sources.iter().any(|(_, source)| source.contains("strftime_now")) {
        part(date.strftime("%F").as_bytes());
    }
    if let Some(system) = system {
        part(b"system");
        part(system.as_bytes());
    }
    if let Some(PairOptions { prefix, source_lang, target_lang, pairs }) = pairs {
        part(b"pairs");
        part(prefix.as_bytes());
        for language in [source_lang, target_lang] {
            part(language.as_deref().unwrap_or_default().as_bytes());
        }
        part(&pairs.limits.source.to_le_bytes());
        part(&pairs.limits.target.to_le_bytes());
        // Rows with untrained labels need a padding token.
        part(&[u8::from(pairs.start.pad.is_some())]);
    }
    hash.finalize().into()
}
