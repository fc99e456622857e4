//! Reads YAML, of which JSON is a part, into a tree with locations. Scalars keep their text, so that no reader's idea of
//! numbers (`1e-5` is text in YAML 1.1) and of truth (`no`) comes between the file and the flag.

use std::fmt;

use saphyr_parser::{Event, Marker, Parser, ScalarStyle};

/// Lists and objects inside each other; a flag's value is one or two deep.
const MAX_DEPTH: usize = 16;

/// A line and a column, both counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct YamlLocation {
    line: usize,
    column: usize,
}

impl From<&Marker> for YamlLocation {
    fn from(marker: &Marker) -> Self {
        Self { line: marker.line(), column: marker.col() + 1 }
    }
}

impl fmt::Display for YamlLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

/// A value and its location.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct YamlNode {
    pub(super) location: YamlLocation,
    pub(super) value: YamlValue,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum YamlValue {
    /// A number, word or text; quotes make it text.
    Scalar {
        text: String,
        is_quoted: bool,
    },
    List(Vec<YamlNode>),
    Object(Vec<Member>),
}

/// A member of an object.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Member {
    pub(super) key: String,
    pub(super) location: YamlLocation,
    pub(super) node: YamlNode,
}

impl YamlValue {
    /// What it is, for a message.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Scalar { .. } => "a single value",
            Self::List(_) => "a list",
            Self::Object(_) => "an object",
        }
    }

    /// Whether it is YAML's null: absent, as if the key were not there.
    pub(super) fn is_null(&self) -> bool {
        matches!(self, Self::Scalar { text, is_quoted: false }
            if matches!(text.as_str(), "" | "~" | "null" | "Null" | "NULL"))
    }

    /// The value as JSON, for flags that take an object.
    pub(super) fn to_json(&self) -> serde_json::Value {
        match self {
            Self::Scalar { .. } if self.is_null() => serde_json::Value::Null,
            Self::Scalar { text, is_quoted: false } => match text.to_ascii_lowercase().as_str() {
                "true" => true.into(),
                "false" => false.into(),
                _ => {
                    let whole = text.parse::<i64>().map(serde_json::Value::from).ok();
                    let float = || text.parse::<f64>().ok().filter(|number| number.is_finite());
                    whole.or_else(|| float().map(Into::into)).unwrap_or_else(|| text.as_str().into())
                }
            },
            Self::Scalar { text, is_quoted: true } => text.as_str().into(),
            Self::List(nodes) => nodes.iter().map(|node| node.value.to_json()).collect(),
            Self::Object(members) => {
                let members = members.iter().map(|member| (member.key.clone(), member.node.value.to_json()));
                serde_json::Value::Object(members.collect())
            }
        }
    }
}

/// Why a text cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SyntaxError {
    pub(super) location: YamlLocation,
    pub(super) message: String,
}

/// Reads a text; `None` if it holds nothing but comments.
pub(super) fn read(text: &str) -> Result<Option<YamlNode>, SyntaxError> {
    let mut reader = Reader { parser: Parser::new_from_str(text) };
    loop {
        let (event, location) = reader.next()?;
        match event {
            Event::StreamEnd => return Ok(None),
            Event::StreamStart | Event::DocumentStart(_) | Event::Nothing => {}
            event => {
                let root = reader.node(event, location, 0)?;
                return reader.end().map(|()| Some(root));
            }
        }
    }
}

struct Reader<'a> {
    parser: Parser<'a, saphyr_parser::StrInput<'a>>,
}

impl<'a> Reader<'a> {
    fn next(&mut self) -> Result<(Event<'a>, YamlLocation), SyntaxError> {
        match self.parser.next() {
            Some(Ok((event, span))) => Ok((event, YamlLocation::from(&span.start))),
            Some(Err(error)) => Err(SyntaxError {
                location: YamlLocation::from(error.marker()),
                message: error.info().to_owned(),
            }),
            // The stream's end comes first, and nobody asks on.
            None => Ok((Event::StreamEnd, YamlLocation { line: 1, column: 1 })),
        }
    }

    fn node(
        &mut self,
        event: Event<'a>,
        location: YamlLocation,
        depth: usize,
    ) -> Result<YamlNode, SyntaxError> {
        let refuse = |message: &str| Err(SyntaxError { location, message: message.to_owned() });
        if depth > MAX_DEPTH {
            return refuse("lists and objects are nested too deeply");
        }
        let value = match event {
            Event::Scalar(text, style, _, _) => {
                YamlValue::Scalar { text: text.into_owned(), is_quoted: style != ScalarStyle::Plain }
            }
            Event::SequenceStart(..) => {
                let mut nodes = Vec::new();
                loop {
                    match self.next()? {
                        (Event::SequenceEnd, _) => break YamlValue::List(nodes),
                        (event, location) => nodes.push(self.node(event, location, depth + 1)?),
                    }
                }
            }
            Event::MappingStart(..) => {
                let mut members = Vec::new();
                loop {
                    match self.next()? {
                        (Event::MappingEnd, _) => break YamlValue::Object(members),
                        (Event::Scalar(key, ..), location) => {
                            let (event, at) = self.next()?;
                            let node = self.node(event, at, depth + 1)?;
                            members.push(Member { key: key.into_owned(), location, node });
                        }
                        (_, location) => {
                            let message = "a key is a single word".to_owned();
                            return Err(SyntaxError { location, message });
                        }
                    }
                }
            }
            Event::Alias(_) => return refuse("references (*name) are not read: write the value out"),
            _ => return refuse("a value is missing"),
        };
        Ok(YamlNode { location, value })
    }

    fn end(&mut self) -> Result<(), SyntaxError> {
        loop {
            match self.next()? {
                (Event::StreamEnd, _) => return Ok(()),
                (Event::DocumentEnd | Event::Nothing, _) => {}
                (_, location) => {
                    let message = "a run file is one document, and a second one begins here".to_owned();
                    return Err(SyntaxError { location, message });
                }
            }
        }
    }
}
