//! Splits a command line into words, and words into flags and values.

use std::path::Path;

use crate::read::Number;

/// The words of a command, up to a pipe or redirection. A single string is split as a shell would split it.
pub(super) fn words(command: &[String]) -> Vec<String> {
    let words = match command {
        [text] if text.contains(char::is_whitespace) => split(text),
        _ => command.to_vec(),
    };
    let end = words.iter().position(|word| ends_command(word)).unwrap_or(words.len());
    // A lone backslash or line break comes from a line continuation inside quotes.
    words.into_iter().take(end).filter(|word| !word.trim().is_empty() && word != "\\").collect()
}

fn ends_command(word: &str) -> bool {
    matches!(word, "|" | "||" | "&&" | "&" | ";" | "2>&1")
        || word.starts_with(['>', '<'])
        || word.starts_with("2>")
}

/// Splits at whitespace outside quotes. A backslash escapes the next character; before a line break both are dropped.
fn split(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut characters = text.chars();
    while let Some(c) = characters.next() {
        match (quote, c) {
            (Some(open), _) if c == open => quote = None,
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None | Some('"'), '\\') => match characters.next() {
                None | Some('\n') => {}
                Some('\r') => {
                    characters.next();
                }
                Some(next) => word.get_or_insert_default().push(next),
            },
            (None, _) if c.is_whitespace() => words.extend(word.take()),
            _ => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// Whether a word is a flag such as `--name` or `-n`, but not `-5` or `-`.
pub(super) fn is_flag(word: &str) -> bool {
    word.strip_prefix("--")
        .or_else(|| word.strip_prefix('-'))
        .is_some_and(|name| name.starts_with(|c: char| c.is_ascii_alphabetic()))
}

/// A flag's name without leading dashes and with `_` for `-`, and the value after `=`.
pub(super) fn name_and_value(word: &str) -> (String, Option<&str>) {
    let bare = word.trim_start_matches('-');
    let (name, value) = bare.split_once('=').map_or((bare, None), |(name, value)| (name, Some(value)));
    (name.replace('-', "_"), value)
}

pub(super) fn is_python_file(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "py")
}

/// Splits an environment assignment `NAME=value`.
pub(super) fn assignment(word: &str) -> Option<(&str, &str)> {
    let (name, value) = word.split_once('=')?;
    let is_name = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    is_name.then_some((name, value))
}

/// The flags of a script in order, each with the words up to the next flag.
#[derive(Debug, Clone, Default)]
pub(super) struct Arguments {
    /// Words before the first flag.
    pub(super) leading: Vec<String>,
    flags: Vec<(String, Vec<String>)>,
    /// Flags whose value cannot be parsed: flag, value, what was expected.
    pub(super) unreadable: Vec<(String, String, &'static str)>,
}

impl Arguments {
    pub(super) fn read(words: &[String]) -> Self {
        let mut arguments = Self::default();
        for word in words {
            if is_flag(word) {
                let (name, value) = name_and_value(word);
                arguments.flags.push((name, value.map(str::to_owned).into_iter().collect()));
            } else if let Some((_, values)) = arguments.flags.last_mut() {
                values.push(word.clone());
            } else {
                arguments.leading.push(word.clone());
            }
        }
        arguments
    }

    /// Whether one of these flags is given.
    pub(super) fn has(&self, names: &[&str]) -> bool {
        self.find(names).is_some()
    }

    /// The last of these flags, with its words.
    fn find(&self, names: &[&str]) -> Option<(&str, &[String])> {
        let found = self.flags.iter().rev().find(|(name, _)| names.contains(&name.as_str()))?;
        Some((&found.0, &found.1))
    }

    /// The flag as `--name`, and its value.
    pub(super) fn text(&self, names: &[&str]) -> Option<(String, String)> {
        let (name, values) = self.find(names)?;
        Some((format!("--{name}"), values.first()?.clone()))
    }

    /// A boolean flag. Without a value, or followed by a word that is not a boolean, it is true.
    pub(super) fn switch(&self, names: &[&str]) -> Option<bool> {
        let (_, values) = self.find(names)?;
        let word = values.first().map(|value| value.to_ascii_lowercase());
        Some(!matches!(word.as_deref(), Some("false" | "f" | "no" | "n" | "0")))
    }

    /// The value of a flag as a finite number.
    pub(super) fn number(&mut self, names: &[&str]) -> Option<f64> {
        self.value(names, "a number", |number| Some(number.as_f64()))
    }

    /// The value of a flag as a whole number of at least 0.
    pub(super) fn whole(&mut self, names: &[&str]) -> Option<u64> {
        self.value(names, "a whole number", |number| u64::try_from(number.as_whole()?).ok())
    }

    fn value<T>(
        &mut self,
        names: &[&str],
        wants: &'static str,
        take: impl Fn(&Number) -> Option<T>,
    ) -> Option<T> {
        let (name, values) = self.find(names)?;
        let text = values.first().map_or("", String::as_str);
        let value = Number::from_text(text).and_then(|number| take(&number));
        if value.is_none() {
            let unreadable = (format!("--{name}"), text.to_owned(), wants);
            self.unreadable.push(unreadable);
        }
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn single_string_is_split_like_a_shell_command() {
        let text = "A=1 torchrun --x 'a b' \\\n  --y=\"c \\\" d\" --z e\\ f 2>&1 | tee log";
        assert_eq!(
            words(&strings(&[text])),
            strings(&["A=1", "torchrun", "--x", "a b", "--y=c \" d", "--z", "e f"])
        );
    }

    #[test]
    fn separate_words_are_kept_unchanged() {
        let given = strings(&["deepspeed", "a b.py", "--x", "-5"]);
        assert_eq!(words(&given), given);
    }

    #[test]
    fn last_flag_wins_and_dashes_equal_underscores() {
        let given =
            strings(&["--learning-rate", "1e-4", "--learning_rate=2e-5", "--bf16", "--fp16", "False"]);
        let mut arguments = Arguments::read(&given);
        assert_eq!(arguments.number(&["learning_rate"]), Some(2e-5));
        assert_eq!(arguments.switch(&["bf16"]), Some(true));
        assert_eq!(arguments.switch(&["fp16"]), Some(false));
        assert_eq!(arguments.switch(&["fp32"]), None);
    }

    #[test]
    fn values_that_are_not_numbers_are_kept_for_the_report() {
        let mut arguments = Arguments::read(&strings(&["--max_grad_norm", "$CLIP", "--max_steps", "1.5"]));
        assert_eq!(arguments.number(&["max_grad_norm"]), None);
        assert_eq!(arguments.whole(&["max_steps"]), None);
        let flags: Vec<&str> = arguments.unreadable.iter().map(|(flag, ..)| flag.as_str()).collect();
        assert_eq!(flags, ["--max_grad_norm", "--max_steps"]);
    }
}
