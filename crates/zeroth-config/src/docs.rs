//! The page `docs/config.md`, written from the table.

use std::fmt::Write;

use crate::explain;
use crate::schema::{self, Effect, Key, KeyType};

const HEAD: &str = "\
# Every key of the config

This page is written from the table in `crates/zeroth-config/src/schema/`; a test fails when it is stale
(`ZEROTH_BLESS=1 cargo test -p zeroth-config --test it pages::` writes it anew). Compatible with DeepSpeed 0.19.6.

A file may be JSON, JSON with comments and trailing commas, or Hjson, and base64 of these on the command line. A key
absent from the file counts as `\"auto\"`: the flag that was given, else the file, else the default. Numbers such as
`5e8` are whole; a numeric text such as `\"8\"` is accepted with a note; a key given twice is an error; a key that
begins with `_` is a comment.

`zeroth config explain KEY` prints an entry of this page; `zeroth config check FILE` says what becomes of each key of a
file; `zeroth config schema` prints the same table as a JSON Schema for editors.

**Here** says what becomes of the key: honoured; not yet (what it asks for is not built); built in (always so); no
effect, with the reason; deprecated; refused. `zeroth train` refuses a file that asks for something not yet built that
would change what is trained or how memory is used; a key that only refines or reports is named in a note.
";

/// The whole page.
pub fn config_page() -> String {
    let mut page = HEAD.to_owned();
    let mut sections: Vec<&str> = Vec::new();
    for key in schema::keys() {
        if !sections.contains(&key.parent()) {
            sections.push(key.parent());
        }
    }
    sections.sort_by_key(|section| first_use(section));
    for section in sections {
        let title = if section.is_empty() { "At the top level".to_owned() } else { format!("`{section}`") };
        // Writing to a String cannot fail.
        let _ = write!(page, "\n## {title}\n\n");
        if let Some(key) = schema::find(section).next() {
            let about = format!("{} {}", key.does, sentence(&explain::here(key)));
            let _ = write!(page, "{}\n\n", wrap(&about, ""));
        }
        page.push_str("| key | holds | default | what it does | \"auto\" | read by | here |\n|---|---|---|---|---|---|---|\n");
        for key in schema::keys().filter(|key| key.parent() == section && key.kind != KeyType::Section) {
            page.push_str(&row(key));
        }
    }
    page
}

/// The width of lines outside of tables.
const WIDTH: usize = 120;

/// Breaks a paragraph into lines of at most 120 characters; lines after the first begin with `indent`.
pub fn wrap(paragraph: &str, indent: &str) -> String {
    let mut lines: Vec<String> = Vec::new();
    for word in paragraph.split(' ') {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= WIDTH => {
                line.extend([" ", word]);
            }
            Some(_) => lines.push(format!("{indent}{word}")),
            None => lines.push(word.to_owned()),
        }
    }
    lines.join("\n")
}

/// Sections appear where the table first names them; the top level comes first.
fn first_use(section: &str) -> usize {
    if section.is_empty() {
        return 0;
    }
    schema::keys().position(|key| key.path == section).map_or(usize::MAX, |position| position + 1)
}

fn row(key: &Key) -> String {
    let names: Vec<String> = std::iter::once(key.name())
        .chain(key.other_names.iter().copied())
        .map(|name| format!("`{name}`"))
        .collect();
    let types = if key.types.is_empty() { String::new() } else { format!(" ({})", key.types.join(", ")) };
    let unit = if key.unit.is_empty() { String::new() } else { format!(", in {}", key.unit) };
    let reader = match key.effect {
        Effect::Works | Effect::WhileEnabled => key.reader.name(),
        _ => "",
    };
    let cells = [
        format!("{}{types}", names.join(", ")),
        format!("{}{unit}", explain::holds(key)),
        explain::default(key),
        format!(
            "{}{}",
            key.does,
            if key.set.is_empty() { String::new() } else { format!(" Set it to: {}.", key.set) }
        ),
        key.auto.map_or("", explain::auto).to_owned(),
        reader.to_owned(),
        explain::here(key),
    ];
    let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
    format!("| {} |\n", cells.join(" | "))
}

fn sentence(words: &str) -> String {
    let mut characters = words.chars();
    let first = characters.next().map(|c| c.to_uppercase().to_string()).unwrap_or_default();
    format!("{first}{}.", characters.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_outside_of_tables_have_at_most_120_characters() {
        for line in config_page().lines().filter(|line| !line.starts_with('|')) {
            assert!(line.chars().count() <= WIDTH, "{line}");
        }
        assert_eq!(wrap(&["word"; 40].join(" "), "  ").lines().map(str::len).max(), Some(119));
    }
}
