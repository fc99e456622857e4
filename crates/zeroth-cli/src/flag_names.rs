//! The flags of a command, and messages for unknown ones.

use clap::{Arg, Command};
use zeroth::base::nearest;

use crate::foreign_names;

/// Flags of `train` that are not built yet, with the names of Hugging Face, ms-swift and PEFT.
const NOT_YET: &[&str] = &["fp8", "fp8-recipe", "loss-type", "ref-model", "rlhf-type"];

/// Minimum Jaro–Winkler similarity for a suggestion: `adam-eps` suggests `adam-epsilon`, but `gradient-clipping` does
/// not suggest `gradient-checkpointing`.
const ALIKE: f64 = 0.92;

/// A (sub)command and its flags.
pub(crate) struct Subcommand<'a> {
    root: &'a Command,
    command: &'a Command,
    /// Its full name, such as `zeroth config new`.
    pub(crate) name: String,
    /// The place of its last word in the command line.
    pub(crate) at: usize,
}

impl<'a> Subcommand<'a> {
    /// Finds the command that a command line names.
    pub(crate) fn find(root: &'a Command, typed: &[String]) -> Self {
        let mut found = Self { root, command: root, name: root.get_name().to_owned(), at: 0 };
        // Words without flags and without the value of --format.
        let words = typed.iter().enumerate().skip(1).filter(|(at, _)| typed[at - 1] != "--format");
        for (at, word) in words.filter(|(_, word)| !word.starts_with('-')) {
            match found.command.find_subcommand(word) {
                Some(command) => {
                    found.command = command;
                    found.name = format!("{} {word}", found.name);
                    found.at = at;
                }
                // In front of the command, a word is the value of a flag that stands in the wrong place.
                None if found.is_root() => {}
                None => break,
            }
        }
        found
    }

    /// A command by itself.
    pub(crate) fn of(command: &'a Command, name: &str) -> Self {
        Self { root: command, command, name: name.to_owned(), at: 0 }
    }

    /// Whether no command is named.
    pub(crate) fn is_root(&self) -> bool {
        std::ptr::eq(self.root, self.command)
    }

    /// Whether a word is the name of a command.
    pub(crate) fn is_command(&self, word: &str) -> bool {
        self.root.find_subcommand(word).is_some()
    }

    /// The message for an unknown flag, and the flag that was likely meant.
    pub(crate) fn unknown(&self, typed: &str) -> (String, Option<String>) {
        let name = typed.replace('_', "-");
        if self.argument(&name).is_some() {
            return (
                format!("--{typed} stands in front of the command: write it after `{}`", self.name),
                None,
            );
        }
        let of_train = self.root.find_subcommand("train").is_some_and(|train| has(train, &name));
        if of_train && self.name == "zeroth config resolve" {
            return (format!("--{typed} is not yet read by `{}`", self.name), None);
        }
        if of_train {
            return (format!("`{}` has no flag --{typed}, which belongs to `zeroth train`", self.name), None);
        }
        if NOT_YET.contains(&name.as_str()) {
            return (format!("--{typed} is not yet built into `{}`", self.name), None);
        }
        let mistake = format!("`{}` has no flag --{typed}", self.name);
        let written = |flag: &str| {
            let spelt = if typed.contains('_') { flag.replace('-', "_") } else { flag.to_owned() };
            format!("`--{spelt}`")
        };
        let has = |flag: &str| self.argument(flag).is_some();
        if let Some(instead) = foreign_names::flag(&name, has, written) {
            return (format!("{mistake}: {instead}"), None);
        }
        match self.meant(&name) {
            Some(meant) => (format!("{mistake}: did you mean {}?", written(&meant)), Some(meant)),
            None => (mistake, None),
        }
    }

    /// All spellings of a flag of this command.
    pub(crate) fn spellings(&self, name: &str) -> Option<Vec<String>> {
        self.argument(name).map(spellings)
    }

    /// The most words that a flag takes as its values; as many as there are for one that no command has.
    pub(crate) fn most_values(&self, name: &str) -> usize {
        let Some(argument) = self.argument(name) else { return usize::MAX };
        if argument.is_require_equals_set() || !argument.get_action().takes_values() {
            return 0;
        }
        argument.get_num_args().map_or(1, |range| range.max_values())
    }

    /// The name of a flag that takes several values, by any of its names.
    pub(crate) fn list_flag(&self, name: &str) -> Option<&'a str> {
        (self.most_values(name) > 1).then(|| self.argument(name)?.get_long())?
    }

    fn argument(&self, name: &str) -> Option<&'a Arg> {
        self.arguments().find(|argument| spellings(argument).iter().any(|known| known == name))
    }

    /// Whether the flag is always required.
    pub(crate) fn always_needs(&self, name: &str) -> bool {
        let mut arguments = self.arguments();
        arguments.any(|argument| {
            argument.is_required_set() && spellings(argument).iter().any(|known| known == name)
        })
    }

    fn arguments(&self) -> impl Iterator<Item = &'a Arg> {
        let global = self.root.get_arguments().filter(|argument| argument.is_global_set());
        self.command.get_arguments().chain(global)
    }

    /// The flag that `name` most likely stands for: a few edits away, or abbreviated.
    fn meant(&self, name: &str) -> Option<String> {
        // Hidden flags change nothing, so they are not what was meant.
        let shown = self.arguments().filter(|argument| !argument.is_hide_set());
        let known: Vec<String> = shown.flat_map(spellings).collect();
        if let Some(near) = nearest(name, known.iter().map(String::as_str)) {
            return Some(near.to_owned());
        }
        // A longer name means something else: --deepspeed-port is not --deepspeed.
        let longer = known.into_iter().filter(|known| known.len() >= name.len());
        let scored = longer.map(|known| (strsim::jaro_winkler(name, &known), known));
        let best = scored.max_by(|(one, _), (other, _)| one.total_cmp(other));
        best.filter(|(score, _)| *score >= ALIKE).map(|(_, known)| known)
    }
}

fn has(command: &Command, name: &str) -> bool {
    command.get_arguments().flat_map(spellings).any(|known| known == name)
}

/// The long name of a flag and its aliases; empty for positional arguments.
pub(crate) fn spellings(argument: &Arg) -> Vec<String> {
    let Some(long) = argument.get_long() else { return Vec::new() };
    let aliases = argument.get_all_aliases().unwrap_or_default();
    std::iter::once(long).chain(aliases).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meant(line: &str, flag: &str) -> Option<String> {
        let root = crate::flag_rules::command();
        let typed: Vec<String> = line.split(' ').map(str::to_owned).collect();
        Subcommand::find(&root, &typed).unknown(flag).1
    }

    #[test]
    fn only_similar_flags_are_suggested() {
        for (typed, expected) in [
            ("lerning-rate", Some("learning-rate")),
            ("adam_eps", Some("adam-epsilon")),
            ("gradient_accumulation", Some("gradient-accumulation-steps")),
            ("num-gpu", Some("num-gpus")),
            ("learning", Some("learning-rate")),
            ("gradient-clipping", None),
            ("deepspeed-port", None),
            ("warm-up", None),
            ("zero-stage", None),
            ("tensorboard-dir", None),
            ("max_seq_lenght", Some("max-seq-length")),
            ("datset", Some("dataset")),
            ("dataloader-num-worker", None),
        ] {
            assert_eq!(meant("zeroth train", typed).as_deref(), expected, "{typed}");
        }
        assert_eq!(meant("zeroth --format json generate", "top-q").as_deref(), Some("top-k"));
        assert_eq!(meant("zeroth bench", "max-step"), None);
    }

    #[test]
    fn flags_listed_as_not_built_do_not_exist() {
        let root = crate::flag_rules::command();
        let train = root.find_subcommand("train").unwrap();
        let built: Vec<&str> = NOT_YET.iter().copied().filter(|flag| has(train, flag)).collect();
        assert!(built.is_empty(), "{built:?}");
    }
}
