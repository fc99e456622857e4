//! The `zeroth` binary: parses the command line, runs a command, and returns its exit code.

mod bench_args;
mod cli;
mod commands;
#[cfg(test)]
mod documented_commands;
mod evaluation_args;
mod exit;
mod flag_names;
mod generate_flags;
mod normalize_args;
mod output;
mod parse_errors;
mod results;
mod sanitize;
mod signals;
mod startup_signals;
mod stderr_writer;
mod stop_signal;
mod table;
mod terminal;
mod train_args;
mod train_flags;
mod unit_hints;
mod value_args;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};

use crate::exit::Exit;
use crate::output::Output;
use crate::parse_errors::ParseFailure;

fn main() -> ExitCode {
    let exit = run();
    stderr_writer::flush();
    exit.into()
}

fn run() -> Exit {
    let typed = match normalize_args::texts(std::env::args_os()) {
        Ok(typed) => typed,
        Err(message) => return refuse(&message),
    };
    if let Some(later) = normalize_args::unbuilt_command(&typed) {
        return refuse(&later);
    }
    let command = cli::Cli::command();
    let parsed = parse_errors::parse(&command, &typed).and_then(|matches| {
        cli::Cli::from_arg_matches(&matches).map_err(|error| ParseFailure::Clap(Box::new(error)))
    });
    match parsed {
        Ok(cli) => {
            let output = Output::new(cli.format);
            let exit = commands::run(cli.command, &output).unwrap_or_else(|error| output::failure(&error));
            output::leave_line();
            end(exit)
        }
        Err(ParseFailure::Clap(error)) => {
            let printed = error.print();
            if error.use_stderr() {
                return Exit::Wrong;
            }
            // Help and version are results too.
            results::written(printed);
            end(Exit::Done)
        }
        Err(ParseFailure::Errors { errors, command }) => {
            for error in errors {
                output::error(&error);
            }
            output::note(&format!("`{command} --help` lists its flags"));
            Exit::Wrong
        }
    }
}

/// The final exit code: a command whose result could not be written has failed.
fn end(exit: Exit) -> Exit {
    let Err(error) = results::finish() else { return exit };
    output::error(&format!("cannot write the result to standard output: {error}"));
    if exit == Exit::Done { Exit::Failed } else { exit }
}

fn refuse(message: &str) -> Exit {
    output::error(message);
    Exit::Wrong
}
