//! `config presets`: lists, shows and writes presets.

use serde_json::{Value, json};
use zeroth::base::publish;
use zeroth::config::preset::{PRESETS, Preset};

use super::refuse_existing::refuse_existing;
use crate::cli::PresetsArgs;
use crate::exit::Exit;
use crate::output::{self, Output};
use crate::table::Table;

pub(super) fn run(arguments: &PresetsArgs, output: &Output) -> anyhow::Result<Exit> {
    let Some(name) = &arguments.name else { return list(output) };
    let preset = Preset::find(name)?;
    match &arguments.output {
        Some(path) => {
            refuse_existing([path.as_path()], arguments.overwrite)?;
            publish(path, preset.text.as_bytes())?;
            output::note(&format!("preset {name} saved to {}", path.display()));
        }
        // The preset's text is JSON in either format.
        None => output::text(preset.text),
    }
    Ok(Exit::Done)
}

fn list(output: &Output) -> anyhow::Result<Exit> {
    if output.is_json() {
        let presets: Vec<Value> =
            PRESETS.iter().map(|preset| json!({"name": preset.name, "about": preset.about})).collect();
        output::json(&json!({"presets": presets}))?;
    } else {
        let mut table = Table::new(&["preset", "what it does"], &[]);
        for preset in PRESETS {
            table.row([preset.name.to_owned(), preset.about.to_owned()]);
        }
        output::text(&table.lines().concat());
        output::text("\nzeroth config presets NAME shows one, -o FILE writes it\n");
    }
    Ok(Exit::Done)
}
