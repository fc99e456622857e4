//! From what was typed to a job: config, model, data, steps, and the machine it will run on.

use std::num::NonZeroU64;

use anyhow::Context;
use serde_json::Map;
use zeroth::base::format_bytes;
use zeroth::config::resolve::{Flags, ModelFacts, Origin, Request, Resolved, resolve};
use zeroth::config::unbuilt::unbuilt;
use zeroth::cuda::CudaDevice;
use zeroth::machine::{Gpus, Machine, Rates, probe, probe_host};
use zeroth::model::{ModelConfig, hidden_size_for_auto, table};
use zeroth::program::Compiled;
use zeroth::program::Settings;
use zeroth::program::Target;
use zeroth::train::checkpoint::Checkpoint;
use zeroth::train::{
    BatchShape, Budget, Evaluation, Freedom, Job, Length, Order, Overhead, Processes, from_config,
    release_freed_memory, same_data,
};

use super::super::config_file;
use super::data::{self, Reading};
use super::told::{Inputs, Told};
use super::{follow, launch, resume};
use crate::cli::{DeviceArg, TrainArgs, TrainTypeArg};

/// Steps from one evaluation, and from one checkpoint, to the next.
pub(super) const DEFAULT_STEPS: u64 = 500;

/// What a training command asks for, resolved.
pub(super) struct Asked {
    pub(super) job: Job,
    pub(super) resolved: Resolved,
    /// The model, as it was named.
    pub(super) name: String,
    pub(super) ranks: u64,
    pub(super) device: DeviceArg,
    /// Cards of this machine.
    pub(super) cards: u64,
    pub(super) target: Target,
    pub(super) logging_steps: u64,
    /// The file's own wish for lines of progress.
    pub(super) steps_per_print: Option<u64>,
    /// Whether the trained model is written at the end.
    pub(super) writes_model: bool,
    /// The checkpoint to go on from; it has been verified.
    pub(super) checkpoint: Option<Checkpoint>,
    /// How rows become tokens.
    pub(super) reading: Reading,
    /// What all ranks are told.
    pub(super) told: Told,
    /// What the command names, as it was read.
    pub(super) inputs: Inputs,
    pub(super) notes: Vec<String>,
}

impl Asked {
    /// Host memory of a rank beside its arenas.
    pub(super) fn overhead(&self, compiled: &Compiled) -> Overhead {
        Overhead::of(&self.job, compiled, self.told.budget.processes)
    }

    /// Compiles the step within the budgets, choosing what nobody typed; says why where it cannot be.
    pub(super) fn fit(&mut self) -> anyhow::Result<Result<Compiled, String>> {
        let checkpoints = |setting: &zeroth::config::resolve::Setting| {
            setting.key.path.starts_with("activation_checkpointing") && setting.origin != Origin::Default
        };
        let freedom = Freedom {
            recompute: is_open(&self.resolved, "zeroth.recompute")
                && !self.resolved.settings.iter().any(checkpoints),
            prefetch: is_open(&self.resolved, "zero_optimization.stage3_prefetch_bucket_size"),
            micro_batch: is_open(&self.resolved, "train_micro_batch_size_per_gpu")
                && is_open(&self.resolved, "gradient_accumulation_steps"),
            update: self.told.rates,
        };
        let (compiled, choices) = match self.job.fit(self.target, self.told.budget, freedom)? {
            Ok(fitted) => fitted,
            Err(misfit) => return Ok(Err(misfit.to_string())),
        };
        for choice in choices {
            let why = match self.told.rates {
                Some(Rates { update, bus, .. }) if choice.key == "zeroth.update" => format!(
                    "the processors update {} of state a second, and the bus moves {} each way",
                    format_bytes(update),
                    format_bytes(bus)
                ),
                Some(_) if choice.key == "zeroth.recompute" => {
                    "chosen for the memory that it leaves".to_owned()
                }
                _ => "chosen to fit the memory".to_owned(),
            };
            self.notes.push(format!("{} is {}: {why}", choice.key, choice.value));
            let setting = self.resolved.settings.iter_mut().find(|setting| setting.key.path == choice.key);
            if let Some(setting) = setting {
                setting.value = choice.value;
                setting.origin = Origin::Auto(why);
            }
        }
        Ok(Ok(compiled))
    }
}

/// Resolves what was typed. Ranks have been `told` what their launcher found; it finds it here.
pub(super) fn ask(
    arguments: &TrainArgs,
    ranks_given: Option<u64>,
    told: Option<Told>,
) -> anyhow::Result<Asked> {
    anyhow::ensure!(
        arguments.train_type == TrainTypeArg::Full,
        "--train-type lora is not yet built: leave it out, or give full, to train all parameters; `zeroth plan --train-type \
         lora` plans it"
    );
    let inputs = match &told {
        Some(Told { inputs: Some(handed), .. }) => Inputs::handed_over(handed)?,
        told => Inputs::read(arguments, told.is_none())?,
    };
    let checked = config_file::checked(&arguments.deepspeed, inputs.config())?;
    let folder = inputs.folder.clone();
    let model = ModelConfig::from_map(&inputs.model, &inputs.origin)?;
    let machine = if arguments.device == Some(DeviceArg::Cpu) { probe_host() } else { probe() };
    let device =
        arguments.device.unwrap_or(if gpus(&machine) > 0 { DeviceArg::Cuda } else { DeviceArg::Cpu });
    let ranks = ranks_given.or(arguments.ranks).unwrap_or(match device {
        DeviceArg::Cuda => gpus(&machine).max(1),
        DeviceArg::Cpu => 1,
    });
    anyhow::ensure!(
        device == DeviceArg::Cpu || gpus(&machine) > 0,
        "--device cuda was asked for and no GPU was found: `zeroth doctor` says what was looked for; --device cpu trains \
         on the processor"
    );
    anyhow::ensure!(arguments.do_train, "--do-train false leaves nothing to do here: leave it out");
    follow::report_to(arguments)?;
    let mut notes = Vec::new();
    let checkpoint = match &told {
        Some(told) => told.resume.as_deref().map(Checkpoint::open).transpose()?,
        None => resume::find(arguments, &mut notes)?,
    };
    let mut flags = arguments.train.to_flags(false)?;
    let facts = || ModelFacts {
        hidden_size: hidden_size_for_auto(&inputs.model),
        blocks: Some(model.blocks + model.encoder_blocks),
    };
    let settle = |flags: &Flags, steps: Option<u64>| {
        resolve(&Request { asked: &checked.report.asked, flags, ranks, model: Some(facts()), steps })
    };
    // Batch sizes first: how many steps the data gives depends on them, and "auto" schedules on the steps.
    let mut resolved = settle(&flags, None)?;
    let table = table(&model);
    let mut is_cut_again = false;
    if let Some(checkpoint) = &checkpoint {
        checkpoint.fits_model(model.family.model_type(), &table)?;
        is_cut_again = resume::keep_batch(checkpoint.manifest(), &resolved, ranks, &mut flags)?;
        if is_cut_again {
            resolved = settle(&flags, None)?;
        }
    }
    let size = |key: &str| resolved.whole(key).unwrap_or(1).max(1);
    let shape = BatchShape {
        micro_batch: size("train_micro_batch_size_per_gpu"),
        accumulation: size("gradient_accumulation_steps"),
        ranks,
    };
    let reading = Reading::new(&arguments.reading, &model, &folder)?;
    let data = match &told {
        Some(told) => data::open(told)?,
        None => data::prepare(arguments, &reading)?,
    };
    release_freed_memory();
    let (mut seed, mut shuffle) = (arguments.seed, arguments.shuffle);
    if let Some(manifest) = checkpoint.as_ref().map(Checkpoint::manifest) {
        same_data(manifest, &data.samples)?;
        resume::keep_order(manifest, &mut seed, &mut shuffle, &mut notes);
    }
    let samples = data.samples;
    let order = Order::new(samples.count(), shuffle.then_some(seed));
    let length = match arguments.train.max_steps {
        Some(steps) => Length::Steps(steps),
        None => Length::Epochs(arguments.num_train_epochs.unwrap_or(3.0)),
    };
    let batch = NonZeroU64::new(shape.train_batch()).context("a step has no samples")?;
    let steps = order.total_steps(length, batch)?;
    let mut resolved = settle(&flags, Some(steps))?;
    if is_cut_again {
        resume::name_origin(&mut resolved);
    }
    notes.extend(reading.note());
    if model.attention_dropout > 0.0 {
        notes.push(format!(
            "attention_dropout {} has no effect here: dropout in attention is not built, and training goes on without it",
            model.attention_dropout
        ));
    }
    notes.extend(samples.totals().notes(reading.max_length()));
    refuse_unbuilt(&resolved, &mut notes)?;
    let evaluation = data
        .evaluation
        .map(|samples| Evaluation { samples, every: arguments.eval_steps.unwrap_or(DEFAULT_STEPS) });
    notes.extend(resolved.notes.iter().map(ToString::to_string));
    if let Some(manifest) = checkpoint.as_ref().map(Checkpoint::manifest) {
        resume::note_changes(manifest, &resolved, ranks, &mut notes);
    }
    let mut job = Job {
        folder,
        files: inputs.files.clone(),
        table,
        model,
        order,
        shape,
        steps,
        row_sizes: Vec::new(),
        settings: Settings::from_config(&resolved),
        recipe: from_config::recipe(&resolved, arguments.max_skipped_steps),
        schedule: from_config::schedule(&resolved, steps)?,
        decays_all: from_config::decays_all(&resolved),
        seed,
        samples,
        evaluation,
    };
    job.size_rows();
    let target = match device {
        DeviceArg::Cuda => Target::Cuda,
        DeviceArg::Cpu => Target::Cpu { threads: threads(arguments, ranks) },
    };
    let saves = resolved.get("zero_optimization.stage3_gather_16bit_weights_on_model_save");
    let told = told.unwrap_or_else(|| Told {
        budget: budget(arguments, device, ranks, &machine),
        rates: rates(&resolved, device, ranks, &machine, &mut notes),
        samples: data.path,
        evaluation: data.evaluation_path,
        resume: checkpoint.as_ref().map(|checkpoint| checkpoint.folder().to_owned()),
        inputs: None,
        agreement: Map::new(),
    });
    Ok(Asked {
        writes_model: job.settings.stage < 3 || saves.is_none_or(|setting| setting.value != false),
        logging_steps: arguments.logging_steps.unwrap_or(5),
        steps_per_print: resolved.whole("steps_per_print"),
        name: arguments.model.clone(),
        job,
        resolved,
        ranks,
        device,
        cards: gpus(&machine),
        target,
        checkpoint,
        reading,
        told,
        inputs,
        notes,
    })
}

fn gpus(machine: &Machine) -> u64 {
    match &machine.gpus {
        Gpus::Found { devices, .. } => devices.len() as u64,
        _ => 0,
    }
}

fn threads(arguments: &TrainArgs, ranks: u64) -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    arguments.threads_per_rank.map_or((processors / ranks as usize).max(1), |threads| threads as usize)
}

/// Keys that ask for what is not built: those that decide what is trained are refused, all at once.
fn refuse_unbuilt(resolved: &Resolved, notes: &mut Vec<String>) -> anyhow::Result<()> {
    let lacking = unbuilt(resolved);
    notes.extend(lacking.noted.iter().map(|lack| format!("not yet built: {lack}")));
    if lacking.refused.is_empty() {
        return Ok(());
    }
    let lines: Vec<String> = lacking.refused.iter().map(|lack| format!("  {lack}")).collect();
    anyhow::bail!("the config asks for what is not yet built:\n{}", lines.join("\n"))
}

/// Whether nobody typed a key's value.
fn is_open(resolved: &Resolved, key: &str) -> bool {
    let origin = resolved.get(key).map(|setting| &setting.origin);
    !matches!(origin, Some(Origin::File(_) | Origin::Flag(_)))
}

/// A rank's share of what this machine can do for an update of state in host memory, where somebody must choose by it.
fn rates(
    resolved: &Resolved,
    device: DeviceArg,
    ranks: u64,
    machine: &Machine,
    notes: &mut Vec<String>,
) -> Option<Rates> {
    let is_away = resolved.text("zero_optimization.offload_optimizer.device") == Some("cpu");
    let is_free = is_open(resolved, "zeroth.update") && is_open(resolved, "zeroth.update_window");
    // In fp32 there is nothing to choose: the processors have no master weights.
    let is_narrow = resolved.is_on("bf16.enabled") || resolved.is_on("fp16.enabled");
    if device != DeviceArg::Cuda || !is_away || !is_free || !is_narrow {
        return None;
    }
    let [device_bytes, host_bytes] = Rates::ARENAS;
    let Settings { moments, stochastic_rounding, .. } = Settings::from_config(resolved);
    let measured = CudaDevice::open(0, device_bytes, host_bytes)
        .and_then(|mut card| Rates::measure(&mut card, moments, stochastic_rounding));
    match measured {
        Ok(Rates { update, bus, memory, matmuls }) => {
            let of_card = ranks.div_ceil(gpus(machine).max(1));
            let [bus, memory, matmuls] = [bus, memory, matmuls].map(|rate| rate / of_card);
            Some(Rates { update: update / ranks, bus, memory, matmuls })
        }
        Err(error) => {
            notes.push(format!("zeroth.update is \"device\": what is faster could not be measured: {error}"));
            None
        }
    }
}

/// Bytes that a rank may take: what was typed, else what is free.
fn budget(arguments: &TrainArgs, device: DeviceArg, ranks: u64, machine: &Machine) -> Budget {
    let typed_host = arguments.host_memory.map(|bytes| bytes / ranks);
    let free_host = machine.host_memory_available().map(|bytes| bytes / ranks);
    // Those that make new weights and read data: one for each processor.
    let threads = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let processes = Processes { region: launch::REGION as u64, threads };
    match device {
        // On the processor a device's memory is the machine's, unless budgets are typed for each.
        DeviceArg::Cpu => Budget {
            device: arguments.device_memory,
            host: typed_host.filter(|_| arguments.device_memory.is_some()),
            together: typed_host.filter(|_| arguments.device_memory.is_none()).or(free_host),
            processes,
        },
        DeviceArg::Cuda => {
            // Ranks beyond the cards there are share them.
            let sharing = ranks.div_ceil(gpus(machine).max(1));
            let free = machine.device_memory().map(|memory| memory.free / sharing);
            Budget {
                device: arguments.device_memory.or(free),
                host: typed_host.or(free_host),
                together: None,
                processes,
            }
        }
    }
}
