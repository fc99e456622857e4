//! Resolves a request: config, model, data, steps and devices.

use std::num::NonZeroU64;

use serde_json::Map;
use zeroth_config::checked::CheckedConfig;
use zeroth_config::resolve::Resolved;
use zeroth_config::unsupported::unsupported_keys;
use zeroth_data::Samples;
use zeroth_model::{ModelConfig, ParameterTable, table};
use zeroth_plan::BatchShape;
use zeroth_program::Settings;
use zeroth_train::checkpoint::Checkpoint;
use zeroth_train::{
    Distillation, Evaluation, Job, LoraJob, RunLength, SampleOrder, adapter_table, check_same_adapters,
    check_same_data, check_same_function, from_config, release_freed_memory,
};

use super::config::ConfigContext;
use super::data::{Reading, RunData};
use super::error::JobError;
use super::events::{OnEvent, ResolveEvent};
use super::handoff::{Inputs, LauncherHandoff, ResumePoint};
use super::machine::{JobMachine, StartedRanks, gpus};
use super::rank_facts::RankFacts;
use super::rank_share::LeastShare;
use super::request::JobRequest;
use super::resolved_job::ResolvedJob;
use super::resume::{self, is_inside};
use super::strategies::Strategies;
use super::teacher::{Student, check_data, teacher_placement};

/// Resolves a request. `started` are the ranks that a launcher has started. Ranks pass the `handoff` of their launcher, which
/// makes its decisions here.
pub fn resolve(
    request: &JobRequest,
    started: Option<StartedRanks>,
    handoff: Option<LauncherHandoff>,
    on_event: OnEvent<'_>,
) -> Result<ResolvedJob, JobError> {
    let mut notes = Vec::new();
    let mut start = Start::read(request, started, handoff.as_ref(), on_event, &mut notes)?;
    let rows = Rows::read(request, &mut start, handoff.as_ref(), on_event, &mut notes)?;
    let Start { inputs, checked, context, mut resolved, model, machine, checkpoint, lora, table, shape } =
        start;
    let Rows { reading, distillation, order: DataOrder { seed, data_seed, shuffle }, data } = rows;
    let RunData { samples, evaluation, caches, .. } = data;
    let order = SampleOrder::new(samples.count(), shuffle.then_some(data_seed));
    let length = match request.flags.max_steps {
        Some(steps) => RunLength::Steps(steps),
        None => RunLength::Epochs(request.epochs.unwrap_or(3.0)),
    };
    let train_batch = NonZeroU64::new(shape.train_batch()).ok_or(JobError::EmptyBatch)?;
    let steps = order.total_steps(length, train_batch)?;
    context.fill_steps(&checked, steps, &mut resolved)?;
    notes.extend(data_notes(&reading, &model, &samples));
    refuse_unsupported(&resolved, &mut notes)?;
    let strategies = Strategies::new(&request.strategies, steps);
    let evaluation = evaluation_of(request, &strategies, evaluation, &reading, &mut notes);
    notes.extend(resolved.notes.iter().map(ToString::to_string));
    let mut job = Job {
        folder: inputs.folder.clone(),
        files: inputs.files.clone(),
        table,
        model,
        order,
        shape,
        steps,
        row_sizes: Vec::new().into(),
        decoder_start: reading.pairs().map(|options| options.pairs.start),
        settings: settings(request, &resolved, &mut notes)?,
        recipe: from_config::recipe(&resolved, request.max_skipped_steps),
        schedule: from_config::schedule(&resolved, steps)?,
        decays_all: from_config::decays_all(&resolved),
        seed,
        data_seed,
        samples,
        evaluation,
        lora,
        objective: distillation.into(),
        save_dtype: request.save_dtype,
    };
    if let Some(checkpoint) = &checkpoint {
        resume::refuse_weights_only(checkpoint, &job)?;
        let manifest = checkpoint.manifest();
        resume::keep_groups(manifest, &resolved, machine.ranks.world, &mut job.settings, &mut notes);
        resume::note_changes(manifest, &job, &resolved, machine.ranks.world, &mut notes);
    }
    if let Some(group) = machine.ranks.usual_group() {
        job.settings.group.get_or_insert(group);
    }
    job.size_rows();
    let own_threads = machine.threads(request);
    let handoff = if let Some(handoff) = handoff {
        LauncherHandoff { caches: Some(caches), ..handoff }
    } else {
        let rates = machine.rates(&resolved, &mut notes);
        let least = LeastShare::of(&machine.shares(request, rates));
        LauncherHandoff {
            threads: least.threads,
            budget: least.budget(machine.device, request.device_memory),
            rates: least.rates,
            caches: Some(caches),
            resume: checkpoint.as_ref().map(ResumePoint::of),
            inputs: None,
            agreement: Map::new(),
        }
    };
    let resumes_here = resumes_here(request, checkpoint.as_ref());
    let kept_name = || resumes_here.then(|| resume::kept_name(&request.output)).flatten();
    Ok(ResolvedJob {
        writes_model: job.settings.stage < 3
            || resolved.values.zero.stage3_gather_16bit_weights_on_model_save,
        strategies,
        holds_out: request.data.split_ratio.is_some(),
        steps_per_print: resolved.values.top_level.steps_per_print,
        name: request.model.clone(),
        run_name: request.run_name.clone().or_else(kept_name),
        resumes_here,
        job,
        resolved,
        ranks: machine.ranks.world,
        started: machine.ranks,
        share: machine.share(request, machine.ranks.local_rank),
        given_device_memory: request.device_memory,
        device: machine.device,
        gpus: gpus(&machine.machine),
        facts: RankFacts::of(&machine.machine, machine.device, own_threads),
        // Rank 0 decides the layout of memory; a rank with fewer threads needs no more scratch than that.
        target: machine.device.target(handoff.threads),
        threads: own_threads.min(handoff.threads),
        checkpoint,
        reading,
        handoff,
        inputs,
        notes,
    })
}

/// What is known before the data is read.
struct Start {
    inputs: Inputs,
    checked: CheckedConfig,
    context: ConfigContext,
    /// The config, whose schedule may wait for the number of steps.
    resolved: Resolved,
    model: ModelConfig,
    machine: JobMachine,
    checkpoint: Option<Checkpoint>,
    lora: Option<LoraJob>,
    table: ParameterTable,
    shape: BatchShape,
}

impl Start {
    fn read(
        request: &JobRequest,
        started: Option<StartedRanks>,
        handoff: Option<&LauncherHandoff>,
        on_event: OnEvent<'_>,
        notes: &mut Vec<String>,
    ) -> Result<Self, JobError> {
        let inputs = match handoff.and_then(|handoff| handoff.inputs.as_ref()) {
            Some(inherited_inputs) => Inputs::inherit(inherited_inputs)?,
            None => Inputs::read(request, handoff.is_none())?,
        };
        let checked = CheckedConfig::of_source(&request.deepspeed, inputs.config())?;
        let model = ModelConfig::from_map(&inputs.model, &inputs.origin)?;
        let machine = JobMachine::find(request, started)?;
        let checkpoint = match handoff {
            Some(handoff) => handoff.resume.as_ref().map(ResumePoint::open).transpose()?,
            None => resume::find(request, notes)?,
        };
        let context = ConfigContext::new(request, &model, &inputs.model, machine.ranks.world);
        // Before the data is read: the number of steps depends on the batch sizes.
        let mut resolved = context.resolve(&checked)?;
        on_event(ResolveEvent::Config {
            file: &checked.report.values,
            resolved: &resolved,
            ranks: machine.ranks.world,
        });
        let (lora, table) = adapters(request, &model, &inputs, notes)?;
        if let Some(checkpoint) = &checkpoint {
            check_checkpoint(checkpoint, &model, lora.as_ref(), &table)?;
            resume::keep_batch(checkpoint.manifest(), machine.ranks.world, &mut resolved)?;
        }
        let top_level = &resolved.values.top_level;
        let shape = BatchShape {
            micro_batch: top_level.train_micro_batch_size_per_gpu,
            accumulation: top_level.gradient_accumulation_steps,
            ranks: machine.ranks.world,
        };
        Ok(Self { inputs, checked, context, resolved, model, machine, checkpoint, lora, table, shape })
    }
}

/// The data of a run, in its order, and what it is distilled from.
struct Rows {
    reading: Reading,
    distillation: Option<Distillation>,
    order: DataOrder,
    data: RunData,
}

impl Rows {
    fn read(
        request: &JobRequest,
        Start { inputs, model, checkpoint, .. }: &mut Start,
        handoff: Option<&LauncherHandoff>,
        on_event: OnEvent<'_>,
        notes: &mut Vec<String>,
    ) -> Result<Self, JobError> {
        let reading = Reading::new(&request.data.reading, model, &inputs.folder)?;
        let max_length = reading.max_length();
        let student = Student { name: &request.model, folder: &inputs.folder, config: model, max_length };
        let distillation = request.distillation.as_ref().map(|distillation| {
            let weights = (request.random_weights, request.seed);
            distillation.resolve(&student, weights, &mut inputs.teacher, notes)
        });
        let distillation = distillation.transpose()?;
        let order = DataOrder::new(request, checkpoint.as_ref(), notes);
        // What is held out depends on the seed of the run's first start.
        let data = if let Some(caches) = handoff.and_then(|handoff| handoff.caches.as_ref()) {
            request.data.open(caches, &reading, order.data_seed)?
        } else {
            let data = request.data.prepare(&reading, &request.output, order.data_seed, on_event)?;
            check_data(distillation.as_ref(), model, &data.all_samples)?;
            data
        };
        release_freed_memory();
        if let Some(checkpoint) = checkpoint {
            check_same_data(checkpoint.manifest(), &data.samples)?;
        }
        Ok(Self { reading, distillation, order, data })
    }
}

/// The adapters to train, and the model's table with them.
fn adapters(
    request: &JobRequest,
    model: &ModelConfig,
    inputs: &Inputs,
    notes: &mut Vec<String>,
) -> Result<(Option<LoraJob>, ParameterTable), JobError> {
    let base = table(model);
    let Some(asked) = &request.lora else { return Ok((None, base)) };
    let found = asked.resolve(&base)?;
    notes.extend(found.notes);
    let job = asked.job(found.lora, &request.model, &inputs.folder, request.random_weights);
    Ok((Some(job), found.table))
}

/// Refuses a checkpoint of another model or of other adapters.
fn check_checkpoint(
    checkpoint: &Checkpoint,
    model: &ModelConfig,
    lora: Option<&LoraJob>,
    table: &ParameterTable,
) -> Result<(), JobError> {
    check_same_adapters(checkpoint, lora, table)?;
    let saved = if lora.is_some() { adapter_table(table) } else { table.clone() };
    checkpoint.check_model(model.family.model_type(), &saved)?;
    Ok(check_same_function(checkpoint, model)?)
}

/// Seeds and order of the data: those of the checkpoint, else as asked for.
struct DataOrder {
    seed: u64,
    data_seed: u64,
    shuffle: bool,
}

impl DataOrder {
    fn new(request: &JobRequest, checkpoint: Option<&Checkpoint>, notes: &mut Vec<String>) -> Self {
        let (mut seed, mut shuffle) = (request.seed, request.shuffle);
        let mut data_seed = request.data_seed.unwrap_or(seed);
        if let Some(manifest) = checkpoint.map(Checkpoint::manifest) {
            resume::keep_order(manifest, &mut seed, &mut data_seed, &mut shuffle, notes);
        }
        Self { seed, data_seed, shuffle }
    }
}

/// The evaluation of a run that has data for it.
fn evaluation_of(
    request: &JobRequest,
    strategies: &Strategies,
    samples: Option<Samples>,
    reading: &Reading,
    notes: &mut Vec<String>,
) -> Option<Evaluation> {
    let samples = samples?;
    if !request.data.evaluation_paths.is_empty() {
        let found = samples.totals().notes(reading.limits());
        notes.extend(found.into_iter().map(|note| format!("--eval-data: {note}")));
    }
    Some(Evaluation {
        samples,
        interval: strategies.evaluation,
        micro_batch: request.data.evaluation_micro_batch,
        best: request.strategies.best,
    })
}

/// The settings of the compiler passes: the config's, with the teacher's placement.
fn settings(
    request: &JobRequest,
    resolved: &Resolved,
    notes: &mut Vec<String>,
) -> Result<Settings, JobError> {
    let mut settings = Settings::from_config(resolved);
    let placement = request.distillation.as_ref().and_then(|found| found.teacher_deepspeed.as_ref());
    if let Some(given) = placement {
        settings.teacher = teacher_placement(given, notes)?;
    }
    Ok(settings)
}

/// Notes on the samples, and on what the model asks for and training does not do.
fn data_notes(reading: &Reading, model: &ModelConfig, samples: &Samples) -> Vec<String> {
    let dropout = (model.attention_dropout > 0.0).then(|| {
        format!(
            "attention_dropout {} has no effect: attention dropout is not built yet, and training runs without it",
            model.attention_dropout
        )
    });
    let of_samples = samples.totals().notes(reading.limits());
    reading.note().into_iter().chain(dropout).chain(of_samples).collect()
}

/// Refuses config keys that are not built and affect training, all at once; notes the others.
fn refuse_unsupported(resolved: &Resolved, notes: &mut Vec<String>) -> Result<(), JobError> {
    let found = unsupported_keys(resolved);
    notes.extend(found.noted.iter().map(|lack| format!("not yet built: {lack}")));
    if found.refused.is_empty() {
        return Ok(());
    }
    Err(JobError::UnsupportedKeys(found.refused.iter().map(|lack| format!("  {lack}")).collect()))
}

/// Whether the run continues one in its own folder.
fn resumes_here(request: &JobRequest, checkpoint: Option<&Checkpoint>) -> bool {
    match checkpoint {
        Some(checkpoint) => is_inside(checkpoint.folder(), &request.output),
        // Killed before its first checkpoint: `auto` starts it again.
        None => request.resume.as_deref() == Some("auto"),
    }
}
