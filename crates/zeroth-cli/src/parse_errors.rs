//! Reports all errors of a command line at once.
//!
//! clap stops at the first error. Here each error is recorded and repaired (a misspelt flag is replaced by the likely
//! one, anything else is removed), and the rest is parsed again until nothing new is found.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgMatches, Command};

use crate::exit::Exit;
use crate::flag_names::Subcommand;
use crate::normalize_args::normalize;
use crate::{foreign_names, output, results};

/// Why a command line was rejected.
#[derive(Debug)]
pub(crate) enum ParseFailure {
    /// Help, version, or a single error that clap explains with the usage.
    Clap(Box<clap::Error>),
    /// All errors, and the command whose help is relevant, if any.
    Errors { errors: Vec<String>, command: Option<String> },
}

impl ParseFailure {
    /// Prints it; help and version are results.
    pub(crate) fn print(self) -> Exit {
        match self {
            Self::Clap(error) => {
                let printed = error.print();
                if error.use_stderr() {
                    return Exit::Wrong;
                }
                results::written(printed);
                Exit::Done
            }
            Self::Errors { errors, command } => {
                for error in errors {
                    output::error(&error);
                }
                if let Some(command) = command {
                    output::note(&format!("`{command} --help` lists its flags"));
                }
                Exit::Wrong
            }
        }
    }
}

/// Parses the command line.
pub(crate) fn parse(command: &Command, typed: &[String]) -> Result<ArgMatches, ParseFailure> {
    let mut line = CommandLine {
        root: command,
        subcommand: Subcommand::find(command, typed),
        typed,
        tokens: typed.to_vec(),
        errors: Vec::new(),
        renamed: Vec::new(),
        removed: Vec::new(),
        removed_values: false,
    };
    loop {
        // Each iteration removes a word, or gives a misspelt flag a name that it keeps, so this terminates. A renamed flag
        // may be a boolean and needs normalising.
        line.tokens = normalize(command, std::mem::take(&mut line.tokens));
        let error = match command.clone().try_get_matches_from(&line.tokens) {
            Ok(matches) if line.errors.is_empty() => return Ok(matches),
            Ok(_) => break,
            Err(error) => error,
        };
        let is_first = line.errors.is_empty();
        let is_repaired = line.take(&error);
        let is_clap_only = is_first && !is_repaired && error.kind() != ErrorKind::UnknownArgument;
        if is_clap_only {
            return Err(ParseFailure::Clap(Box::new(error)));
        }
        if !is_repaired {
            break;
        }
    }
    Err(ParseFailure::Errors { errors: line.errors, command: Some(line.subcommand.name) })
}

/// A command line without the errors found so far.
struct CommandLine<'a> {
    root: &'a Command,
    subcommand: Subcommand<'a>,
    typed: &'a [String],
    tokens: Vec<String>,
    errors: Vec<String>,
    /// Flags that replaced misspelt ones: errors about them are not the user's.
    renamed: Vec<String>,
    /// Flags removed with their values: they are not missing.
    removed: Vec<String>,
    /// Whether an unknown flag was removed with words after it, which may have been positional arguments.
    removed_values: bool,
}

impl CommandLine<'_> {
    /// Records and repairs an error. False if parsing cannot continue.
    fn take(&mut self, error: &clap::Error) -> bool {
        match error.kind() {
            ErrorKind::DisplayHelp
            | ErrorKind::DisplayVersion
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => false,
            ErrorKind::UnknownArgument => match context(error, ContextKind::InvalidArg) {
                Some(flag) if flag.starts_with("--") => self.repair_unknown(flag, error),
                _ => self.note(error),
            },
            ErrorKind::ValueValidation | ErrorKind::InvalidValue => self.repair_value(error),
            ErrorKind::MissingRequiredArgument => self.report_missing(error),
            _ => self.note(error),
        }
    }

    fn note(&mut self, error: &clap::Error) -> bool {
        self.errors.push(sentence(error));
        false
    }

    fn repair_unknown(&mut self, flag: &str, error: &clap::Error) -> bool {
        let name = flag.trim_start_matches("--");
        let Some(at) = self.tokens.iter().position(|token| name_of(token) == Some(name)) else {
            return self.note(error);
        };
        // Found as typed, with dashes or underscores.
        let same = |token: &&String| name_of(token).is_some_and(|typed| typed.replace('_', "-") == name);
        let typed = self.typed.iter().find(same).and_then(|token| name_of(token)).unwrap_or(name);
        let command = Subcommand::find(self.root, &self.tokens).at;
        let is_in_front = at < command;
        // A name that replaced a misspelt one is reported already.
        if !self.renamed.iter().any(|renamed| renamed == name) {
            let (message, meant) = self.subcommand.unknown(typed);
            self.errors.push(message);
            // In front of the command no flag of its own is read, however it is spelt.
            if let Some(meant) = meant.filter(|_| !is_in_front) {
                self.tokens[at] = self.tokens[at].replacen(name, &meant, 1);
                self.renamed.push(meant);
                return true;
            }
        }
        let words = self.tokens[at + 1..].iter().take_while(|token| !token.starts_with('-')).count();
        let values = if is_in_front { words.min(command - at - 1) } else { words };
        self.removed_values |= values > 0;
        self.tokens.drain(at..=at + values);
        true
    }

    fn repair_value(&mut self, error: &clap::Error) -> bool {
        let argument = context(error, ContextKind::InvalidArg).unwrap_or_default();
        let value = context(error, ContextKind::InvalidValue).unwrap_or_default();
        // `zeroth --format plan …`: the command was taken for the value, and nothing can be said about the rest.
        if self.subcommand.is_root() && self.subcommand.is_command(value) {
            return self.note(error);
        }
        let Some(names) = flag_in(argument).and_then(|name| self.subcommand.spellings(name)) else {
            return self.note(error);
        };
        // A boolean flag without a value counts as true, which its parser may refuse.
        let is_switch = argument.contains("[=");
        let is_it = |at: &usize| {
            let token = &self.tokens[*at];
            let after = &self.tokens[at + 1..=at + self.values_after(*at)];
            let is_named = name_of(token).is_some_and(|name| names.iter().any(|known| known == name));
            let has_value = match token.split_once('=') {
                Some((_, given)) => given.contains(value),
                None if is_switch => true,
                None if value.is_empty() => after.is_empty(),
                // A value that begins with a dash may follow the flag too.
                None => after
                    .iter()
                    .chain(self.tokens.get(at + 1).filter(|_| after.is_empty()))
                    .any(|given| given.contains(value)),
            };
            is_named && has_value
        };
        let Some(at) = (1..self.tokens.len()).find(is_it) else { return self.note(error) };
        if !names.iter().any(|name| self.renamed.contains(name)) {
            self.errors.push(value_error(error, &names, value));
        }
        let has_own = self.tokens[at].contains('=') || value.is_empty() || is_switch;
        let values = if has_own { 0 } else { self.values_after(at).max(1) };
        let end = (at + 1 + values).min(self.tokens.len());
        self.tokens.drain(at..end);
        self.removed.extend(names);
        true
    }

    /// Reports only flags that were not typed at all.
    fn report_missing(&mut self, error: &clap::Error) -> bool {
        let Some(ContextValue::Strings(missing)) = error.get(ContextKind::InvalidArg) else {
            return self.note(error);
        };
        let is_missing = |argument: &&String| match flag_in(argument) {
            // Flags required only with others may not be, with the intended value.
            Some(flag) if !self.removed.is_empty() => self.subcommand.always_needs(flag),
            Some(_) => true,
            None => !self.removed_values,
        };
        let was_typed = |argument: &&String| {
            let words = argument.split(|c: char| c != '-' && !c.is_ascii_alphanumeric());
            let mut flags = words.filter_map(|word| word.strip_prefix("--"));
            flags.any(|flag| self.removed.iter().any(|removed| removed == flag))
        };
        let missing = missing.iter().filter(|argument| is_missing(argument) && !was_typed(argument));
        let missing: Vec<&str> = missing.map(String::as_str).collect();
        if !missing.is_empty() {
            self.errors.push(format!("`{}` also requires {}", self.subcommand.name, missing.join(", ")));
        }
        false
    }

    /// Number of words after this flag that are its values.
    fn values_after(&self, at: usize) -> usize {
        let most = name_of(&self.tokens[at]).map_or(0, |name| self.subcommand.most_values(name));
        self.tokens[at + 1..].iter().take(most).take_while(|token| !token.starts_with('-')).count()
    }
}

/// The name of a long flag, without its value.
pub(crate) fn name_of(token: &str) -> Option<&str> {
    let flag = token.strip_prefix("--").filter(|flag| !flag.is_empty())?;
    Some(flag.split_once('=').map_or(flag, |(name, _)| name))
}

/// The first long flag in a description such as `--ranks <N>`.
fn flag_in(argument: &str) -> Option<&str> {
    let (_, flag) = argument.split_once("--")?;
    flag.split([' ', '>', '|', '=', '[']).next()
}

fn context(error: &clap::Error, kind: ContextKind) -> Option<&str> {
    match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text),
        _ => None,
    }
}

/// The message about a value, with what to write instead of one that other trainers have.
pub(crate) fn value_error(error: &clap::Error, flags: &[String], value: &str) -> String {
    let instead = foreign_names::value(flags, value).map(|instead| format!("\n  {instead}"));
    format!("{}{}", sentence(error), instead.unwrap_or_default())
}

/// clap's message without usage and help hints.
fn sentence(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let end = ["\n\nUsage:", "\n\nFor more information", "\nUsage:"]
        .into_iter()
        .filter_map(|tail| text.find(tail))
        .min()
        .unwrap_or(text.len());
    let lines = text[..end].lines().filter(|line| !line.trim().is_empty());
    lines.collect::<Vec<_>>().join("\n")
}
