//! A model's chat template, rendered as transformers renders it.
//!
//! Templates come with models, and so from strangers. Here their steps, their output and the depth of what they write as
//! JSON are bounded. What values they make on the way is not: minijinja has no hook for operators, and sixty times
//! `s = s ~ s` is a few hundred steps. [`template_process`](super::template_process) bounds that.
//!
//! Same environment (blocks trimmed, loop controls, `raise_exception`, `strftime_now`, `tojson` without escapes), same
//! variables (messages, tools, documents, add_generation_prompt, the special tokens by name). `{% generation %}`, which
//! transformers adds to Jinja to mark what an assistant wrote, becomes a filter that puts a sentinel on either side.

use std::error::Error as _;
use std::io::{self, Write};
use std::ops::Range;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, State, UndefinedBehavior, Value, context};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};
use zeroth_base::grouped;

use super::day::Day;
use super::python;

/// Around what `{% generation %}` encloses. Noncharacters: Unicode keeps them for a program's own use.
const SENTINELS: [char; 2] = ['\u{FDD0}', '\u{FDD1}'];

/// Instructions that one render may take: real templates write ten thousand messages with fewer.
const STEPS: u64 = 10_000_000;
/// Bytes that one render may write.
pub(super) const OUTPUT_BYTES: usize = 64 << 20;

/// The templates of a folder by name: "default", and "tool_use" where it has one.
pub(super) type Sources = Vec<(String, String)>;

/// What all templates of a folder see.
pub(super) struct Surroundings<'a> {
    /// Special tokens by name.
    pub(super) special: &'a [(&'a str, String)],
    /// Variables beyond those of transformers.
    pub(super) variables: &'a Map<String, Json>,
    /// What `strftime_now` shows.
    pub(super) day: Day,
}

/// Templates compiled in this process.
pub(super) struct CompiledTemplate {
    environment: Environment<'static>,
    facts: TemplateFacts,
}

/// What is known of the templates of a folder before a row is rendered.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct TemplateFacts {
    default: Facts,
    tool_use: Option<Facts>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Facts {
    marks_generation: bool,
    asks_for_generation_prompt: bool,
    takes_lists: bool,
}

/// Why a conversation was not rendered.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum NotRendered {
    /// The template refused it, or failed.
    Refused(String),
    /// A bound was reached: what the template did.
    Stopped(String),
}

/// A rendered conversation.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Rendered {
    pub(super) text: String,
    /// The bytes that `{% generation %}` enclosed.
    pub(super) generated: Vec<Range<usize>>,
}

impl TemplateFacts {
    fn of(self, tools: bool) -> Facts {
        self.tool_use.filter(|_| tools).unwrap_or(self.default)
    }

    /// Whether the template itself says what an assistant wrote.
    pub(super) fn marks_generation(self, tools: bool) -> bool {
        self.of(tools).marks_generation
    }

    /// Whether it looks at `add_generation_prompt` at all.
    pub(super) fn asks_for_generation_prompt(self, tools: bool) -> bool {
        self.of(tools).asks_for_generation_prompt
    }

    /// Whether it can write contents that are lists of parts.
    pub(super) fn takes_lists(self, tools: bool) -> bool {
        self.of(tools).takes_lists
    }
}

impl CompiledTemplate {
    /// Compiles; the error says what is wrong with which template.
    pub(super) fn new(sources: &Sources, around: &Surroundings) -> Result<Self, NotRendered> {
        let mut environment = environment(around).map_err(NotRendered::Refused)?;
        let facts = |name: &str, environment: &mut Environment<'static>| {
            let Some((_, source)) = sources.iter().find(|(known, _)| known == name) else { return Ok(None) };
            let (source, marks_generation) = with_sentinels(source);
            let asks_for_generation_prompt = source.contains("add_generation_prompt");
            let compiled = environment.add_template_owned(name.to_owned(), source);
            compiled.map_err(|error| {
                NotRendered::Refused(format!("the template `{name}`: {}", described(&error)))
            })?;
            let takes_lists = takes_lists(environment, name)?;
            Ok::<_, NotRendered>(Some(Facts { marks_generation, asks_for_generation_prompt, takes_lists }))
        };
        let default = facts("default", &mut environment)?;
        let tool_use = facts("tool_use", &mut environment)?;
        let Some(default) = default else {
            let names: Vec<&str> = sources.iter().map(|(name, _)| name.as_str()).collect();
            let names = names.join(", ");
            return Err(NotRendered::Refused(format!(
                "it has the templates {names}, and none is named \"default\""
            )));
        };
        Ok(Self { environment, facts: TemplateFacts { default, tool_use } })
    }

    /// What is known of the templates.
    pub(super) fn facts(&self) -> TemplateFacts {
        self.facts
    }

    /// Renders within the bounds.
    pub(super) fn render(
        &self,
        messages: &[Map<String, Json>],
        tools: Option<&Json>,
        add_generation_prompt: bool,
    ) -> Result<Rendered, NotRendered> {
        let name = if tools.is_some() && self.facts.tool_use.is_some() { "tool_use" } else { "default" };
        let rendered = render(&self.environment, name, messages, tools, add_generation_prompt)?;
        if !self.facts.marks_generation(tools.is_some()) {
            return Ok(Rendered { text: rendered, generated: Vec::new() });
        }
        Ok(without_sentinels(&rendered))
    }
}

/// The first of the sentinels in a text, which would be taken for one of ours.
pub(super) fn sentinel_in(text: &str) -> Option<char> {
    text.chars().find(|character| SENTINELS.contains(character))
}

fn environment(around: &Surroundings) -> Result<Environment<'static>, String> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.map_err(|error| error.to_string())?);
    environment.set_fuel(Some(STEPS));
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(python::method);
    environment.add_filter("tojson", python::tojson);
    environment.add_filter("trim", python::trim);
    environment.add_filter("zeroth_generation", |text: String| {
        [SENTINELS[0].to_string(), text, SENTINELS[1].to_string()].concat()
    });
    environment.add_test("iterable", python::is_iterable);
    environment.add_function("raise_exception", |message: &Value| {
        Err::<Value, _>(Error::new(ErrorKind::InvalidOperation, message.to_string()))
    });
    let day = around.day;
    environment.add_function("strftime_now", move |_: &State, format: String| day.strftime(&format));
    for (name, text) in around.special {
        environment.add_global((*name).to_owned(), text.clone());
    }
    for (name, value) in around.variables {
        environment.add_global(name.clone(), value_of(value));
    }
    Ok(environment)
}

fn render(
    environment: &Environment,
    name: &str,
    messages: &[Map<String, Json>],
    tools: Option<&Json>,
    add_generation_prompt: bool,
) -> Result<String, NotRendered> {
    let mut out = Bounded(Vec::new());
    let context = context! {
        messages => messages.iter().map(object_of).collect::<Vec<_>>(),
        tools => tools.map_or_else(|| Value::from(()), value_of),
        documents => Value::from(()),
        add_generation_prompt,
    };
    let rendered = environment
        .get_template(name)
        .and_then(|found| found.render_captured_to(context, &mut out).map(drop));
    rendered.map_err(|error| not_rendered(&error))?;
    String::from_utf8(out.0).map_err(|error| NotRendered::Refused(error.to_string()))
}

/// Takes [`OUTPUT_BYTES`] and then fails.
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > OUTPUT_BYTES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn not_rendered(error: &Error) -> NotRendered {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    let kinds = causes.filter_map(|cause| Some(cause.downcast_ref::<Error>()?.kind()));
    let stopped = kinds.chain([error.kind()]).find_map(|kind| match kind {
        ErrorKind::OutOfFuel => Some(format!("took more than {} steps", grouped(STEPS))),
        ErrorKind::WriteFailure => Some(format!("wrote more than {} MiB", OUTPUT_BYTES >> 20)),
        _ => None,
    });
    match stopped {
        Some(stopped) => NotRendered::Stopped(stopped),
        None if error.detail() == Some(python::TOO_DEEP) => NotRendered::Stopped(python::TOO_DEEP.to_owned()),
        None => NotRendered::Refused(described(error)),
    }
}

/// JSON as a template sees it.
fn value_of(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(flag) => Value::from(*flag),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(whole), _) => Value::from(whole),
            (None, Some(whole)) => Value::from(whole),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(list) => Value::from(list.iter().map(value_of).collect::<Vec<_>>()),
        Json::Object(object) => object_of(object),
    }
}

fn object_of(object: &Map<String, Json>) -> Value {
    Value::from_pairs(object.iter().map(|(key, value)| (key.as_str(), value_of(value))))
}

/// Many templates take a content for a text, and would write a list of parts as Python shows it, drop it, or fail.
/// One that has to be stopped for so little is not asked for more.
fn takes_lists(environment: &Environment, name: &str) -> Result<bool, NotRendered> {
    const PROBE: &str = "probe text";
    let message = serde_json::json!({"role": "user", "content": [{"type": "text", "text": PROBE}]});
    let Json::Object(message) = message else { return Ok(false) };
    match render(environment, name, &[message], None, false) {
        Ok(text) => Ok(text.contains(PROBE) && !text.contains("'type'") && !text.contains("\"type\"")),
        Err(NotRendered::Refused(_)) => Ok(false),
        Err(stopped) => Err(stopped),
    }
}

/// What a template said when it stopped.
fn described(error: &Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{what} (line {line} of the template)"),
        None => what,
    }
}

/// Puts our filter where `{% generation %}` and `{% endgeneration %}` stand, and says whether there was one. The tags'
/// own white space control is kept; `with` gives the block a scope of its own, as transformers' tag has.
fn with_sentinels(source: &str) -> (String, bool) {
    let mut out = String::with_capacity(source.len());
    let mut found = false;
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let Some(close) = rest[open..].find("%}").map(|close| open + close) else { break };
        let inside = &rest[open + 2..close];
        let before = inside.strip_prefix(['-', '+']).map_or("", |_| &inside[..1]);
        let inside = &inside[before.len()..];
        let after = inside.strip_suffix(['-', '+']).map_or("", |bare| &inside[bare.len()..]);
        let word = inside[..inside.len() - after.len()].trim();
        out.push_str(&rest[..open]);
        match word {
            "generation" => {
                found = true;
                out.push_str(&format!("{{%{before} filter zeroth_generation %}}{{% with {after}%}}"));
            }
            "endgeneration" => out.push_str(&format!("{{%{before} endwith %}}{{% endfilter {after}%}}")),
            _ => out.push_str(&rest[open..close + 2]),
        }
        rest = &rest[close + 2..];
    }
    out.push_str(rest);
    (out, found)
}

fn without_sentinels(rendered: &str) -> Rendered {
    let mut text = String::with_capacity(rendered.len());
    let mut generated = Vec::new();
    let mut start = None;
    for character in rendered.chars() {
        if character == SENTINELS[0] {
            start = Some(text.len());
        } else if character == SENTINELS[1] {
            generated.extend(start.take().map(|start| start..text.len()));
        } else {
            text.push(character);
        }
    }
    Rendered { text, generated }
}
