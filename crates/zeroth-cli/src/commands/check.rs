//! `config check`: the verdict on every key of a file.

use serde_json::{Value, json};
use zeroth::config::check::{CheckReport, KeyStatus, Severity, Verdict, check};
use zeroth::config::checked::{config_source, read_error_text};
use zeroth::config::read::{ConfigSource, ReadError, ReadErrorKind, parse};
use zeroth::config::snippet;

use crate::cli::CheckArgs;
use crate::exit::Exit;
use crate::output::{self, Colour, Output};
use crate::table::Table;

pub(super) fn run(arguments: &CheckArgs, output: &Output) -> anyhow::Result<Exit> {
    let document = match config_source(&arguments.file).and_then(parse) {
        Ok(document) => document,
        Err(error) => return unreadable(&arguments.file, &error, output),
    };
    let report = check(&document);
    let ok = report.is_ok(arguments.strict);
    if output.is_json() {
        let keys: Vec<Value> = report.verdicts.iter().map(row).collect();
        output::json(&json!({"file": document.source.name(), "ok": ok, "keys": keys}))?;
    } else {
        output::text(&text(&report, &document.source, arguments.strict, output));
    }
    Ok(if ok { Exit::Done } else { Exit::Problems })
}

/// A missing file is an invalid argument (exit code 2); an unparsable one is a problem found (exit code 4).
fn unreadable(argument: &str, error: &ReadError, output: &Output) -> anyhow::Result<Exit> {
    if output.is_json() {
        let (line, column) =
            (error.location.map(|location| location.line), error.location.map(|location| location.column));
        let problem = json!({"message": error.message, "help": error.help, "line": line, "column": column});
        output::json(&json!({"file": error.source_name, "ok": false, "keys": [], "error": problem}))?;
    } else {
        output::error(&read_error_text(argument, error));
    }
    // Otherwise the contents are wrong.
    let is_about_argument =
        matches!(error.kind, ReadErrorKind::NotFound | ReadErrorKind::Io | ReadErrorKind::TooLarge);
    Ok(if is_about_argument { Exit::Wrong } else { Exit::Problems })
}

fn row(verdict: &Verdict) -> Value {
    json!({
        "path": verdict.path,
        "canonical": verdict.key.map(|key| key.path),
        "status": verdict.status.word(),
        "value": verdict.value,
        "line": verdict.location.line,
        "column": verdict.location.column,
        "message": verdict.message,
    })
}

fn text(report: &CheckReport, source: &ConfigSource, strict: bool, output: &Output) -> String {
    let mut text = String::new();
    let loud = |verdict: &Verdict| {
        verdict.severity() == Severity::Error
            || matches!(verdict.status, KeyStatus::Unknown | KeyStatus::Deprecated)
    };
    // Errors, unknown keys and deprecated names come first, each with its source line.
    for verdict in report.verdicts.iter().filter(|verdict| loud(verdict)) {
        let error = strict || verdict.severity() == Severity::Error;
        let (level, colour) = if error { ("error", Colour::Red) } else { ("warning", Colour::Yellow) };
        let shown = snippet::of_verdict(level, source, verdict);
        let (title, rest) = shown.split_once('\n').unwrap_or((&shown, ""));
        text.push_str(&format!("{}\n{rest}\n", output.coloured(colour, title)));
    }
    let mut table = Table::new(&["key", "verdict", "line", "why"], &[2]);
    let rows: Vec<&Verdict> = report.of_keys().filter(|verdict| !loud(verdict)).collect();
    for verdict in &rows {
        table.row([
            verdict.path.clone(),
            verdict.status.title().to_owned(),
            verdict.location.line.to_string(),
            verdict.message.clone(),
        ]);
    }
    if !rows.is_empty() {
        for (index, line) in table.lines().iter().enumerate() {
            let colour = match index.checked_sub(1).map(|index| rows[index].status) {
                None => None,
                Some(KeyStatus::Honoured | KeyStatus::BuiltIn) => Some(Colour::Green),
                Some(KeyStatus::Unsupported) => Some(Colour::Dim),
                Some(_) => Some(Colour::Yellow),
            };
            let line = line.trim_end();
            let line = colour.map_or_else(|| output.bold(line), |colour| output.coloured(colour, line));
            text.push_str(&format!("{line}\n"));
        }
        text.push('\n');
    }
    let counts: Vec<String> = KeyStatus::ALL
        .iter()
        .map(|status| (status, report.count(*status)))
        .filter(|(_, count)| *count > 0)
        .map(|(status, count)| format!("{count} {}", status.title()))
        .collect();
    let total = report.of_keys().count();
    let counts = if counts.is_empty() { String::new() } else { format!(": {}", counts.join(", ")) };
    text.push_str(&format!("{}: {total} keys{counts}\n", source.name()));
    if strict && report.is_ok(false) && !report.is_ok(true) {
        text.push_str("not ok: with --strict, keys that are not yet supported, without effect, deprecated or unknown are errors\n");
    }
    text
}
