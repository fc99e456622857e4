//! `plan`: bytes by tier and category for every preset, what fits, and what to change if nothing does.

use anyhow::Context;
use serde_json::json;
use zeroth::base::{counted, format_bytes, format_count, grouped};
use zeroth::config::preset::PRESETS;
use zeroth::config::resolve::{Flags, ModelFacts, Precision, Request, Resolved, resolve};
use zeroth::config::schema::RecomputePolicy;
use zeroth::graph::DistillSpec;
use zeroth::machine::{known_gpu, probe};
use zeroth::model::{
    Batch, Lora, ModelConfig, ParameterTable, adapts_experts, add_adapters, forward_distilled,
    hidden_size_for_auto, named_config, table,
};
use zeroth::plan::deepspeed::{Cluster, zero2_lines, zero3_lines};
use zeroth::plan::{
    Basis, Frozen, Placement, Plan, PlanDevice, PlanRequest, PlannedSource, PlannedTeacher, Shape, States,
    TrainType, TrainableModel, plan,
};
use zeroth::planning;
use zeroth::program::Bytes;
use zeroth::train::{CacheManifest, TeacherCache, TeacherModel};

use super::config_file;
use super::resolve::builtin_note;
use super::train::teacher_placement;
use crate::cli::{PlanArgs, StatesArg};
use crate::exit::Exit;
use crate::kd_args::PlanTeacherArgs;
use crate::lora_args::parse_targets;
use crate::output::{self, Colour, Output};
use crate::table::Table;
use crate::unit_hints;
use crate::value_args::{DeviceArg, TrainTypeArg};

/// Maximum row length by default.
const LONGEST_ROW: u64 = 2048;

pub(super) fn run(arguments: &PlanArgs, output: &Output) -> anyhow::Result<Exit> {
    let model = arguments.model.as_deref().map(Model::read).transpose()?;
    let dtype = model.as_ref().and_then(|model| model.config.dtype);
    let flags = arguments.train.to_flags(arguments.train_type == TrainTypeArg::Lora, dtype)?;
    let configs = configs(arguments, &flags, model.as_ref())?;
    let device_memory = device_memory(arguments, &configs)?;
    let placements = configs
        .iter()
        .map(|(name, config)| planning::placement(name, config, model.as_ref().map(|model| &model.table)))
        .collect::<Result<Vec<Placement>, _>>()?;
    let mut notes = Vec::new();
    let request = request(arguments, model.as_ref(), &configs, device_memory, &mut notes)?;
    let mut plan = plan(&request, &placements)?;
    plan.notes.extend(notes);
    plan.notes.extend(idle_flags(arguments));
    let budgets = [("--device-memory", arguments.device_memory), ("--host-memory", arguments.host_memory)];
    let builtin = model.as_ref().and_then(|model| model.builtin.clone());
    plan.notes.splice(0..0, unit_hints::hints(&budgets).into_iter().chain(builtin));
    if output.is_json() {
        let mut json = serde_json::to_value(&plan)?;
        json["model"] = json!(model.as_ref().map(|model| &model.name));
        json["estimate"] = json!(plan.rows.iter().any(|row| row.basis == Basis::Estimate));
        json["device"] = json!(request.model.as_ref().map(|model| device_word(model.device())));
        json["deepspeed_estimators"] = json!(estimators(&request));
        output::json(&json)?;
    } else {
        output::text(&text(&plan, &request, model.as_ref(), output));
    }
    Ok(if plan.is_possible() { Exit::Done } else { Exit::DoesNotFit })
}

/// A note about flags that have no effect without a model.
fn idle_flags(arguments: &PlanArgs) -> Option<String> {
    let typed = [
        ("--max-length", arguments.max_length.is_some()),
        ("--max-source-length", arguments.lengths.max_source_length.is_some()),
        ("--max-target-length", arguments.lengths.max_target_length.is_some()),
        ("--per-device-train-batch-size", arguments.train.per_device_train_batch_size.is_some()),
        ("--gradient-checkpointing", arguments.train.gradient_checkpointing.is_some()),
        ("--device", arguments.device.is_some()),
        ("--lora-rank", arguments.lora_rank.is_some()),
        ("--target-modules", !arguments.target_modules.is_empty()),
        ("--lora-dropout", arguments.lora_dropout.is_some()),
        ("--quantize", arguments.quantize.is_some()),
    ];
    let idle: Vec<&str> = typed.into_iter().filter(|(_, typed)| *typed).map(|(flag, _)| flag).collect();
    let counts = arguments.model.is_some() || idle.is_empty();
    (!counts).then(|| format!("{} have no effect without --model", idle.join(", ")))
}

/// A model's shapes.
struct Model {
    name: String,
    config: ModelConfig,
    table: ParameterTable,
    hidden_size: Option<u64>,
    /// Says that a built-in config is used.
    builtin: Option<String>,
}

impl Model {
    fn read(name: &str) -> anyhow::Result<Self> {
        let named = named_config(name)?;
        let config = ModelConfig::from_named(&named)?;
        let (table, hidden_size) = (table(&config), hidden_size_for_auto(&named.map));
        let builtin = builtin_note(name, &named);
        Ok(Self { name: name.to_owned(), config, table, hidden_size, builtin })
    }

    fn blocks(&self) -> u64 {
        self.config.blocks + self.config.encoder_blocks
    }
}

/// The configs to plan, resolved: the given one, or all presets.
fn configs(
    arguments: &PlanArgs,
    flags: &Flags,
    model: Option<&Model>,
) -> anyhow::Result<Vec<(String, Resolved)>> {
    let names: Vec<&str> = match &arguments.deepspeed {
        Some(name) => vec![name],
        None => PRESETS.iter().map(|preset| preset.name).collect(),
    };
    // Without a model no buffers are counted, so the size of "auto" buckets does not matter.
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

/// The memory budget of a device: given, or that of a GPU model; one without bf16 is rejected for bf16 runs.
fn device_memory(arguments: &PlanArgs, configs: &[(String, Resolved)]) -> anyhow::Result<Option<u64>> {
    let Some(name) = &arguments.card else { return Ok(arguments.device_memory) };
    let gpu = known_gpu(name)?;
    let bf16 = configs.iter().any(|(_, config)| config.values.bf16.enabled);
    if bf16 && !gpu.supports_bf16() {
        anyhow::bail!("{} does not support bf16, which the run uses: use --fp16", gpu.name);
    }
    Ok(Some(gpu.memory))
}

/// The devices to plan for: as typed, those of the GPU model, or what this machine would train on.
fn device(arguments: &PlanArgs) -> PlanDevice {
    let cuda = match arguments.device {
        Some(device) => device == DeviceArg::Cuda,
        None => arguments.card.is_some() || probe().device_memory().is_some(),
    };
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    if cuda { PlanDevice::Cuda } else { PlanDevice::Cpu { cpus } }
}

fn device_word(device: PlanDevice) -> &'static str {
    match device {
        PlanDevice::Cpu { .. } => "cpu",
        PlanDevice::Cuda => "cuda",
    }
}

/// What the planned model is distilled from.
fn teacher(arguments: &PlanTeacherArgs, notes: &mut Vec<String>) -> anyhow::Result<Option<PlannedTeacher>> {
    // Neither changes the bytes.
    let (spec, alpha) = (DistillSpec { beta: 0.0, temperature: 2.0, squared: true }, 0.5);
    if let Some(folder) = &arguments.kd_cache {
        let cache = TeacherCache::open(folder).context("--kd-cache")?;
        let CacheManifest { k, vocab, .. } = *cache.manifest();
        let source = PlannedSource::Cache { k, vocab, tail: true };
        return Ok(Some(PlannedTeacher { spec, alpha, source, placement: None }));
    }
    let Some(name) = &arguments.teacher else { return Ok(None) };
    let named = named_config(name).context("--teacher")?;
    let config = ModelConfig::from_named(&named).context("--teacher")?;
    let is_quantized = arguments.teacher_quantize.is_some();
    let folder = named.folder.clone().unwrap_or_default();
    let TeacherModel { config, table, .. } =
        TeacherModel::new(name.clone(), folder, config, is_quantized, true);
    notes.extend(builtin_note(name, &named));
    let placement = arguments.teacher_deepspeed.as_ref();
    let placement = placement.map(|given| teacher_placement(given, notes)).transpose()?;
    notes.push(format!(
        "with the teacher {name}, {} parameters, among the parameters",
        format_count(table.total())
    ));
    let source = PlannedSource::Weights { config: Box::new(config), table };
    Ok(Some(PlannedTeacher { spec, alpha, source, placement }))
}

fn request(
    arguments: &PlanArgs,
    model: Option<&Model>,
    configs: &[(String, Resolved)],
    device_memory: Option<u64>,
    notes: &mut Vec<String>,
) -> anyhow::Result<PlanRequest> {
    let top_level = configs.first().map(|(_, config)| &config.values.top_level);
    let is_full = arguments.train_type == TrainTypeArg::Full;
    anyhow::ensure!(
        !is_full || arguments.quantize.is_none(),
        "--quantize nf4 needs --train-type lora: only frozen weights are kept in 4 bits"
    );
    let usual = Lora::default();
    let mut lora = Lora {
        rank: arguments.lora_rank.unwrap_or(usual.rank),
        dropout: arguments.lora_dropout.unwrap_or(usual.dropout),
        targets: parse_targets(&arguments.target_modules)?.unwrap_or(usual.targets),
        ..usual
    };
    if let Some(model) =
        model.filter(|model| !is_full && adapts_experts(&model.table, &lora).unwrap_or(false))
    {
        // Adapters of experts and routers have no dropout.
        lora.dropout = arguments.lora_dropout.unwrap_or(0.0);
        add_adapters(&model.table, &lora)?;
    }
    // What cannot be trained yet, and accountings other than a run's, are estimated.
    let teacher = teacher(&arguments.teacher, notes)?;
    anyhow::ensure!(
        teacher.is_none() || arguments.states.is_none(),
        "estimates of a teacher are not yet built: --teacher and --kd-cache need a plan by the program, without --states"
    );
    if let (Some(model), Some(teacher)) = (model, &teacher) {
        // Refused here with its reason: a model that cannot be trained is estimated below.
        let (config, table) = (&model.config, &model.table);
        forward_distilled(config, table, Some(teacher.distilled()), Batch::of_tokens(1))?;
    }
    let trainable = model.filter(|_| arguments.states.is_none()).and_then(|model| {
        let mut adapted = add_adapters(&model.table, &lora).ok();
        if arguments.quantize.is_some() {
            adapted.iter_mut().for_each(ParameterTable::quantize);
        }
        let (config, table) = (model.config.clone(), model.table.clone());
        TrainableModel::distilled(config, table, adapted, device(arguments), teacher).ok()
    });
    anyhow::ensure!(
        trainable.is_some() || arguments.quantize.is_none(),
        "estimates of nf4 are not yet built: --quantize needs --model with a model that can be trained"
    );
    if trainable.is_none() && configs.iter().all(|(_, config)| precision(config) == Precision::Fp32) {
        anyhow::bail!(
            "estimates of fp32 runs are not yet built: closed forms assume 16-bit parameters; use bf16 or fp16, or \
             --model with a model that can be trained"
        );
    }
    let states = match arguments.states {
        Some(StatesArg::Plain) => States::Plain,
        Some(StatesArg::Run) => States::Run,
        None if model.is_some() => States::Run,
        Some(StatesArg::Master) | None => States::Master,
    };
    let params = model.map_or(arguments.params.unwrap_or(0), |model| model.table.total());
    let request = PlanRequest {
        train_type: if is_full { TrainType::Full } else { TrainType::Lora },
        ranks_per_host: arguments.ranks_per_host.unwrap_or(arguments.ranks),
        states,
        accumulates_in_16_bits: configs.iter().all(|(_, config)| has_narrow_sums(config)),
        in_bf16: configs.iter().all(|(_, config)| precision(config) != Precision::Fp16),
        accumulation: top_level.map_or(1, |top_level| top_level.gradient_accumulation_steps),
        largest_layer: model
            .and_then(|model| model.table.largest_module().map(|(_, elements)| elements))
            .or(arguments.largest_layer),
        model: trainable,
        quantized: arguments.quantize.is_some(),
        device_memory,
        host_memory: arguments.host_memory,
        ..PlanRequest::new(params, arguments.ranks)
    };
    let Some(model) = model else { return Ok(request) };
    let longest = model.config.max_positions.unwrap_or(LONGEST_ROW).min(LONGEST_ROW);
    let recompute =
        configs.iter().any(|(_, config)| config.values.zeroth.recompute == RecomputePolicy::Block);
    let lengths = match arguments.lengths.limits(&model.config)? {
        Some(limits) => [limits.source, limits.target],
        None => [arguments.max_length.unwrap_or(longest), 0],
    };
    if model.config.family.is_encoder_decoder() && arguments.max_length.is_some() {
        notes.push(
            "--max-length does not apply to an encoder-decoder model: --max-source-length and --max-target-length do"
                .to_owned(),
        );
    }
    let micro_batch = top_level.map_or(1, |top_level| top_level.train_micro_batch_size_per_gpu);
    Ok(PlanRequest {
        adapters: Some(planning::adapters(&model.table, &lora)?),
        shape: Some(planning::shape(&model.config, &model.table, micro_batch, lengths, recompute)),
        ..request
    })
}

/// Whether gradient shards accumulate in 16 bits; only stages 2 and 3 keep shards.
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

/// DeepSpeed's own memory estimates for the same job, in its format.
fn estimators(request: &PlanRequest) -> Vec<String> {
    if request.train_type == TrainType::Lora {
        return Vec::new();
    }
    let gpus_per_node = request.ranks_per_host.min(request.ranks).max(1);
    let cluster = Cluster { gpus_per_node, nodes: request.ranks.div_ceil(gpus_per_node) };
    let mut lines: Vec<String> =
        zero2_lines(request.params, cluster).iter().map(|line| format!("ZeRO-2 {line}")).collect();
    if let Some(layer) = request.largest_layer {
        lines.extend(zero3_lines(request.params, layer, cluster).iter().map(|line| format!("ZeRO-3 {line}")));
    }
    lines
}

fn text(plan: &Plan, request: &PlanRequest, model: Option<&Model>, output: &Output) -> String {
    let mut text = head(plan, request, model);
    text.push_str(&rows(plan, request, output));
    text.push_str(&limits(plan, request));
    match &plan.recommended {
        Some(preset) => {
            text.push_str(&format!("\nrecommended: {}\n  {}\n", output.bold(preset), plan.reason));
        }
        None => text.push_str(&format!("\n{}\n", output.coloured(Colour::Red, &plan.reason))),
    }
    if !plan.changes.is_empty() {
        text.push_str("\nany of these changes would make it fit:\n");
        for change in &plan.changes {
            text.push_str(&format!("  {}\n", change.text));
        }
    }
    let estimators = estimators(request);
    if !estimators.is_empty() {
        text.push_str("\nDeepSpeed's own estimators for the same job (states only; its GB are GiB):\n");
        text.push_str("         per CPU  |  per GPU |   options\n");
        for line in estimators {
            text.push_str(&format!("  {line}\n"));
        }
    }
    if !plan.advice.is_empty() {
        text.push_str("\ncommon advice, compared with these numbers:\n");
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

fn head(plan: &Plan, request: &PlanRequest, model: Option<&Model>) -> String {
    let each = plan.bytes_per_parameter;
    let mut head = match model {
        Some(model) => {
            let active = model.table.active_per_token();
            let active = if active < plan.params {
                format!(", {} active per token", format_count(active))
            } else {
                String::new()
            };
            let basis = match &request.model {
                Some(planned) => format!("the step is compiled for {}", device_word(planned.device())),
                None => "closed-form estimate".to_owned(),
            };
            format!(
                "{}: {} parameters ({}){active}, {basis}\n",
                model.name,
                grouped(plan.params),
                format_count(plan.params)
            )
        }
        None => format!(
            "{} parameters ({}), closed-form estimate\n",
            grouped(plan.params),
            format_count(plan.params)
        ),
    };
    head.push_str(&format!(
        "{}, {} bytes per trained parameter: {} parameters + {} gradients + {} optimizer\n",
        counted(plan.ranks, "rank"),
        each.parameters + each.gradients + each.optimizer,
        each.parameters,
        each.gradients,
        each.optimizer
    ));
    if let Some(shape) = &request.shape {
        head.push_str(&format!(
            "micro-batch {} × {}, accumulation {}{}\n",
            shape.micro_batch,
            length(shape),
            request.accumulation,
            if shape.recompute { ", blocks recomputed in backward" } else { "" }
        ));
    }
    if request.train_type == TrainType::Lora {
        let own =
            request.adapters.map_or_else(|| "an unknown number of".to_owned(), |own| grouped(own.params));
        let kept = if request.quantized { ", its linear layers in nf4" } else { "" };
        head.push_str(&format!("LoRA trains {own} parameters; the model's are frozen{kept}\n"));
    }
    head.push('\n');
    head
}

fn rows(plan: &Plan, request: &PlanRequest, output: &Output) -> String {
    let budget = request
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
        let preset = match (row.basis, row.frozen) {
            (Basis::Program, None) => row.preset.clone(),
            (Basis::Program, Some(Frozen::Whole)) => format!("{} (frozen whole)", row.preset),
            (Basis::Program, Some(Frozen::Sharded)) => format!("{} (frozen sharded)", row.preset),
            (Basis::Estimate, _) => format!("{} (estimate)", row.preset),
        };
        table.row(std::iter::once(preset).chain(figures.into_iter().map(format_bytes)).chain([
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

/// What the budgets leave, and how far micro-batches could grow: a second table, where there is a budget.
fn limits(plan: &Plan, request: &PlanRequest) -> String {
    let Some(shape) = request.shape.as_ref() else { return String::new() };
    if plan.rows.iter().all(|row| row.fits.is_none()) {
        return String::new();
    }
    let micro_batch = format!("largest micro-batch of {}", length(shape));
    let row = format!("longest row in micro-batches of {}", grouped(shape.micro_batch));
    let mut table = Table::new(&["preset", "device free", "host free", &micro_batch, &row], &[1, 2, 3, 4]);
    let free = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), format_bytes);
    let count = |count: Option<u64>| match count {
        None => "-".to_owned(),
        Some(0) => "none".to_owned(),
        Some(count) => grouped(count),
    };
    for row in &plan.rows {
        table.row([
            row.preset.clone(),
            free(row.device_bytes_free),
            free(row.host_bytes_free),
            count(row.largest_micro_batch),
            count(row.longest_row),
        ]);
    }
    let lines: Vec<String> = table.lines().iter().map(|line| format!("{}\n", line.trim_end())).collect();
    format!("\n{}", lines.concat())
}

/// The tokens of a row; of an encoder-decoder, those of its source and its target.
fn length(shape: &Shape) -> String {
    match shape.max_target_length {
        0 => counted(shape.max_length, "token"),
        target => format!("({} + {} tokens)", grouped(shape.max_length), grouped(target)),
    }
}
