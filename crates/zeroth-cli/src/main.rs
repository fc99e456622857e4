//! The `zeroth` binary: parses the command line, runs a command, and returns its exit code.

mod arguments;
mod before_first_step;
mod bench_args;
mod cli;
mod commands;
#[cfg(test)]
mod documented;
mod exit;
mod flag_names;
mod generate_flags;
mod missing_unit;
mod mistakes;
mod output;
mod plain;
mod results;
mod signals;
mod stderr_writer;
mod table;
mod terminal;
mod train_args;
mod train_flags;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};

use crate::exit::Exit;
use crate::mistakes::Refusal;
use crate::output::Output;

fn main() -> ExitCode {
    let exit = run();
    stderr_writer::flush();
    exit.into()
}

fn run() -> Exit {
    let typed = match arguments::texts(std::env::args_os()) {
        Ok(typed) => typed,
        Err(message) => return refuse(&message),
    };
    if let Some(later) = arguments::later_command(&typed) {
        return refuse(&later);
    }
    let command = cli::Cli::command();
    let parsed = mistakes::parse(&command, &typed).and_then(|matches| {
        cli::Cli::from_arg_matches(&matches).map_err(|error| Refusal::Clap(Box::new(error)))
    });
    match parsed {
        Ok(cli) => {
            let output = Output::new(cli.format);
            let exit = commands::run(cli.command, &output).unwrap_or_else(|error| output::failure(&error));
            output::leave_line();
            results::end(exit)
        }
        Err(Refusal::Clap(error)) => {
            let printed = error.print();
            if error.use_stderr() {
                return Exit::Wrong;
            }
            // Help and version are results too.
            results::written(printed);
            results::end(Exit::Done)
        }
        Err(Refusal::Mistakes { mistakes, command }) => {
            for mistake in mistakes {
                output::error(&mistake);
            }
            output::note(&format!("`{command} --help` lists its flags"));
            Exit::Wrong
        }
    }
}

fn refuse(message: &str) -> Exit {
    output::error(message);
    Exit::Wrong
}
