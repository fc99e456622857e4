//! Knowledge distillation: the teacher of a job, as weights or as a cache of its distributions.

mod cache_file;
mod cache_manifest;
mod cache_writer;
mod error;
mod make_cache;
mod record_checksums;
mod teacher_weights;

use std::path::PathBuf;

use zeroth_graph::DistillSpec;
use zeroth_model::{Distilled, ModelConfig, ModelFunction, ParameterTable, TeacherForward};

pub(crate) use cache_file::TeacherRecords;
pub use cache_file::{TeacherCache, VerifiedCache};
pub use cache_manifest::{BlockChecksums, CacheManifest, CachedData};
pub use cache_writer::{CacheWriter, OpenedCache};
pub use error::{TeacherCacheError, TeacherError};
pub use make_cache::{CacheJob, CacheProgress, MakeCacheError};
pub use teacher_weights::TeacherWeights;
pub(crate) use teacher_weights::{TeacherLoad, read_teacher};

/// The distillation of a job: alpha · KD + (1 − alpha) · CE.
#[derive(Debug)]
pub struct Distillation {
    /// The divergence.
    pub spec: DistillSpec,
    /// The divergence's share of the loss.
    pub alpha: f64,
    /// Where the teacher's distributions come from.
    pub teacher: TeacherSource,
}

/// Where a teacher's distributions come from.
#[derive(Debug)]
pub enum TeacherSource {
    /// The teacher, computed beside the student.
    Weights(Box<TeacherModel>),
    /// A cache that `zeroth distill cache` wrote.
    Cache {
        /// The cache.
        cache: Box<TeacherCache>,
        /// Whether the mass that it lacks is one more bucket; else both distributions are renormalised over the cached ids.
        tail: bool,
    },
}

/// A teacher with its weights.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "names say what they are")]
pub struct TeacherModel {
    /// Its folder or Hub name, as given.
    pub name: String,
    pub folder: PathBuf,
    pub config: ModelConfig,
    /// Its parameters, all frozen.
    pub table: ParameterTable,
    /// Whether its linear layers are kept in nf4.
    pub quantized: bool,
    /// Whether weights are drawn from the seed where the folder has none.
    pub random: bool,
}

impl TeacherModel {
    /// A teacher of this config, whose linear layers are in nf4 if it is `quantized`.
    pub fn new(name: String, folder: PathBuf, config: ModelConfig, quantized: bool, random: bool) -> Self {
        let mut table = zeroth_model::table(&config);
        for parameter in table.units.iter_mut().flat_map(|unit| &mut unit.parameters) {
            parameter.trained = false;
        }
        if quantized {
            table.quantize();
        }
        Self { name, folder, config, table, quantized, random }
    }

    /// What it computes from its weights. The loss that balances its experts is not trained.
    pub fn function(&self) -> ModelFunction {
        ModelConfig { aux_loss: None, ..self.config.clone() }.function()
    }
}

impl Distillation {
    /// What the student's graph is composed with.
    pub fn distilled(&self) -> Distilled<'_> {
        let teacher = match &self.teacher {
            TeacherSource::Weights(teacher) => {
                TeacherForward::Weights { config: &teacher.config, table: &teacher.table }
            }
            TeacherSource::Cache { cache, tail } => {
                let CacheManifest { k, vocab, .. } = *cache.manifest();
                TeacherForward::TopK { k, vocab, tail: *tail }
            }
        };
        Distilled { teacher, spec: self.spec, alpha: self.alpha }
    }

    /// The teacher, where it is computed beside the student.
    pub fn model(&self) -> Option<&TeacherModel> {
        match &self.teacher {
            TeacherSource::Weights(teacher) => Some(teacher),
            TeacherSource::Cache { .. } => None,
        }
    }

    /// The cache, where there is one.
    pub fn cache(&self) -> Option<&TeacherCache> {
        match &self.teacher {
            TeacherSource::Weights(_) => None,
            TeacherSource::Cache { cache, .. } => Some(cache),
        }
    }
}
