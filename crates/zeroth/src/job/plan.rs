//! Resolves a request for a plan: config, model, adapters and teacher as of its run, without data.

use std::sync::Arc;

use zeroth_base::{DType, counted, format_bytes, format_count};
use zeroth_config::checked::CheckedConfig;
use zeroth_config::preset::PRESETS;
use zeroth_config::resolve::Resolved;
use zeroth_machine::{DeviceKind, KnownGpu, probe, probe_host};
use zeroth_model::{
    BatchTokens, ForwardError, ModelConfig, NamedConfig, ParameterTable, named_config, table,
};
use zeroth_plan::{
    Placement, PlanDevice, PlanRequest, PlannedRows, PlannedSource, PlannedTeacher, States, TrainType,
    TrainableModel,
};
use zeroth_program::Recompute;
use zeroth_train::{CacheManifest, TeacherCache, TeacherModel};

use super::config::ConfigContext;
use super::error::JobError;
use super::lora::LoraRequest;
use super::machine::{cpus, free_device_memory, gpus, processes, usual_ranks};
use super::request::JobRequest;
use super::row_length::longest_row;
use super::teacher::{DistillRequest, DistillRequestError, teacher_placement};
use crate::planning::{NvmeOffload, placement};

/// What is planned besides the job that is asked for.
#[derive(Debug, Clone, Default)]
pub struct PlanOptions {
    /// Every preset instead of the request's config.
    pub every_preset: bool,
    /// Parameters instead of the request's model, for an estimate.
    pub parameters: Option<ParameterCount>,
    /// A GPU model to train on, instead of this machine's.
    pub card: Option<&'static KnownGpu>,
    /// Ranks on a host; all if not given.
    pub ranks_per_host: Option<u64>,
    /// An accounting of bytes per parameter, for an estimate instead of a compiled step.
    pub states: Option<States>,
    /// The adapters of the LoRA run that a plan of full training may suggest.
    pub suggested_lora: LoraRequest,
}

/// The size of a model that is not there.
#[derive(Debug, Clone, Copy)]
pub struct ParameterCount {
    /// Its parameters.
    pub total: u64,
    /// Those of its largest layer, if they are known.
    pub largest_layer: Option<u64>,
}

/// A request that makes no plan.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum PlanRequestError {
    #[error("{gpu} does not support bf16, which the run uses: use --fp16")]
    NoBf16 { gpu: &'static str },
    #[error(transparent)]
    Nvme(#[from] NvmeOffload),
    #[error(
        "estimates of a teacher are not yet built: --teacher and --kd-cache need a plan by the program, without --states"
    )]
    EstimateOfTeacher,
    #[error("estimates of nf4 are not yet built: --quantize needs --model with a model that can be trained")]
    EstimateOfNf4,
    #[error(
        "estimates of fp32 runs are not yet built: closed forms assume 16-bit parameters; use bf16 or fp16, or --model with \
         a model that can be trained"
    )]
    EstimateOfFp32,
    #[error(transparent)]
    Forward(#[from] ForwardError),
}

/// A plan's request, with the placements to plan.
#[derive(Debug)]
pub struct ResolvedPlan {
    /// The job.
    pub request: PlanRequest,
    /// One for each config.
    pub placements: Vec<Placement>,
    /// The model; `None` for a number of parameters.
    pub model: Option<PlannedModel>,
    /// What was decided, and what has no effect.
    pub notes: Vec<String>,
}

/// The model of a plan.
#[derive(Debug)]
pub struct PlannedModel {
    /// As it was given.
    pub name: String,
    /// Its parameters, without adapters.
    pub table: ParameterTable,
    /// Says that a built-in config is used.
    pub builtin: Option<String>,
    config: ModelConfig,
    named: NamedConfig,
}

/// Resolves a request into what a plan needs of the job that [`super::resolve`] makes of it.
pub fn resolve_plan(request: &JobRequest, options: &PlanOptions) -> Result<ResolvedPlan, JobError> {
    let model = match options.parameters {
        Some(_) => None,
        None => Some(PlannedModel::read(&request.model)?),
    };
    let machine = PlannedMachine::find(request, options);
    let configs = configs(request, options, model.as_ref(), machine.ranks)?;
    if let Some(card) = options.card.filter(|card| !card.supports_bf16())
        && configs.iter().any(|(_, config)| config.values.bf16.enabled)
    {
        return Err(PlanRequestError::NoBf16 { gpu: card.name }.into());
    }
    let placements = configs.iter().map(|(name, config)| placement(name, config));
    let placements = placements.collect::<Result<Vec<_>, _>>().map_err(PlanRequestError::from)?;
    let mut notes: Vec<String> = machine.note.iter().cloned().collect();
    let request = plan_request(request, options, model.as_ref(), &configs, &machine, &mut notes)?;
    Ok(ResolvedPlan { request, placements, model, notes })
}

impl PlannedModel {
    fn read(name: &str) -> Result<Self, JobError> {
        let named = named_config(name)?;
        let config = ModelConfig::from_named(&named)?;
        let (table, builtin) = (table(&config), builtin_note(name, &named));
        Ok(Self { name: name.to_owned(), table, builtin, config, named })
    }
}

/// Says that a built-in config is used.
pub fn builtin_note(name: &str, config: &NamedConfig) -> Option<String> {
    let is_builtin = config.folder.is_none();
    is_builtin
        .then(|| format!("{name}: the built-in config is used, as there is no such folder or cached model"))
}

/// The configs to plan by name, resolved.
fn configs(
    request: &JobRequest,
    options: &PlanOptions,
    model: Option<&PlannedModel>,
    ranks: u64,
) -> Result<Vec<(String, Resolved)>, JobError> {
    let names: Vec<&str> = if options.every_preset {
        PRESETS.iter().map(|preset| preset.name).collect()
    } else {
        vec![&request.deepspeed]
    };
    let context = match model {
        Some(model) => ConfigContext::new(request, &model.config, &model.named.map, ranks),
        None => ConfigContext::without_model(request, ranks),
    };
    names
        .into_iter()
        .map(|name| Ok((name.to_owned(), context.resolve(&CheckedConfig::load(name)?)?)))
        .collect()
}

/// The devices that are planned for, with what each has.
struct PlannedMachine {
    device: PlanDevice,
    ranks: u64,
    /// The memory budget of a device.
    device_memory: Option<u64>,
    /// Says where a budget comes from that was not asked for.
    note: Option<String>,
}

impl PlannedMachine {
    /// As asked for, that of the GPU model, or what this machine would train on.
    fn find(request: &JobRequest, options: &PlanOptions) -> Self {
        let card = options.card;
        // A GPU is looked for only where it may decide.
        let is_cpu = request.device == Some(DeviceKind::Cpu);
        let is_known = card.is_some() || (request.device_memory.is_some() && request.ranks.is_some());
        let machine = if is_cpu || (request.device.is_some() && is_known) { probe_host() } else { probe() };
        let usual = if card.is_some() || gpus(&machine) > 0 { DeviceKind::Cuda } else { DeviceKind::Cpu };
        let device = request.device.unwrap_or(usual);
        // The GPUs of a GPU model are elsewhere.
        let usual = if card.is_some() { 1 } else { usual_ranks(device, &machine) };
        let ranks = request.ranks.unwrap_or(usual);
        let on_host = options.ranks_per_host.map_or(ranks, |on_host| on_host.min(ranks));
        let found = free_device_memory(&machine, on_host).filter(|_| device == DeviceKind::Cuda);
        let given = request.device_memory.or(card.map(|gpu| gpu.memory));
        let note = found.filter(|_| given.is_none()).map(|free| {
            format!(
                "the budget is what this machine's {} free for each of {}, {}: --device-memory or --card plans for others",
                if gpus(&machine) == 1 { "GPU has" } else { "GPUs have" },
                counted(ranks, "rank"),
                format_bytes(free)
            )
        });
        let threads = request.threads_per_rank.map(|threads| threads as usize);
        let device = PlanDevice { kind: device, cpus: cpus(), threads };
        Self { device, ranks, device_memory: given.or(found), note }
    }
}

impl DistillRequest {
    /// What the planned model is distilled from. The teacher needs no weights, and nothing is compared with the student's data.
    fn plan(&self, notes: &mut Vec<String>) -> Result<PlannedTeacher, DistillRequestError> {
        let alpha = self.alpha;
        if let Some(folder) = &self.cache {
            let cache = TeacherCache::open(folder).map_err(DistillRequestError::Cache)?;
            let CacheManifest { k, vocab, temperature, .. } = *cache.manifest();
            let source = PlannedSource::Cache { k, vocab, tail: self.tail };
            return Ok(PlannedTeacher { spec: self.spec(temperature), alpha, source, placement: None });
        }
        let name = self.teacher.as_ref().ok_or(DistillRequestError::NoSource)?;
        let named = named_config(name).map_err(DistillRequestError::Teacher)?;
        let config = ModelConfig::from_named(&named).map_err(DistillRequestError::Teacher)?;
        let folder = named.folder.clone().unwrap_or_default();
        let TeacherModel { config, table, .. } =
            TeacherModel::new(name.clone(), folder, config, self.teacher_quantized, true);
        notes.extend(builtin_note(name, &named));
        let placement = self.teacher_deepspeed.as_ref();
        let placement = placement.map(|given| teacher_placement(given, notes)).transpose()?;
        notes.push(format!(
            "with the teacher {name}, {} parameters, among the parameters",
            format_count(table.total())
        ));
        let (spec, source) = (self.own_spec(), PlannedSource::Weights { config: Box::new(config), table });
        Ok(PlannedTeacher { spec, alpha, source, placement })
    }
}

fn plan_request(
    request: &JobRequest,
    options: &PlanOptions,
    model: Option<&PlannedModel>,
    configs: &[(String, Resolved)],
    machine: &PlannedMachine,
    notes: &mut Vec<String>,
) -> Result<PlanRequest, JobError> {
    let asked_lora = request.lora.as_ref();
    let lora = asked_lora.unwrap_or(&options.suggested_lora);
    let lora = model.map(|model| lora.resolve(&model.table)).transpose()?;
    if let (Some(found), Some(_)) = (&lora, asked_lora) {
        notes.extend(found.notes.iter().cloned());
    }
    let adapted = lora.map(|found| found.table);
    let adapter_params = adapted.as_ref().map(ParameterTable::trained);
    let teacher = request.distillation.as_ref().map(|asked| asked.plan(notes)).transpose()?;
    let trainable = trainable(model, adapted, machine.device, teacher, options, notes)?;
    let quantized = asked_lora.is_some_and(|lora| lora.quantized);
    if trainable.is_none() && quantized {
        return Err(PlanRequestError::EstimateOfNf4.into());
    }
    if trainable.is_none() && configs.iter().all(|(_, config)| precision(config) == DType::F32) {
        return Err(PlanRequestError::EstimateOfFp32.into());
    }
    let rows = match (&trainable, model) {
        (Some(_), Some(model)) => Some(rows(request, model, configs, notes)?),
        _ => None,
    };
    let usual = if model.is_some() { States::Run } else { States::Master };
    let count = options.parameters;
    let params = model.map(|model| model.table.total()).or(count.map(|count| count.total));
    let largest_layer = match model {
        Some(model) => model.table.largest_module().map(|(_, elements)| elements),
        None => count.and_then(|count| count.largest_layer),
    };
    Ok(PlanRequest {
        train_type: if asked_lora.is_some() { TrainType::Lora } else { TrainType::Full },
        ranks_per_host: options.ranks_per_host.unwrap_or(machine.ranks),
        states: options.states.unwrap_or(usual),
        accumulates_in_16_bits: configs.iter().all(|(_, config)| has_narrow_sums(config)),
        in_bf16: configs.iter().all(|(_, config)| precision(config) != DType::F16),
        accumulation: configs
            .first()
            .map_or(1, |(_, config)| config.values.top_level.gradient_accumulation_steps),
        rows,
        largest_layer,
        model: trainable,
        adapter_params,
        quantized,
        device_memory: machine.device_memory,
        host_memory: request.host_memory,
        processes: processes(),
        ..PlanRequest::new(params.unwrap_or(0), machine.ranks)
    })
}

/// The model whose step is compiled. `None` for a model that cannot be trained yet, and for other accountings than a run's:
/// those are estimated.
fn trainable(
    model: Option<&PlannedModel>,
    adapted: Option<ParameterTable>,
    device: PlanDevice,
    teacher: Option<PlannedTeacher>,
    options: &PlanOptions,
    notes: &mut Vec<String>,
) -> Result<Option<Arc<TrainableModel>>, PlanRequestError> {
    if teacher.is_some() && options.states.is_some() {
        return Err(PlanRequestError::EstimateOfTeacher);
    }
    if let (Some(model), Some(teacher)) = (model, &teacher) {
        // Refused here with its reason: a model that cannot be trained is estimated below.
        teacher.objective().forward(&model.config, &model.table, BatchTokens::of_tokens(1))?;
    }
    let Some(model) = model.filter(|_| options.states.is_none()) else { return Ok(None) };
    let (config, table) = (model.config.clone(), model.table.clone());
    match TrainableModel::distilled(config, table, adapted, device, teacher) {
        Ok(trainable) => Ok(Some(trainable)),
        Err(error) => {
            notes.push(format!("an estimate, since no training step can be compiled: {error}"));
            Ok(None)
        }
    }
}

/// The rows of a micro-batch: all as long as the longest that a run takes.
fn rows(
    request: &JobRequest,
    model: &PlannedModel,
    configs: &[(String, Resolved)],
    notes: &mut Vec<String>,
) -> Result<PlannedRows, JobError> {
    let is_block =
        |(_, config): &(_, Resolved)| matches!(config.values.zeroth.recompute, Recompute::Block { .. });
    let reading = &request.data.reading;
    let [max_length, max_target_length] = match reading.pairs.lengths.limits(&model.config)? {
        Some(limits) => [limits.source, limits.target],
        None => [longest_row(reading.max_length, &model.config), 0],
    };
    if model.config.family.is_encoder_decoder() && reading.max_length.is_some() {
        notes.push(
            "--max-length does not apply to an encoder-decoder model: --max-source-length and --max-target-length do"
                .to_owned(),
        );
    }
    Ok(PlannedRows {
        micro_batch: configs
            .first()
            .map_or(1, |(_, config)| config.values.top_level.train_micro_batch_size_per_gpu),
        max_length,
        max_target_length,
        recompute: configs.iter().any(is_block),
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
