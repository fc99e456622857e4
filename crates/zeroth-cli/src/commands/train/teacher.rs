//! `--teacher` and `--kd-cache`: what a run distils from, checked before anything is loaded.

use std::path::Path;

use anyhow::Context;
use zeroth::base::{format_count, grouped};
use zeroth::config::check::Report;
use zeroth::config::checked::CheckedConfig;
use zeroth::config::preset::Preset;
use zeroth::data::{Samples, TokenizerDifference, tokenizer_difference, tokenizer_ids};
use zeroth::graph::DistillSpec;
use zeroth::model::ModelConfig;
use zeroth::program::TeacherPlacement;
use zeroth::train::checkpoint::{BaseEntry, Checkpoint, DistillEntry};
use zeroth::train::{
    CachedData, Distillation, TeacherCache, TeacherCacheError, TeacherModel, TeacherSource, TeacherWeights,
    check_same_distillation,
};

use super::handoff::TeacherConfig;
use super::resolve_job::ResolvedJob;
use crate::cli::TrainArgs;
use crate::kd_args::{KdArgs, TailArg};
use crate::lora_args::QuantizeArg;

/// The keys of a teacher's config that count.
const STAGE: &str = "zero_optimization.stage";
const OFFLOAD: &str = "zero_optimization.offload_param.device";

/// The student that a teacher must suit.
pub(in super::super) struct Student<'a> {
    pub(in super::super) name: &'a str,
    pub(in super::super) folder: &'a Path,
    pub(in super::super) config: &'a ModelConfig,
    pub(in super::super) max_length: u64,
}

impl Student<'_> {
    /// Refuses an encoder-decoder.
    fn check(&self) -> anyhow::Result<()> {
        anyhow::ensure!(
            !self.config.family.is_encoder_decoder(),
            "--model {} is an encoder-decoder model ({}): distillation is not yet built for its two streams; leave out --teacher \
             and --kd-cache, or give a decoder-only student",
            self.name,
            self.config.family.model_type()
        );
        Ok(())
    }
}

/// What the run distils from; `None` if it does not. `config` is the teacher's as the launcher has read it, else it is read.
pub(super) fn resolve(
    arguments: &TrainArgs,
    student: &Student<'_>,
    config: &mut Option<TeacherConfig>,
    notes: &mut Vec<String>,
) -> anyhow::Result<Option<Distillation>> {
    let kd = &arguments.kd;
    if !kd.distils() {
        return Ok(None);
    }
    student.check()?;
    let is_random = arguments.lora.random_weights;
    let teacher = match &kd.teacher {
        Some(name) => {
            // The launcher has compared the folders as they were at the start.
            let (config, compared) = match config {
                Some(config) => (&*config, None),
                None => (&*config.insert(TeacherConfig::read(name)?), Some(student)),
            };
            Some(suited(name, config, kd.teacher_quantize, is_random, compared)?)
        }
        None => None,
    };
    let spec = |temperature: f64| DistillSpec {
        beta: kd.kd_beta.unwrap_or(0.0),
        temperature,
        squared: kd.kd_squared.unwrap_or(true),
    };
    let alpha = kd.alpha();
    let Some(folder) = &kd.kd_cache else {
        let teacher = teacher.context("a run without a cache has a teacher")?;
        let teacher = TeacherSource::Weights(Box::new(teacher));
        return Ok(Some(Distillation { spec: spec(kd.kd_temperature.unwrap_or(2.0)), alpha, teacher }));
    };
    let cache = TeacherCache::open(folder).context("--kd-cache")?;
    check_cache(kd, &cache, teacher.as_ref(), arguments.seed)?;
    notes.extend(cache.note());
    let temperature = cache.manifest().temperature;
    if kd.kd_temperature.is_none() {
        notes.push(format!("--kd-temperature is {temperature}, that of the cache"));
    }
    let tail = kd.kd_tail != Some(TailArg::Renormalize);
    let teacher = TeacherSource::Cache { cache: Box::new(cache), tail };
    Ok(Some(Distillation { spec: spec(temperature), alpha, teacher }))
}

/// A teacher that suits the student, or any model for a cache.
pub(in super::super) fn open(
    name: &str,
    quantize: Option<QuantizeArg>,
    is_random: bool,
    student: Option<&Student<'_>>,
) -> anyhow::Result<TeacherModel> {
    suited(name, &TeacherConfig::read(name)?, quantize, is_random, student)
}

fn suited(
    name: &str,
    TeacherConfig { folder, map, origin }: &TeacherConfig,
    quantize: Option<QuantizeArg>,
    is_random: bool,
    student: Option<&Student<'_>>,
) -> anyhow::Result<TeacherModel> {
    let config = ModelConfig::from_map(map, origin).context("--teacher")?;
    anyhow::ensure!(
        !config.family.is_encoder_decoder(),
        "--teacher {name} is an encoder-decoder model ({}): its predictions are those of a decoder's targets, not of the \
         student's tokens; give a decoder-only teacher",
        config.family.model_type()
    );
    if let Some(student) = student {
        student.check()?;
        check_tokenizers(name, folder, &config, student)?;
        check_embedding(name, folder, &config)?;
        if let Some(positions) = config.max_positions.filter(|positions| *positions < student.max_length) {
            anyhow::bail!(
                "--teacher {name} has {} positions (max_position_embeddings), fewer than the {} of --max-length: give \
                 --max-length {positions}, or a teacher with more positions",
                grouped(positions),
                grouped(student.max_length)
            );
        }
    }
    Ok(TeacherModel::new(name.to_owned(), folder.clone(), config, quantize.is_some(), is_random))
}

/// Refuses a teacher whose ids mean something else.
fn check_tokenizers(
    name: &str,
    folder: &Path,
    config: &ModelConfig,
    student: &Student<'_>,
) -> anyhow::Result<()> {
    const WHY: &str = "distillation compares distributions over the same tokens";
    match tokenizer_difference(student.folder, folder)? {
        None => Ok(()),
        Some(TokenizerDifference::BothMissing) if config.vocab == student.config.vocab => Ok(()),
        Some(TokenizerDifference::BothMissing) => anyhow::bail!(
            "--teacher {name} has a vocabulary of {} ids, the student {} one of {}, and neither has a tokenizer.json that \
             would say whether the first ids are the same: {WHY}; give a teacher with the same vocabulary",
            grouped(config.vocab),
            student.name,
            grouped(student.config.vocab)
        ),
        Some(TokenizerDifference::OnlyOne(of_student)) => {
            let (with, without) = if of_student { (student.name, name) } else { (name, student.name) };
            anyhow::bail!(
                "{without} has no tokenizer.json, and {with} has one: {WHY}; copy tokenizer.json there if both models were \
                 trained with it, or give another teacher"
            )
        }
        Some(TokenizerDifference::Content(how)) => anyhow::bail!(
            "--teacher {name} has another tokenizer than the student {}: {how}; {WHY}; give a teacher of the student's \
             tokenizer",
            student.name
        ),
    }
}

/// Refuses a teacher whose tokenizer has ids that it has no embedding of.
fn check_embedding(name: &str, folder: &Path, config: &ModelConfig) -> anyhow::Result<()> {
    let ids = tokenizer_ids(folder)?.unwrap_or(0);
    anyhow::ensure!(
        ids <= config.vocab,
        "--teacher {name} has an embedding of {} ids (vocab_size), fewer than the {} of its tokenizer.json: it has no \
         distribution after tokens that it does not know; give a teacher whose embedding has all of them",
        grouped(config.vocab),
        grouped(ids)
    );
    Ok(())
}

/// Refuses a cache that was made otherwise than the flags say.
fn check_cache(
    kd: &KdArgs,
    cache: &TeacherCache,
    teacher: Option<&TeacherModel>,
    seed: u64,
) -> anyhow::Result<()> {
    let manifest = cache.manifest();
    let mut differences = Vec::new();
    if let Some(typed) = kd.kd_temperature.filter(|typed| *typed != manifest.temperature) {
        differences.push(format!("--kd-temperature is {typed}, that of the cache {}", manifest.temperature));
    }
    if let Some(teacher) = teacher {
        if teacher.quantized != manifest.quantized {
            let word = |quantized: bool| if quantized { "nf4" } else { "none" };
            differences.push(format!(
                "--teacher-quantize is {}, that of the cache {}",
                word(teacher.quantized),
                word(manifest.quantized)
            ));
        }
        let weights = TeacherWeights::open(teacher, seed)?;
        let sample = weights.sample().context("--teacher")?;
        let (name, total) = (teacher.name.clone(), teacher.table.total());
        let now = BaseEntry { name, total, sample, hash: String::new() };
        differences.extend(manifest.teacher_differences(&now, Some(&teacher.function())));
    }
    refuse(cache, differences)
}

/// Refuses a cache of other data than the samples of a run, all of them, and tokens that a teacher has no embedding of.
pub(super) fn check_data(
    distillation: Option<&Distillation>,
    student: &ModelConfig,
    samples: &Samples,
) -> anyhow::Result<()> {
    let teacher = distillation.and_then(Distillation::model);
    if let Some(teacher) = teacher.filter(|teacher| teacher.config.vocab < student.vocab) {
        check_tokens(teacher, samples)?;
    }
    let Some(cache) = distillation.and_then(Distillation::cache) else { return Ok(()) };
    let difference = cache.manifest().data_difference(&CachedData::of(samples)?);
    refuse(cache, difference.into_iter().collect())
}

/// Refuses ready tokens beyond the embedding of a teacher, which the student's may have.
pub(in super::super) fn check_tokens(teacher: &TeacherModel, samples: &Samples) -> anyhow::Result<()> {
    let mut ids = Vec::new();
    for sample in 0..samples.totals().samples {
        ids.clear();
        samples.append_ids(sample, &mut ids)?;
        let beyond = ids.iter().position(|id| u64::try_from(*id).is_ok_and(|id| id >= teacher.config.vocab));
        if let Some(place) = beyond {
            anyhow::bail!(
                "token {place} of sample {sample} is {}, and --teacher {} has an embedding of {} ids (vocab_size): give a \
                 teacher that knows all tokens of the data, or data without these",
                ids[place],
                teacher.name,
                grouped(teacher.config.vocab)
            );
        }
    }
    Ok(())
}

fn refuse(cache: &TeacherCache, differences: Vec<String>) -> anyhow::Result<()> {
    if differences.is_empty() {
        return Ok(());
    }
    let remedy = "give the --data, --max-length, --columns, --system, --max-train-samples, --teacher and --kd-temperature \
                  that it was made with, or make another cache with `zeroth distill cache`";
    let folder = cache.folder().to_owned();
    Err(TeacherCacheError::Other { folder, differences, remedy }).context("--kd-cache")
}

/// Where the teacher's weights are by `--teacher-deepspeed`, of which only the stage and `offload_param` count.
pub(in super::super) fn placement(
    argument: &str,
    notes: &mut Vec<String>,
) -> anyhow::Result<TeacherPlacement> {
    // The text has its own headline; the flag goes below it.
    let loaded = CheckedConfig::load(argument)
        .map_err(|error| anyhow::anyhow!("{error}\n  given by --teacher-deepspeed"));
    let Report { values, .. } = loaded?.report;
    let value = |path: &str| values.get(path).map(|found| &found.value);
    let stage = value(STAGE).and_then(serde_json::Value::as_u64).unwrap_or(0);
    let device = value(OFFLOAD).and_then(serde_json::Value::as_str).unwrap_or("none");
    anyhow::ensure!(
        device != "nvme",
        "--teacher-deepspeed {argument}: offload_param.device \"nvme\" is not yet built; use \"cpu\" or \"none\""
    );
    // The other keys of a preset are not the user's.
    if Preset::find(argument).is_err() {
        let others: Vec<&str> =
            values.iter().map(|(path, _)| path).filter(|path| ![STAGE, OFFLOAD].contains(path)).collect();
        if !others.is_empty() {
            notes.push(format!(
                "of --teacher-deepspeed only {STAGE} and {OFFLOAD} count; these have no effect: {}",
                others.join(", ")
            ));
        }
    }
    Ok(TeacherPlacement { sharded: stage >= 3, offloaded: device == "cpu" })
}

/// Checks the teacher's weights, and, where a run is resumed, that teacher and loss are those of the checkpoint. Returns notes.
pub(super) fn check_weights(resolved_job: &ResolvedJob) -> anyhow::Result<Vec<String>> {
    let (job, checkpoint) = (&resolved_job.job, resolved_job.checkpoint.as_ref());
    let mut entry = job.distillation.as_ref().map(DistillEntry::of);
    let mut notes = Vec::new();
    if let (Some(model), Some(entry)) = (job.distillation.as_ref().and_then(Distillation::model), &mut entry)
    {
        let weights = TeacherWeights::open(model, job.seed)?;
        notes = weights.notes();
        entry.teacher.sample = weights.sample().context("--teacher")?;
    }
    if let Some(checkpoint) = checkpoint {
        check_resumed(checkpoint, entry.as_ref())?;
    }
    Ok(notes)
}

fn check_resumed(checkpoint: &Checkpoint, now: Option<&DistillEntry>) -> anyhow::Result<()> {
    Ok(check_same_distillation(checkpoint, now)?)
}

/// The line of the start-up summary.
pub(super) fn summary(resolved_job: &ResolvedJob) -> Option<String> {
    let Distillation { spec, alpha, teacher } = resolved_job.job.distillation.as_ref()?;
    let from = match teacher {
        TeacherSource::Weights(teacher) => {
            let TeacherPlacement { sharded, offloaded } = resolved_job.job.settings.teacher;
            let place = match (sharded, offloaded) {
                (_, true) => "sharded in host memory",
                (true, false) => "sharded",
                (false, false) => "whole on every rank",
            };
            let kept = if teacher.quantized { ", linear layers in nf4" } else { "" };
            let total = teacher.table.total();
            let family = teacher.config.family.model_type();
            format!("{}: {family} with {} parameters, {place}{kept}", teacher.name, format_count(total))
        }
        TeacherSource::Cache { cache, tail } => format!(
            "{}: the {} most probable tokens of {}, {}",
            cache.folder().display(),
            cache.manifest().k,
            cache.manifest().teacher.name,
            if *tail { "the others as one bucket" } else { "renormalised" }
        ),
    };
    let squared = if spec.squared { " · T²" } else { "" };
    Some(format!(
        "distilled from {from}; loss {alpha} · KD{squared} + {} · CE, beta {}, temperature {}",
        1.0 - alpha,
        spec.beta,
        spec.temperature
    ))
}
