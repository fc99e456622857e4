//! The `zeroth` binary: parses the command line, runs a command, and returns its exit code.

mod bench_args;
mod cli;
mod command_line;
mod commands;
#[cfg(test)]
mod documented_commands;
mod evaluation_args;
mod exit;
mod flag_names;
mod flag_rules;
mod flags_without_effect;
mod foreign_names;
mod generate_flags;
mod host_args;
mod job_request;
mod kd_args;
mod launch_args;
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
mod value_args;

use std::process::ExitCode;

use crate::command_line::CommandRead;
use crate::exit::Exit;
use crate::output::Output;

fn main() -> ExitCode {
    let exit = run();
    stderr_writer::flush();
    exit.into()
}

fn run() -> Exit {
    if let Err(error) = signals::report_file_size_limit() {
        output::note(&format!("note: a file that exceeds `ulimit -f` kills this process: {error}"));
    }
    match command_line::read(&flag_rules::command(), std::env::args_os()) {
        Ok(CommandRead { cli, notes }) => {
            for note in notes {
                output::note(&format!("note: {note}"));
            }
            let output = Output::new(cli.format);
            let exit = commands::run(cli.command, &output).unwrap_or_else(|error| output::failure(&error));
            output::leave_line();
            end(exit)
        }
        Err(failure) => match failure.print() {
            Exit::Done => end(Exit::Done),
            exit => exit,
        },
    }
}

/// The final exit code: a command whose result could not be written has failed.
fn end(exit: Exit) -> Exit {
    let Err(error) = results::finish() else { return exit };
    output::error(&format!("cannot write the result to standard output: {error}"));
    if exit == Exit::Done { Exit::Failed } else { exit }
}
