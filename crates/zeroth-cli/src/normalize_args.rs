//! Normalises the command line before clap parses it: underscores in flags, booleans with a value, commands not built
//! yet.

use std::ffi::OsString;

use clap::Command;

use crate::flag_names::spellings;
use crate::foreign_names;

/// Commands that are not built yet.
const UNBUILT_COMMANDS: [&str; 1] = ["checkpoint import"];

/// Converts arguments to UTF-8; a lossy conversion would name another path.
pub(crate) fn texts(typed: impl Iterator<Item = OsString>) -> Result<Vec<String>, String> {
    let mut texts: Vec<String> = Vec::new();
    for argument in typed {
        let argument = argument.into_string().map_err(|argument| {
            let shown = argument.to_string_lossy();
            let flag = texts.last().filter(|before| before.starts_with("--") && !shown.starts_with('-'));
            let flag = flag.map(|flag| format!("{flag} ")).unwrap_or_default();
            format!("{flag}{shown} is not UTF-8: rename it, or give a symlink with a UTF-8 path")
        })?;
        texts.push(argument);
    }
    Ok(texts)
}

/// Commands: the words that are neither flags nor the value of --format.
fn command_words(typed: &[String]) -> impl Iterator<Item = &str> {
    let words = typed.iter().zip(typed.iter().skip(1)).filter(|(before, _)| *before != "--format");
    words.map(|(_, word)| word.as_str()).filter(|word| !word.starts_with('-'))
}

/// The message for a command of another program.
pub(crate) fn foreign_command(root: &Command, typed: &[String]) -> Option<String> {
    let word = command_words(typed).next().filter(|word| root.find_subcommand(word).is_none())?;
    Some(format!("there is no `zeroth {word}`: {}", foreign_names::command(word)?))
}

/// The message for a command that is not built yet.
pub(crate) fn unsupported_command(typed: &[String]) -> Option<String> {
    let mut words = command_words(typed);
    let command = words.next()?;
    let with_its_own = format!("{command} {}", words.next().unwrap_or_default());
    let later = UNBUILT_COMMANDS.into_iter().find(|later| [command, &with_its_own].contains(later))?;
    Some(format!(
        "`zeroth {later}` is not yet built in this version; available are train, launch, generate, plan, config, checkpoint \
         (inspect, verify, export), data preview, distill cache, init, bench, monitor, doctor and completions"
    ))
}

/// Rewrites flags to clap's spelling: `--per_device_train_batch_size` with dashes, booleans joined with a following true or
/// false, and flags that may stand in front of a command joined with their value. Arguments after a bare `--` belong to another command.
pub(crate) fn normalize(command: &Command, typed: Vec<String>) -> Vec<String> {
    let booleans = boolean_flags(command);
    let globals: Vec<String> =
        command.get_arguments().filter(|argument| argument.is_global_set()).flat_map(spellings).collect();
    let mut normal: Vec<String> = Vec::with_capacity(typed.len());
    let mut arguments = typed.into_iter().peekable();
    while let Some(argument) = arguments.next() {
        if argument == "--" {
            normal.push(argument);
            normal.extend(arguments);
            break;
        }
        let Some(flag) = argument.strip_prefix("--") else {
            normal.push(argument);
            continue;
        };
        let (name, value) = match flag.split_once('=') {
            Some((name, value)) => (name.replace('_', "-"), Some(value.to_owned())),
            None => (flag.replace('_', "-"), None),
        };
        // Hugging Face's default, by which epochs count.
        if name == "max-steps"
            && value.as_deref().or_else(|| arguments.peek().map(String::as_str)) == Some("-1")
        {
            if value.is_none() {
                arguments.next();
            }
            continue;
        }
        let value = value.or_else(|| {
            let is_boolean = booleans.contains(&name);
            arguments.next_if(|next| is_boolean && is_truth(next)).map(|next| next.to_ascii_lowercase())
        });
        // clap would read what follows the command first, and complain about that alone.
        let value =
            value.or_else(|| arguments.next_if(|next| globals.contains(&name) && !next.starts_with('-')));
        normal.push(match value {
            Some(value) if booleans.contains(&name) => format!("--{name}={}", value.to_ascii_lowercase()),
            Some(value) => format!("--{name}={value}"),
            None => format!("--{name}"),
        });
    }
    normal
}

fn is_truth(text: &str) -> bool {
    text.eq_ignore_ascii_case("true") || text.eq_ignore_ascii_case("false")
}

/// Long names of all boolean flags of all commands.
fn boolean_flags(command: &Command) -> Vec<String> {
    let own = command.get_arguments().filter(|argument| argument.is_require_equals_set()).flat_map(spellings);
    own.chain(command.get_subcommands().flat_map(boolean_flags)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normal(line: &str) -> String {
        let typed = line.split(' ').map(str::to_owned).collect();
        normalize(&crate::flag_rules::command(), typed).join(" ")
    }

    #[test]
    fn underscores_become_dashes_in_names_and_stay_in_values() {
        let line = "zeroth config resolve my_file.json --per_device_train_batch_size 2 --lr_scheduler_type=constant_with_warmup";
        let expected = "zeroth config resolve my_file.json --per-device-train-batch-size 2 --lr-scheduler-type=constant_with_warmup";
        assert_eq!(normal(line), expected);
    }

    #[test]
    fn booleans_take_an_optional_value() {
        assert_eq!(
            normal("zeroth config resolve x --bf16 True --fp16 false"),
            "zeroth config resolve x --bf16=true --fp16=false"
        );
        assert_eq!(
            normal("zeroth config check --strict file.json"),
            "zeroth config check --strict file.json"
        );
    }

    #[test]
    fn flags_of_all_commands_are_joined_with_their_value() {
        assert_eq!(normal("zeroth --format xml plan --params 8B"), "zeroth --format=xml plan --params 8B");
        assert_eq!(normal("zeroth plan --format --params 8B"), "zeroth plan --format --params 8B");
    }

    #[test]
    fn arguments_after_a_double_dash_are_unchanged() {
        let line = "zeroth config verify ds.json -- deepspeed --num_gpus=4 train.py --bf16 True";
        assert_eq!(normal(line), line);
    }

    #[test]
    fn commands_not_built_yet_are_reported() {
        let typed = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert!(unsupported_command(&typed("zeroth checkpoint import --web")).unwrap().contains("not yet"));
        assert!(
            unsupported_command(&typed("zeroth --format json checkpoint import"))
                .unwrap()
                .contains("not yet")
        );
        assert_eq!(unsupported_command(&typed("zeroth config check import")), None);
        assert!(
            unsupported_command(&typed("zeroth checkpoint import x"))
                .unwrap()
                .contains("`zeroth checkpoint import`")
        );
        assert_eq!(unsupported_command(&typed("zeroth checkpoint verify import")), None);
    }
}
