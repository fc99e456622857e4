//! Renders a model's chat template as transformers does.
//!
//! Templates come with models, so they are untrusted. Steps, output size and JSON nesting are bounded here.
//! Intermediate values are not: minijinja has no hook for operators, and sixty `s = s ~ s` take only a few hundred
//! steps. [`template_process`](super::template_process) bounds those.
//!
//! The environment matches transformers: trimmed blocks, loop controls, `raise_exception`, `strftime_now`, `tojson`
//! without escapes, and the variables messages, tools, documents, add_generation_prompt and the special tokens by
//! name. `{% generation %}`, transformers' tag for assistant text, becomes a filter that adds a sentinel on each
//! side.

use std::error::Error as _;
use std::io::{self, Write};
use std::ops::Range;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, State, UndefinedBehavior, Value, context};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};
use zeroth_base::grouped;

use super::date::Date;
use super::python_compat as python;

/// Sentinels around `{% generation %}`. Noncharacters, which Unicode reserves for internal use.
const SENTINELS: [char; 2] = ['\u{FDD0}', '\u{FDD1}'];

/// Instructions per render: real templates render ten thousand messages with fewer.
const STEPS: u64 = 10_000_000;
/// Output bytes per render.
pub(super) const OUTPUT_BYTES: usize = 64 << 20;

/// The templates of a folder by name: "default", and optionally "tool_use".
pub(super) type Sources = Vec<(String, String)>;

/// The environment of a folder's templates.
pub(super) struct TemplateContext<'a> {
    /// Special tokens by name.
    pub(super) special: &'a [(&'a str, String)],
    /// Additional variables.
    pub(super) variables: &'a Map<String, Json>,
    /// The date of `strftime_now`.
    pub(super) date: Date,
}

/// Templates compiled in this process.
pub(super) struct CompiledTemplate {
    environment: Environment<'static>,
    properties: TemplateProperties,
}

/// Properties of a folder's templates, known before rendering.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct TemplateProperties {
    default: Properties,
    tool_use: Option<Properties>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Properties {
    marks_generation: bool,
    asks_for_generation_prompt: bool,
    takes_lists: bool,
}

/// Why rendering failed.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum RenderError {
    /// The template raised an error.
    Failed(String),
    /// The template exceeded a limit, described here.
    LimitExceeded(String),
}

/// A rendered conversation.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Rendered {
    pub(super) text: String,
    /// Byte ranges inside `{% generation %}`.
    pub(super) generated: Vec<Range<usize>>,
}

impl TemplateProperties {
    fn of(self, tools: bool) -> Properties {
        self.tool_use.filter(|_| tools).unwrap_or(self.default)
    }

    /// Whether the template marks assistant text with `{% generation %}`.
    pub(super) fn marks_generation(self, tools: bool) -> bool {
        self.of(tools).marks_generation
    }

    /// Whether it uses `add_generation_prompt`.
    pub(super) fn asks_for_generation_prompt(self, tools: bool) -> bool {
        self.of(tools).asks_for_generation_prompt
    }

    /// Whether it supports contents that are lists of parts.
    pub(super) fn takes_lists(self, tools: bool) -> bool {
        self.of(tools).takes_lists
    }
}

impl CompiledTemplate {
    /// Compiles the templates; the error names the one that is invalid.
    pub(super) fn new(sources: &Sources, context: &TemplateContext) -> Result<Self, RenderError> {
        let mut environment = environment(context).map_err(RenderError::Failed)?;
        let properties = |name: &str, environment: &mut Environment<'static>| {
            let Some((_, source)) = sources.iter().find(|(known, _)| known == name) else { return Ok(None) };
            let (source, marks_generation) = with_sentinels(source);
            let asks_for_generation_prompt = source.contains("add_generation_prompt");
            let compiled = environment.add_template_owned(name.to_owned(), source);
            compiled.map_err(|error| {
                RenderError::Failed(format!("the template `{name}`: {}", described(&error)))
            })?;
            let takes_lists = takes_lists(environment, name)?;
            Ok::<_, RenderError>(Some(Properties {
                marks_generation,
                asks_for_generation_prompt,
                takes_lists,
            }))
        };
        let default = properties("default", &mut environment)?;
        let tool_use = properties("tool_use", &mut environment)?;
        let Some(default) = default else {
            let names: Vec<&str> = sources.iter().map(|(name, _)| name.as_str()).collect();
            let names = names.join(", ");
            return Err(RenderError::Failed(format!(
                "it has the templates {names}, but none named \"default\""
            )));
        };
        Ok(Self { environment, properties: TemplateProperties { default, tool_use } })
    }

    /// Properties of the templates.
    pub(super) fn properties(&self) -> TemplateProperties {
        self.properties
    }

    /// Renders within the limits.
    pub(super) fn render(
        &self,
        messages: &[Map<String, Json>],
        tools: Option<&Json>,
        add_generation_prompt: bool,
    ) -> Result<Rendered, RenderError> {
        let name = if tools.is_some() && self.properties.tool_use.is_some() { "tool_use" } else { "default" };
        let rendered = render(&self.environment, name, messages, tools, add_generation_prompt)?;
        if !self.properties.marks_generation(tools.is_some()) {
            return Ok(Rendered { text: rendered, generated: Vec::new() });
        }
        Ok(without_sentinels(&rendered))
    }
}

/// The first sentinel in a text.
pub(super) fn sentinel_in(text: &str) -> Option<char> {
    text.chars().find(|character| SENTINELS.contains(character))
}

fn environment(context: &TemplateContext) -> Result<Environment<'static>, String> {
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
    let date = context.date;
    environment.add_function("strftime_now", move |_: &State, format: String| date.strftime(&format));
    for (name, text) in context.special {
        environment.add_global((*name).to_owned(), text.clone());
    }
    for (name, value) in context.variables {
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
) -> Result<String, RenderError> {
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
    rendered.map_err(|error| render_error(&error))?;
    String::from_utf8(out.0).map_err(|error| RenderError::Failed(error.to_string()))
}

/// A buffer that fails beyond [`OUTPUT_BYTES`].
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

fn render_error(error: &Error) -> RenderError {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    let kinds = causes.filter_map(|cause| Some(cause.downcast_ref::<Error>()?.kind()));
    let stopped = kinds.chain([error.kind()]).find_map(|kind| match kind {
        ErrorKind::OutOfFuel => Some(format!("took more than {} steps", grouped(STEPS))),
        ErrorKind::WriteFailure => Some(format!("wrote more than {} MiB", OUTPUT_BYTES >> 20)),
        _ => None,
    });
    match stopped {
        Some(stopped) => RenderError::LimitExceeded(stopped),
        None if error.detail() == Some(python::TOO_DEEP) => {
            RenderError::LimitExceeded(python::TOO_DEEP.to_owned())
        }
        None => RenderError::Failed(described(error)),
    }
}

/// Converts JSON to a template value.
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

/// Probes support for lists of parts: many templates expect text, and would write a list in Python syntax, drop it,
/// or fail. A template that exceeds a limit here is rejected.
fn takes_lists(environment: &Environment, name: &str) -> Result<bool, RenderError> {
    const PROBE: &str = "probe text";
    let message = serde_json::json!({"role": "user", "content": [{"type": "text", "text": PROBE}]});
    let Json::Object(message) = message else { return Ok(false) };
    match render(environment, name, &[message], None, false) {
        Ok(text) => Ok(text.contains(PROBE) && !text.contains("'type'") && !text.contains("\"type\"")),
        Err(RenderError::Failed(_)) => Ok(false),
        Err(stopped) => Err(stopped),
    }
}

/// The error message of a template.
fn described(error: &Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{what} (line {line} of the template)"),
        None => what,
    }
}

/// Replaces `{% generation %}` and `{% endgeneration %}` with the sentinel filter, and returns whether there was one.
/// Whitespace control is kept; `with` gives the block its own scope, like transformers' tag.
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
