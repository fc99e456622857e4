//! Loads a LoRA run: the frozen base from the model folder, adapters from a checkpoint, an adapter folder or the seed.

use std::collections::HashMap;
use std::ops::Range;

use rayon::prelude::*;
use zeroth_engine::{Engine, StateKind};
use zeroth_model::{Adapter, Parameter, ParameterTable, WeightsError, fill_adapter};

use super::adapter_base::{differs, sample_of};
use super::base_hash::{BaseHash, name_key, overlaps};
use super::error::LoraWeightsError;
use super::initial::{AT_ONCE, InitialWeights};
use super::load_progress::LoadProgress;
use crate::checkpoint::{BaseEntry, Checkpoint};
use crate::distill::{TeacherLoad, read_teacher};
use crate::export::recorded_base;
use crate::job::{Job, LoraJob, base_table};
use crate::resume::{ResumeError, restore_optimizer};
use crate::trainer::TrainError;

/// The sources of a LoRA run's weights.
pub struct LoraWeights {
    base: InitialWeights,
    base_table: ParameterTable,
    adapter: Option<Adapter>,
}

impl LoraWeights {
    /// Opens the base and, unless the run is resumed, the adapter it starts from. Only headers are read.
    pub fn open(job: &Job, lora: &LoraJob, is_resumed: bool) -> Result<Self, LoraWeightsError> {
        let base_table = base_table(&job.table);
        let base = InitialWeights::open(&job.folder, &job.model, &base_table, job.seed)?;
        if matches!(base, InitialWeights::Random { .. }) && !lora.random_base {
            return Err(LoraWeightsError::NoBase { folder: job.folder.display().to_string() });
        }
        let adapter = lora.adapter.as_ref().filter(|_| !is_resumed);
        let adapter = adapter.map(|folder| Adapter::open(folder, &base_table)).transpose()?;
        Ok(Self { base, base_table, adapter })
    }

    /// Notes about the weights, one sentence each.
    pub fn notes(&self, lora: &LoraJob) -> Vec<String> {
        let mut notes = self.base.notes();
        if matches!(self.base, InitialWeights::Files(_)) && lora.random_base {
            notes.push("--random-weights has no effect: the model folder has weights".to_owned());
        }
        notes.extend(self.adapter.iter().flat_map(|adapter| adapter.notes().iter().cloned()));
        notes
    }

    /// The hash of the first elements of each of the base's tensors.
    pub fn sample(&self) -> Result<String, WeightsError> {
        sample_of(&self.base_table, &|parameter, range, out| self.base.read(parameter, range, out))
    }

    /// Loads this rank's part, adapters and optimizer state from a checkpoint if one is given. Returns the identity of the
    /// base; that of the checkpoint must be the same. Collective.
    pub(crate) fn load(
        &self,
        job: &Job,
        lora: &LoraJob,
        engine: &mut Engine<'_>,
        from: Option<&Checkpoint>,
        teacher: &mut Option<TeacherLoad<'_>>,
        report: &mut dyn FnMut(u64, u64),
    ) -> Result<BaseEntry, TrainError> {
        let names = param_names(engine);
        let states = from.map_or(1, |from| from.manifest().states.len());
        let mut progress = LoadProgress::new(engine.compiled(), states, report);
        let known = job.table.by_name();
        let found: Vec<Option<&Parameter>> =
            names.iter().map(|name| known.get(name.as_str()).copied()).collect();
        let keys: Vec<u64> = names.iter().map(|name| name_key(name)).collect();
        // Where weights are whole on every rank, each rank reads all of them and hashes its share.
        let mut owned: HashMap<usize, Vec<Range<u64>>> = HashMap::new();
        for (param, range, _) in engine.owned(StateKind::Weights) {
            owned.entry(param.index()).or_default().push(range);
        }
        let mut hash = BaseHash::default();
        engine.load(&mut |param, range, elements| {
            let end = range.end;
            if read_teacher(teacher, param.index(), &range, elements)? {
                progress.loaded(param.index(), end);
                return Ok(());
            }
            let Some(parameter) = found[param.index()] else { return Ok(()) };
            match from {
                Some(from) if parameter.is_adapter() => {
                    from.read_f32(StateKind::Weights, &parameter.name, range, elements)?;
                }
                _ if parameter.is_adapter() => self.start_adapter(job, lora, parameter, range, elements)?,
                _ => {
                    self.base.read(parameter, range.clone(), elements)?;
                    let own = owned.get(&param.index()).map_or(&[][..], Vec::as_slice);
                    for part in overlaps(&range, own) {
                        let places = (part.start - range.start) as usize..(part.end - range.start) as usize;
                        hash.add(keys[param.index()], part.start, &elements[places]);
                    }
                }
            }
            progress.loaded(param.index(), end);
            Ok(())
        })?;
        let all = engine.all_gather(0, "identity of the base", &hash)?;
        let hash = all.into_iter().fold(BaseHash::default(), BaseHash::and);
        debug_assert_eq!(hash.elements(), self.base_table.total(), "every element is hashed once");
        let base = BaseEntry {
            name: lora.base.clone(),
            total: self.base_table.total(),
            hash: hash.text(),
            sample: self.sample()?,
        };
        // The first weights of each tensor were compared before: only now all of them are known.
        let adapter = lora.adapter.as_ref().filter(|_| from.is_none() && !lora.allows_other_base);
        if let Some((adapter, saved)) = adapter.and_then(|folder| Some((folder, recorded_base(folder)?)))
            && let Some(other) = differs(adapter, &base.name, &saved, |saved| &saved.hash, &base.hash)
        {
            return Err(LoraWeightsError::from(other).into());
        }
        if let Some(from) = from {
            check_base(from, &base.name, |saved| &saved.hash, &base.hash)?;
            restore_optimizer(from, engine, &names, &mut progress)?;
        }
        Ok(base)
    }

    /// The first values of an adapter: those of `--adapter`, or new ones.
    fn start_adapter(
        &self,
        job: &Job,
        lora: &LoraJob,
        parameter: &Parameter,
        range: Range<u64>,
        elements: &mut [f32],
    ) -> Result<(), WeightsError> {
        if let Some(adapter) = &self.adapter {
            return adapter.read_f32(&parameter.name, range, elements);
        }
        // Counter-based random numbers: the result does not depend on the number of threads.
        elements.par_chunks_mut(AT_ONCE).enumerate().for_each(|(place, part)| {
            let first = range.start + (place * AT_ONCE) as u64;
            fill_adapter(job.seed, lora.init, parameter, first..first + part.len() as u64, part);
        });
        Ok(())
    }
}

/// The names of a program's parameters.
pub(crate) fn param_names(engine: &Engine<'_>) -> Vec<String> {
    engine.compiled().graph.params.iter().map(|param| param.spec.name.clone()).collect()
}

/// Refuses to resume over another base than that of the checkpoint.
pub fn check_base(
    checkpoint: &Checkpoint,
    given: &str,
    of_saved: impl Fn(&BaseEntry) -> &String,
    found: &str,
) -> Result<(), ResumeError> {
    let Some(saved) = checkpoint.manifest().lora.as_ref().map(|lora| &lora.base) else { return Ok(()) };
    let expected = of_saved(saved);
    if expected == found {
        return Ok(());
    }
    Err(ResumeError::Base {
        checkpoint: checkpoint.folder().display().to_string(),
        saved: saved.name.clone(),
        expected: expected.clone(),
        given: given.to_owned(),
        found: found.to_owned(),
    })
}
