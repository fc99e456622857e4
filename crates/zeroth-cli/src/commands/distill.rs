//! `distill cache`: writes a teacher's most probable tokens for all tokens of a dataset.

use std::sync::Mutex;
use std::time::Instant;

use serde_json::json;
use zeroth::base::{counted, format_bytes, grouped};
use zeroth::comm::alone;
use zeroth::config::check::check;
use zeroth::config::preset::Preset;
use zeroth::config::read::parse;
use zeroth::config::resolve::{Flags, ResolveRequest, resolve};
use zeroth::data::{Samples, check_trained, prepare_with_progress};
use zeroth::job::{
    Reading, Student, check_tokens, open_teacher, refuse_output_inside, teacher_placement, token_cache,
};
use zeroth::machine::{probe, probe_host};
use zeroth::model::{ModelConfig, locate, read_config};
use zeroth::program::{Compiled, Settings, TopLogProbs};
use zeroth::train::checkpoint::free_bytes;
use zeroth::train::{
    CacheJob, CacheManifest, CacheProgress, CacheWriter, OpenedCache, TeacherModel, TeacherWeights,
    check_writable,
};

use super::data_inputs;
use super::process_memory::{MemoryShortfall, ProcessMemory};
use crate::exit::Exit;
use crate::kd_args::{DistillCacheArgs, DistillCommand};
use crate::output::{self, Output};
use crate::pair_args::PairArgs;
use crate::signals::{SaveSignals, SignalRole, Signals};
use crate::startup_signals::InterruptedWork;
use crate::terminal::Meter;
use crate::train_flags::precision;
use crate::value_args::{DeviceArg, target};

pub(super) fn run(command: &DistillCommand, output: &Output) -> anyhow::Result<Exit> {
    let DistillCommand::Cache(arguments) = command;
    cache(arguments, output)
}

fn cache(arguments: &DistillCacheArgs, output: &Output) -> anyhow::Result<Exit> {
    let signals = Signals::install(SignalRole::Primary, InterruptedWork::TeacherCache, SaveSignals::NONE)?;
    if let Some(before) = signals.startup() {
        before.on_stop(zeroth::base::remove_own);
    }
    let memory = ProcessMemory::at_start();
    check_writable(&arguments.output)?;
    let mut notes = Vec::new();
    let settings = settings(arguments, &mut notes)?;
    let (teacher, reading) = teacher_and_reading(arguments)?;
    anyhow::ensure!(
        arguments.top_k <= teacher.config.vocab,
        "--top-k {} exceeds the teacher's vocabulary of {} ids: give at most as many",
        arguments.top_k,
        grouped(teacher.config.vocab)
    );
    let weights = TeacherWeights::open(&teacher, arguments.seed)?;
    notes.extend(weights.notes());
    notes.extend(reading.note());
    refuse_output_inside("--data", &arguments.data, &arguments.output)?;
    let samples = samples(arguments, &reading, &signals)?;
    // Rows may be those of a student with more ids.
    check_tokens(&teacher, &samples)?;
    notes.extend(samples.totals().notes(reading.limits()));
    let job = CacheJob {
        samples: &samples,
        teacher: &teacher,
        settings,
        top: TopLogProbs { k: arguments.top_k, temperature: arguments.kd_temperature },
        micro_batch: arguments.per_device_train_batch_size,
        seed: arguments.seed,
    };
    for note in &notes {
        output::note(&format!("note: {note}"));
    }
    let manifest = job.manifest(&weights)?;
    drop(weights);
    let machine = if arguments.device == Some(DeviceArg::Cpu) { probe_host() } else { probe() };
    let compiled = job.compile(target(arguments.device, arguments.threads, &machine)?)?;
    if let Some(lack) = lack(arguments, &manifest, memory.shortfall(&compiled, &machine)) {
        output::error(&lack);
        return Ok(Exit::DoesNotFit);
    }
    let mut writer = match CacheWriter::open(&arguments.output, &manifest)? {
        OpenedCache::Complete { manifest, added_checksums } => {
            output::note(if added_checksums {
                "this cache is already complete; checksums of what it holds were added"
            } else {
                "this cache is already complete; nothing was changed"
            });
            summary(arguments, &manifest, None, output)?;
            return Ok(Exit::Done);
        }
        OpenedCache::Open(writer) => writer,
    };
    let before = writer.manifest().tokens_done;
    if before > 0 {
        output::note(&format!("continuing after {}", counted(before, "token")));
    }
    let seconds = match compute(&job, &compiled, &mut writer, &signals) {
        Ok(Some(seconds)) => seconds,
        Ok(None) => {
            if let Some(before) = signals.startup() {
                before.acknowledge();
            }
            let done = writer.manifest().tokens_done;
            output::note(&format!(
                "stopped after {} of {}; the same command continues",
                grouped(done),
                counted(writer.manifest().data.tokens, "token")
            ));
            return Ok(signals.stop_requested().map_or(Exit::Failed, Exit::after));
        }
        Err(error) => {
            output::error(&error.to_string());
            output::note(&format!(
                "{} of {} are done; once that is fixed, the same command continues",
                grouped(writer.manifest().tokens_done),
                counted(writer.manifest().data.tokens, "token")
            ));
            return Ok(Exit::Failed);
        }
    };
    let computed = writer.manifest().data.tokens - before;
    summary(arguments, writer.manifest(), Some((computed, seconds)), output)?;
    Ok(Exit::Done)
}

/// Computes what is not done yet. Seconds that it took without loading the teacher; `None` if it was stopped.
fn compute(
    job: &CacheJob<'_>,
    compiled: &Compiled,
    writer: &mut CacheWriter,
    signals: &Signals,
) -> anyhow::Result<Option<f64>> {
    let device = compiled.target.open(0, compiled.memory.arenas())?;
    let mut meter = Some(Meter::new("loading the teacher"));
    let mut begun = Instant::now();
    let mut report = |progress: CacheProgress| match progress {
        CacheProgress::Loading { loaded, total } => {
            if let Some(meter) = &mut meter {
                meter.tell(loaded, total, || None);
            }
        }
        CacheProgress::Loaded => {
            meter = None;
            // From here on there is something to keep.
            signals.begin_steps(&*alone());
            meter = Some(Meter::new("caching"));
            begun = Instant::now();
        }
        CacheProgress::Tokens { done, total } => {
            let tokens = || Some(format!("{} tokens", grouped(done)));
            if let Some(meter) = &mut meter {
                meter.tell(done, total, tokens);
            }
        }
    };
    let is_done = job.run(compiled, device, writer, &mut report, &|| signals.stop_requested().is_some())?;
    Ok(is_done.then(|| begun.elapsed().as_secs_f64()))
}

/// The teacher, and how rows are tokenised: by the student's folder where one is given.
fn teacher_and_reading(arguments: &DistillCacheArgs) -> anyhow::Result<(TeacherModel, Reading)> {
    let (is_quantized, is_random) = (arguments.teacher_quantize.is_some(), arguments.random_weights);
    let reading = arguments.reading.request(&PairArgs::default());
    let Some(name) = &arguments.model else {
        let teacher = open_teacher(&arguments.teacher, is_quantized, is_random, None)?;
        let reading = Reading::new(&reading, &teacher.config, &teacher.folder)?;
        if let Some(note) = teacher.config.max_positions.filter(|positions| *positions < reading.max_length())
        {
            anyhow::bail!(
                "--teacher {} has {} positions (max_position_embeddings), fewer than --max-length {}: give --max-length {note}",
                arguments.teacher,
                grouped(note),
                grouped(reading.max_length())
            );
        }
        return Ok((teacher, reading));
    };
    let folder = locate(name)?;
    let (map, origin) = read_config(&folder)?;
    let config = ModelConfig::from_map(&map, &origin)?;
    let reading = Reading::new(&reading, &config, &folder)?;
    let student = Student { name, folder: &folder, config: &config, max_length: reading.max_length() };
    Ok((open_teacher(&arguments.teacher, is_quantized, is_random, Some(&student))?, reading))
}

/// Settings of the compiler passes: the precision, and the teacher's placement.
fn settings(arguments: &DistillCacheArgs, notes: &mut Vec<String>) -> anyhow::Result<Settings> {
    let preset = Preset::find("zero0")?;
    let document = parse(preset.source())?;
    let report = check(&document);
    let flags = Flags {
        precision: precision(arguments.bf16, arguments.fp16, arguments.fp32)?,
        per_device_train_batch_size: Some(arguments.per_device_train_batch_size),
        ..Flags::default()
    };
    let request = ResolveRequest { file: &report.values, flags: &flags, ranks: 1, model: None, steps: None };
    let mut settings = Settings::from_config(&resolve(&request)?);
    if let Some(given) = &arguments.teacher_deepspeed {
        settings.teacher = teacher_placement(given, notes)?;
    }
    Ok(settings)
}

fn samples(arguments: &DistillCacheArgs, reading: &Reading, signals: &Signals) -> anyhow::Result<Samples> {
    let cache = token_cache(&arguments.output);
    if let Some(before) = signals.startup() {
        let cache = cache.clone();
        before.on_stop(move || cache.remove_unfinished());
    }
    let encoder = reading.encoder()?;
    let files = data_inputs::files(&arguments.data)?;
    let options = reading.options(arguments.max_train_samples, false);
    let meter = Mutex::new(Meter::new("tokenising"));
    let prepared = prepare_with_progress(&files, &encoder, &options, &cache, &|done| {
        // Skip the update if another thread is printing.
        if let Ok(mut meter) = meter.try_lock() {
            meter.tell(done.bytes, done.total_bytes, || Some(format!("{} rows", grouped(done.rows))));
        }
    })?;
    drop(meter);
    check_trained(&prepared.samples, &files, &encoder, &options)?;
    Ok(prepared.samples)
}

/// What memory or disk lacks, in words.
fn lack(
    arguments: &DistillCacheArgs,
    manifest: &CacheManifest,
    memory: Option<MemoryShortfall>,
) -> Option<String> {
    if let Some(MemoryShortfall { program, process, free }) = memory {
        let process = match process {
            0 => String::new(),
            process => format!(", and the process itself {}", format_bytes(process)),
        };
        return Some(format!(
            "the teacher needs {}{process}, but {} are free: a smaller --per-device-train-batch-size, --teacher-quantize \
             nf4 or --teacher-deepspeed zero3_offload may fit",
            format_bytes(program),
            format_bytes(free)
        ));
    }
    let needed = manifest.data.tokens * manifest.record_bytes();
    let present = arguments.output.join("records.bin").metadata().map_or(0, |found| found.len());
    let free = free_bytes(&arguments.output).ok()?.saturating_add(present);
    (free < needed).then(|| {
        format!(
            "the cache needs {} ({} × {} bytes), but {} are free on the disk of {}: a smaller --top-k, or another --output",
            format_bytes(needed),
            counted(manifest.data.tokens, "token"),
            manifest.record_bytes(),
            format_bytes(free),
            arguments.output.display()
        )
    })
}

/// Prints what the cache holds; `computed` are the tokens of this command and their seconds.
fn summary(
    arguments: &DistillCacheArgs,
    manifest: &CacheManifest,
    computed: Option<(u64, f64)>,
    output: &Output,
) -> anyhow::Result<()> {
    let bytes = manifest.data.tokens * manifest.record_bytes();
    if output.is_json() {
        return output::json(&json!({
            "path": arguments.output,
            "teacher": manifest.teacher.name,
            "samples": manifest.data.samples,
            "tokens": manifest.data.tokens,
            "k": manifest.k,
            "temperature": manifest.temperature,
            "bytes": bytes,
            "computed_tokens": computed.map_or(0, |(tokens, _)| tokens),
            "seconds": computed.map(|(_, seconds)| seconds),
        }));
    }
    let rate = computed.map(|(tokens, seconds)| {
        format!(
            ", {} computed at {} tokens/s",
            grouped(tokens),
            grouped((tokens as f64 / seconds.max(1e-9)) as u64)
        )
    });
    output::text(&format!(
        "{}: the {} most probable tokens of {} for {} of {} at temperature {}: {}{}\n",
        arguments.output.display(),
        manifest.k,
        manifest.teacher.name,
        counted(manifest.data.tokens, "token"),
        counted(manifest.data.samples, "sample"),
        manifest.temperature,
        format_bytes(bytes),
        rate.unwrap_or_default()
    ));
    Ok(())
}
