//! Says which defaults of another trainer differ, where flags are typed that only that one has.

use zeroth::config::file_values::FileValues;
use zeroth::config::trainer_defaults::{FLAG_DEFAULTS, FlagDefault, ForeignTrainer, swift_accumulation};

use crate::flag_names::spellings;
use crate::flag_rules;

/// The run that defaults are compared for.
pub(super) struct Compared<'a> {
    pub(super) file: &'a FileValues,
    pub(super) is_lora: bool,
    pub(super) micro_batch: u64,
    pub(super) ranks: u64,
}

/// Names and values of the long flags of a command line, as typed but with dashes.
fn typed_flags<'a>(arguments: impl Iterator<Item = &'a String>) -> Vec<(String, Option<&'a str>)> {
    let mut typed: Vec<(String, Option<&str>)> = Vec::new();
    for argument in arguments {
        match argument.strip_prefix("--") {
            Some(flag) => {
                let (name, value) =
                    flag.split_once('=').map_or((flag, None), |(name, value)| (name, Some(value)));
                typed.push((name.replace('_', "-"), value));
            }
            None => {
                if let Some((_, value)) = typed.last_mut() {
                    value.get_or_insert(argument);
                }
            }
        }
    }
    typed
}

impl Compared<'_> {
    /// A line for each trainer whose own flags are among the arguments and whose defaults differ.
    pub(super) fn notes<'a>(&self, arguments: impl Iterator<Item = &'a String>) -> Vec<String> {
        let typed = typed_flags(arguments);
        ForeignTrainer::ALL.into_iter().filter_map(|trainer| self.note(trainer, &typed)).collect()
    }

    fn note(&self, trainer: ForeignTrainer, typed: &[(String, Option<&str>)]) -> Option<String> {
        let is_there = |word: &&str| {
            let (flag, wanted) =
                word.split_once('=').map_or((*word, None), |(flag, value)| (flag, Some(value)));
            typed.iter().any(|(name, value)| name == flag && (wanted.is_none() || *value == wanted))
        };
        let sign = trainer.signs().iter().find(|sign| sign.iter().all(is_there))?;
        let command = flag_rules::command();
        let train = command.find_subcommand("train")?;
        let is_typed = |flag: &str| {
            let names =
                train.get_arguments().map(spellings).find(|names| names.iter().any(|name| name == flag));
            names.is_some_and(|names| typed.iter().any(|(name, _)| names.contains(name)))
        };
        let name = trainer.name();
        let differs = |row: &&FlagDefault| {
            row.lora.is_none_or(|lora| lora == self.is_lora)
                && !is_typed(row.flag)
                && !row.also.iter().any(|flag| is_typed(flag))
                && !row.is_in(self.file)
                && (row.only_with.is_empty() || row.only_with.iter().any(|flag| is_typed(flag)))
        };
        let shown = |row: &FlagDefault| {
            let mut theirs = row.of(trainer)?.to_owned();
            if trainer == ForeignTrainer::Swift && row.flag == "gradient-accumulation-steps" {
                theirs = swift_accumulation(self.micro_batch, self.ranks).to_string();
            }
            (theirs != row.here).then(|| format!("--{} {} ({name}: {theirs})", row.flag, row.here))
        };
        let rows: Vec<String> = FLAG_DEFAULTS.iter().filter(differs).filter_map(shown).collect();
        let sign: Vec<String> = sign.iter().map(|word| format!("--{}", word.replace('=', " "))).collect();
        let verb = if sign.len() == 1 { "is" } else { "are" };
        (!rows.is_empty()).then(|| {
            format!(
                "{} {verb} of {name}, whose defaults differ from those here: {}",
                sign.join(" with "),
                rows.join("; ")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes(line: &str, is_lora: bool, ranks: u64) -> Vec<String> {
        let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
        Compared { file: &FileValues::default(), is_lora, micro_batch: 1, ranks }.notes(arguments.iter())
    }

    #[test]
    fn the_trainer_of_a_flag_is_named_with_what_differs() {
        let [note] = &notes("train --tuner_type full --dataset d", false, 8)[..] else {
            panic!("one trainer")
        };
        assert!(note.starts_with("--tuner-type is of ms-swift, whose defaults differ"), "{note}");
        assert!(note.contains("--gradient-accumulation-steps 1 (ms-swift: 2)"), "{note}");
        assert!(note.contains("--gradient-checkpointing false (ms-swift: true)"), "{note}");
        assert!(!note.contains("--train-type") && !note.contains("--lora-rank"), "{note}");
        let typed = "train --tuner-type full --gradient_accumulation_steps=4 --cutoff-len 9";
        let [swift, factory] = &notes(typed, false, 8)[..] else { panic!("two trainers") };
        assert!(
            !swift.contains("--gradient-accumulation-steps") && !swift.contains("--max-length"),
            "{swift}"
        );
        assert!(factory.starts_with("--cutoff-len is of LLaMA-Factory"), "{factory}");
        // 16 ranks make up ms-swift's batch.
        assert!(!notes("train --tuner_type full", false, 16)[0].contains("accumulation"));
        let [axolotl] = &notes("train --adapter=lora", true, 1)[..] else { panic!("one trainer") };
        assert!(axolotl.starts_with("--adapter lora is of axolotl"), "{axolotl}");
        assert!(axolotl.contains("--lora-dropout 0.05 (axolotl: 0)"), "{axolotl}");
        assert!(!axolotl.contains("--eval-strategy"), "{axolotl}");
        assert!(notes("train --adapter=lora --eval-data e", true, 1)[0].contains("(axolotl: epoch)"));
        assert!(notes("train --adapter some/folder --train-type lora", true, 1).is_empty());
        assert_eq!(notes("train --dataset d --train_type full", false, 1).len(), 1);
        for ours in
            ["train --model m --data d", "train --model m --data d --train-type lora --dataset-num-proc 4"]
        {
            assert!(notes(ours, true, 1).is_empty(), "{ours}");
        }
    }

    #[test]
    fn signs_and_rows_are_flags_of_train() {
        let command = flag_rules::command();
        let train = command.find_subcommand("train").unwrap();
        let known: Vec<String> = train.get_arguments().flat_map(spellings).collect();
        let is_known = |flag: &str| known.iter().any(|known| known == flag);
        for sign in ForeignTrainer::ALL.into_iter().flat_map(ForeignTrainer::signs).copied().flatten() {
            assert!(is_known(sign.split('=').next().unwrap()), "--{sign}");
        }
        let main: Vec<&str> = train.get_arguments().filter_map(|argument| argument.get_long()).collect();
        for row in FLAG_DEFAULTS {
            assert!(main.contains(&row.flag), "--{}", row.flag);
            assert!(row.also.iter().chain(row.only_with).all(|flag| is_known(flag)), "--{}", row.flag);
        }
    }
}
