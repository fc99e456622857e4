//! Tokenises text with tokenizer.json (the `tokenizers` crate) and the special tokens of the files beside it.

use std::collections::HashSet;
use std::path::Path;
use std::sync::OnceLock;

use serde_json::{Map, Value};
use tokenizers::processors::PostProcessorWrapper;
use tokenizers::{AddedToken, Tokenizer, TruncationDirection};

use super::byte_gate::ByteGate;
use super::catch_panic::catch_panic;
use super::longest_token::LongestToken;
use super::row_limits::MAX_TEXT_BYTES;
use super::{EncoderError, RowProblem};

/// Special tokens that templates access by name, as in transformers.
const NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// A token and its byte range in the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SpannedToken {
    pub(super) id: u32,
    pub(super) from: usize,
    pub(super) to: usize,
}

/// A tokenizer and its special tokens.
pub(super) struct TextTokenizer {
    inner: Tokenizer,
    /// Ids of special tokens. A set, as files may assign arbitrary ids.
    special: HashSet<u32>,
    /// By name, in the order of [`NAMES`].
    named: Vec<(&'static str, String)>,
    /// Tokens that transformers adds around a text according to tokenizer_config.json; `None` uses the tokenizer's
    /// own post-processor.
    around: Option<SpecialTokens>,
    truncation_side: TruncationSide,
    /// Found on first use.
    longest: OnceLock<Option<LongestToken>>,
    /// The text that is being tokenised by all threads.
    gate: ByteGate,
}

/// The side that a text which is too long loses tokens from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TruncationSide {
    Left,
    Right,
}

/// Tokens added around a text.
struct SpecialTokens {
    bos: Option<u32>,
    eos: Option<u32>,
}

impl TextTokenizer {
    /// Loads the tokenizer of a model folder from the contents of tokenizer.json. The tokenizers crate panics on some
    /// damaged files.
    pub(super) fn new(folder: &Path, tokenizer: &[u8], files: &SpecialFiles) -> Result<Self, EncoderError> {
        let path = || folder.join("tokenizer.json");
        catch_panic(|| Self::load(folder, tokenizer, files))
            .unwrap_or_else(|message| Err(EncoderError::Tokenizer { path: path(), message }))
    }

    fn load(folder: &Path, tokenizer: &[u8], files: &SpecialFiles) -> Result<Self, EncoderError> {
        let path = || folder.join("tokenizer.json");
        let failed =
            |error: tokenizers::Error| EncoderError::Tokenizer { path: path(), message: error.to_string() };
        let mut inner = Tokenizer::from_bytes(tokenizer).map_err(failed)?;
        let truncation_side = files.truncation_side(&inner);
        // A row is one text: no truncation, no padding.
        inner.with_truncation(None).map_err(failed)?;
        inner.with_padding(None);
        keep_whole_offsets(&mut inner).map_err(|error| failed(error.into()))?;

        let named = files.named(&inner);
        let present = named.iter().filter(|(_, text)| inner.token_to_id(text).is_some());
        let added: Vec<AddedToken> = present
            .map(|(_, text)| AddedToken::from(text.clone(), true))
            .filter(|t| !is_added(&inner, t))
            .collect();
        inner.add_special_tokens(added).map_err(failed)?;

        let decoder = inner.get_added_tokens_decoder();
        let special = decoder.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        let (longest, gate) = (OnceLock::new(), ByteGate::of(MAX_TEXT_BYTES));
        let mut tokenizer = Self { inner, special, named, around: None, truncation_side, longest, gate };
        tokenizer.around = files.around().map(|(bos, eos)| SpecialTokens {
            bos: tokenizer.named_id("bos_token").filter(|_| bos),
            eos: tokenizer.named_id("eos_token").filter(|_| eos),
        });
        Ok(tokenizer)
    }

    /// Tokens that a text has at least, found without tokenising it; `None` for tokenizers that may drop text.
    pub(super) fn least_tokens(&self, text: &str) -> Option<u64> {
        let longest = self.longest.get_or_init(|| LongestToken::of(&self.inner));
        longest.map(|longest| longest.least_tokens(text))
    }

    /// Tokenises a text, with special tokens around it if `around` is set. Long texts wait for each other.
    pub(super) fn tokens(&self, text: &str, around: bool) -> Result<Vec<SpannedToken>, RowProblem> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(RowProblem::TextTooLong { bytes: text.len() as u64 });
        }
        let _taken = self.gate.take(text.len());
        let own = around && self.around.is_none();
        let encoding = catch_panic(|| self.inner.encode(text, own))
            .map_err(|panic| format!("tokenizer.json is damaged: {panic}"))
            .and_then(|encoding| encoding.map_err(|error| error.to_string()))
            .map_err(|message| RowProblem::Tokenizer { message })?;
        let given = self.around.as_ref().filter(|_| around);
        let mut tokens = Vec::with_capacity(encoding.len() + 2);
        tokens.extend(given.and_then(|given| given.bos).map(|id| SpannedToken { id, from: 0, to: 0 }));
        let pairs = encoding.get_ids().iter().zip(encoding.get_offsets());
        tokens.extend(pairs.map(|(&id, &(from, to))| SpannedToken { id, from, to }));
        let end = text.len();
        tokens.extend(given.and_then(|given| given.eos).map(|id| SpannedToken { id, from: end, to: end }));
        Ok(tokens)
    }

    pub(super) fn truncation_side(&self) -> TruncationSide {
        self.truncation_side
    }

    pub(super) fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// The special tokens by name.
    pub(super) fn named(&self) -> &[(&'static str, String)] {
        &self.named
    }

    /// The id of a special token by name.
    pub(super) fn named_id(&self, name: &str) -> Option<u32> {
        let (_, text) = self.named.iter().find(|(known, _)| *known == name)?;
        self.inner.token_to_id(text)
    }

    /// Vocabulary size, including added tokens.
    pub(super) fn size(&self) -> u64 {
        self.inner.get_vocab_size(true) as u64
    }

    /// Decodes tokens without special ones.
    pub(super) fn decode(&self, ids: &[u32]) -> Option<String> {
        catch_panic(|| self.inner.decode(ids, true).ok()).ok()?
    }

    /// The token with exactly this text.
    pub(super) fn token_id(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// The text of one token. Partial characters are shown as in the vocabulary.
    pub(super) fn token_text(&self, id: u32) -> Option<String> {
        let raw = self.inner.id_to_token(id)?;
        if raw.contains('▁') {
            return Some(raw.replace('▁', " "));
        }
        match catch_panic(|| self.inner.decode(&[id], false)) {
            Ok(Ok(text)) if !text.is_empty() && !text.contains(char::REPLACEMENT_CHARACTER) => Some(text),
            _ => Some(raw),
        }
    }
}

fn is_added(tokenizer: &Tokenizer, token: &AddedToken) -> bool {
    tokenizer.get_added_vocabulary().get_vocab().contains_key(&token.content)
}

/// Byte-level tokenizers may exclude spaces from a token's offsets. Trained spans are matched by offsets, so offsets
/// must cover the whole text; the tokens are unchanged.
fn keep_whole_offsets(tokenizer: &mut Tokenizer) -> Result<(), serde_json::Error> {
    fn keep(value: &mut Value) {
        match value {
            Value::Object(object) => {
                if let Some(trim) = object.get_mut("trim_offsets") {
                    *trim = Value::Bool(false);
                }
                object.values_mut().for_each(keep);
            }
            Value::Array(list) => list.iter_mut().for_each(keep),
            _ => {}
        }
    }
    if let Some(processor) = tokenizer.get_post_processor() {
        let mut value = serde_json::to_value(processor)?;
        keep(&mut value);
        tokenizer.with_post_processor(Some(serde_json::from_value::<PostProcessorWrapper>(value)?));
    }
    Ok(())
}

/// Files beside tokenizer.json that define special tokens. Each may be absent.
#[derive(Default)]
pub(super) struct SpecialFiles {
    pub(super) tokenizer_config: Map<String, Value>,
    pub(super) map: Map<String, Value>,
    pub(super) config: Map<String, Value>,
}

impl SpecialFiles {
    /// tokenizer_config.json, then special_tokens_map.json; `null` means none. Ids in config.json apply to the
    /// end-of-text token, and to the others if no file names any.
    fn named(&self, tokenizer: &Tokenizer) -> Vec<(&'static str, String)> {
        let given = |name: &str| self.tokenizer_config.get(name).or_else(|| self.map.get(name));
        let none_named = !NAMES.iter().any(|name| given(name).is_some());
        let by_id = |name: &str| {
            let id = self.config.get(&format!("{name}_id"))?;
            let id = id.as_array().map_or(Some(id), |several| several.first())?.as_u64()?;
            tokenizer.id_to_token(u32::try_from(id).ok()?)
        };
        let text = |name: &'static str| {
            let text = match given(name) {
                Some(Value::String(text)) => Some(text.clone()),
                Some(Value::Object(token)) => token.get("content")?.as_str().map(str::to_owned),
                None if none_named || name == "eos_token" => by_id(name),
                Some(_) | None => None,
            };
            text.map(|text| (name, text))
        };
        NAMES.into_iter().filter_map(text).collect()
    }

    /// `truncation_side` of tokenizer_config.json, else the direction in tokenizer.json.
    fn truncation_side(&self, tokenizer: &Tokenizer) -> TruncationSide {
        let direction = tokenizer.get_truncation().map(|truncation| truncation.direction);
        let is_left = match self.tokenizer_config.get("truncation_side").and_then(Value::as_str) {
            Some(side) => side == "left",
            None => matches!(direction, Some(TruncationDirection::Left)),
        };
        if is_left { TruncationSide::Left } else { TruncationSide::Right }
    }

    /// `add_bos_token` and `add_eos_token`: if either is given, they replace the tokenizer's post-processor.
    fn around(&self) -> Option<(bool, bool)> {
        let flag = |name: &str| self.tokenizer_config.get(name).and_then(Value::as_bool);
        match (flag("add_bos_token"), flag("add_eos_token")) {
            (None, None) => None,
            (bos, eos) => Some((bos.unwrap_or(false), eos.unwrap_or(false))),
        }
    }
}
