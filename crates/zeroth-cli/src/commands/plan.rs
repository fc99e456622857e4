//! `plan`: bytes by tier and category for every preset, what fits, and what to change where nothing does.

use serde_json::json;
use zeroth::base::{counted, format_bytes, format_count, grouped};
use zeroth::config::preset::PRESETS;
use zeroth::config::resolve::{Flags, ModelFacts, Precision, Request, Resolved, resolve};
use zeroth::config::schema::RecomputePolicy;
use zeroth::machine::known_gpu;
use zeroth::model::{
    Lora, LoraTargets, ModelConfig, ParameterTable, hidden_size_for_auto, locate_config, read_config, table,
};
use zeroth::plan::deepspeed::{Machines, zero2_lines, zero3_lines};
use zeroth::plan::{Ask, Placement, Plan, States, TrainType, plan};
use zeroth::planning;
use zeroth::program::Bytes;

use super::config_file;
use crate::cli::{PlanArgs, StatesArg, TrainTypeArg};
use crate::exit::Exit;
use crate::missing_unit;
use crate::output::{self, Colour, Output};
use crate::table::Table;

/// LoRA's rank where none is typed, ms-swift's.
const LORA_RANK: u64 = 8;

/// The longest row that is planned for where the model allows more.
const LONGEST_ROW: u64 = 2048;

pub(super) fn run(arguments: &PlanArgs, output: &Output) -> anyhow::Result<Exit> {
    let model = arguments.model.as_deref().map(Model::read).transpose()?;
    let flags = arguments.train.to_flags(arguments.train_type == TrainTypeArg::Lora)?;
    let configs = configs(arguments, &flags, model.as_ref())?;
    let device_memory = device_memory(arguments, &configs)?;
    let placements = configs
        .iter()
        .map(|(name, config)| planning::placement(name, config, model.as_ref().map(|model| &model.table)))
        .collect::<Result<Vec<Placement>, _>>()?;
    let ask = ask(arguments, model.as_ref(), &configs, device_memory)?;
    let mut plan = plan(&ask, &placements)?;
    plan.notes.extend(idle_flags(arguments));
    let budgets = [("--device-memory", arguments.device_memory), ("--host-memory", arguments.host_memory)];
    plan.notes.splice(0..0, missing_unit::hints(&budgets));
    if output.is_json() {
        let mut json = serde_json::to_value(&plan)?;
        json["model"] = json!(model.as_ref().map(|model| &model.name));
        json["estimate"] = json!(model.is_none());
        json["deepspeed_estimators"] = json!(estimators(&ask));
        output::json(&json)?;
    } else {
        output::text(&text(&plan, &ask, model.as_ref(), output));
    }
    Ok(if plan.is_possible() { Exit::Done } else { Exit::DoesNotFit })
}

/// What was typed and counts for nothing without a model.
fn idle_flags(arguments: &PlanArgs) -> Option<String> {
    let typed = [
        ("--max-length", arguments.max_length.is_some()),
        ("--per-device-train-batch-size", arguments.train.per_device_train_batch_size.is_some()),
        ("--gradient-checkpointing", arguments.train.gradient_checkpointing.is_some()),
        ("--lora-rank", arguments.lora_rank.is_some()),
        ("--target-modules", !arguments.target_modules.is_empty()),
    ];
    let idle: Vec<&str> = typed.into_iter().filter(|(_, typed)| *typed).map(|(flag, _)| flag).collect();
    let counts = arguments.model.is_some() || idle.is_empty();
    (!counts)
        .then(|| format!("{} changed nothing: what they count needs a model, with --model", idle.join(", ")))
}

/// A model by its table: shapes only.
struct Model {
    name: String,
    config: ModelConfig,
    table: ParameterTable,
    hidden_size: Option<u64>,
}

impl Model {
    fn read(name: &str) -> anyhow::Result<Self> {
        let folder = locate_config(name)?;
        let (map, _) = read_config(&folder)?;
        let config = ModelConfig::from_folder(&folder)?;
        let table = table(&config);
        Ok(Self { name: name.to_owned(), config, table, hidden_size: hidden_size_for_auto(&map) })
    }

    fn blocks(&self) -> u64 {
        self.config.blocks + self.config.encoder_blocks
    }
}

/// The configs to plan, resolved: one that was named, or every preset.
fn configs(
    arguments: &PlanArgs,
    flags: &Flags,
    model: Option<&Model>,
) -> anyhow::Result<Vec<(String, Resolved)>> {
    let names: Vec<&str> = match &arguments.deepspeed {
        Some(name) => vec![name],
        None => PRESETS.iter().map(|preset| preset.name).collect(),
    };
    // Without a model no buffer is counted, so that the size of "auto" buckets does not matter.
    let facts = model.map_or(ModelFacts { hidden_size: Some(0), blocks: None }, |model| ModelFacts {
        hidden_size: model.hidden_size,
        blocks: Some(model.blocks()),
    });
    names
        .into_iter()
        .map(|name| {
            let checked = config_file::load(name)?;
            let file = &checked.report.values;
            let request = Request { file, flags, ranks: arguments.ranks, model: Some(facts), steps: None };
            Ok((name.to_owned(), resolve(&request)?))
        })
        .collect()
}

/// The budget of a device: given, or a card's; a card without bf16 is refused for a run in bf16.
fn device_memory(arguments: &PlanArgs, configs: &[(String, Resolved)]) -> anyhow::Result<Option<u64>> {
    let Some(name) = &arguments.card else { return Ok(arguments.device_memory) };
    let card = known_gpu(name)?;
    let bf16 = configs.iter().any(|(_, config)| config.values.bf16.enabled);
    if bf16 && !card.supports_bf16() {
        anyhow::bail!("{} has no bf16, and the run is in bf16: use --fp16", card.name);
    }
    Ok(Some(card.memory))
}

fn ask(
    arguments: &PlanArgs,
    model: Option<&Model>,
    configs: &[(String, Resolved)],
    device_memory: Option<u64>,
) -> anyhow::Result<Ask> {
    let top_level = configs.first().map(|(_, config)| &config.values.top_level);
    if configs.iter().all(|(_, config)| precision(config) == Precision::Fp32) {
        anyhow::bail!(
            "planning of fp32 runs is not yet built: the plan counts 16-bit parameters; use bf16 or fp16"
        );
    }
    let targets = match arguments.target_modules.as_slice() {
        [] => LoraTargets::AllLinear,
        names => LoraTargets::from_names(names),
    };
    let lora = Lora { rank: arguments.lora_rank.unwrap_or(LORA_RANK), targets };
    let states = match arguments.states {
        Some(StatesArg::Plain) => States::Plain,
        Some(StatesArg::Run) => States::Run,
        None if model.is_some() => States::Run,
        Some(StatesArg::Master) | None => States::Master,
    };
    let params = model.map_or(arguments.params.unwrap_or(0), |model| model.table.total());
    let ask = Ask {
        train_type: match arguments.train_type {
            TrainTypeArg::Full => TrainType::Full,
            TrainTypeArg::Lora => TrainType::Lora,
        },
        ranks_per_host: arguments.ranks_per_host.unwrap_or(arguments.ranks),
        states,
        narrow_sums: configs.iter().all(|(_, config)| has_narrow_sums(config)),
        in_bf16: configs.iter().all(|(_, config)| precision(config) != Precision::Fp16),
        accumulation: top_level.map_or(1, |top_level| top_level.gradient_accumulation_steps),
        largest_layer: model
            .and_then(|model| model.table.largest_module().map(|(_, elements)| elements))
            .or(arguments.largest_layer),
        device_memory,
        host_memory: arguments.host_memory,
        ..Ask::new(params, arguments.ranks)
    };
    let Some(model) = model else { return Ok(ask) };
    let longest = model.config.max_positions.unwrap_or(LONGEST_ROW).min(LONGEST_ROW);
    let recompute =
        configs.iter().any(|(_, config)| config.values.zeroth.recompute == RecomputePolicy::Block);
    let max_length = arguments.max_length.unwrap_or(longest);
    let micro_batch = top_level.map_or(1, |top_level| top_level.train_micro_batch_size_per_gpu);
    Ok(Ask {
        adapters: Some(planning::adapters(&model.table, &lora)?),
        shape: Some(planning::shape(&model.config, &model.table, micro_batch, max_length, recompute)),
        ..ask
    })
}

/// Whether shards of gradients add up in 16 bits: only stages 2 and 3 keep shards.
fn has_narrow_sums(config: &Resolved) -> bool {
    config.values.zero.stage >= 2 && config.values.data_types.grad_accum_dtype.bytes() == 2
}

fn precision(config: &Resolved) -> Precision {
    if config.values.bf16.enabled {
        Precision::Bf16
    } else if config.values.fp16.enabled {
        Precision::Fp16
    } else {
        Precision::Fp32
    }
}

/// DeepSpeed's own tables for the same job, as it prints them.
fn estimators(ask: &Ask) -> Vec<String> {
    if ask.train_type == TrainType::Lora {
        return Vec::new();
    }
    let gpus_per_node = ask.ranks_per_host.min(ask.ranks).max(1);
    let machines = Machines { gpus_per_node, nodes: ask.ranks.div_ceil(gpus_per_node) };
    let mut lines: Vec<String> =
        zero2_lines(ask.params, machines).iter().map(|line| format!("ZeRO-2 {line}")).collect();
    if let Some(layer) = ask.largest_layer {
        lines.extend(zero3_lines(ask.params, layer, machines).iter().map(|line| format!("ZeRO-3 {line}")));
    }
    lines
}

fn text(plan: &Plan, ask: &Ask, model: Option<&Model>, output: &Output) -> String {
    let mut text = head(plan, ask, model);
    text.push_str(&rows(plan, ask, output));
    match &plan.recommended {
        Some(preset) => {
            text.push_str(&format!("\nrecommended: {}\n  {}\n", output.bold(preset), plan.reason));
        }
        None => text.push_str(&format!("\n{}\n", output.coloured(Colour::Red, &plan.reason))),
    }
    if !plan.changes.is_empty() {
        text.push_str("\nany one of these changes would fit:\n");
        for change in &plan.changes {
            text.push_str(&format!("  {}\n", change.text));
        }
    }
    let estimators = estimators(ask);
    if !estimators.is_empty() {
        text.push_str("\nDeepSpeed's own estimators for the same job (states only; its GB are GiB):\n");
        text.push_str("         per CPU  |  per GPU |   options\n");
        for line in estimators {
            text.push_str(&format!("  {line}\n"));
        }
    }
    if !plan.advice.is_empty() {
        text.push_str("\nusual advice, beside the arithmetic:\n");
        for advice in &plan.advice {
            let verdict = match advice.agrees {
                Some(true) => "confirmed",
                Some(false) => "refuted",
                None => "not compared with a budget",
            };
            text.push_str(&format!("  {}: {verdict}: {}\n", advice.says, advice.arithmetic));
        }
    }
    for note in &plan.notes {
        text.push_str(&format!("note: {note}\n"));
    }
    text
}

fn head(plan: &Plan, ask: &Ask, model: Option<&Model>) -> String {
    let each = plan.bytes_per_parameter;
    let mut head = match model {
        Some(model) => {
            let active = model.table.active_per_token();
            let active = if active < plan.params {
                format!(", {} of them active for a token", format_count(active))
            } else {
                String::new()
            };
            format!(
                "{}: {} parameters ({}){active}\n",
                model.name,
                grouped(plan.params),
                format_count(plan.params)
            )
        }
        None => format!(
            "{} parameters ({}), an estimate: closed forms from this number alone\n",
            grouped(plan.params),
            format_count(plan.params)
        ),
    };
    head.push_str(&format!(
        "{}, {} bytes a trained parameter: {} parameters + {} gradients + {} optimizer\n",
        counted(plan.ranks, "rank"),
        each.parameters + each.gradients + each.optimizer,
        each.parameters,
        each.gradients,
        each.optimizer
    ));
    if let Some(shape) = &ask.shape {
        head.push_str(&format!(
            "micro-batch {} × {}, accumulation {}{}\n",
            shape.micro_batch,
            counted(shape.max_length, "token"),
            ask.accumulation,
            if shape.recompute { ", blocks computed again in backward" } else { "" }
        ));
    }
    if ask.train_type == TrainType::Lora {
        let own = ask.adapters.map_or_else(|| "an unknown number of".to_owned(), |own| grouped(own.params));
        head.push_str(&format!("LoRA trains {own} parameters of its own; the model's stay as they are\n"));
    }
    head.push('\n');
    head
}

fn rows(plan: &Plan, ask: &Ask, output: &Output) -> String {
    let budget = ask
        .device_memory
        .map_or_else(|| "fits".to_owned(), |budget| format!("fits {}", format_bytes(budget)));
    let head = [
        "preset",
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "buffers",
        "device",
        "host",
        "sent/step",
        "saving",
        &budget,
    ];
    let mut table = Table::new(&head, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
    for row in &plan.rows {
        let Bytes { parameters, gradients, optimizer, activations, buffers, total } = row.device_bytes;
        let figures = [parameters, gradients, optimizer, activations, buffers, total, row.host_bytes.total];
        let fits = match row.fits {
            Some(true) => "yes",
            Some(false) => "no",
            None => "-",
        };
        let saving = row.saving.map_or_else(|| "-".to_owned(), |saving| format!("{saving:.2}x"));
        table.row(std::iter::once(row.preset.clone()).chain(figures.into_iter().map(format_bytes)).chain([
            format_bytes(row.comm_bytes_per_step),
            saving,
            fits.to_owned(),
        ]));
    }
    let mut text = String::new();
    for (index, line) in table.lines().iter().enumerate() {
        let line = line.trim_end();
        let line = match index.checked_sub(1).map(|index| plan.rows[index].fits) {
            None => output.bold(line),
            Some(Some(true)) => output.coloured(Colour::Green, line),
            Some(Some(false)) => output.coloured(Colour::Red, line),
            Some(None) => line.to_owned(),
        };
        text.push_str(&format!("{line}\n"));
    }
    text
}
