//! Assistant-only loss: which tokens of a rendered conversation are trained.
//!
//! A template with `{% generation %}` marks them itself. For any other, messages are located in the rendered text:
//! the conversation is rendered again with a marker character around each message. If the text without markers is
//! unchanged, they give each message's position. Otherwise the template depends on the content, so messages are
//! replaced one at a time, and the part that changes belongs to the message. The trained span is then extended: back
//! to the end of the generation prompt, so that text the template writes before the content (an empty `<think>`, the
//! start of a tool call) is trained as the model has to generate it, and forward to the first special token, which
//! ends the turn.

use std::cell::Cell;
use std::ops::Range;

use serde_json::{Map, Value};

use super::chat_template::{Rendered, sentinel_in};
use super::conversation::{ASSISTANT, Conversation, REASONING, role};
use super::renderer::ChatTemplate;
use super::tokenizer::{SpannedToken, TextTokenizer};
use super::{Encoded, IGNORED, RowProblem};

/// Marker characters: two private-use code points per message, from here on.
const FIRST_MARKER: u32 = 0xF_0000;
const MARKERS: u32 = 0xFFFE;
/// Messages that are marked at a time.
const MARKED: usize = (MARKERS / 2) as usize;

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
        let (text, tokens, work) = (&text[..], &tokens[..], Cell::new(0));
        let search = MessageSearch { conversation, template, tokenizer, text, tokens, work };
        search.trained(&generated)?
    };
    label(&tokens, trained, into);
    Ok(())
}

/// Renders; the error names the message from which on the template refuses the conversation.
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
    // Up to `accepted` messages are rendered, and up to `number` are not.
    let (mut accepted, mut number) = (0, messages.len());
    while number - accepted > 1 {
        let middle = accepted.midpoint(number);
        match template.render(&messages[..middle], tools.as_ref(), false)? {
            Ok(_) => accepted = middle,
            Err(_) => number = middle,
        }
    }
    Err(RowProblem::Template { number, message })
}

/// Labels tokens that overlap a trained span with their own id.
fn label(tokens: &[SpannedToken], mut trained: Vec<Range<usize>>, into: &mut Encoded) {
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

/// What all renders of a conversation may take together, in bytes of text: some templates need one for each message.
const MAX_WORK: u64 = 2 << 30;
/// What a message takes in addition to its text.
const MESSAGE_WORK: usize = 256;

/// Locates messages in the rendered text.
struct MessageSearch<'a> {
    conversation: &'a Conversation,
    template: &'a ChatTemplate,
    tokenizer: &'a TextTokenizer,
    text: &'a str,
    tokens: &'a [SpannedToken],
    /// What was rendered so far.
    work: Cell<u64>,
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
        let edges = Edges::of(&found.places);
        for (index, message) in messages.iter().enumerate().filter(|(index, _)| trained[*index]) {
            let Some(place) = &found.places[index] else {
                return Err(RowProblem::NoTrace { number: index + 1, role: role(message).to_owned() });
            };
            let before = parts.len();
            // In order, and none inside of another.
            let first = generated.partition_point(|part| part.end < place.start);
            let near = generated[first..].iter().take_while(|part| part.start <= place.end);
            parts.extend(near.filter(|part| within(part, place)).cloned());
            if parts.len() == before {
                parts.push(self.extended(index, place, &found, &edges)?);
            }
        }
        Ok(parts)
    }

    /// Locates all messages with one more render for each [`MARKED`] of them; `None` if markers change the template's
    /// output.
    fn by_markers(&self) -> Result<Option<Found>, RowProblem> {
        if self.text.contains(is_marker) {
            return Ok(None);
        }
        let count = self.conversation.messages.len();
        let mut places: Vec<Option<Range<usize>>> = vec![None; count];
        let mut generation_prompt = String::new();
        for first in (0..count).step_by(MARKED) {
            let marked = first..count.min(first + MARKED);
            match self.mark(marked.clone(), &mut places[marked])? {
                Some(prompt) => generation_prompt = prompt,
                None => return Ok(None),
            }
        }
        if self.prompts() && generation_prompt.is_empty() {
            generation_prompt = self.generation_prompt()?;
        }
        Ok(Some(Found { places, exact: false, generation_prompt }))
    }

    /// Locates some of the messages, and returns the generation prompt.
    fn mark(
        &self,
        range: Range<usize>,
        places: &mut [Option<Range<usize>>],
    ) -> Result<Option<String>, RowProblem> {
        let mut messages = self.conversation.messages.clone();
        for (message, index) in messages[range].iter_mut().zip(0..) {
            *message = marked(message, index);
        }
        let prompts = self.prompts();
        let Ok(rendered) = self.render(&messages, prompts)? else { return Ok(None) };

        let mut closed = vec![false; places.len()];
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
        Ok(Some(plain[same..].to_owned()))
    }

    fn prompts(&self) -> bool {
        self.template.properties().asks_for_generation_prompt(self.conversation.tools.is_some())
    }

    /// What rendering a number of messages takes.
    fn work_of(&self, messages: usize) -> u64 {
        (messages * MESSAGE_WORK + self.text.len()) as u64
    }

    /// Refuses more work than the limit, before it is done.
    fn check_work(&self, more: u64) -> Result<(), RowProblem> {
        if self.work.get().saturating_add(more) > MAX_WORK {
            return Err(RowProblem::TooManyRenders { messages: self.conversation.messages.len() });
        }
        Ok(())
    }

    /// Renders other messages, within the limit of a conversation.
    fn render(
        &self,
        messages: &[Map<String, Value>],
        add_generation_prompt: bool,
    ) -> Result<Result<Rendered, String>, RowProblem> {
        self.work.set(self.work.get() + self.work_of(messages.len()));
        self.check_work(0)?;
        self.template.render(messages, self.conversation.tools.as_ref(), add_generation_prompt)
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
        self.check_work(self.work_of(messages.len()).saturating_mul(messages.len() as u64))?;
        let foreign = absent_from(self.text);
        let mut places = Vec::with_capacity(messages.len());
        let mut others = messages.clone();
        for (index, message) in messages.iter().enumerate() {
            others[index] = with_texts(message, &mut |_| foreign.clone());
            let rendered = self.render(&others, false)?;
            others[index].clone_from(message);
            let Ok(Rendered { text: other, .. }) = rendered else {
                places.push(None);
                continue;
            };
            let start = common_prefix(self.text, &other);
            let end = self.text.len() - common_suffix(&self.text[start..], &other[start..]);
            places.push((other != self.text).then_some(start..end));
        }
        let generation_prompt = if self.prompts() { self.generation_prompt()? } else { String::new() };
        Ok(Found { places, exact: true, generation_prompt })
    }

    /// The generation prompt: what the template appends after the whole conversation or, as some only append it after
    /// a user turn, before a trained assistant message.
    fn generation_prompt(&self) -> Result<String, RowProblem> {
        let Conversation { messages, trained, .. } = self.conversation;
        let answers =
            (1..messages.len()).filter(|index| trained[*index] && role(&messages[*index]) == ASSISTANT);
        for count in [messages.len()].into_iter().chain(answers) {
            let render = |prompt| self.render(&messages[..count], prompt);
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
        edges: &Edges,
    ) -> Result<Range<usize>, RowProblem> {
        let before = edges.before(index, place).and_then(|other| found.places[other].as_ref());
        let floor = before.map_or(0, |before| before.end);
        let ceiling = edges.after(index, place).unwrap_or(self.text.len());
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
        let ends_turn = |token: &&SpannedToken| self.tokenizer.is_special(token.id);
        let turn_end = self.tokens[after..].iter().take_while(|token| token.from < ceiling).find(ends_turn);
        Ok(start..turn_end.map_or(own.end.min(ceiling), |token| token.to))
    }

    /// Where assistant text would begin in place of this message: a template may write its own text before a tool
    /// call or reasoning. `before` is the position of the previous message.
    fn beginning_of_turn(&self, index: usize, before: &Range<usize>) -> Result<Option<usize>, RowProblem> {
        let messages = &self.conversation.messages;
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
            let rendered = self.render(&others.messages[..count], false)?;
            if let Some(beginning) = rendered.ok().and_then(|rendered| written(&rendered.text)) {
                return Ok(Some(beginning));
            }
        }
        Ok(None)
    }
}

/// Where messages begin and end, each sorted by position: a search for neighbours does not look at all of them.
struct Edges {
    /// Ends and their messages.
    ends: Vec<(usize, usize)>,
    /// Beginnings and their messages.
    starts: Vec<(usize, usize)>,
}

impl Edges {
    fn of(places: &[Option<Range<usize>>]) -> Self {
        let known = || places.iter().enumerate().filter_map(|(index, place)| Some((place.as_ref()?, index)));
        let mut ends: Vec<_> = known().map(|(place, index)| (place.end, index)).collect();
        let mut starts: Vec<_> = known().map(|(place, index)| (place.start, index)).collect();
        ends.sort_unstable();
        starts.sort_unstable();
        Self { ends, starts }
    }

    /// The last other message that ends before this one begins.
    fn before(&self, index: usize, place: &Range<usize>) -> Option<usize> {
        let count = self.ends.partition_point(|(end, _)| *end <= place.start);
        self.ends[..count].iter().rev().map(|(_, other)| *other).find(|other| *other != index)
    }

    /// Where the next other message begins.
    fn after(&self, index: usize, place: &Range<usize>) -> Option<usize> {
        let first = self.starts.partition_point(|(start, _)| *start < place.end);
        self.starts[first..].iter().find(|(_, other)| *other != index).map(|(start, _)| *start)
    }
}

fn is_marker(character: char) -> bool {
    (FIRST_MARKER..FIRST_MARKER + MARKERS).contains(&(character as u32))
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
