//! A model's chat template, rendered as transformers renders it.
//!
//! Same environment (blocks trimmed, loop controls, `raise_exception`, `strftime_now`, `tojson` without escapes), same
//! variables (messages, tools, documents, add_generation_prompt, the special tokens by name). `{% generation %}`, which
//! transformers adds to Jinja to mark what an assistant wrote, becomes a filter that puts a sentinel on either side.

use std::ops::Range;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, State, UndefinedBehavior, Value, context};
use serde_json::{Map, Value as Json};

use super::day::Day;
use super::python;

/// Around what `{% generation %}` encloses. Noncharacters: Unicode keeps them for a program's own use.
const SENTINELS: [char; 2] = ['\u{FDD0}', '\u{FDD1}'];

/// The templates of a folder by name: "default", and "tool_use" where it has one.
pub(super) type Sources = Vec<(String, String)>;

/// What all templates of a folder see.
pub(super) struct Surroundings<'a> {
    /// Special tokens by name.
    pub(super) special: &'a [(&'static str, String)],
    /// Variables beyond those of transformers.
    pub(super) variables: &'a Map<String, Json>,
    /// What `strftime_now` shows.
    pub(super) day: Day,
}

/// Compiled templates.
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    default: Facts,
    tool_use: Option<Facts>,
}

/// What is known of a template without rendering it.
#[derive(Clone, Copy)]
struct Facts {
    marks_generation: bool,
    asks_for_generation_prompt: bool,
    takes_lists: bool,
}

/// A rendered conversation.
pub(super) struct Rendered {
    pub(super) text: String,
    /// The bytes that `{% generation %}` enclosed.
    pub(super) generated: Vec<Range<usize>>,
}

impl ChatTemplate {
    /// Compiles; the error says what is wrong with which template.
    pub(super) fn new(sources: &Sources, around: &Surroundings) -> Result<Self, String> {
        let mut environment = environment(around)?;
        let facts = |name: &str, environment: &mut Environment<'static>| {
            let Some((_, source)) = sources.iter().find(|(known, _)| known == name) else { return Ok(None) };
            let (source, marks_generation) = with_sentinels(source);
            let asks_for_generation_prompt = source.contains("add_generation_prompt");
            let compiled = environment.add_template_owned(name.to_owned(), source);
            compiled.map_err(|error| format!("the template `{name}`: {}", described(&error)))?;
            let takes_lists = takes_lists(environment, name);
            Ok::<_, String>(Some(Facts { marks_generation, asks_for_generation_prompt, takes_lists }))
        };
        let default = facts("default", &mut environment)?;
        let tool_use = facts("tool_use", &mut environment)?;
        let Some(default) = default else {
            let names: Vec<&str> = sources.iter().map(|(name, _)| name.as_str()).collect();
            return Err(format!("it has the templates {}, and none is named \"default\"", names.join(", ")));
        };
        Ok(Self { environment, default, tool_use })
    }

    fn facts(&self, tools: bool) -> Facts {
        self.tool_use.filter(|_| tools).unwrap_or(self.default)
    }

    /// Whether the template itself says what an assistant wrote.
    pub(super) fn marks_generation(&self, tools: bool) -> bool {
        self.facts(tools).marks_generation
    }

    /// Whether it looks at `add_generation_prompt` at all.
    pub(super) fn asks_for_generation_prompt(&self, tools: bool) -> bool {
        self.facts(tools).asks_for_generation_prompt
    }

    /// Whether it can write contents that are lists of parts.
    pub(super) fn takes_lists(&self, tools: bool) -> bool {
        self.facts(tools).takes_lists
    }

    /// Renders; the error is what the template said.
    pub(super) fn render(
        &self,
        messages: &[Map<String, Json>],
        tools: Option<&Json>,
        add_generation_prompt: bool,
    ) -> Result<Rendered, String> {
        let name = if tools.is_some() && self.tool_use.is_some() { "tool_use" } else { "default" };
        let rendered = render(&self.environment, name, messages, tools, add_generation_prompt)
            .map_err(|error| described(&error))?;
        if !self.marks_generation(tools.is_some()) {
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
        environment.add_global(*name, text.clone());
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
) -> Result<String, Error> {
    environment.get_template(name)?.render(context! {
        messages => messages.iter().map(object_of).collect::<Vec<_>>(),
        tools => tools.map_or_else(|| Value::from(()), value_of),
        documents => Value::from(()),
        add_generation_prompt,
    })
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
fn takes_lists(environment: &Environment, name: &str) -> bool {
    const PROBE: &str = "probe text";
    let message = serde_json::json!({"role": "user", "content": [{"type": "text", "text": PROBE}]});
    let Json::Object(message) = message else { return false };
    render(environment, name, &[message], None, false)
        .is_ok_and(|text| text.contains(PROBE) && !text.contains("'type'") && !text.contains("\"type\""))
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
