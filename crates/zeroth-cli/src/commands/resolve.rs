//! `config resolve`: a config's resolved values, with the origin of each.

use serde_json::{Value, json};
use zeroth::base::DType;
use zeroth::config::checked::CheckedConfig;
use zeroth::config::resolve::{ModelFacts, Origin, ResolveRequest, ResolvedSetting, resolve};
use zeroth::job::builtin_note;
use zeroth::model::{ModelConfig, hidden_size_for_auto, named_config};

use crate::cli::ResolveArgs;
use crate::exit::Exit;
use crate::output::{self, Output};
use crate::table::Table;
use crate::value_args::TrainTypeArg;

pub(super) fn run(arguments: &ResolveArgs, output: &Output) -> anyhow::Result<Exit> {
    let checked = CheckedConfig::load(&arguments.file)?;
    let found = arguments.model.as_deref().map(model_facts).transpose()?;
    let dtype = found.as_ref().and_then(|found| found.dtype);
    let flags = arguments.train.to_flags(arguments.train_type == TrainTypeArg::Lora, dtype)?;
    let (model, builtin) = found.map_or((None, None), |found| (Some(found.facts), found.note));
    let request = ResolveRequest {
        file: &checked.report.values,
        flags: &flags,
        ranks: arguments.ranks,
        model,
        steps: None,
    };
    let resolved = resolve(&request)?;
    let notes: Vec<String> =
        builtin.into_iter().chain(resolved.notes.iter().map(ToString::to_string)).collect();
    let name = checked.document.source.name();
    if output.is_json() {
        let origins: Vec<Value> = resolved.settings().iter().map(origin).collect();
        output::json(&json!({
            "file": name,
            "run_file": arguments.config,
            "ranks": arguments.ranks,
            "config": resolved.to_json(),
            "origins": origins,
            "notes": notes,
        }))?;
        return Ok(Exit::Done);
    }
    let mut table = Table::new(&["key", "value", "origin"], &[]);
    let shown = |setting: &&ResolvedSetting| arguments.all || setting.origin != Origin::Default;
    for setting in resolved.settings().iter().filter(shown) {
        table.row([setting.key.path.to_owned(), setting.value.to_string(), setting.origin.to_string()]);
    }
    output::text(&table.lines().concat());
    let hidden = resolved.settings().iter().filter(|setting| !shown(setting)).count();
    if hidden > 0 {
        output::text(&format!("\n{hidden} more keys have their defaults; --all shows them\n"));
    }
    for note in &notes {
        output::text(&format!("note: {note}\n"));
    }
    Ok(Exit::Done)
}

fn origin(setting: &ResolvedSetting) -> Value {
    let mut entry = json!({
        "path": setting.key.path,
        "value": setting.value,
        "origin": setting.origin.word(),
        "detail": setting.origin.to_string(),
    });
    if let Origin::File(location) = setting.origin {
        entry["line"] = location.line.into();
        entry["column"] = location.column.into();
    }
    entry
}

/// A model's facts for the resolver.
struct NamedModel {
    facts: ModelFacts,
    dtype: Option<DType>,
    /// Says that a built-in config is used.
    note: Option<String>,
}

/// The hidden size is read from any config.json, as in Hugging Face; the number of blocks and the dtype only for
/// supported architectures.
fn model_facts(name: &str) -> anyhow::Result<NamedModel> {
    let config = named_config(name)?;
    let model = ModelConfig::from_map(&config.map, &config.origin).ok();
    let dtype = model.as_ref().and_then(|model| model.dtype);
    let blocks = model.map(|model| model.blocks());
    let facts = ModelFacts { hidden_size: hidden_size_for_auto(&config.map), blocks };
    Ok(NamedModel { facts, dtype, note: builtin_note(name, &config) })
}
