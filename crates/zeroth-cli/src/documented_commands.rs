//! Checks that all commands in the docs and help texts parse.

use std::path::Path;

use clap::Command;

use crate::flag_rules;
use crate::parse_errors::{ParseFailure, parse};

const PAGES: [&str; 14] = [
    "README.md",
    "ARCHITECTURE.md",
    "docs/checkpoints.md",
    "docs/cli.md",
    "docs/cluster.md",
    "docs/coming-from.md",
    "docs/data.md",
    "docs/distillation.md",
    "docs/faq.md",
    "docs/faults.md",
    "docs/monitor.md",
    "docs/performance.md",
    "docs/program.md",
    "docs/training.md",
];

/// Splits a line like a shell: quotes group words, `#` starts a comment.
fn shell_words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in line.chars() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '#' | '|' | '>' | ';') if word.is_none() => break,
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    let end = words.iter().position(|word| word == "&&").unwrap_or(words.len());
    words.truncate(end);
    words
}

/// The commands of a page: complete ones in code blocks, and code spans, which may be abbreviated.
fn commands(page: &str) -> (Vec<String>, Vec<String>) {
    let joined = page.replace("\\\n", " ");
    let (mut blocks, mut prose, mut is_fenced) = (Vec::new(), String::new(), false);
    for line in joined.lines() {
        is_fenced ^= line.starts_with("```");
        let is_block = is_fenced || line.starts_with("    ");
        let typed = line.trim_start().trim_start_matches("$ ");
        // A table of crates contains the name too.
        if is_block && typed.starts_with("zeroth ") && !typed.starts_with("zeroth  ") {
            blocks.push(typed.to_owned());
        } else if !is_block {
            prose.push_str(line);
            prose.push('\n');
        }
    }
    let spans = prose.split('`').skip(1).step_by(2).filter(|span| span.starts_with("zeroth "));
    (blocks, spans.map(|span| span.replace('\n', " ")).collect())
}

/// The problem with a command. Abbreviated ones (`…`, `N`) are only checked for unknown flags.
fn problem(command: &Command, line: &str, is_whole: bool) -> Option<String> {
    let typed: Vec<String> = shell_words(line).into_iter().filter(|word| !word.contains('…')).collect();
    if crate::normalize_args::unsupported_command(&typed).is_some() {
        return None;
    }
    match parse(command, &typed) {
        Ok(_) => None,
        Err(ParseFailure::Clap(error)) if !error.use_stderr() => None,
        Err(ParseFailure::Clap(_)) if !is_whole => None,
        Err(ParseFailure::Clap(error)) => Some(format!("{line}\n{error}")),
        Err(ParseFailure::Errors { errors, .. }) => {
            let errors: Vec<String> =
                errors.into_iter().filter(|error| is_whole || error.contains("no flag")).collect();
            (!errors.is_empty()).then(|| format!("{line}\n{}", errors.join("\n")))
        }
    }
}

#[test]
fn every_command_of_the_pages_parses() {
    let command = flag_rules::command();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut seen = 0;
    let mut problems = Vec::new();
    for page in PAGES {
        let text = std::fs::read_to_string(root.join(page)).unwrap();
        let (blocks, spans) = commands(&text);
        seen += blocks.len() + spans.len();
        // A run file holds the flags that are missing.
        let found = blocks.iter().map(|line| (line, !line.contains('…') && !line.contains("--config ")));
        let found = found.chain(spans.iter().map(|line| (line, false)));
        problems.extend(
            found
                .filter_map(|(line, is_whole)| problem(&command, line, is_whole))
                .map(|problem| format!("{page}: {problem}")),
        );
    }
    assert!(seen > 80, "{seen}");
    assert!(problems.is_empty(), "{}", problems.join("\n\n"));
}

/// Examples in the help of a command and its subcommands.
fn examples(command: &Command, name: &str, found: &mut Vec<(String, String)>) {
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let lines = help.lines().map(|line| line.trim_start().trim_start_matches("Example: "));
    // A remark in parentheses may follow.
    let lines = lines
        .filter(|line| line.starts_with("zeroth "))
        .map(|line| line.split("   (").next().unwrap_or(line));
    found.extend(lines.map(|line| (name.to_owned(), line.to_owned())));
    for below in command.get_subcommands() {
        examples(below, &format!("{name} {}", below.get_name()), found);
    }
}

#[test]
fn every_command_has_an_example_of_itself_and_all_parse() {
    let command = flag_rules::command();
    let mut found = Vec::new();
    examples(&command, "zeroth", &mut found);
    let problems: Vec<String> = found.iter().filter_map(|(_, line)| problem(&command, line, true)).collect();
    assert!(problems.is_empty(), "{}", problems.join("\n\n"));
    let with_own = |name: &str| found.iter().any(|(of, line)| of == name && line.starts_with(name));
    let mut lacking = Vec::new();
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        let name = format!("zeroth {}", below.get_name());
        let leaves: Vec<String> = match below.get_subcommands().count() {
            0 => vec![name],
            _ => below.get_subcommands().map(|leaf| format!("{name} {}", leaf.get_name())).collect(),
        };
        lacking.extend(leaves.into_iter().filter(|leaf| !with_own(leaf)));
    }
    assert!(lacking.is_empty(), "no example in the help of {lacking:?}");
}
