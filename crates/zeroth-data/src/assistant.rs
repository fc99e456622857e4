//! Assistant-only loss: which tokens of a rendered conversation are trained.
//!
//! A template with `{% generation %}` marks them itself. For any other, messages are located in the rendered text:
//! the conversation is rendered again with a marker character around each message. If the text without markers is
//! unchanged, they give each message's position. Otherwise the template depends on the content, so messages are
//! replaced one at a time, and the part that changes belongs to the message. The trained span is then extended: back
//! to the end of the generation prompt, so that text the template writes before the content (an empty `<think>`, the
//! start of a tool call) is trained as the model has to generate it, and forward to the first special token, which
//! ends the turn.

use std::ops::Range;

use serde_json::{Map, Value};

use super::chat_template::{Rendered, sentinel_in};
use super::conversation::{ASSISTANT, Conversation, REASONING, role};
use super::renderer::ChatTemplate;
use super::tokenizer::{TextTokenizer, Token};
use super::{Encoded, IGNORED, RowProblem};

/// Marker characters: two private-use code points per message, from here on.
const FIRST_MARKER: u32 = 0xF_0000;
const MARKERS: u32 = 0xFFFE;

/// Tokenises a conversation into `into`, with labels on the trained tokens.
pub(super) fn encode(
    conversation: &Conversation,
    template: &ChatTemplate,
    tokenizer: &TextTokenizer,
    into: &mut Encoded,
) -> Result<(), RowProblem> {
    let tools = conversation.tools.as_ref();
    let marked = template.properties().marks_generation(tools.is_some());
    if marked && let Some(found) = conversation.messages.iter().find_map(reserved) {
        return Err(RowProblem::Reserved { code: found as u32 });
    }
    let Rendered { text, generated } = render(conversation, template, false)?;
    if into.skip(&text, || tokenizer.least_tokens(&text)) {
        return Ok(());
    }
    let tokens = tokenizer.tokens(&text, false)?;
    let trained = if marked && !conversation.is_overridden() {
        generated
    } else {
        let search = MessageSearch { conversation, template, tokenizer, text: &text, tokens: &tokens };
        search.trained(&generated)?
    };
    label(&tokens, trained, into);
    Ok(())
}

/// Renders; the error names the first message that the template refuses.
pub(super) fn render(
    conversation: &Conversation,
    template: &ChatTemplate,
    add_generation_prompt: bool,
) -> Result<Rendered, RowProblem> {
    let Conversation { messages, tools, .. } = conversation;
    let message = match template.render(messages, tools.as_ref(), add_generation_prompt)? {
        Ok(rendered) => return Ok(rendered),
        Err(message) => message,
    };
    for number in 1..messages.len() {
        if template.render(&messages[..number], tools.as_ref(), false)?.is_err() {
            return Err(RowProblem::Template { number, message });
        }
    }
    Err(RowProblem::Template { number: messages.len(), message })
}

/// Labels tokens that overlap a trained span with their own id.
fn label(tokens: &[Token], mut trained: Vec<Range<usize>>, into: &mut Encoded) {
    trained.sort_by_key(|part| (part.start, part.end));
    let mut next = 0;
    into.ids.clear();
    into.labels.clear();
    for token in tokens {
        while trained.get(next).is_some_and(|part| part.end <= token.from) {
            next += 1;
        }
        let to = token.to.max(token.from + 1);
        let is_trained = trained.get(next).is_some_and(|part| part.start < to && token.from < part.end);
        into.ids.push(token.id as i32);
        into.labels.push(if is_trained { token.id as i32 } else { IGNORED });
    }
}

/// Locates messages in the rendered text.
struct MessageSearch<'a> {
    conversation: &'a Conversation,
    template: &'a ChatTemplate,
    tokenizer: &'a TextTokenizer,
    text: &'a str,
    tokens: &'a [Token],
}

/// The position of each message's text, and the generation prompt.
struct Found {
    places: Vec<Option<Range<usize>>>,
    /// Whether positions include leading and trailing whitespace of the content.
    exact: bool,
    generation_prompt: String,
}

impl MessageSearch<'_> {
    /// The trained spans. `generated` are those that the template marks itself.
    fn trained(&self, generated: &[Range<usize>]) -> Result<Vec<Range<usize>>, RowProblem> {
        let Conversation { messages, trained, .. } = self.conversation;
        if !trained.contains(&true) {
            return Ok(Vec::new());
        }
        let found = match self.by_markers()? {
            Some(found) => found,
            None => self.by_replacement()?,
        };
        let within = |part: &Range<usize>, place: &Range<usize>| {
            part.start <= place.start && place.end <= part.end
                || part.start < place.end && place.start < part.end
        };
        let mut parts = Vec::new();
        for (index, message) in messages.iter().enumerate().filter(|(index, _)| trained[*index]) {
            let Some(place) = &found.places[index] else {
                return Err(RowProblem::NoTrace { number: index + 1, role: role(message).to_owned() });
            };
            let before = parts.len();
            parts.extend(generated.iter().filter(|part| within(part, place)).cloned());
            if parts.len() == before {
                parts.push(self.extended(index, place, &found)?);
            }
        }
        Ok(parts)
    }

    /// Locates all messages with one more render; `None` if markers change the template's output.
    fn by_markers(&self) -> Result<Option<Found>, RowProblem> {
        let messages = &self.conversation.messages;
        let is_marker = |c: char| (FIRST_MARKER..FIRST_MARKER + MARKERS).contains(&(c as u32));
        if messages.len() as u32 > MARKERS / 2 || self.text.contains(is_marker) {
            return Ok(None);
        }
        let marked: Vec<_> =
            messages.iter().zip(0..).map(|(message, index)| marked(message, index)).collect();
        let tools = self.conversation.tools.as_ref();
        let prompts = self.template.properties().asks_for_generation_prompt(tools.is_some());
        let Ok(rendered) = self.template.render(&marked, tools, prompts)? else { return Ok(None) };

        let mut places: Vec<Option<Range<usize>>> = vec![None; messages.len()];
        let mut closed = vec![false; messages.len()];
        let mut plain = String::with_capacity(rendered.text.len());
        let mut last_mark = 0;
        for character in rendered.text.chars() {
            if !is_marker(character) {
                plain.push(character);
                continue;
            }
            let (index, ends) = ((character as u32 - FIRST_MARKER) / 2, (character as u32) % 2 == 1);
            let (index, here) = (index as usize, plain.len());
            last_mark = here;
            match &mut places[index] {
                Some(place) => place.end = here,
                // The start marker was dropped, so the position is unknown.
                None if ends => return Ok(None),
                place => *place = Some(here..here),
            }
            closed[index] = ends;
        }
        let same = common_prefix(&plain, self.text);
        // After the last message, a template may write an end of turn where it would otherwise write the prompt.
        let undisturbed = same == self.text.len() || prompts && same >= last_mark;
        if !undisturbed || places.iter().zip(&closed).any(|(place, closed)| place.is_some() && !closed) {
            return Ok(None);
        }
        let generation_prompt = plain[same..].to_owned();
        let generation_prompt = if prompts && generation_prompt.is_empty() {
            self.generation_prompt()?
        } else {
            generation_prompt
        };
        Ok(Some(Found { places, exact: false, generation_prompt }))
    }

    /// Markers are inside the content's surrounding whitespace, which the template may have kept.
    fn with_white_space(&self, message: &Map<String, Value>, place: &Range<usize>) -> Range<usize> {
        let content = message.get("content").and_then(Value::as_str).unwrap_or_default();
        let lead = &content[..content.len() - content.trim_start().len()];
        let tail = if lead == content { "" } else { &content[content.trim_end().len()..] };
        let before = if self.text[..place.start].ends_with(lead) { lead.len() } else { 0 };
        let after = if self.text[place.end..].starts_with(tail) { tail.len() } else { 0 };
        place.start - before..place.end + after
    }

    /// Locates each message by rendering the conversation with a different one in its place.
    fn by_replacement(&self) -> Result<Found, RowProblem> {
        let messages = &self.conversation.messages;
        let tools = self.conversation.tools.as_ref();
        let foreign = absent_from(self.text);
        let mut places = Vec::with_capacity(messages.len());
        for (index, message) in messages.iter().enumerate() {
            let mut others = messages.clone();
            others[index] = with_texts(message, &mut |_| foreign.clone());
            let Ok(Rendered { text: other, .. }) = self.template.render(&others, tools, false)? else {
                places.push(None);
                continue;
            };
            let start = common_prefix(self.text, &other);
            let end = self.text.len() - common_suffix(&self.text[start..], &other[start..]);
            places.push((other != self.text).then_some(start..end));
        }
        let prompts = self.template.properties().asks_for_generation_prompt(tools.is_some());
        let generation_prompt = if prompts { self.generation_prompt()? } else { String::new() };
        Ok(Found { places, exact: true, generation_prompt })
    }

    /// The generation prompt: what the template appends after the whole conversation or, as some only append it after
    /// a user turn, before a trained assistant message.
    fn generation_prompt(&self) -> Result<String, RowProblem> {
        let Conversation { messages, trained, tools } = self.conversation;
        let answers =
            (1..messages.len()).filter(|index| trained[*index] && role(&messages[*index]) == ASSISTANT);
        for count in [messages.len()].into_iter().chain(answers) {
            let render = |prompt| self.template.render(&messages[..count], tools.as_ref(), prompt);
            let (Ok(with), Ok(without)) = (render(true)?, render(false)?) else { continue };
            let prompt = &with.text[common_prefix(&with.text, &without.text)..];
            if !prompt.is_empty() {
                return Ok(prompt.to_owned());
            }
        }
        Ok(String::new())
    }

    /// The trained span of the message at `place`.
    fn extended(
        &self,
        index: usize,
        place: &Range<usize>,
        found: &Found,
    ) -> Result<Range<usize>, RowProblem> {
        let others = || {
            found
                .places
                .iter()
                .enumerate()
                .filter(|(other, _)| *other != index)
                .filter_map(|(_, p)| p.as_ref())
        };
        let before = others().filter(|other| other.end <= place.start).max_by_key(|other| other.end);
        let floor = before.map_or(0, |before| before.end);
        let ceiling = others()
            .map(|other| other.start)
            .filter(|start| *start >= place.end)
            .min()
            .unwrap_or(self.text.len());
        let message = &self.conversation.messages[index];
        let own = if found.exact { place.clone() } else { self.with_white_space(message, place) };

        let mut start = own.start.max(floor);
        if role(message) == ASSISTANT {
            let prompt = &found.generation_prompt;
            let prompt_end = self.text[floor..place.start].rfind(prompt).map(|at| floor + at + prompt.len());
            let before = before.filter(|before| !before.is_empty());
            let beginning = match (prompt_end.filter(|_| !prompt.is_empty()), before) {
                (Some(end), _) => Some(end),
                (None, Some(before)) => self.beginning_of_turn(index, before)?.filter(|at| *at <= start),
                (None, None) => None,
            };
            start = beginning.unwrap_or(start);
        }
        let after = self.tokens.partition_point(|token| token.from < place.end);
        let ends_turn = |token: &&Token| self.tokenizer.is_special(token.id);
        let turn_end = self.tokens[after..].iter().take_while(|token| token.from < ceiling).find(ends_turn);
        Ok(start..turn_end.map_or(own.end.min(ceiling), |token| token.to))
    }

    /// Where assistant text would begin in place of this message: a template may write its own text before a tool
    /// call or reasoning. `before` is the position of the previous message.
    fn beginning_of_turn(&self, index: usize, before: &Range<usize>) -> Result<Option<usize>, RowProblem> {
        let Conversation { messages, tools, .. } = self.conversation;
        let message = &messages[index];
        if !message.contains_key("tool_calls") && !REASONING.iter().any(|name| message.contains_key(*name)) {
            return Ok(None);
        }
        let foreign = absent_from(self.text);
        let mut others = Conversation { messages: messages.clone(), ..Conversation::default() };
        others.say(ASSISTANT, &foreign);
        others.messages.swap_remove(index);
        let said = &self.text[before.clone()];
        // Some templates refuse messages that follow a tool call without the call, so try again without them.
        let written = |rendered: &str| {
            let rendered = &rendered[..rendered.find(&foreign)?];
            let header = &rendered[rendered.rfind(said)? + said.len()..];
            self.text[before.end..].starts_with(header).then_some(before.end + header.len())
        };
        for count in [messages.len(), index + 1] {
            let rendered = self.template.render(&others.messages[..count], tools.as_ref(), false)?;
            if let Some(beginning) = rendered.ok().and_then(|rendered| written(&rendered.text)) {
                return Ok(Some(beginning));
            }
        }
        Ok(None)
    }
}

/// A text that does not occur in this one and shares no character with it.
fn absent_from(text: &str) -> String {
    let mut candidates = ('\u{E000}'..='\u{F8FF}').chain('\u{FDD0}'..='\u{FDEF}');
    candidates.find(|candidate| !text.contains(*candidate)).unwrap_or('\u{E000}').to_string()
}

/// The message with marker characters around its texts. Surrounding whitespace stays outside, as templates trim it.
fn marked(message: &Map<String, Value>, index: u32) -> Map<String, Value> {
    let mark =
        |side| char::from_u32(FIRST_MARKER + 2 * index + side).expect("every such number is a character");
    with_texts(message, &mut |text| {
        let core = text.trim_start();
        let (lead, core) = (&text[..text.len() - core.len()], core.trim_end());
        let tail = &text[lead.len() + core.len()..];
        [lead, &mark(0).to_string(), core, &mark(1).to_string(), tail].concat()
    })
}

/// The message with each text changed: content, reasoning, names and arguments of calls. Blank texts are kept, as
/// templates test for them, unless all are blank.
fn with_texts(message: &Map<String, Value>, change: &mut impl FnMut(&str) -> String) -> Map<String, Value> {
    let mut all_blank = true;
    let mut copy = message.clone();
    each_text(&mut copy, &mut |text| all_blank &= text.trim().is_empty());
    each_text(&mut copy, &mut |text| {
        if all_blank || !text.trim().is_empty() {
            *text = change(text);
        }
    });
    copy
}

fn each_text(message: &mut Map<String, Value>, visit: &mut dyn FnMut(&mut String)) {
    for (key, value) in message.iter_mut() {
        match (key.as_str(), value) {
            ("content", Value::Array(parts)) => {
                parts.iter_mut().filter_map(|part| part.get_mut("text")).for_each(|text| leaves(text, visit));
            }
            ("content", content) => leaves(content, visit),
            ("tool_calls", Value::Array(calls)) => {
                for call in calls {
                    let call = if call.get("function").is_some() { &mut call["function"] } else { call };
                    for key in ["name", "arguments"] {
                        call.get_mut(key).into_iter().for_each(|value| leaves(value, visit));
                    }
                }
            }
            (key, reasoning) if REASONING.contains(&key) => leaves(reasoning, visit),
            _ => {}
        }
    }
}

fn leaves(value: &mut Value, visit: &mut dyn FnMut(&mut String)) {
    match value {
        Value::String(text) => visit(text),
        Value::Array(list) => list.iter_mut().for_each(|entry| leaves(entry, visit)),
        Value::Object(object) => object.values_mut().for_each(|entry| leaves(entry, visit)),
        _ => {}
    }
}

/// A character in the message that would be mistaken for a `{% generation %}` sentinel.
fn reserved(message: &Map<String, Value>) -> Option<char> {
    fn find(value: &Value) -> Option<char> {
        match value {
            Value::String(text) => sentinel_in(text),
            Value::Array(list) => list.iter().find_map(find),
            Value::Object(object) => object.values().find_map(find),
            _ => None,
        }
    }
    message.values().find_map(find)
}

/// Length of the common prefix in bytes, at a character boundary.
fn common_prefix(a: &str, b: &str) -> usize {
    let same = a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count();
    (0..=same).rev().find(|at| a.is_char_boundary(*at) && b.is_char_boundary(*at)).unwrap_or(0)
}

/// Length of the common suffix in bytes, at a character boundary.
fn common_suffix(a: &str, b: &str) -> usize {
    let pairs = a.chars().rev().zip(b.chars().rev());
    pairs.take_while(|(a, b)| a == b).map(|(character, _)| character.len_utf8()).sum()
}
