//! What a run distils from, checked before anything is loaded.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use zeroth_base::grouped;
use zeroth_config::check::CheckReport;
use zeroth_config::checked::{CheckedConfig, ConfigError};
use zeroth_config::preset::Preset;
use zeroth_data::{
    DataError, EncoderError, Samples, TokenizerDifference, tokenizer_difference, tokenizer_ids,
};
use zeroth_graph::DistillSpec;
use zeroth_model::{ModelConfig, ModelError, WeightsError, locate, read_config};
use zeroth_program::TeacherPlacement;
use zeroth_train::checkpoint::BaseEntry;
use zeroth_train::{
    CachedData, Distillation, TeacherCache, TeacherCacheError, TeacherError, TeacherModel, TeacherSource,
    TeacherWeights,
};

/// What a run distils from. `None` leaves a value to the cache, or to its default.
#[derive(Debug, Clone)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct DistillRequest {
    /// The teacher's folder or name.
    pub teacher: Option<String>,
    /// Where its weights are: a preset or a DeepSpeed config; as the student's if not given.
    pub teacher_deepspeed: Option<String>,
    /// Whether its linear layers are kept in 4 bits.
    pub teacher_quantized: bool,
    /// The share of the distillation in the loss.
    pub alpha: f64,
    /// The temperature of both distributions.
    pub temperature: Option<f64>,
    pub beta: Option<f64>,
    /// Whether the divergence is multiplied by the squared temperature.
    pub squared: Option<bool>,
    /// A cache of the teacher's predictions.
    pub cache: Option<PathBuf>,
    /// Whether what the cache lacks of a distribution is one more bucket, or left out.
    pub tail: bool,
}

/// The config.json of a teacher.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct TeacherConfig {
    pub folder: PathBuf,
    pub map: Map<String, Value>,
    /// That file's name for messages.
    pub origin: String,
}

impl TeacherConfig {
    /// Reads it.
    pub fn read(name: &str) -> Result<Self, DistillRequestError> {
        let folder = locate(name).map_err(DistillRequestError::Teacher)?;
        let (map, origin) = read_config(&folder).map_err(DistillRequestError::Teacher)?;
        Ok(Self { folder, map, origin })
    }
}

/// A teacher or a cache that does not suit the run.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum DistillRequestError {
    #[error("a run that distils has a teacher or a cache")]
    NoSource,
    #[error("--teacher")]
    Teacher(#[source] ModelError),
    #[error("--teacher")]
    Weights(#[source] WeightsError),
    #[error(transparent)]
    TeacherWeights(#[from] TeacherError),
    #[error("--kd-cache")]
    Cache(#[source] TeacherCacheError),
    #[error(transparent)]
    Encoder(#[from] EncoderError),
    #[error(transparent)]
    Data(#[from] DataError),
    /// The config of the placement cannot be used. Its text has a headline of its own, so the flag goes below.
    #[error("{0}\n  given by --teacher-deepspeed")]
    Placement(ConfigError),
    #[error(
        "--teacher-deepspeed {given}: offload_param.device \"nvme\" is not yet built; use \"cpu\" or \"none\""
    )]
    Nvme { given: String },
    #[error(
        "--model {name} is an encoder-decoder model ({family}): distillation is not yet built for its two streams; leave out --teacher \
         and --kd-cache, or give a decoder-only student"
    )]
    PairedStudent { name: String, family: &'static str },
    #[error(
        "--teacher {name} is an encoder-decoder model ({family}): its predictions are those of a decoder's targets, not of the \
         student's tokens; give a decoder-only teacher"
    )]
    PairedTeacher { name: String, family: &'static str },
    #[error(
        "--teacher {name} has {} positions (max_position_embeddings), fewer than the {} of --max-length: give \
         --max-length {positions}, or a teacher with more positions",
        grouped(*.positions),
        grouped(*.max_length)
    )]
    Positions { name: String, positions: u64, max_length: u64 },
    #[error(
        "--teacher {name} has a vocabulary of {} ids, the student {student} one of {}, and neither has a tokenizer.json that \
         would say whether the first ids are the same: {SAME_TOKENS}; give a teacher with the same vocabulary",
        grouped(*.vocab),
        grouped(*.students)
    )]
    Vocabulary { name: String, vocab: u64, student: String, students: u64 },
    #[error(
        "{without} has no tokenizer.json, and {with} has one: {SAME_TOKENS}; copy tokenizer.json there if both models were \
         trained with it, or give another teacher"
    )]
    OneTokenizer { with: String, without: String },
    #[error(
        "--teacher {name} has another tokenizer than the student {student}: {how}; {SAME_TOKENS}; give a teacher of the student's \
         tokenizer"
    )]
    Tokenizer { name: String, student: String, how: String },
    #[error(
        "--teacher {name} has an embedding of {} ids (vocab_size), fewer than the {} of its tokenizer.json: it has no \
         distribution after tokens that it does not know; give a teacher whose embedding has all of them",
        grouped(*.vocab),
        grouped(*.ids)
    )]
    Embedding { name: String, vocab: u64, ids: u64 },
    #[error(
        "token {place} of sample {sample} is {id}, and --teacher {name} has an embedding of {} ids (vocab_size): give a \
         teacher that knows all tokens of the data, or data without these",
        grouped(*.vocab)
    )]
    UnknownToken { place: usize, sample: u64, id: i32, name: String, vocab: u64 },
}

const SAME_TOKENS: &str = "distillation compares distributions over the same tokens";

/// The keys of a teacher's config that count.
const STAGE: &str = "zero_optimization.stage";
const OFFLOAD: &str = "zero_optimization.offload_param.device";

/// The student that a teacher must suit.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct Student<'a> {
    /// Its name in messages.
    pub name: &'a str,
    pub folder: &'a Path,
    pub config: &'a ModelConfig,
    /// Maximum tokens of a row.
    pub max_length: u64,
}

impl Student<'_> {
    /// Refuses an encoder-decoder.
    fn check(&self) -> Result<(), DistillRequestError> {
        if !self.config.family.is_encoder_decoder() {
            return Ok(());
        }
        let family = self.config.family.model_type();
        Err(DistillRequestError::PairedStudent { name: self.name.to_owned(), family })
    }
}

impl DistillRequest {
    /// What the run distils from. `config` is the teacher's as the launcher has read it, else it is read.
    pub(super) fn resolve(
        &self,
        student: &Student<'_>,
        (is_random, seed): (bool, u64),
        config: &mut Option<TeacherConfig>,
        notes: &mut Vec<String>,
    ) -> Result<Distillation, DistillRequestError> {
        student.check()?;
        let open = |name: &String| {
            // The launcher has compared the folders as they were at the start.
            let (config, compared) = match config {
                Some(config) => (&*config, None),
                None => (&*config.insert(TeacherConfig::read(name)?), Some(student)),
            };
            suited(name, config, self.teacher_quantized, is_random, compared)
        };
        let teacher = self.teacher.as_ref().map(open).transpose()?;
        let alpha = self.alpha;
        let (folder, teacher) = match (&self.cache, teacher) {
            (None, Some(teacher)) => {
                let teacher = TeacherSource::Weights(Box::new(teacher));
                return Ok(Distillation { spec: self.own_spec(), alpha, teacher });
            }
            (None, None) => return Err(DistillRequestError::NoSource),
            (Some(folder), teacher) => (folder, teacher),
        };
        let cache = TeacherCache::open(folder).map_err(DistillRequestError::Cache)?;
        self.check_cache(&cache, teacher.as_ref(), seed)?;
        notes.extend(cache.note());
        let temperature = cache.manifest().temperature;
        if self.temperature.is_none() {
            notes.push(format!("--kd-temperature is {temperature}, that of the cache"));
        }
        let teacher = TeacherSource::Cache { cache: Box::new(cache), tail: self.tail };
        Ok(Distillation { spec: self.spec(temperature), alpha, teacher })
    }

    /// The divergence at the temperature that is asked for.
    pub(super) fn own_spec(&self) -> DistillSpec {
        self.spec(self.temperature.unwrap_or(2.0))
    }

    /// The divergence at the temperature of a cache.
    pub(super) fn spec(&self, temperature: f64) -> DistillSpec {
        DistillSpec { beta: self.beta.unwrap_or(0.0), temperature, squared: self.squared.unwrap_or(true) }
    }

    /// Refuses a cache that was made otherwise than is asked for.
    fn check_cache(
        &self,
        cache: &TeacherCache,
        teacher: Option<&TeacherModel>,
        seed: u64,
    ) -> Result<(), DistillRequestError> {
        let manifest = cache.manifest();
        let mut differences = Vec::new();
        if let Some(typed) = self.temperature.filter(|typed| *typed != manifest.temperature) {
            differences
                .push(format!("--kd-temperature is {typed}, that of the cache {}", manifest.temperature));
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
            let sample = weights.sample().map_err(DistillRequestError::Weights)?;
            let (name, total) = (teacher.name.clone(), teacher.table.total());
            let now = BaseEntry { name, total, sample, hash: String::new() };
            differences.extend(manifest.teacher_differences(&now, Some(&teacher.function())));
        }
        refuse(cache, differences)
    }
}

/// A teacher that suits the student, or any model for a cache.
pub fn open_teacher(
    name: &str,
    is_quantized: bool,
    is_random: bool,
    student: Option<&Student<'_>>,
) -> Result<TeacherModel, DistillRequestError> {
    suited(name, &TeacherConfig::read(name)?, is_quantized, is_random, student)
}

fn suited(
    name: &str,
    TeacherConfig { folder, map, origin }: &TeacherConfig,
    is_quantized: bool,
    is_random: bool,
    student: Option<&Student<'_>>,
) -> Result<TeacherModel, DistillRequestError> {
    let config = ModelConfig::from_map(map, origin).map_err(DistillRequestError::Teacher)?;
    if config.family.is_encoder_decoder() {
        let family = config.family.model_type();
        return Err(DistillRequestError::PairedTeacher { name: name.to_owned(), family });
    }
    if let Some(student) = student {
        student.check()?;
        check_tokenizers(name, folder, &config, student)?;
        check_embedding(name, folder, &config)?;
        let max_length = student.max_length;
        if let Some(positions) = config.max_positions.filter(|positions| *positions < max_length) {
            return Err(DistillRequestError::Positions { name: name.to_owned(), positions, max_length });
        }
    }
    Ok(TeacherModel::new(name.to_owned(), folder.clone(), config, is_quantized, is_random))
}

/// Refuses a teacher whose ids mean something else.
fn check_tokenizers(
    name: &str,
    folder: &Path,
    config: &ModelConfig,
    student: &Student<'_>,
) -> Result<(), DistillRequestError> {
    let Some(difference) = tokenizer_difference(student.folder, folder)? else { return Ok(()) };
    let (name, own) = (name.to_owned(), student.name.to_owned());
    Err(match difference {
        TokenizerDifference::BothMissing if config.vocab == student.config.vocab => return Ok(()),
        TokenizerDifference::BothMissing => {
            let (vocab, students) = (config.vocab, student.config.vocab);
            DistillRequestError::Vocabulary { name, vocab, student: own, students }
        }
        TokenizerDifference::OnlyOne(true) => DistillRequestError::OneTokenizer { with: own, without: name },
        TokenizerDifference::OnlyOne(false) => DistillRequestError::OneTokenizer { with: name, without: own },
        TokenizerDifference::Content(how) => DistillRequestError::Tokenizer { name, student: own, how },
    })
}

/// Refuses a teacher whose tokenizer has ids that it has no embedding of.
fn check_embedding(name: &str, folder: &Path, config: &ModelConfig) -> Result<(), DistillRequestError> {
    let (ids, vocab) = (tokenizer_ids(folder)?.unwrap_or(0), config.vocab);
    if ids > vocab {
        return Err(DistillRequestError::Embedding { name: name.to_owned(), vocab, ids });
    }
    Ok(())
}

/// Refuses a cache of other data than the samples of a run, all of them, and tokens that a teacher has no embedding of.
pub(super) fn check_data(
    distillation: Option<&Distillation>,
    student: &ModelConfig,
    samples: &Samples,
) -> Result<(), DistillRequestError> {
    let teacher = distillation.and_then(Distillation::model);
    if let Some(teacher) = teacher.filter(|teacher| teacher.config.vocab < student.vocab) {
        check_tokens(teacher, samples)?;
    }
    let Some(cache) = distillation.and_then(Distillation::cache) else { return Ok(()) };
    let difference = cache.manifest().data_difference(&CachedData::of(samples)?);
    refuse(cache, difference.into_iter().collect())
}

/// Refuses ready tokens beyond the embedding of a teacher, which the student's may have.
pub fn check_tokens(teacher: &TeacherModel, samples: &Samples) -> Result<(), DistillRequestError> {
    let mut ids = Vec::new();
    for sample in 0..samples.totals().samples {
        ids.clear();
        samples.append_ids(sample, &mut ids)?;
        let vocab = teacher.config.vocab;
        let beyond = ids.iter().position(|id| u64::try_from(*id).is_ok_and(|id| id >= vocab));
        if let Some(place) = beyond {
            let name = teacher.name.clone();
            return Err(DistillRequestError::UnknownToken { place, sample, id: ids[place], name, vocab });
        }
    }
    Ok(())
}

fn refuse(cache: &TeacherCache, differences: Vec<String>) -> Result<(), DistillRequestError> {
    if differences.is_empty() {
        return Ok(());
    }
    let remedy = "give the --data, --max-length, --columns, --system, --max-train-samples, --teacher and --kd-temperature \
                  that it was made with, or make another cache with `zeroth distill cache`";
    let folder = cache.folder().to_owned();
    Err(DistillRequestError::Cache(TeacherCacheError::Other { folder, differences, remedy }))
}

/// Where the teacher's weights are by `--teacher-deepspeed`, of which only the stage and `offload_param` count.
pub fn teacher_placement(
    given: &str,
    notes: &mut Vec<String>,
) -> Result<TeacherPlacement, DistillRequestError> {
    let loaded = CheckedConfig::load(given).map_err(DistillRequestError::Placement)?;
    let CheckReport { values, .. } = loaded.report;
    let value = |path: &str| values.get(path).map(|found| &found.value);
    let stage = value(STAGE).and_then(Value::as_u64).unwrap_or(0);
    let device = value(OFFLOAD).and_then(Value::as_str).unwrap_or("none");
    if device == "nvme" {
        return Err(DistillRequestError::Nvme { given: given.to_owned() });
    }
    // The other keys of a preset are not the user's.
    if Preset::find(given).is_err() {
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
