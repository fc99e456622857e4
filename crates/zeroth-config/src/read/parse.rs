//! Objects and lists: from a text to a tree, in one pass.

use super::cursor::Cursor;
use super::error::{Fault, Parsed, ReadErrorKind, shown};
use super::location::TextSpan;
use super::source::ConfigSource;
use super::value::{Entry, JsonNode, JsonValue};

/// How deep lists and objects may nest, the root included. A config has four levels; the stack has its limit.
pub const MAX_DEPTH: usize = 128;

/// Which values may stand where the reader is; see the module's quoteless rule.
#[derive(Clone, Copy, PartialEq)]
enum Style {
    Json,
    Hjson,
}

/// A list or an object that is being read.
#[derive(Clone, Copy)]
struct Open {
    /// Its opening bracket; the root may have none.
    bracket: Option<TextSpan>,
    closing: u8,
}

#[derive(Clone, Copy)]
struct Parser<'a> {
    cursor: Cursor<'a>,
    depth: usize,
    /// The last quoteless text that has a closing bracket in it: the likely reason for one that is missing.
    swallowed: Option<TextSpan>,
}

/// Reads a whole text.
pub(super) fn root(source: &ConfigSource) -> Parsed<JsonNode> {
    let mut parser = Parser { cursor: Cursor::new(source), depth: 0, swallowed: None };
    parser.cursor.skip_blank()?;
    match parser.cursor.peek() {
        None => Err(Fault {
            kind: ReadErrorKind::Empty,
            span: TextSpan { start: 0, end: 0 },
            message: "there is nothing in this config".to_owned(),
            help: Some("write `{}` for a config that is all defaults".to_owned()),
        }),
        Some(b'[') => Err(not_an_object(parser.cursor.here(), "a list")),
        Some(b'{') => {
            let root = parser.value(Style::Json)?;
            parser.cursor.skip_blank()?;
            if parser.cursor.peek().is_some() {
                return Err(parser.after_root());
            }
            Ok(root)
        }
        Some(_) => parser.root_without_braces(),
    }
}

fn not_an_object(span: TextSpan, found: &str) -> Fault {
    Fault {
        kind: ReadErrorKind::NotAnObject,
        span,
        message: format!("a config is an object, and this is {found}"),
        help: Some("write `{\"key\": value, …}`".to_owned()),
    }
}

impl Parser<'_> {
    fn root_without_braces(&mut self) -> Parsed<JsonNode> {
        let start = self.cursor.at;
        // A text that is one value and nothing else deserves to hear so.
        let mut alone = *self;
        if let Ok(node) = alone.value(Style::Json)
            && alone.cursor.skip_blank().is_ok()
            && alone.cursor.peek().is_none()
        {
            return Err(not_an_object(node.span, node.value.kind()));
        }
        self.depth = 1;
        let entries = self.members(Open { bracket: None, closing: b'}' })?;
        let end = entries.last().map_or(start, |entry| entry.node.span.end);
        Ok(JsonNode { span: TextSpan { start, end }, value: JsonValue::Object(entries) })
    }

    /// The value that begins here. The caller has seen that something does.
    fn value(&mut self, style: Style) -> Parsed<JsonNode> {
        let start = self.cursor.at;
        let bracket = self.cursor.here();
        let value = match self.cursor.peek() {
            Some(b'\'') if self.cursor.rest().starts_with("'''") => {
                JsonValue::Text(self.cursor.multi_line()?)
            }
            Some(b'"' | b'\'') => JsonValue::Text(self.cursor.quoted()?),
            Some(b'{') => {
                self.enter(bracket)?;
                let members = self.members(Open { bracket: Some(bracket), closing: b'}' })?;
                self.depth -= 1;
                JsonValue::Object(members)
            }
            Some(b'[') => {
                self.enter(bracket)?;
                let elements = self.elements(Open { bracket: Some(bracket), closing: b']' }, style)?;
                self.depth -= 1;
                JsonValue::List(elements)
            }
            _ if style == Style::Json => return self.cursor.json_word(),
            _ => {
                let node = self.cursor.hjson_word()?;
                if self.cursor.slice(node.span).contains(['}', ']']) {
                    self.swallowed = Some(node.span);
                }
                return Ok(node);
            }
        };
        Ok(JsonNode { span: self.cursor.since(start), value })
    }

    fn enter(&mut self, bracket: TextSpan) -> Parsed<()> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(Fault {
                kind: ReadErrorKind::TooDeep,
                span: bracket,
                message: format!("this is nested deeper than {MAX_DEPTH} levels"),
                help: Some("a config needs four: look for brackets that are never closed".to_owned()),
            });
        }
        self.cursor.at = bracket.end;
        Ok(())
    }

    /// The members of an object, and its closing bracket.
    fn members(&mut self, open: Open) -> Parsed<Vec<Entry>> {
        let mut entries = Vec::new();
        self.cursor.skip_blank()?;
        while !self.closed(open)? {
            let (key, key_span, style) = self.key()?;
            self.cursor.skip_blank()?;
            if !self.cursor.eat(":") {
                return Err(self.no_colon(key_span));
            }
            let next_line = self.cursor.skip_blank()?;
            let is_absent = matches!(self.cursor.peek(), None | Some(b',' | b'}' | b']' | b':'));
            // Hjson would take the next member, key and all, for the text that this one lacks.
            if is_absent || (next_line && self.is_member()) {
                return Err(Fault::syntax(
                    key_span,
                    format!("the key {} has no value", shown(&key)),
                    "write a value after the colon; text that has a colon in it needs quotes",
                ));
            }
            let node = self.value(style)?;
            entries.push(Entry { key, key_span, node });
            self.separator()?;
        }
        Ok(entries)
    }

    /// The elements of a list, and its closing bracket.
    fn elements(&mut self, open: Open, style: Style) -> Parsed<Vec<JsonNode>> {
        let mut nodes = Vec::new();
        self.cursor.skip_blank()?;
        while !self.closed(open)? {
            if self.cursor.peek() == Some(b':') {
                return Err(self.stray_colon());
            }
            nodes.push(self.value(style)?);
            self.separator()?;
        }
        Ok(nodes)
    }

    /// A key, its place, and what it permits as value.
    fn key(&mut self) -> Parsed<(String, TextSpan, Style)> {
        let start = self.cursor.at;
        match self.cursor.peek() {
            Some(b'"') => Ok((self.cursor.quoted()?, self.cursor.since(start), Style::Json)),
            Some(b'\'') => Ok((self.cursor.quoted()?, self.cursor.since(start), Style::Hjson)),
            Some(b':') => Err(Fault::syntax(
                self.cursor.here(),
                "there is no key before this colon",
                "a member is `\"key\": value`",
            )),
            Some(byte @ (b'{' | b'[')) => Err(Fault::syntax(
                self.cursor.here(),
                format!("`{}` stands where a key was expected", char::from(byte)),
                "a member is `\"key\": value`",
            )),
            _ => {
                self.cursor.at = self.quoteless_key_end();
                let span = self.cursor.since(start);
                self.cursor.check_visible(span)?;
                Ok((self.cursor.slice(span).to_owned(), span, Style::Hjson))
            }
        }
    }

    fn quoteless_key_end(&self) -> usize {
        self.cursor.find(|bytes| {
            matches!(bytes[0], b' ' | b'\t' | b'\n' | b'\r' | b':' | b'{' | b'}' | b'[' | b']' | b',')
        })
    }

    /// Whether a key and a colon come next, on one line.
    fn is_member(&self) -> bool {
        let mut ahead = self.cursor;
        match ahead.peek() {
            Some(b'"' | b'\'') if ahead.quoted().is_err() => return false,
            Some(b'"' | b'\'') => {}
            _ => ahead.at = self.quoteless_key_end(),
        }
        ahead.at > self.cursor.at && ahead.rest().trim_start_matches([' ', '\t']).starts_with(':')
    }

    /// Steps over the closing bracket of `open` if it comes next. A root without brackets closes with the text.
    fn closed(&mut self, open: Open) -> Parsed<bool> {
        let here = self.cursor.here();
        match (self.cursor.peek(), open.bracket) {
            (None, None) => Ok(true),
            (None, Some(bracket)) => Err(self.never_closed(bracket, open.closing)),
            (Some(byte), Some(_)) if byte == open.closing => {
                self.cursor.at += 1;
                Ok(true)
            }
            (Some(byte @ (b'}' | b']')), None) => Err(closes_nothing(here, byte)),
            (Some(byte @ (b'}' | b']')), Some(bracket)) => {
                let opening = self.cursor.slice(bracket);
                let location = self.cursor.source.location(bracket.start);
                Err(Fault::syntax(
                    here,
                    format!("`{}` does not close the `{opening}` of {location}", char::from(byte)),
                    format!("write `{}` before it, or remove it", char::from(open.closing)),
                ))
            }
            (Some(b','), _) => Err(Fault::syntax(
                here,
                "there is nothing before this comma",
                "remove it, or write what is missing",
            )),
            _ => Ok(false),
        }
    }

    /// Steps to the next member or element, or to what closes them. They are parted by a comma or a line end.
    fn separator(&mut self) -> Parsed<()> {
        let line_ended = self.cursor.skip_blank()?;
        if self.cursor.eat(",") {
            self.cursor.skip_blank()?;
            return Ok(());
        }
        match self.cursor.peek() {
            None | Some(b'}' | b']') => Ok(()),
            Some(b':') => Err(self.stray_colon()),
            Some(_) if line_ended => Ok(()),
            Some(_) => {
                let start = self.cursor.at;
                let end = self.cursor.find(|bytes| bytes[0] == b' ' || super::cursor::ends_word(bytes));
                let span = TextSpan { start, end: end.max(self.cursor.here().end) };
                self.cursor.check_visible(self.cursor.here())?;
                Err(Fault::syntax(
                    span,
                    format!("a comma is missing before {}", shown(self.cursor.slice(span))),
                    "write `,` between the two, or quotes around text that belongs together",
                ))
            }
        }
    }

    fn stray_colon(&self) -> Fault {
        Fault::syntax(
            self.cursor.here(),
            "this colon follows no key",
            "a member is `\"key\": value`: is a value, a comma or a `{` missing before it?",
        )
    }

    fn no_colon(&self, key_span: TextSpan) -> Fault {
        let key = self.cursor.slice(key_span);
        let help = match key.split_once('=') {
            Some((name, value)) if !key.starts_with(['"', '\'']) => format!("write `{name}: {value}`"),
            _ if self.cursor.rest().starts_with('=') => "write `:` instead of `=`".to_owned(),
            _ => "a member is `\"key\": value`".to_owned(),
        };
        Fault::syntax(key_span, format!("the key {} has no colon after it", shown(key)), help)
    }

    fn never_closed(&self, bracket: TextSpan, closing: u8) -> Fault {
        let closing = char::from(closing);
        let help = match self.swallowed {
            Some(text) => format!(
                "the text of {} runs to the end of its line, `{closing}` included: put it in quotes",
                self.cursor.source.location(text.start)
            ),
            None => format!("add `{closing}` where it ends"),
        };
        Fault::syntax(bracket, format!("this `{}` is never closed", self.cursor.slice(bracket)), help)
    }

    fn after_root(&self) -> Fault {
        let here = self.cursor.here();
        match self.cursor.peek() {
            Some(byte @ (b'}' | b']')) => closes_nothing(here, byte),
            _ => Fault::syntax(
                here,
                "there is more after the end of the config",
                "remove it, or move it before the last `}`",
            ),
        }
    }
}

fn closes_nothing(span: TextSpan, bracket: u8) -> Fault {
    let message = format!("this `{}` closes nothing", char::from(bracket));
    Fault::syntax(span, message, "remove it, or add the bracket that opens it")
}
