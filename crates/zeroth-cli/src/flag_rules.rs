//! What holds for all flags of all commands.

use clap::{Arg, ArgAction, Command, CommandFactory};

use crate::cli::Cli;

/// The commands and their flags.
pub(crate) fn command() -> Command {
    with_rules(Cli::command())
}

fn with_rules(command: Command) -> Command {
    command.mut_args(with_rule).mut_subcommands(with_rules)
}

/// A flag that is given twice has its last values, also where it takes several; -5 is a value, never a flag.
fn with_rule(argument: Arg) -> Arg {
    if argument.get_long().is_none() || !argument.get_action().takes_values() {
        return argument;
    }
    let argument = argument.allow_negative_numbers(true);
    if matches!(argument.get_action(), ArgAction::Append) {
        argument.action(ArgAction::Set)
    } else {
        argument
    }
}
