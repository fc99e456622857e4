//! One file per command.

mod bench;
mod check;
mod checkpoint;
mod checkpoint_merge;
mod data;
mod data_inputs;
mod distill;
mod doctor;
mod dump_program;
mod explain;
mod generate;
mod generate_answers;
mod generate_chat;
mod generate_rows;
mod generate_sampling;
mod generate_sequences;
mod generate_setup;
mod generate_stream;
mod generate_text;
mod init;
mod launch;
mod machine_profile;
mod monitor;
mod plan;
mod plan_text;
mod presets;
mod process_memory;
mod refuse_existing;
pub(crate) mod render_templates;
mod resolve;
mod train;
mod verify;
mod verify_cache;

pub(crate) use self::train::strategies;
use crate::cli::{Command, ConfigCommand};
use crate::exit::Exit;
use crate::flag_rules;
use crate::output::{self, Output};

pub(crate) fn run(command: Command, output: &Output) -> anyhow::Result<Exit> {
    if let Command::Train(_)
    | Command::Checkpoint(_)
    | Command::Data(_)
    | Command::Distill(_)
    | Command::Generate(_) = command
    {
        zeroth::train::start_threads()?;
    }
    match command {
        Command::Train(arguments) => train::run(&arguments, output),
        Command::Launch(arguments) => launch::run(&arguments),
        Command::Plan(arguments) => plan::run(&arguments, output),
        Command::Config(config) => match config {
            ConfigCommand::New(arguments) => generate::new(&arguments, output),
            ConfigCommand::Tiers(arguments) => generate::tiers(&arguments, output),
            ConfigCommand::Presets(arguments) => presets::run(&arguments, output),
            ConfigCommand::Check(arguments) => check::run(&arguments, output),
            ConfigCommand::Resolve(arguments) => resolve::run(&arguments, output),
            ConfigCommand::Explain { key } => explain::run(&key, output),
            ConfigCommand::Verify(arguments) => verify::run(&arguments, output),
            ConfigCommand::Schema => {
                output::json(&zeroth::config::json_schema::json_schema())?;
                Ok(Exit::Done)
            }
        },
        Command::Checkpoint(command) => checkpoint::run(&command, output),
        Command::Data(command) => data::run(&command, output),
        Command::Distill(command) => distill::run(&command, output),
        Command::Generate(arguments) => generate_text::run(&arguments, output),
        Command::Init(arguments) => init::run(&arguments, output),
        Command::Bench(arguments) => bench::run(&arguments, output),
        Command::Monitor(arguments) => monitor::run(&arguments, output),
        Command::RenderTemplates => render_templates::run(),
        Command::Doctor => doctor::run(output),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut flag_rules::command(), "zeroth", &mut script);
            output::text(&String::from_utf8_lossy(&script));
            Ok(Exit::Done)
        }
    }
}
