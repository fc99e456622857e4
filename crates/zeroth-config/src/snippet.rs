//! Compiler-style messages: the line of the file, carets under the error, a remedy.

use crate::check::Verdict;
use crate::read::{ConfigSource, ReadError, TextSpan};

/// Lines longer than this are shown around the caret only.
const WIDTH: usize = 100;

/// The lines of a message: title, place, the line of the file with carets and a label under them.
///
/// ```text
/// error: `gradient_cliping` is unknown
///   ds.json: line 4, column 3
///     |
///   4 |   "gradient_cliping": 1.0,
///     |   ^^^^^^^^^^^^^^^^^^ the top level has no key …; did you mean `gradient_clipping`?
/// ```
pub fn snippet(title: &str, source: &ConfigSource, span: TextSpan, label: &str) -> String {
    let location = source.location(span.start);
    let line = source.line(location.line);
    let underlined = source.text().get(span.start..span.end).map_or(1, |text| {
        // A span over several lines is underlined to the end of its first.
        text.lines().next().unwrap_or("").chars().count().max(1)
    });
    frame(title, source.name(), location.line, location.column, line, underlined, label)
}

/// The message for a verdict on a key.
pub fn of_verdict(level: &str, source: &ConfigSource, verdict: &Verdict) -> String {
    let title = format!("{level}: `{}` is {}", verdict.path, verdict.status.title());
    snippet(&title, source, verdict.span, &verdict.message)
}

/// The message for a file that cannot be read.
pub fn of_read_error(error: &ReadError) -> String {
    let (Some(location), Some(line)) = (&error.location, &error.line_text) else {
        let help = error.help.as_ref().map(|help| format!("\n  {help}")).unwrap_or_default();
        return format!("error: {error}{help}\n");
    };
    // The span counts bytes, carets count characters, and both end with the line.
    let bytes = error.span.map_or(1, |span| span.end.saturating_sub(span.start));
    let after = line.char_indices().nth(location.column - 1).map_or("", |(at, _)| &line[at..]);
    let underlined = after.char_indices().take_while(|(at, _)| *at < bytes).count().max(1);
    let label = error.help.as_deref().unwrap_or("here");
    let title = format!("error: {}", error.message);
    frame(&title, &error.source_name, location.line, location.column, line, underlined, label)
}

fn frame(
    title: &str,
    name: &str,
    line_number: usize,
    column: usize,
    line: &str,
    underlined: usize,
    label: &str,
) -> String {
    let number = line_number.to_string();
    let gutter = " ".repeat(number.len());
    let (shown, indent) = window(line, column - 1);
    let carets = "^".repeat(underlined.min(WIDTH.saturating_sub(indent.chars().count()).max(1)));
    format!(
        "{title}\n  {name}: line {line_number}, column {column}\n  {gutter} |\n  {number} | {shown}\n  {gutter} | \
         {indent}{carets} {label}\n"
    )
}

/// The part of a line around a column (from 0), and the blank that brings a caret under it. Tabs stay tabs in the
/// blank, so that the caret stands right whatever their width.
fn window(line: &str, column: usize) -> (String, String) {
    let characters: Vec<char> = line.chars().collect();
    let start = if characters.len() <= WIDTH { 0 } else { column.saturating_sub(WIDTH / 2) };
    let shown: String = characters.iter().skip(start).take(WIDTH).map(|c| printable(*c)).collect();
    let blank =
        characters.iter().skip(start).take(column - start).map(|c| if *c == '\t' { '\t' } else { ' ' });
    let cut = if start > 0 { "…" } else { "" };
    let pad = if start > 0 { " " } else { "" };
    (format!("{cut}{shown}"), pad.chars().chain(blank).collect())
}

/// Control characters in a file must not reach the terminal.
fn printable(c: char) -> char {
    if c.is_control() && c != '\t' { '\u{fffd}' } else { c }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_caret_stands_under_the_key() {
        let source = ConfigSource::from_text("ds.json", "{\n  \"stage\": 3\n}");
        let text = snippet("error: wrong", &source, TextSpan { start: 4, end: 11 }, "say this");
        let expected = "error: wrong\n  ds.json: line 2, column 3\n    |\n  2 |   \"stage\": 3\n    |   ^^^^^^^ say this\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn an_error_of_reading_is_underlined_by_characters() {
        let error =
            crate::read::parse(ConfigSource::from_text("ds.json", "{\u{201c}stage\u{201d}: 3}")).unwrap_err();
        let text = of_read_error(&error);
        let carets = text.lines().last().unwrap().matches('^').count();
        assert_eq!(carets, 1, "one typographic quote of three bytes has one caret:\n{text}");
    }

    #[test]
    fn a_tab_before_the_key_stays_a_tab() {
        let source = ConfigSource::from_text("ds.json", "{\n\t\"stage\": 3}");
        let text = snippet("error", &source, TextSpan { start: 3, end: 10 }, "x");
        assert!(text.contains("\n    | \t^^^^^^^ x"), "{text}");
    }

    #[test]
    fn a_long_line_is_shown_around_the_place() {
        let line =
            format!("{{\"a\": \"{}\", \"wrong\": 1, \"b\": \"{}\"}}", "x".repeat(500), "y".repeat(500));
        let at = line.find("\"wrong\"").unwrap();
        let source = ConfigSource::from_text("long.json", line);
        let text = snippet("error", &source, TextSpan { start: at, end: at + 7 }, "here");
        let shown = text.lines().nth(3).unwrap();
        assert!(shown.chars().count() < 120 && shown.contains("\"wrong\": 1"), "{text}");
        let caret = text.lines().nth(4).unwrap().find('^').unwrap();
        // The mark of the cut is one character of three bytes.
        assert_eq!(shown.find("\"wrong\"").unwrap() - 2, caret, "{text}");
    }
}
