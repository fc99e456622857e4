//! Resolves the command line into a job: config, model, data, steps and devices.

use std::num::NonZeroU64;

use anyhow::Context;
use serde_json::Map;
use zeroth::base::{DType, format_bytes};
use zeroth::config::checked::CheckedConfig;
use zeroth::config::resolve::{Choice, Flags, ModelFacts, Request, Resolved, resolve};
use zeroth::config::schema::{FrozenPlacement, OffloadDevice};
use zeroth::config::unimplemented::unimplemented;
use zeroth::cuda::CudaDevice;
use zeroth::graph::Op;
use zeroth::job::ResolvedLora;
use zeroth::machine::{Machine, Rates, probe, probe_host};
use zeroth::model::{ModelConfig, hidden_size_for_auto, table};
use zeroth::plan::PrefetchLimit;
use zeroth::planning::{self, is_open};
use zeroth::program::Compiled;
use zeroth::program::Settings;
use zeroth::program::Target;
use zeroth::train::checkpoint::Checkpoint;
use zeroth::train::{
    BatchShape, Budget, Evaluation, Job, Overhead, Report, RunLength, SampleOrder, adapter_table,
    check_same_adapters, check_same_data, check_same_function, from_config, release_freed_memory,
};

use super::super::rank_share::{cpus, free_device_memory, gpus, processes, usual_ranks};
use super::data::{self, Reading};
use super::handoff::{Inputs, LauncherHandoff};
use super::rank_facts::RankFacts;
use super::resume;
use super::strategies::{self, Strategies};
use super::teacher::{self, Student};
use super::trainer_note::Compared;
use crate::cli::TrainArgs;
use crate::run_file;
use crate::value_args::{DeviceArg, TrainTypeArg};

/// A training command, resolved.
pub(super) struct ResolvedJob {
    pub(super) job: Job,
    pub(super) resolved: Resolved,
    /// The model, as given.
    pub(super) name: String,
    /// --run-name, or the name of the run that is resumed.
    pub(super) run_name: Option<String>,
    pub(super) ranks: u64,
    pub(super) device: DeviceArg,
    /// GPUs of this machine.
    pub(super) gpus: u64,
    /// What its ranks may differ in.
    pub(super) facts: RankFacts,
    /// What the program is compiled for, the same on all ranks.
    pub(super) target: Target,
    /// CPU threads that this rank computes with, at most those that memory is planned for.
    pub(super) threads: usize,
    /// When it evaluates, saves and logs.
    pub(super) strategies: Strategies,
    /// The config's `steps_per_print`.
    pub(super) steps_per_print: Option<u64>,
    /// Whether the evaluation data was taken from the training data.
    pub(super) holds_out: bool,
    /// Whether the trained model is exported at the end.
    pub(super) writes_model: bool,
    /// The checkpoint to resume from, already verified.
    pub(super) checkpoint: Option<Checkpoint>,
    /// Tokenisation settings.
    pub(super) reading: Reading,
    /// Passed to all ranks.
    pub(super) handoff: LauncherHandoff,
    /// Input files, as read.
    pub(super) inputs: Inputs,
    pub(super) notes: Vec<String>,
}

impl ResolvedJob {
    /// Host memory of a rank outside its arenas.
    pub(super) fn overhead(&self, compiled: &Compiled) -> Overhead {
        self.job.overhead(compiled, self.handoff.budget.processes)
    }

    /// Compiles the step within the budgets, choosing values that were left open. The inner error explains why it does not fit.
    pub(super) fn fit(&mut self) -> anyhow::Result<Result<Compiled, String>> {
        let freedom = planning::freedom(&self.resolved, self.handoff.rates);
        let (compiled, choices) = match self.job.fit(self.target, self.handoff.budget, freedom)? {
            Ok(fitted) => fitted,
            Err(misfit) => return Ok(Err(misfit.to_string())),
        };
        for choice in choices {
            let why = why_chosen(choice, self.handoff.rates);
            let settings = choice.settings().into_iter();
            self.notes.extend(settings.map(|(key, value)| format!("{key} is {value}: {why}")));
            self.resolved.choose(choice, &why);
        }
        let mut ops = compiled.graph.nodes.iter().map(|node| node.op);
        if freedom.micro_batch && ops.any(|op| matches!(op, Op::BalanceLoss { .. })) {
            self.notes.push(
                "the micro-batch is not chosen by memory: the auxiliary loss (router_aux_loss_coef) balances the experts \
                 within each"
                    .to_owned(),
            );
        }
        if let Some(limit) = PrefetchLimit::of(&compiled, &self.job.settings) {
            self.notes.push(limit.to_string());
        }
        Ok(Ok(compiled))
    }
}

/// Resolves the command line. Ranks pass the `handoff` of their launcher, which makes its decisions here.
pub(super) fn resolve_job(
    arguments: &TrainArgs,
    ranks_given: Option<u64>,
    handoff: Option<LauncherHandoff>,
) -> anyhow::Result<ResolvedJob> {
    let is_lora = arguments.lora.train_type()? == TrainTypeArg::Lora;
    strategies::check(arguments)?;
    let mut inputs = match &handoff {
        Some(LauncherHandoff { inputs: Some(inherited_inputs), .. }) => Inputs::inherit(inherited_inputs)?,
        handoff => Inputs::read(arguments, handoff.is_none())?,
    };
    let checked = CheckedConfig::of_source(&arguments.deepspeed, inputs.config())?;
    let folder = inputs.folder.clone();
    let model = ModelConfig::from_map(&inputs.model, &inputs.origin)?;
    let machine = if arguments.device == Some(DeviceArg::Cpu) { probe_host() } else { probe() };
    let device =
        arguments.device.unwrap_or(if gpus(&machine) > 0 { DeviceArg::Cuda } else { DeviceArg::Cpu });
    let ranks = ranks_given.or(arguments.ranks).unwrap_or_else(|| usual_ranks(device, &machine));
    anyhow::ensure!(
        device == DeviceArg::Cpu || gpus(&machine) > 0,
        "--device cuda needs a GPU, but none was found: `zeroth doctor` shows what was probed; --device cpu trains \
         on the CPU"
    );
    anyhow::ensure!(arguments.do_train, "--do-train false leaves nothing to do: leave it out");
    report_to(arguments)?;
    let kd_notes = arguments.kd.check()?;
    let mut notes: Vec<String> = arguments.without_effect.notes().collect();
    notes.extend(idle_flags(arguments));
    notes.extend(kd_notes);
    if !is_lora {
        notes.extend(arguments.lora.notes_of_full()?);
    }
    let checkpoint = match &handoff {
        Some(handoff) => handoff.resume.as_deref().map(Checkpoint::open).transpose()?,
        None => resume::find(arguments, &mut notes)?,
    };
    let mut flags = arguments.train.to_flags(is_lora, model.dtype)?;
    let facts =
        || ModelFacts { hidden_size: hidden_size_for_auto(&inputs.model), blocks: Some(model.blocks()) };
    let resolve_with = |flags: &Flags, steps: Option<u64>| {
        resolve(&Request { file: &checked.report.values, flags, ranks, model: Some(facts()), steps })
    };
    // Batch sizes first: the number of steps depends on them, and "auto" schedules depend on the steps.
    let mut resolved = resolve_with(&flags, None)?;
    let compared = Compared {
        file: &checked.report.values,
        is_lora,
        micro_batch: resolved.values.top_level.train_micro_batch_size_per_gpu,
        ranks,
    };
    notes.extend(compared.notes(run_file::for_ranks()));
    let base = table(&model);
    let (lora, table) = if is_lora {
        let request = arguments.lora.request()?;
        let ResolvedLora { lora, table, notes: found } = request.resolve(&base)?;
        notes.extend(found);
        (Some(request.job(lora, &arguments.model, &folder, arguments.lora.random_weights)), table)
    } else {
        (None, base)
    };
    let mut is_redistributed = false;
    if let Some(checkpoint) = &checkpoint {
        check_same_adapters(checkpoint, lora.as_ref(), &table)?;
        let saved = if is_lora { adapter_table(&table) } else { table.clone() };
        checkpoint.check_model(model.family.model_type(), &saved)?;
        check_same_function(checkpoint, &model)?;
        is_redistributed = resume::keep_batch(checkpoint.manifest(), &resolved, ranks, &mut flags)?;
        if is_redistributed {
            resolved = resolve_with(&flags, None)?;
        }
    }
    let shape = BatchShape {
        micro_batch: resolved.values.top_level.train_micro_batch_size_per_gpu,
        accumulation: resolved.values.top_level.gradient_accumulation_steps,
        ranks,
    };
    let reading = Reading::new(&arguments.reading, &arguments.pairs, &model, &folder)?;
    let max_length = reading.max_length();
    let student = Student { name: &arguments.model, folder: &folder, config: &model, max_length };
    let distillation = teacher::resolve(arguments, &student, &mut inputs.teacher, &mut notes)?;
    let (mut seed, mut shuffle) = (arguments.seed, arguments.shuffle);
    let mut data_seed = arguments.trainer.data_seed.unwrap_or(seed);
    if let Some(manifest) = checkpoint.as_ref().map(Checkpoint::manifest) {
        resume::keep_order(manifest, &mut seed, &mut data_seed, &mut shuffle, &mut notes);
    }
    // What is held out depends on the seed of the run's first start.
    let data = if let Some(handoff) = &handoff {
        data::open(handoff, arguments, &reading, data_seed)?
    } else {
        let data = data::prepare(arguments, &reading, data_seed)?;
        teacher::check_data(distillation.as_ref(), &model, &data.all_samples)?;
        data
    };
    release_freed_memory();
    if let Some(manifest) = checkpoint.as_ref().map(Checkpoint::manifest) {
        check_same_data(manifest, &data.samples)?;
    }
    let samples = data.samples;
    let order = SampleOrder::new(samples.count(), shuffle.then_some(data_seed));
    let length = match arguments.train.max_steps {
        Some(steps) => RunLength::Steps(steps),
        None => RunLength::Epochs(arguments.num_train_epochs.unwrap_or(3.0)),
    };
    let batch = NonZeroU64::new(shape.train_batch()).context("the train batch is empty")?;
    let steps = order.total_steps(length, batch)?;
    let mut resolved = resolve_with(&flags, Some(steps))?;
    if is_redistributed {
        resume::name_origin(&mut resolved);
    }
    notes.extend(reading.note());
    if model.attention_dropout > 0.0 {
        notes.push(format!(
            "attention_dropout {} has no effect: attention dropout is not built yet, and training runs without it",
            model.attention_dropout
        ));
    }
    notes.extend(samples.totals().notes(reading.limits()));
    refuse_unbuilt(&resolved, &mut notes)?;
    let strategies = Strategies::new(arguments, steps);
    let evaluation = data.evaluation.map(|samples| Evaluation {
        samples,
        interval: strategies.evaluation,
        micro_batch: arguments.evaluation.per_device_eval_batch_size,
        best: strategies::best_policy(arguments),
    });
    if let (Some(evaluation), false) = (&evaluation, arguments.eval_data.is_empty()) {
        let found = evaluation.samples.totals().notes(reading.limits());
        notes.extend(found.into_iter().map(|note| format!("--eval-data: {note}")));
    }
    if !arguments.eval_data.is_empty() && evaluation.is_none() {
        notes.push("--eval-data is not read: --eval-strategy is no".to_owned());
    }
    notes.extend(resolved.notes.iter().map(ToString::to_string));
    let mut settings = Settings::from_config(&resolved);
    if let Some(given) = arguments.kd.teacher_deepspeed.as_ref().filter(|_| arguments.kd.distils()) {
        settings.teacher = teacher::placement(given, &mut notes)?;
    }
    let mut job = Job {
        folder,
        files: inputs.files.clone(),
        table,
        model,
        order,
        shape,
        steps,
        row_sizes: Vec::new().into(),
        decoder_start: reading.pairs().map(|options| options.pairs.start),
        settings,
        recipe: from_config::recipe(&resolved, arguments.max_skipped_steps),
        schedule: from_config::schedule(&resolved, steps)?,
        decays_all: from_config::decays_all(&resolved),
        seed,
        data_seed,
        samples,
        evaluation,
        lora,
        distillation,
        save_dtype: arguments.trainer.save_dtype.map(DType::from),
    };
    if let Some(checkpoint) = &checkpoint {
        resume::refuse_weights_only(checkpoint, &job)?;
        resume::note_changes(checkpoint.manifest(), &job, &resolved, ranks, &mut notes);
    }
    job.size_rows();
    let own_threads = threads(arguments, ranks);
    let handoff = handoff.unwrap_or_else(|| LauncherHandoff {
        threads: own_threads,
        budget: budget(arguments, device, ranks, &machine),
        rates: rates(&resolved, device, ranks, &machine, &mut notes),
        samples: data.path,
        evaluation: data.evaluation_path,
        resume: checkpoint.as_ref().map(|checkpoint| checkpoint.folder().to_owned()),
        inputs: None,
        agreement: Map::new(),
    });
    // Rank 0 decides the layout of memory; a rank with fewer threads needs no more scratch than that.
    let target = match device {
        DeviceArg::Cuda => Target::Cuda,
        DeviceArg::Cpu => Target::Cpu { threads: handoff.threads },
    };
    let kept_name = || {
        super::resumes_here(arguments, checkpoint.as_ref())
            .then(|| resume::kept_name(&arguments.output))
            .flatten()
    };
    let run_name = arguments.trainer.run_name.clone().or_else(kept_name);
    Ok(ResolvedJob {
        writes_model: job.settings.stage < 3
            || resolved.values.zero.stage3_gather_16bit_weights_on_model_save,
        strategies,
        holds_out: arguments.evaluation.split_ratio().is_some(),
        steps_per_print: resolved.values.top_level.steps_per_print,
        name: arguments.model.clone(),
        run_name,
        job,
        resolved,
        ranks,
        device,
        gpus: gpus(&machine),
        facts: RankFacts::of(&machine, device, own_threads),
        target,
        threads: own_threads.min(handoff.threads),
        checkpoint,
        reading,
        handoff,
        inputs,
        notes,
    })
}

/// The reason of a choice, as the origin of its keys.
fn why_chosen(choice: Choice, rates: Option<Rates>) -> String {
    match (choice, rates) {
        (Choice::UpdatedBy(_), Some(Rates { update, bus, .. })) => format!(
            "the CPUs update {} of state per second, and the bus moves {} per second each way",
            format_bytes(update),
            format_bytes(bus)
        ),
        (Choice::Frozen(FrozenPlacement::Whole), _) => {
            "every rank has room for all frozen weights".to_owned()
        }
        (Choice::Frozen(FrozenPlacement::ByStage | FrozenPlacement::Sharded), _) => {
            "not every rank has room for all frozen weights".to_owned()
        }
        (Choice::Recompute(_), Some(_)) => "chosen for the memory it saves".to_owned(),
        (Choice::UpdatedBy(_) | Choice::Recompute(_), None)
        | (Choice::Prefetch(_) | Choice::UpdateWindow(_) | Choice::Batch { .. }, _) => {
            "chosen to fit the memory".to_owned()
        }
    }
}

/// The reports of `--report-to`.
pub(super) fn report_to(arguments: &TrainArgs) -> anyhow::Result<Vec<Report>> {
    Ok(Report::parse(arguments.report_to.iter().map(String::as_str))?)
}

/// Notes on flags that others make idle.
fn idle_flags(arguments: &TrainArgs) -> Vec<String> {
    let mut notes = strategies::idle_flags(arguments);
    if arguments.trainer.logging_dir.is_some() && arguments.report_to.iter().all(|name| name == "none") {
        notes.push("--logging-dir has no effect without --report-to tensorboard or csv".to_owned());
    }
    if arguments.trainer.data_seed.is_some()
        && !arguments.shuffle
        && arguments.evaluation.split_ratio().is_none()
    {
        notes.push("--data-seed has no effect with --shuffle false".to_owned());
    }
    notes
}

fn threads(arguments: &TrainArgs, ranks: u64) -> usize {
    arguments.threads_per_rank.map_or((cpus() / ranks as usize).max(1), |threads| threads as usize)
}

/// Refuses config keys that are not built and affect training, all at once; notes the others.
fn refuse_unbuilt(resolved: &Resolved, notes: &mut Vec<String>) -> anyhow::Result<()> {
    let lacking = unimplemented(resolved);
    notes.extend(lacking.noted.iter().map(|lack| format!("not yet built: {lack}")));
    if lacking.refused.is_empty() {
        return Ok(());
    }
    let lines: Vec<String> = lacking.refused.iter().map(|lack| format!("  {lack}")).collect();
    anyhow::bail!("the config uses features that are not yet built:\n{}", lines.join("\n"))
}

/// A rank's share of the measured update rates, if the placement of the offloaded optimizer update depends on them.
fn rates(
    resolved: &Resolved,
    device: DeviceArg,
    ranks: u64,
    machine: &Machine,
    notes: &mut Vec<String>,
) -> Option<Rates> {
    let is_offloaded = resolved.values.offload_optimizer.device == OffloadDevice::Cpu;
    let is_free = is_open(resolved, "zeroth.update") && is_open(resolved, "zeroth.update_window");
    // In fp32 there is nothing to choose: there are no separate master weights.
    let is_narrow = resolved.values.bf16.enabled || resolved.values.fp16.enabled;
    if device != DeviceArg::Cuda || !is_offloaded || !is_free || !is_narrow {
        return None;
    }
    let [device_bytes, host_bytes] = Rates::ARENAS;
    let Settings { moment_dtype: moments, stochastic_rounding, .. } = Settings::from_config(resolved);
    let measured = CudaDevice::open(0, device_bytes, host_bytes)
        .and_then(|mut gpu| Rates::measure(&mut gpu, moments, stochastic_rounding));
    match measured {
        Ok(Rates { update, bus, memory, matmuls }) => {
            let ranks_per_gpu = ranks.div_ceil(gpus(machine).max(1));
            let [bus, memory, matmuls] = [bus, memory, matmuls].map(|rate| rate / ranks_per_gpu);
            Some(Rates { update: update / ranks, bus, memory, matmuls })
        }
        Err(error) => {
            notes.push(format!("zeroth.update is \"device\": cannot measure which is faster: {error}"));
            None
        }
    }
}

/// Memory budget of a rank: as given, else free memory.
fn budget(arguments: &TrainArgs, device: DeviceArg, ranks: u64, machine: &Machine) -> Budget {
    let typed_host = arguments.host_memory.map(|bytes| bytes / ranks);
    let free_host = machine.host_memory_available().map(|bytes| bytes / ranks);
    match device {
        // On a CPU, device memory is host memory, unless separate budgets are given.
        DeviceArg::Cpu if arguments.device_memory.is_some() => Budget {
            together: free_host,
            ..Budget::given(arguments.device_memory, typed_host, true, processes())
        },
        DeviceArg::Cpu => Budget::given(None, typed_host.or(free_host), true, processes()),
        DeviceArg::Cuda => {
            let free = free_device_memory(machine, ranks);
            let device = arguments.device_memory.or(free);
            Budget::given(device, typed_host.or(free_host), false, processes())
        }
    }
}
