//! The longest token of a tokenizer, from which follows how many tokens a text has at least, before it is tokenised.
//!
//! This holds only where no byte of a text is lost: for byte-level BPE and BPE with byte fallback, whose normalizers and
//! pre-tokenizers keep everything. Others fold unknown characters into one token, or drop white space.

use serde_json::Value;
use tokenizers::Tokenizer;
use tokenizers::models::ModelWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

/// What one token replaces at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LongestToken {
    /// Bytes of the text.
    bytes: usize,
    /// Whether added tokens also replace any white space beside them.
    strips: bool,
}

/// Unicode normalization forms and lower case replace at most this number of bytes by one.
const NORMALIZED: usize = 4;

impl LongestToken {
    /// The longest token, if the tokenizer keeps every byte of a text.
    pub(super) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let ModelWrapper::BPE(model) = tokenizer.get_model() else { return None };
        let json = |part: Option<serde_json::Result<Value>>| part.unwrap_or(Ok(Value::Null)).ok();
        let normalizer = json(tokenizer.get_normalizer().map(serde_json::to_value))?;
        let pre_tokenizer = json(tokenizer.get_pre_tokenizer().map(serde_json::to_value))?;
        let shrinks = shrinks(&normalizer)?;
        if !keeps_all(&pre_tokenizer) {
            return None;
        }
        let vocabulary = model.get_vocab();
        let is_byte_level = has_byte_level(&normalizer) || has_byte_level(&pre_tokenizer);
        let is_complete = if is_byte_level {
            ByteLevel::alphabet().iter().all(|byte| vocabulary.contains_key(&byte.to_string()))
        } else {
            let has_byte = |byte: u8| vocabulary.contains_key(&format!("<0x{byte:02X}>"));
            model.byte_fallback && (0..=u8::MAX).all(has_byte)
        };
        if !is_complete {
            return None;
        }
        let bytes = |token: &str| if is_byte_level { token.chars().count() } else { token.len() };
        let longest = vocabulary.keys().map(|token| bytes(token)).max()?;
        let added = tokenizer.get_added_tokens_decoder();
        let longest = added.values().map(|token| token.content.len()).chain([longest]).max()?;
        let strips = added.values().any(|token| token.lstrip || token.rstrip);
        Some(Self { bytes: longest.max(1).saturating_mul(shrinks), strips })
    }

    /// Tokens that a text has at least.
    pub(super) fn least_tokens(self, text: &str) -> u64 {
        let bytes = if self.strips {
            text.chars().filter(|character| !character.is_whitespace()).map(char::len_utf8).sum()
        } else {
            text.len()
        };
        bytes.div_ceil(self.bytes) as u64
    }
}

/// Parts of a sequence, or the one part.
fn parts<'a>(value: &'a Value, key: &str) -> Vec<&'a Value> {
    match value.get(key).and_then(Value::as_array) {
        Some(list) => list.iter().flat_map(|part| parts(part, key)).collect(),
        None if value.is_null() => Vec::new(),
        None => vec![value],
    }
}

fn kind(part: &Value) -> &str {
    part.get("type").and_then(Value::as_str).unwrap_or_default()
}

/// How many bytes a normalizer replaces by one at most; `None` if it drops any.
fn shrinks(normalizer: &Value) -> Option<usize> {
    parts(normalizer, "normalizers").into_iter().try_fold(1_usize, |product, part| {
        let factor = match kind(part) {
            "NFC" | "NFD" | "NFKC" | "NFKD" | "Lowercase" => NORMALIZED,
            "Prepend" | "ByteLevel" => 1,
            "Replace" => {
                let pattern = part.get("pattern")?.get("String")?.as_str()?;
                let content = part.get("content")?.as_str()?;
                pattern.len().checked_div(content.len())? + 1
            }
            _ => return None,
        };
        product.checked_mul(factor)
    })
}

/// Whether a pre-tokenizer only splits.
fn keeps_all(pre_tokenizer: &Value) -> bool {
    parts(pre_tokenizer, "pretokenizers").into_iter().all(|part| match kind(part) {
        "ByteLevel" | "Metaspace" | "Digits" | "UnicodeScripts" => true,
        "Split" | "Punctuation" => {
            part.get("behavior").and_then(Value::as_str).is_some_and(|behavior| behavior != "Removed")
        }
        _ => false,
    })
}

fn has_byte_level(part: &Value) -> bool {
    ["normalizers", "pretokenizers"]
        .into_iter()
        .any(|key| parts(part, key).into_iter().any(|part| kind(part) == "ByteLevel"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// A byte-level tokenizer with one merged token, and what `change` makes of it.
    fn tokenizer(change: impl FnOnce(&mut Value)) -> Tokenizer {
        let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
        alphabet.sort_unstable();
        let mut vocab: serde_json::Map<String, Value> =
            alphabet.iter().zip(0..).map(|(byte, id)| (byte.to_string(), json!(id))).collect();
        vocab.insert("ab".to_owned(), json!(256));
        let mut file = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": "\\s+"}, "behavior": "Isolated", "invert": false},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
            ]},
            "post_processor": null, "decoder": null,
            "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]], "byte_fallback": false},
        });
        change(&mut file);
        file.to_string().parse().unwrap()
    }

    fn added(content: &str, strips: bool) -> Value {
        json!([{
            "id": 257, "content": content, "special": true, "lstrip": false, "rstrip": strips, "normalized": false,
            "single_word": false,
        }])
    }

    #[test]
    fn only_tokenizers_that_lose_nothing_have_a_longest_token() {
        let longest = |change: fn(&mut Value)| LongestToken::of(&tokenizer(change)).map(|found| found.bytes);
        assert_eq!(longest(|_| ()), Some(2 * NORMALIZED));
        assert_eq!(longest(|file| file["normalizer"] = Value::Null), Some(2));
        assert_eq!(
            longest(|file| file["added_tokens"] = added("<|im_start|>", false)),
            Some(12 * NORMALIZED)
        );
        assert_eq!(
            longest(
                |file| file["normalizer"] = json!({"type": "Strip", "strip_left": true, "strip_right": true})
            ),
            None
        );
        assert_eq!(longest(|file| file["pre_tokenizer"] = json!({"type": "Whitespace"})), None);
        assert_eq!(
            longest(|file| file["pre_tokenizer"]["pretokenizers"][0]["behavior"] = json!("Removed")),
            None
        );
        let incomplete = |file: &mut Value| {
            file["model"]["vocab"].as_object_mut().unwrap().remove("!");
        };
        assert_eq!(longest(incomplete), None);
        assert_eq!(
            longest(|file| file["model"] = json!({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"})),
            None
        );
    }

    #[test]
    fn tokens_that_strip_white_space_do_not_count_it() {
        let tokenizer = tokenizer(|file| file["added_tokens"] = added("<|end|>", true));
        let longest = LongestToken::of(&tokenizer).unwrap();
        let text = format!("<|end|>{}", " ".repeat(1000));
        assert_eq!(tokenizer.encode(&text[..], false).unwrap().len(), 1);
        assert_eq!(longest.least_tokens(&text), 1);
    }

    proptest! {
        #[test]
        fn texts_have_at_least_so_many_tokens(text in "[ab \\t\\u{ac00}-\\u{ac01}\\u{1100}-\\u{1103}\\u{1161}-\\u{1163}\\u{11a8}-\\u{11aa}Å①-③\\PC]{0,60}", strips in any::<bool>()) {
            let tokenizer = tokenizer(|file| {
                file["added_tokens"] = added("ab", strips);
                file["normalizer"] = json!({"type": "NFKC"});
            });
            let least = LongestToken::of(&tokenizer).unwrap().least_tokens(&text);
            let tokens = tokenizer.encode(&text[..], false).unwrap().len() as u64;
            prop_assert!(least <= tokens, "{} tokens and not {}", tokens, least);
        }
    }
}
