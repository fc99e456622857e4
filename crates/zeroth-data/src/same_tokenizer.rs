//! Whether two model folders have the same tokenizer: by what it makes of a text, not by the bytes of its file.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use super::EncoderError;
use super::folder_file::{read, read_object_of};

/// How the tokenizers of two model folders differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenizerDifference {
    /// Neither folder has a tokenizer.json.
    BothMissing,
    /// Only one of them has one: `true` for the first.
    OnlyOne(bool),
    /// They differ in this, as a phrase that names both.
    Content(String),
}

/// The difference between the tokenizers of two model folders; `None` where both make the same ids of any text.
///
/// Vocabulary, added tokens, merges, normalizer and pre-tokenizer count. What is added around a text, padding and decoding
/// do not: the rows are tokenised once, for both models.
pub fn tokenizer_difference(one: &Path, other: &Path) -> Result<Option<TokenizerDifference>, EncoderError> {
    let [first, second] = [one, other].map(|folder| folder.join("tokenizer.json"));
    let [first_bytes, second_bytes] = [read(&first)?, read(&second)?];
    let (first_bytes, second_bytes) = match (first_bytes, second_bytes) {
        (None, None) => return Ok(Some(TokenizerDifference::BothMissing)),
        (Some(_), None) => return Ok(Some(TokenizerDifference::OnlyOne(true))),
        (None, Some(_)) => return Ok(Some(TokenizerDifference::OnlyOne(false))),
        (Some(first), Some(second)) => (first, second),
    };
    if first_bytes == second_bytes {
        return Ok(None);
    }
    let [first, second] = [(first, first_bytes), (second, second_bytes)]
        .map(|(path, bytes)| read_object_of(&path, &bytes).map(|object| Tokenizer::of(&object)));
    Ok(first?.difference(&second?).map(TokenizerDifference::Content))
}

/// The ids of a folder's tokenizer.json, added tokens included: one more than the largest. `None` without the file.
pub fn tokenizer_ids(folder: &Path) -> Result<Option<u64>, EncoderError> {
    let path = folder.join("tokenizer.json");
    let Some(bytes) = read(&path)? else { return Ok(None) };
    let tokenizer = Tokenizer::of(&read_object_of(&path, &bytes)?);
    Ok(Some(tokenizer.ids.values().max().map_or(0, |largest| largest.saturating_add(1))))
}

/// What decides the ids of a text.
struct Tokenizer {
    kind: Option<String>,
    /// Id by token, added tokens included.
    ids: BTreeMap<String, u64>,
    merges: Vec<String>,
    normalizer: Value,
    splitter: Value,
}

impl Tokenizer {
    fn of(file: &Map<String, Value>) -> Self {
        let field = |name: &str| file.get(name).cloned().unwrap_or_default();
        let model = field("model");
        let mut ids = BTreeMap::new();
        match &model["vocab"] {
            Value::Object(vocab) => {
                ids.extend(vocab.iter().filter_map(|(token, id)| Some((token.clone(), id.as_u64()?))));
            }
            // Unigram: pairs of token and score, numbered in order.
            Value::Array(pieces) => {
                let token = |piece: &Value| Some(format!("{} {}", piece[0].as_str()?, piece[1]));
                ids.extend(pieces.iter().zip(0..).filter_map(|(piece, id)| Some((token(piece)?, id))));
            }
            _ => {}
        }
        let added = field("added_tokens");
        for token in added.as_array().into_iter().flatten() {
            if let (Some(text), Some(id)) = (token["content"].as_str(), token["id"].as_u64()) {
                ids.insert(text.to_owned(), id);
            }
        }
        // Files have merges as "a b" or as ["a", "b"].
        let merge = |merge: &Value| match merge {
            Value::String(text) => text.clone(),
            pair => {
                let part = |part: &Value| part.as_str().unwrap_or_default().to_owned();
                pair.as_array().into_iter().flatten().map(part).collect::<Vec<_>>().join(" ")
            }
        };
        Self {
            kind: model["type"].as_str().map(str::to_owned),
            ids,
            merges: model["merges"].as_array().into_iter().flatten().map(merge).collect(),
            normalizer: field("normalizer"),
            splitter: field("pre_tokenizer"),
        }
    }

    fn difference(&self, other: &Self) -> Option<String> {
        if self.kind != other.kind {
            let word = |kind: &Option<String>| kind.clone().unwrap_or_else(|| "no type".to_owned());
            return Some(format!("one is {}, the other {}", word(&self.kind), word(&other.kind)));
        }
        let own = self.ids.iter().find(|(token, id)| other.ids.get(*token) != Some(id));
        let only_other = || other.ids.iter().find(|(token, _)| !self.ids.contains_key(*token));
        if let Some((token, _)) = own.or_else(only_other) {
            let id = |ids: &BTreeMap<String, u64>| match ids.get(token) {
                Some(id) => format!("id {id}"),
                None => "no token".to_owned(),
            };
            return Some(format!(
                "{token:?} is {} in one and {} in the other (vocabularies of {} and {} tokens)",
                id(&self.ids),
                id(&other.ids),
                self.ids.len(),
                other.ids.len()
            ));
        }
        let parts = [
            ("merges", self.merges == other.merges),
            ("normalizers", self.normalizer == other.normalizer),
            ("pre-tokenizers", self.splitter == other.splitter),
        ];
        let (part, _) = parts.into_iter().find(|(_, is_same)| !is_same)?;
        Some(format!("their {part} differ"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn difference(one: &Value, other: &Value) -> Option<TokenizerDifference> {
        let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
        for (folder, tokenizer) in folders.iter().zip([one, other]) {
            if !tokenizer.is_null() {
                std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
            }
        }
        tokenizer_difference(folders[0].path(), folders[1].path()).unwrap()
    }

    #[test]
    fn tokenizers_are_compared_by_content() {
        let usual = json!({
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
            "added_tokens": [{"id": 3, "content": "<eos>", "special": true}],
            "normalizer": null, "pre_tokenizer": {"type": "ByteLevel"},
        });
        assert_eq!(difference(&usual, &usual), None);
        // Merges as pairs, an added token with another flag, another post-processor: the same ids.
        let mut same = usual.clone();
        same["model"]["merges"] = json!([["a", "b"]]);
        same["added_tokens"][0]["special"] = json!(false);
        same["post_processor"] = json!({"type": "ByteLevel"});
        assert_eq!(difference(&usual, &same), None);
        let words = |other: &Value| match difference(&usual, other) {
            Some(TokenizerDifference::Content(words)) => words,
            other => panic!("{other:?}"),
        };
        let mut other = usual.clone();
        other["model"]["vocab"]["b"] = json!(7);
        assert_eq!(
            words(&other),
            "\"b\" is id 1 in one and id 7 in the other (vocabularies of 4 and 4 tokens)"
        );
        let mut other = usual.clone();
        other["added_tokens"] = json!([]);
        assert!(words(&other).starts_with("\"<eos>\" is id 3 in one and no token in the other"));
        let mut other = usual.clone();
        other["model"]["merges"] = json!([]);
        assert_eq!(words(&other), "their merges differ");
        let mut other = usual.clone();
        other["normalizer"] = json!({"type": "NFC"});
        assert_eq!(words(&other), "their normalizers differ");
        assert_eq!(difference(&usual, &Value::Null), Some(TokenizerDifference::OnlyOne(true)));
        assert_eq!(difference(&Value::Null, &usual), Some(TokenizerDifference::OnlyOne(false)));
        assert_eq!(difference(&Value::Null, &Value::Null), Some(TokenizerDifference::BothMissing));
    }
}
