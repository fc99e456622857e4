//! The binary `zeroth`: parses the command line, runs one command, turns its end into an exit code.

mod arguments;
mod bench_args;
mod cli;
mod commands;
mod exit;
mod generate_flags;
mod output;
mod results;
mod signals;
mod table;
mod train_args;
mod train_flags;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};

use crate::exit::Exit;
use crate::output::Output;

fn main() -> ExitCode {
    let typed = match arguments::texts(std::env::args_os()) {
        Ok(typed) => typed,
        Err(message) => return refuse(&message),
    };
    if let Some(later) = arguments::later_command(&typed) {
        return refuse(&later);
    }
    let command = cli::Cli::command();
    let arguments = arguments::normalise(&command, typed);
    let parsed =
        command.try_get_matches_from(arguments).and_then(|matches| cli::Cli::from_arg_matches(&matches));
    let error = match parsed {
        Ok(cli) => {
            let output = Output::new(cli.format);
            let exit = commands::run(cli.command, &output).unwrap_or_else(|error| output::failure(&error));
            return results::end(exit).into();
        }
        Err(error) => error,
    };
    if let Some(later) = arguments::later_flag(&error) {
        return refuse(&later);
    }
    let printed = error.print();
    if error.use_stderr() {
        return Exit::Wrong.into();
    }
    // Help and versions are results too.
    results::written(printed);
    results::end(Exit::Done).into()
}

fn refuse(message: &str) -> ExitCode {
    output::error(message);
    Exit::Wrong.into()
}
