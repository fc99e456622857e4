//! Messages that pages quote are those that the source prints.
//!
//! Output in the `text` blocks of these pages is compared with the string literals of the crates, phrase by phrase. A phrase
//! ends at punctuation, at a value (a number, a path, a name with a digit) and where columns are apart. Of a long phrase every
//! four words must stand together in one literal; a short one must be all that a literal has between its placeholders.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use crate::common::root;

const PAGES: [&str; 3] = ["docs/faults.md", "docs/checkpoints.md", "docs/faq.md"];

/// What examples have in the place of placeholders: words of the system, operations, hosts, settings, counted things.
const VALUES: [&str; 9] = [
    "No space left on device",
    "Read-only file system",
    "Too many open files",
    "download of the",
    "end of a",
    "gather of block",
    "minutes",
    "sharded",
    "vm",
];

/// Words that are compared together.
const WINDOW: usize = 4;

type Phrase = Vec<String>;

/// The string literals of a source file, up to its unit tests.
fn literals(source: &str) -> Vec<String> {
    let source = source.split("\n#[cfg(test)]\nmod tests {").next().unwrap();
    let mut found = Vec::new();
    let mut rest = source;
    while let Some(at) = rest.find(['"', '/', '\'', '#']) {
        let (before, from) = rest.split_at(at);
        rest = if from.starts_with("//") {
            from.split_once('\n').map_or("", |(_, rest)| rest)
        } else if let Some(text) = from.strip_prefix("#\"").filter(|_| before.ends_with('r')) {
            let (literal, rest) = text.split_once("\"#").unwrap_or((text, ""));
            found.push(literal.to_owned());
            rest
        } else if from.starts_with("'\"'") || from.starts_with("'\\") {
            &from[3..]
        } else if let Some(text) = from.strip_prefix('"') {
            let (literal, rest) = quoted(text);
            found.push(literal);
            rest
        } else {
            &from[1..]
        };
    }
    found
}

/// A literal from behind its first quote, and what follows it.
fn quoted(text: &str) -> (String, &str) {
    let mut literal = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return (literal, &text[at + 1..]),
            '\\' => match characters.next() {
                // The line goes on behind the white space of the next one.
                Some((_, '\n')) => {
                    let mut ahead = characters.clone();
                    while ahead.next().is_some_and(|(_, next)| next.is_whitespace()) {
                        characters.next();
                    }
                }
                Some((_, 'n' | 't')) => literal.push('\n'),
                Some((_, escaped)) => literal.push(escaped),
                None => {}
            },
            other => literal.push(other),
        }
    }
    (literal, "")
}

/// The phrases of a line of output, or of a literal with its placeholders.
fn phrases(text: &str) -> Vec<Phrase> {
    let mut phrases = vec![Phrase::new()];
    let mut is_number = false;
    for token in without_placeholders(text).replace('\n', "  ").replace("  ", " \0 ").split(' ') {
        let word = token.trim_matches(|c: char| !c.is_alphanumeric() && !matches!(c, '\0' | '…' | '_'));
        let is_unit = is_number && ["B", "kB", "MB", "GB", "TB", "s", "ms"].contains(&word);
        let is_word = word.chars().all(|c| c.is_ascii_alphabetic() || matches!(c, '-' | '\''))
            && (word.len() > 1 || word == "a");
        if token.starts_with(['(', '"', '[']) || !(is_word || is_unit) {
            phrases.push(Phrase::new());
        }
        if is_word && !is_unit {
            phrases.last_mut().unwrap().push(word.to_owned());
        }
        is_number = word == "\0" || word.chars().all(|c| c.is_ascii_digit() || matches!(c, '.' | ','));
        if token.ends_with([':', ';', ',', '.', ')', ']', '"']) {
            phrases.push(Phrase::new());
        }
    }
    phrases.retain(|phrase| !phrase.is_empty());
    phrases
}

/// A literal with a NUL for each `{…}`.
fn without_placeholders(text: &str) -> String {
    let mut parts = text.split('{');
    let mut replaced = parts.next().unwrap().to_owned();
    for part in parts {
        match part.split_once('}') {
            Some((_, rest)) => replaced.extend([" \0 ", rest]),
            None => replaced.push_str(part),
        }
    }
    replaced
}

/// What the sources print.
#[derive(Default)]
struct Printed {
    phrases: Vec<Phrase>,
    windows: HashSet<Phrase>,
    short: HashSet<Phrase>,
}

impl Printed {
    fn by_the_crates() -> Self {
        let mut printed = Self::default();
        for folder in fs::read_dir(root().join("crates")).unwrap() {
            printed.add_folder(&folder.unwrap().path().join("src"));
        }
        assert!(printed.windows.len() > 5_000 && printed.short.len() > 2_000, "the sources were not read");
        printed
    }

    fn add_folder(&mut self, folder: &Path) {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            let name = path.file_name().unwrap().to_string_lossy();
            if path.is_dir() && name != "tests" {
                self.add_folder(&path);
            } else if name.ends_with(".rs") && !name.contains("tests") {
                self.add(&fs::read_to_string(&path).unwrap());
            }
        }
    }

    fn add(&mut self, source: &str) {
        for phrase in literals(source).iter().flat_map(|literal| phrases(literal)) {
            if phrase.len() < WINDOW {
                self.short.insert(phrase.clone());
            }
            self.windows.extend(phrase.windows(WINDOW).map(<[String]>::to_vec));
            self.phrases.push(phrase);
        }
    }

    /// The phrases of a line that no source prints, with a star at each word.
    fn unknown(&self, line: &str) -> Vec<String> {
        phrases(line).into_iter().filter_map(|phrase| self.unknown_words(&phrase)).collect()
    }

    fn unknown_words(&self, phrase: &Phrase) -> Option<String> {
        let values = VALUES.map(|value| value.split(' ').map(str::to_owned).collect::<Phrase>());
        let mut known = vec![false; phrase.len()];
        for at in 0..phrase.len() {
            for end in at + 1..=phrase.len() {
                let words = &phrase[at..end];
                let is_literal = (words.len() > 1 || phrase.len() == 1) && self.short.contains(words);
                if is_literal || self.windows.contains(words) || values.iter().any(|value| value == words) {
                    known[at..end].fill(true);
                }
            }
        }
        // One word alone is of no literal in particular: it counts at an end of others that are known.
        if known.contains(&true) {
            for at in [0, phrase.len() - 1] {
                known[at] |= self.short.contains(&phrase[at..=at]);
            }
        }
        let marked =
            phrase.iter().zip(&known).map(|(word, known)| format!("{}{word}", if *known { "" } else { "*" }));
        let marked = marked.collect::<Vec<_>>().join(" ");
        known.contains(&false).then_some(marked)
    }

    /// Whether a literal has these words in this order, somewhere.
    fn contains(&self, words: &Phrase) -> bool {
        self.phrases.iter().any(|phrase| phrase.windows(words.len()).any(|window| window == words))
    }
}

/// The lines of output in the `text` blocks of a page, with their numbers.
fn output(page: &str) -> Vec<(usize, &str)> {
    let (mut block, mut lines) = (None, Vec::new());
    for (number, line) in (1..).zip(page.lines()) {
        match (line.strip_prefix("```"), block) {
            (Some(language), None) => block = Some(language),
            (Some(_), Some(_)) => block = None,
            (None, Some("text")) if !line.starts_with("$ ") => lines.push((number, line)),
            (None, _) => {}
        }
    }
    lines
}

#[test]
fn messages_of_pages_are_printed_by_the_source() {
    let printed = Printed::by_the_crates();
    let (mut stale, mut checked) = (Vec::new(), 0);
    for path in PAGES {
        let page = fs::read_to_string(root().join(path)).unwrap();
        for (number, line) in output(&page) {
            checked += 1;
            stale.extend(printed.unknown(line).iter().map(|phrase| format!("{path}:{number}: {phrase}")));
        }
    }
    assert!(checked > 60, "{checked} lines");
    assert!(stale.is_empty(), "no source prints the words with a star:\n{}", stale.join("\n"));
}

#[test]
fn the_table_of_errors_has_words_of_the_source() {
    let printed = Printed::by_the_crates();
    let page = fs::read_to_string(root().join("docs/checkpoints.md")).unwrap();
    let rows = page.lines().skip_while(|line| !line.starts_with("| message contains")).skip(2);
    let rows: Vec<&str> = rows.take_while(|line| line.starts_with('|')).collect();
    assert!(rows.len() > 4);
    for row in rows {
        for phrase in phrases(row.split('|').nth(1).unwrap()) {
            assert!(printed.contains(&phrase), "no source prints {phrase:?}: {row}");
        }
    }
}

#[test]
fn a_changed_word_of_a_message_is_found() {
    let mut printed = Printed::default();
    printed.add(
        r#"#[error("{} is damaged: its SHA-256 is {found}, but was {expected} when it was saved; restore it from a \
            backup")]"#,
    );
    let line = "run/step-6 is damaged: its SHA-256 is 7cc7…, but was 91be… when it was saved; restore it from a backup";
    assert_eq!(printed.unknown(line), [""; 0]);
    for (from, to) in [("damaged", "broken"), ("but was", "and was"), ("backup", "copy"), ("saved", "stored")]
    {
        assert_ne!(printed.unknown(&line.replace(from, to)), [""; 0], "{to}");
    }
}
