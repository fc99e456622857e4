//! Computes a teacher's most probable tokens for every token of the data, and caches them.

use zeroth_base::counted;
use zeroth_data::{DataError, Samples};
use zeroth_engine::{Engine, RankSetup, RunError};
use zeroth_kernel::{Device, Recipe, Target};
use zeroth_model::{BatchTokens, ModelConfig, forward};
use zeroth_plan::{RowSizes, SizingError};
use zeroth_program::{Compiled, Settings, TopLogProbs};

use super::TeacherModel;
use super::cache_manifest::{BlockChecksums, CacheManifest, CachedData, FORMAT_VERSION, KIND};
use super::cache_writer::{CacheWriter, first_not_finite};
use super::error::{TeacherCacheError, TeacherError};
use super::teacher_weights::{TeacherLoad, TeacherWeights};
use crate::checkpoint::BaseEntry;
use crate::data::{EpochSample, TokenBatch};
use crate::trainer::TrainError;
use crate::weights::{LoadProgress, param_names};

/// A cache to be made.
pub struct CacheJob<'a> {
    /// All samples of the token cache.
    pub samples: &'a Samples,
    /// The teacher.
    pub teacher: &'a TeacherModel,
    /// Settings of the compiler passes; those of the teacher's placement and the dtypes count.
    pub settings: Settings,
    /// What is kept of a distribution.
    pub top: TopLogProbs,
    /// Samples of a micro-batch.
    pub micro_batch: u64,
    /// The seed of weights that the teacher's folder lacks.
    pub seed: u64,
}

/// Progress of making a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "names say what they are")]
pub enum CacheProgress {
    /// Elements of the teacher's weights that are loaded, and all of them.
    Loading { loaded: u64, total: u64 },
    /// Weights are loaded; the first micro-batch comes next.
    Loaded,
    /// Tokens that are done.
    Tokens {
        /// Done, by earlier runs too.
        done: u64,
        total: u64,
    },
}

/// A cache that could not be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum MakeCacheError {
    #[error(transparent)]
    Cache(#[from] TeacherCacheError),
    #[error(transparent)]
    Teacher(#[from] TeacherError),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Run(Box<RunError>),
    #[error(transparent)]
    Load(Box<TrainError>),
    #[error(
        "the teacher's logits at token {token} of sample {sample} are not finite, and so its distribution is none: check its \
         weights, or compute in another precision"
    )]
    NotFinite {
        /// The sample, from 0 in file order.
        sample: u64,
        token: usize,
    },
}

impl From<RunError> for MakeCacheError {
    fn from(error: RunError) -> Self {
        Self::Run(Box::new(error))
    }
}

impl From<TrainError> for MakeCacheError {
    fn from(error: TrainError) -> Self {
        Self::Load(Box::new(error))
    }
}

impl CacheJob<'_> {
    /// What the cache will be made of. The teacher's weights are known by the first of each tensor.
    pub fn manifest(&self, weights: &TeacherWeights<'_>) -> Result<CacheManifest, MakeCacheError> {
        let sample = weights.sample().map_err(TeacherError::from)?;
        let manifest = CacheManifest {
            kind: KIND.to_owned(),
            format_version: FORMAT_VERSION,
            data: CachedData::of(self.samples)?,
            teacher: BaseEntry {
                name: self.teacher.name.clone(),
                total: self.teacher.table.total(),
                hash: String::new(),
                sample,
            },
            function: Some(self.teacher.function()),
            quantized: self.teacher.quantized,
            dtype: self.settings.types.compute.to_string(),
            vocab: self.teacher.config.vocab,
            k: self.top.k,
            temperature: self.top.temperature,
            tokens_done: 0,
            checksums: None,
        };
        Ok(CacheManifest { checksums: Some(BlockChecksums::new(manifest.record_bytes())), ..manifest })
    }

    /// Compiles the teacher's forward for the largest micro-batch.
    pub fn compile(&self, target: &'static dyn Target) -> Result<Compiled, SizingError> {
        let sizes = RowSizes::new(self.largest_micro_batch());
        let sizes: Vec<u64> = sizes.all().iter().map(|size| *size as u64).collect();
        // Experts are balanced in training only.
        let config = ModelConfig { aux_loss: None, ..self.teacher.config.clone() };
        let tokens = sizes.last().copied().unwrap_or(1);
        let graph = forward(&config, &self.teacher.table, BatchTokens::of_tokens(tokens))?;
        Ok(Compiled::top_log_probs(graph, 1, &self.settings, target, sizes, self.top)?)
    }

    /// Tokens of the largest micro-batch, wherever an earlier run has stopped.
    fn largest_micro_batch(&self) -> u64 {
        let samples = self.samples.totals().samples;
        let length = |sample: u64| self.samples.sample_length(sample);
        let (mut tokens, mut largest) = (0, 0);
        for sample in 0..samples {
            tokens += length(sample);
            if let Some(left) = sample.checked_sub(self.micro_batch) {
                tokens -= length(left);
            }
            largest = largest.max(tokens);
        }
        largest
    }

    /// Computes what is not done yet. Returns whether all of it is: `stops` is asked after every micro-batch.
    pub fn run(
        &self,
        compiled: &Compiled,
        device: Box<dyn Device>,
        writer: &mut CacheWriter,
        report: &mut dyn FnMut(CacheProgress),
        stops: &dyn Fn() -> bool,
    ) -> Result<bool, MakeCacheError> {
        let rank =
            RankSetup { comm: None, device, recipe: Recipe::default(), decayed: &|_| false, seed: self.seed };
        let mut engine = Engine::new(compiled, rank)?;
        let teacher = self.load(&mut engine, report)?;
        writer.identify(teacher.hash)?;
        report(CacheProgress::Loaded);
        let written = self.write(&mut engine, writer, report, stops);
        // What is done stays, whatever went wrong.
        let committed = writer.commit();
        let is_done = written?;
        committed?;
        Ok(is_done)
    }

    fn load(
        &self,
        engine: &mut Engine<'_>,
        report: &mut dyn FnMut(CacheProgress),
    ) -> Result<BaseEntry, MakeCacheError> {
        let names = param_names(engine);
        let weights = TeacherWeights::open(self.teacher, self.seed)?;
        let mut load = TeacherLoad::new(weights, engine, &names, "");
        let mut loaded = |loaded, total| report(CacheProgress::Loading { loaded, total });
        let mut progress = LoadProgress::new(engine.compiled(), 1, &mut loaded);
        engine.load(&mut |param, range, elements| {
            load.read(param.index(), &range, elements)?;
            progress.loaded(param.index(), range.end);
            Ok(())
        })?;
        Ok(load.finish(engine)?)
    }

    fn write(
        &self,
        engine: &mut Engine<'_>,
        writer: &mut CacheWriter,
        report: &mut dyn FnMut(CacheProgress),
        stops: &dyn Fn() -> bool,
    ) -> Result<bool, MakeCacheError> {
        let totals = self.samples.totals();
        let mut done = writer.manifest().tokens_done;
        let mut sample = self.first_sample(done, writer)?;
        let mut batch = TokenBatch::default();
        let (mut ids, mut log_probs) = (Vec::new(), Vec::new());
        let (mut own_ids, mut labels) = (Vec::new(), Vec::new());
        while sample < totals.samples {
            if stops() {
                return Ok(false);
            }
            let end = (sample + self.micro_batch).min(totals.samples);
            batch.clear();
            for sample in sample..end {
                own_ids.clear();
                labels.clear();
                self.samples.append_ids(sample, &mut own_ids)?;
                self.samples.append_labels(sample, 0, &mut labels)?;
                batch.push(&own_ids, &labels, EpochSample { sample, epoch: 0 });
            }
            engine.top_log_probs(&batch.view(), &mut ids, &mut log_probs)?;
            if let Some(row) = first_not_finite(&log_probs, self.top.k) {
                let sequence = batch.starts.partition_point(|start| *start as usize <= row) - 1;
                let token = row - batch.starts[sequence] as usize;
                return Err(MakeCacheError::NotFinite { sample: sample + sequence as u64, token });
            }
            writer.append(&ids, &log_probs)?;
            (sample, done) = (end, done + batch.tokens() as u64);
            report(CacheProgress::Tokens { done, total: totals.tokens });
        }
        Ok(true)
    }

    /// The sample whose records come next.
    fn first_sample(&self, done: u64, writer: &CacheWriter) -> Result<u64, TeacherCacheError> {
        let samples = self.samples.totals().samples;
        let (mut from, mut to) = (0, samples);
        while from < to {
            let middle = from.midpoint(to);
            if self.samples.token_offset(middle) < done { from = middle + 1 } else { to = middle }
        }
        let found =
            if from < samples { self.samples.token_offset(from) } else { self.samples.totals().tokens };
        if found == done {
            Ok(from)
        } else {
            Err(writer.damaged(format!("its {} are not whole samples", counted(done, "token"))))
        }
    }
}

impl CachedData {
    /// The data of a run: all samples, those that are held out included.
    pub fn of(samples: &Samples) -> Result<Self, DataError> {
        let totals = samples.totals();
        Ok(Self { hash: samples.content_digest()?, samples: totals.samples, tokens: totals.tokens })
    }
}
