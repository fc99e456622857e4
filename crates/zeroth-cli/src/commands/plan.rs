//! `plan`: bytes by tier and category for every preset, what fits, and what to change if nothing does.

use std::path::Path;

use anyhow::Context;
use serde_json::json;
use zeroth::base::{DType, counted, format_bytes, format_count};
use zeroth::config::checked::CheckedConfig;
use zeroth::config::preset::PRESETS;
use zeroth::config::resolve::{Flags, ModelFacts, ResolveRequest, Resolved, resolve};
use zeroth::graph::DistillSpec;
use zeroth::job::{cpus, free_device_memory, gpus, longest_row, processes, teacher_placement, usual_ranks};
use zeroth::machine::{DeviceKind, KnownGpu, known_gpu, other_sizes, probe, probe_host};
use zeroth::model::{BatchTokens, ModelConfig, ParameterTable, hidden_size_for_auto, named_config, table};
use zeroth::plan::{
    Basis, Placement, PlanDevice, PlanRequest, PlannedRows, PlannedSource, PlannedTeacher, States, TrainType,
    TrainableModel, compile, plan,
};
use zeroth::planning;
use zeroth::program::Recompute;
use zeroth::train::{CacheManifest, TeacherCache, TeacherModel};

use super::resolve::builtin_note;
use super::{dump_program, plan_text};
use crate::cli::{PlanArgs, StatesArg};
use crate::exit::Exit;
use crate::kd_args::PlanTeacherArgs;
use crate::output::{self, Output};
use crate::value_args::{DeviceArg, TrainTypeArg};

pub(super) fn run(arguments: &PlanArgs, output: &Output) -> anyhow::Result<Exit> {
    let model = arguments.model.as_deref().map(Model::read).transpose()?;
    let dtype = model.as_ref().and_then(|model| model.config.dtype);
    let is_lora = arguments.lora.train_type_or_full()? == TrainTypeArg::Lora;
    let flags = arguments.train.to_flags(is_lora, dtype)?;
    let machine = PlannedMachine::find(arguments)?;
    let configs = configs(arguments, &flags, model.as_ref(), machine.ranks)?;
    if let Some(gpu) = machine.card {
        let bf16 = configs.iter().any(|(_, config)| config.values.bf16.enabled);
        if bf16 && !gpu.supports_bf16() {
            anyhow::bail!("{} does not support bf16, which the run uses: use --fp16", gpu.name);
        }
    }
    let placements = configs
        .iter()
        .map(|(name, config)| planning::placement(name, config))
        .collect::<Result<Vec<Placement>, _>>()?;
    let mut notes: Vec<String> = machine.note.iter().cloned().collect();
    let request = request(arguments, model.as_ref(), &configs, &machine, &mut notes)?;
    if let Some(file) = &arguments.dump_program {
        return dump(file, &request, &placements);
    }
    let mut plan = plan(&request, &placements)?;
    plan.notes.extend(notes);
    plan.notes.extend(idle_flags(arguments));
    let builtin = model.as_ref().and_then(|model| model.builtin.clone());
    plan.notes.splice(0..0, card_note(arguments).into_iter().chain(builtin));
    if output.is_json() {
        let mut json = serde_json::to_value(&plan)?;
        json["model"] = json!(model.as_ref().map(|model| &model.name));
        json["estimate"] = json!(plan.rows.iter().any(|row| row.basis == Basis::Estimate));
        json["device"] = json!(request.model.as_ref().map(|model| model.device().kind.name()));
        json["device_memory"] = json!(request.device_memory);
        json["deepspeed_estimators"] = json!(plan_text::estimators(&request));
        output::json(&json)?;
    } else {
        output::text(&plan_text::text(&plan, &request, model.as_ref(), output));
    }
    Ok(if plan.is_possible() { Exit::Done } else { Exit::DoesNotFit })
}

/// Writes the program of the only placement.
fn dump(file: &Path, request: &PlanRequest, placements: &[Placement]) -> anyhow::Result<Exit> {
    let placement = placements.first().context("--dump-program needs --deepspeed")?;
    let (compiled, fits) = compile(request, placement)?
        .context("--dump-program needs a model that can be trained, without --states")?;
    dump_program::write(file, &compiled)?;
    Ok(if fits { Exit::Done } else { Exit::DoesNotFit })
}

/// A note about flags that have no effect without a model.
fn idle_flags(arguments: &PlanArgs) -> Option<String> {
    let typed = [
        ("--max-length", arguments.rows.max_length.is_some()),
        ("--max-source-length", arguments.lengths.max_source_length.is_some()),
        ("--max-target-length", arguments.lengths.max_target_length.is_some()),
        ("--per-device-train-batch-size", arguments.train.per_device_train_batch_size.is_some()),
        ("--gradient-checkpointing", arguments.train.gradient_checkpointing.is_some()),
        ("--device", arguments.device.is_some()),
        ("--quantize", arguments.lora.quantize.is_some()),
    ];
    let typed = typed.into_iter().filter(|(_, typed)| *typed).map(|(flag, _)| flag);
    let idle: Vec<&str> = typed.chain(arguments.lora.typed()).collect();
    let counts = arguments.model.is_some() || idle.is_empty();
    (!counts).then(|| format!("{} have no effect without --model", idle.join(", ")))
}

/// A model's shapes.
pub(super) struct Model {
    pub(super) name: String,
    config: ModelConfig,
    pub(super) table: ParameterTable,
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
        self.config.blocks()
    }
}

/// The configs to plan, resolved: the given one, or all presets.
fn configs(
    arguments: &PlanArgs,
    flags: &Flags,
    model: Option<&Model>,
    ranks: u64,
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
            let checked = CheckedConfig::load(name)?;
            let file = &checked.report.values;
            let request = ResolveRequest { file, flags, ranks, model: Some(facts), steps: None };
            Ok((name.to_owned(), resolve(&request)?))
        })
        .collect()
}

/// The devices that are planned for, with what each has.
struct PlannedMachine {
    device: PlanDevice,
    ranks: u64,
    /// The memory budget of a device.
    device_memory: Option<u64>,
    /// The GPU that --card names.
    card: Option<&'static KnownGpu>,
    /// Says where a budget comes from that was not typed.
    note: Option<String>,
}

impl PlannedMachine {
    /// As typed, those of the GPU model, or what this machine would train on.
    fn find(arguments: &PlanArgs) -> anyhow::Result<Self> {
        let card = arguments.card.as_deref().map(known_gpu).transpose()?;
        // A GPU is looked for only where it may decide.
        let is_cpu = arguments.device == Some(DeviceArg::Cpu);
        let is_known = card.is_some() || (arguments.device_memory.is_some() && arguments.ranks.is_some());
        let machine = if is_cpu || (arguments.device.is_some() && is_known) { probe_host() } else { probe() };
        let usual = if card.is_some() || gpus(&machine) > 0 { DeviceKind::Cuda } else { DeviceKind::Cpu };
        let device = arguments.device.map_or(usual, DeviceKind::from);
        // The GPUs of --card are elsewhere.
        let usual = if card.is_some() { 1 } else { usual_ranks(device, &machine) };
        let ranks = arguments.ranks.unwrap_or(usual);
        let found = free_device_memory(&machine, ranks).filter(|_| device == DeviceKind::Cuda);
        let given = arguments.device_memory.or(card.map(|gpu| gpu.memory));
        let note = found.filter(|_| given.is_none()).map(|free| {
            format!(
                "the budget is what this machine's {} free for each of {}, {}: --device-memory or --card plans for others",
                if gpus(&machine) == 1 { "GPU has" } else { "GPUs have" },
                counted(ranks, "rank"),
                format_bytes(free)
            )
        });
        let threads = arguments.threads_per_rank.map(|threads| threads as usize);
        let device = PlanDevice { kind: device, cpus: cpus(), threads };
        Ok(Self { device, ranks, device_memory: given.or(found), card, note })
    }
}

/// Says which memory size was assumed for a GPU model that has several.
fn card_note(arguments: &PlanArgs) -> Option<String> {
    let name = arguments.card.as_deref()?;
    let (gpu, others) = (known_gpu(name).ok()?, other_sizes(name));
    let sizes: Vec<String> = others.iter().map(|other| format_bytes(other.memory)).collect();
    let other = others.first()?.name;
    Some(format!(
        "--card {name} has {} or {}: {} is assumed; --card \"{other}\" says the other",
        format_bytes(gpu.memory),
        sizes.join(" or "),
        format_bytes(gpu.memory)
    ))
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
    machine: &PlannedMachine,
    notes: &mut Vec<String>,
) -> anyhow::Result<PlanRequest> {
    let top_level = configs.first().map(|(_, config)| &config.values.top_level);
    let is_full = arguments.lora.train_type_or_full()? == TrainTypeArg::Full;
    if is_full {
        arguments.lora.check_full()?;
    }
    let lora = arguments.lora.request()?;
    let quantized = lora.quantized;
    let lora = model.map(|model| lora.resolve(&model.table)).transpose()?;
    if let (Some(lora), false) = (&lora, is_full) {
        notes.extend(lora.notes.iter().cloned());
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
        teacher.objective().forward(config, table, BatchTokens::of_tokens(1))?;
    }
    let adapted = lora.map(|lora| lora.table);
    let adapter_params = adapted.as_ref().map(ParameterTable::trained);
    let trainable = model.filter(|_| arguments.states.is_none()).and_then(|model| {
        let (config, table) = (model.config.clone(), model.table.clone());
        let trainable = TrainableModel::distilled(config, table, adapted, machine.device, teacher);
        let note =
            |error: &_| notes.push(format!("an estimate, since no training step can be compiled: {error}"));
        trainable.inspect_err(note).ok()
    });
    anyhow::ensure!(
        trainable.is_some() || !quantized,
        "estimates of nf4 are not yet built: --quantize needs --model with a model that can be trained"
    );
    if trainable.is_none() && configs.iter().all(|(_, config)| precision(config) == DType::F32) {
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
        ranks_per_host: arguments.ranks_per_host.unwrap_or(machine.ranks),
        states,
        accumulates_in_16_bits: configs.iter().all(|(_, config)| has_narrow_sums(config)),
        in_bf16: configs.iter().all(|(_, config)| precision(config) != DType::F16),
        accumulation: top_level.map_or(1, |top_level| top_level.gradient_accumulation_steps),
        largest_layer: model
            .and_then(|model| model.table.largest_module().map(|(_, elements)| elements))
            .or(arguments.largest_layer),
        model: trainable,
        adapter_params,
        quantized,
        device_memory: machine.device_memory,
        host_memory: arguments.host_memory,
        processes: processes(),
        ..PlanRequest::new(params, machine.ranks)
    };
    let Some(model) = model.filter(|_| request.model.is_some()) else { return Ok(request) };
    let is_block = |config: &Resolved| matches!(config.values.zeroth.recompute, Recompute::Block { .. });
    let recompute = configs.iter().any(|(_, config)| is_block(config));
    let [max_length, max_target_length] = match arguments.lengths.request().limits(&model.config)? {
        Some(limits) => [limits.source, limits.target],
        None => [longest_row(arguments.rows.max_length, &model.config), 0],
    };
    if model.config.family.is_encoder_decoder() && arguments.rows.max_length.is_some() {
        notes.push(
            "--max-length does not apply to an encoder-decoder model: --max-source-length and --max-target-length do"
                .to_owned(),
        );
    }
    let micro_batch = top_level.map_or(1, |top_level| top_level.train_micro_batch_size_per_gpu);
    Ok(PlanRequest {
        rows: Some(PlannedRows { micro_batch, max_length, max_target_length, recompute }),
        ..request
    })
}

/// Whether gradient shards accumulate in 16 bits; only stages 2 and 3 keep shards.
fn has_narrow_sums(config: &Resolved) -> bool {
    config.values.zero.stage >= 2 && config.values.data_types.grad_accum_dtype.bytes() == 2
}

fn precision(config: &Resolved) -> DType {
    if config.values.bf16.enabled {
        DType::Bf16
    } else if config.values.fp16.enabled {
        DType::F16
    } else {
        DType::F32
    }
}
