//! The `zeroth` binary: parses the command line, runs a command, and returns its exit code.

mod bench_args;
mod cli;
mod commands;
#[cfg(test)]
mod documented_commands;
mod evaluation_args;
mod exit;
mod flag_names;
mod flags_without_effect;
mod generate_flags;
mod kd_args;
mod lora_args;
mod monitor_args;
mod normalize_args;
mod optimizer_names;
mod output;
mod pair_args;
mod parse_errors;
mod precision_flags;
mod results;
mod run_file;
mod sanitize;
mod schedule_kwargs;
mod signals;
mod startup_signals;
mod stderr_writer;
mod stop_signal;
mod table;
mod terminal;
mod train_args;
mod train_flags;
mod trainer_args;
mod unit_hints;
mod value_args;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};
use zeroth::comm::local::JOB_FD;

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
    // Ranks have the launcher's arguments, run file included.
    let expanded =
        if std::env::var_os(JOB_FD).is_some() { Ok(typed) } else { run_file::expand(&command, typed) };
    let typed = match expanded {
        Ok(typed) => typed,
        Err(errors) => {
            for error in errors {
                output::error(&error);
            }
            return Exit::Wrong;
        }
    };
    run_file::keep(&typed);
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
