//! Rows of encoder-decoder models: a source and a target text, tokenised as transformers' run_translation does, or
//! ready tokens.

use serde_json::{Map, Value};

use super::conversation::{ASSISTANT, Conversation, role};
use super::pairs::PairOptions;
use super::row_fields::{Pair, RowFields};
use super::row_format::RowFormat;
use super::row_problem::shortened;
use super::token_row::TokenLists;
use super::tokenizer::{TextTokenizer, TruncationSide};
use super::{Columns, Encoded, IGNORED, RowProblem};

/// A source, a target, and the name of the target in the row.
struct PairTexts {
    source: String,
    target: String,
    target_key: String,
}

/// Encodes a row as tokens of a source and labels of a target. Returns the tokenizer that it used, if any: its tokens are
/// not checked against the vocabulary.
pub(super) fn encode<'a>(
    row: &Map<String, Value>,
    columns: &Columns,
    options: &PairOptions,
    vocabulary: u64,
    tokenizer: impl FnOnce(RowFormat) -> Result<&'a TextTokenizer, RowProblem>,
    into: &mut Encoded,
) -> Result<Option<&'a TextTokenizer>, RowProblem> {
    let format = RowFormat::of(row, columns)?;
    if format == RowFormat::Tokens {
        ready_tokens(TokenLists::of(row, columns)?, options, vocabulary, into)?;
        return Ok(None);
    }
    let PairTexts { source, target, target_key } = texts(format, &RowFields { row, columns }, options)?;
    if target.trim().is_empty() {
        return Err(RowProblem::EmptyTarget { key: target_key });
    }
    let tokenizer = tokenizer(format)?;
    let end = tokenizer.named_id("eos_token").ok_or(RowProblem::NoEndOfText)?;
    let source = with_end(tokenizer, &[&options.prefix, &source[..]].concat(), end)?;
    let target = with_end(tokenizer, &target, end)?;
    let limits = options.pairs.limits;
    let (side, end) = (tokenizer.truncation_side(), end as i32);
    into.cut = [truncate(source, limits.source, side, end, &mut into.ids), 0];
    into.cut[1] = truncate(target, limits.target, side, end, &mut into.labels);
    Ok(Some(tokenizer))
}

/// The source and target of a row with texts.
fn texts(format: RowFormat, fields: &RowFields<'_>, options: &PairOptions) -> Result<PairTexts, RowProblem> {
    let texts = |source: &str, target: &str, name: &str| PairTexts {
        source: source.to_owned(),
        target: target.to_owned(),
        target_key: fields.columns.theirs(name).to_owned(),
    };
    match format {
        RowFormat::Translation => translation(fields, options),
        RowFormat::PromptCompletion => match fields.pair()? {
            Pair::Texts(prompt, completion) => Ok(texts(prompt, completion, "completion")),
            Pair::Messages(said) => single_answer(said, "completion"),
        },
        RowFormat::Messages => single_answer(fields.conversation("messages")?, "messages"),
        RowFormat::Sharegpt => single_answer(fields.conversation("conversations")?, "conversations"),
        RowFormat::Alpaca => single_answer(fields.turns(format)?, fields.columns.theirs("output")),
        RowFormat::QueryResponse => single_answer(fields.turns(format)?, fields.columns.theirs("response")),
        RowFormat::QuestionAnswer => single_answer(fields.turns(format)?, fields.columns.theirs("answer")),
        RowFormat::Text | RowFormat::Tokens => Err(RowProblem::NoSource { format: format.shown() }),
    }
}

/// The texts of the two languages.
fn translation(fields: &RowFields<'_>, options: &PairOptions) -> Result<PairTexts, RowProblem> {
    let columns = fields.columns;
    let key = columns.theirs("translation").to_owned();
    let value = fields.row.get(&key).unwrap_or(&Value::Null);
    let Value::Object(languages) = value else {
        return Err(RowProblem::Translation { key, found: shortened(value) });
    };
    let present = || languages.keys().cloned().collect();
    let side = |flag: &'static str,
                given: Option<&str>,
                name: &str|
     -> Result<(String, String), RowProblem> {
        let mapped = columns.names(name).then(|| columns.theirs(name));
        let Some(asked) = given.or(mapped) else {
            return Err(RowProblem::LanguageNotGiven { flag, present: present() });
        };
        // Codes with a country, as in en_XX, are of the tokenizer: run_translation looks up what precedes it.
        let codes = [asked, asked.split('_').next().unwrap_or(asked)];
        let found = codes.into_iter().find_map(|code| Some((code, languages.get(code)?)));
        let Some((code, text)) = found else {
            return Err(RowProblem::NoLanguage { flag, asked: asked.to_owned(), present: present() });
        };
        match text {
            Value::String(text) => Ok((text.clone(), format!("{key}.{code}"))),
            other => Err(RowProblem::Translation { key: format!("{key}.{code}"), found: shortened(other) }),
        }
    };
    let (source, _) = side("--source-lang", options.source_lang.as_deref(), "source")?;
    let (target, target_key) = side("--target-lang", options.target_lang.as_deref(), "target")?;
    Ok(PairTexts { source, target, target_key })
}

/// The last message of a conversation as the target, and the ones before it as lines of the source. None of those may
/// be an answer: it would be read, but not trained.
fn single_answer(mut said: Conversation, key: &str) -> Result<PairTexts, RowProblem> {
    said.join_parts();
    let answers = said.messages.iter().filter(|message| role(message) == ASSISTANT).count();
    let content = |message: &Map<String, Value>| message.get("content")?.as_str().map(str::to_owned);
    let texts: Option<Vec<String>> = said.messages.iter().map(content).collect();
    let is_last = said.messages.last().is_some_and(|last| role(last) == ASSISTANT);
    let is_trained = said.trained.last() == Some(&true);
    match texts {
        Some(mut texts)
            if answers == 1 && is_last && is_trained && texts.len() > 1 && said.tools.is_none() =>
        {
            let target = texts.pop().unwrap_or_default();
            Ok(PairTexts { source: texts.join("\n"), target, target_key: key.to_owned() })
        }
        _ => Err(RowProblem::NotAPair { key: key.to_owned(), messages: said.messages.len(), answers }),
    }
}

/// Tokenises a text, with one end-of-text token at its end: the one that the tokenizer adds, or that the text has.
pub(super) fn with_end(tokenizer: &TextTokenizer, text: &str, end: u32) -> Result<Vec<i32>, RowProblem> {
    let mut ids: Vec<i32> = tokenizer.tokens(text, true)?.iter().map(|token| token.id as i32).collect();
    let end = end as i32;
    while ids.ends_with(&[end, end]) {
        ids.pop();
    }
    if ids.last() != Some(&end) {
        ids.push(end);
    }
    Ok(ids)
}

/// Stores at most `most` tokens, the last of them the end-of-text token if that is the last of all. Returns how many
/// are cut.
pub(super) fn truncate(
    mut ids: Vec<i32>,
    most: u64,
    side: TruncationSide,
    end: i32,
    into: &mut Vec<i32>,
) -> usize {
    let most = usize::try_from(most).unwrap_or(usize::MAX).max(1);
    let cut = ids.len().saturating_sub(most);
    if side == TruncationSide::Left {
        ids.drain(..cut);
    } else if cut > 0 {
        let is_ended = ids.last() == Some(&end);
        ids.truncate(most);
        if is_ended {
            ids[most - 1] = end;
        }
    }
    into.clear();
    into.append(&mut ids);
    cut
}

/// Ready tokens: the labels are the decoder's targets, with a length of their own.
fn ready_tokens(
    lists: TokenLists,
    options: &PairOptions,
    vocabulary: u64,
    into: &mut Encoded,
) -> Result<(), RowProblem> {
    let TokenLists { ids, labels, mask } = lists;
    let Some(mut labels) = labels else { return Err(RowProblem::NoLabels) };
    // Padding of the labels trains nothing, and no label sees it.
    let end = labels.iter().rposition(|label| *label != i64::from(IGNORED)).map_or(1, |last| last + 1);
    labels.truncate(end);
    if labels.is_empty() {
        return Err(RowProblem::EmptyTarget { key: "labels".to_owned() });
    }
    let mut source = Encoded::default();
    TokenLists { ids, labels: None, mask }.take(vocabulary, &mut source)?;
    let untrained = i64::from(IGNORED);
    if let Some(place) = labels
        .iter()
        .position(|label| *label != untrained && u64::try_from(*label).map_or(true, |id| id >= vocabulary))
    {
        return Err(RowProblem::Label { place, label: labels[place], vocabulary });
    }
    let inner = &labels[..labels.len() - 1];
    if let Some(place) =
        inner.iter().position(|label| *label == untrained).filter(|_| options.pairs.start.pad.is_none())
    {
        return Err(RowProblem::NoPadding { place });
    }
    let target: Vec<i32> = labels.iter().map(|label| *label as i32).collect();
    let limits = options.pairs.limits;
    // A truncated sequence keeps its last token where that ends both: the end-of-text token of this data.
    let end = *target.last().unwrap_or(&IGNORED);
    let side = TruncationSide::Right;
    into.cut = [truncate(source.ids, limits.source, side, end, &mut into.ids), 0];
    into.cut[1] = truncate(target, limits.target, side, end, &mut into.labels);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncated_sequences_keep_their_end() {
        let cut_from = |side, ids: &[i32], most| {
            let mut into = vec![7];
            let cut = truncate(ids.to_vec(), most, side, 1, &mut into);
            (into, cut)
        };
        let cut = |ids: &[i32], most| cut_from(TruncationSide::Right, ids, most);
        assert_eq!(cut(&[4, 5, 6, 1], 4), (vec![4, 5, 6, 1], 0));
        assert_eq!(cut(&[4, 5, 6, 1], 3), (vec![4, 5, 1], 1));
        assert_eq!(cut(&[4, 5, 6, 8], 2), (vec![4, 5], 2));
        assert_eq!(cut(&[4, 5, 1], 1), (vec![1], 2));
        let cut = |ids: &[i32], most| cut_from(TruncationSide::Left, ids, most);
        assert_eq!(cut(&[4, 5, 6, 1], 4), (vec![4, 5, 6, 1], 0));
        assert_eq!(cut(&[4, 5, 6, 1], 3), (vec![5, 6, 1], 1));
        assert_eq!(cut(&[4, 5, 1], 1), (vec![1], 2));
    }
}
