//! Decisions that the launcher makes once and passes to all ranks, which might otherwise decide differently.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use zeroth_comm::launch::inherited;
use zeroth_config::checked::{self, ConfigError};
use zeroth_config::read::ConfigSource;
use zeroth_machine::Rates;
use zeroth_model::{ModelError, locate, read_config};
use zeroth_plan::Budget;
use zeroth_train::checkpoint::Checkpoint;
use zeroth_train::{ModelFiles, ModelFilesError};

use super::request::JobRequest;
use super::resume::ResumeRequestError;
use super::teacher::TeacherConfig;

/// The environment variable with the handoff's file descriptor.
pub const HANDOFF_VARIABLE: &str = "ZEROTH_HANDOFF_FD";

/// Inputs that cannot be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum InputsError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Files(#[from] ModelFilesError),
    #[error("{origin}")]
    ModelConfig { origin: String, source: io::Error },
    #[error("{HANDOFF_VARIABLE} is invalid: it is set by zeroth's launcher for its ranks; unset it")]
    Handoff(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Passed from the launcher to every rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LauncherHandoff {
    /// Memory budget of a rank. Fixed once, as free memory changes while ranks start.
    pub budget: Budget,
    /// Measured rates for placing the optimizer update of offloaded state; `None` if nothing depends on them.
    pub rates: Option<Rates>,
    /// CPU threads of a rank that memory is planned for: the scratch of kernels grows with them, and every arena must have
    /// one layout.
    pub threads: usize,
    /// The token caches that all ranks of a host read. `None` for the first rank of another host, which finds or makes its
    /// own; the agreement compares what they hold.
    pub caches: Option<TokenCaches>,
    /// The checkpoint to resume from, already verified.
    pub resume: Option<ResumePoint>,
    /// Inputs as read by the launcher, for the ranks it starts. Under an external launcher, ranks read their own files,
    /// which may differ.
    pub inputs: Option<InheritedInputs>,
    /// Settings that every rank must agree on.
    pub agreement: Map<String, Value>,
}

/// The token caches of a run on one host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenCaches {
    /// Of the training data.
    pub samples: PathBuf,
    /// Of the evaluation data.
    pub evaluation: Option<PathBuf>,
}

/// A checkpoint that all ranks resume from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct ResumePoint {
    pub folder: PathBuf,
    pub step: u64,
    /// The SHA-256 of its manifest: another host may have another checkpoint under that path.
    pub identity: String,
}

impl ResumePoint {
    /// That of a checkpoint.
    pub fn of(checkpoint: &Checkpoint) -> Self {
        Self {
            folder: checkpoint.folder().to_owned(),
            step: checkpoint.manifest().step,
            identity: checkpoint.identity().to_owned(),
        }
    }

    /// Opens the same checkpoint.
    pub(super) fn open(&self) -> Result<Checkpoint, ResumeRequestError> {
        let checkpoint = Checkpoint::open(&self.folder)?;
        if checkpoint.identity() != self.identity {
            return Err(ResumeRequestError::AnotherCheckpoint {
                folder: self.folder.clone(),
                host: zeroth_base::host_name(),
            });
        }
        Ok(checkpoint)
    }
}

/// Input files as read at start, as they may change during a run.
#[derive(Debug, Clone)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct Inputs {
    config: ConfigSource,
    pub folder: PathBuf,
    pub model: Map<String, Value>,
    /// That file's name, for messages.
    pub origin: String,
    /// Config and tokenizer files.
    pub files: ModelFiles,
    /// The teacher's config.json, if there is a teacher.
    pub teacher: Option<TeacherConfig>,
}

/// The same inputs, serialised for another process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InheritedInputs {
    /// Name and text of the DeepSpeed config.
    config: (String, String),
    folder: PathBuf,
    origin: String,
    /// File descriptor of the memfd with the model's files, and their names and lengths.
    memory: u32,
    files: Vec<(String, u64)>,
    teacher: Option<TeacherConfig>,
}

impl Inputs {
    /// Reads all inputs; config.json only, unless this process `writes` checkpoints.
    pub fn read(request: &JobRequest, writes: bool) -> Result<Self, InputsError> {
        let config = checked::read_config(&request.deepspeed)?;
        let folder = locate(&request.model)?;
        let (_, origin) = read_config(&folder)?;
        let files = if writes { ModelFiles::read(&folder)? } else { ModelFiles::read_config(&folder)? };
        let model = model_config(&files, &origin)?;
        Ok(Self { config, folder, model, origin, files, teacher: None })
    }

    /// Takes over the inputs that the launcher has read.
    pub fn inherit(inherited_inputs: &InheritedInputs) -> Result<Self, InputsError> {
        let InheritedInputs { config: (name, text), folder, origin, memory, files, teacher } =
            inherited_inputs.clone();
        let files =
            inherited(memory).and_then(|memory| ModelFiles::of_memory(memory, files)).map_err(invalid)?;
        let model = model_config(&files, &origin)?;
        Ok(Self { config: ConfigSource::from_text(name, text), folder, model, origin, files, teacher })
    }

    /// Serialises the inputs for ranks that inherit the memfd `memory`.
    pub fn for_ranks(&self, memory: &File) -> InheritedInputs {
        InheritedInputs {
            config: (self.config.name().to_owned(), self.config.text().to_owned()),
            folder: self.folder.clone(),
            origin: self.origin.clone(),
            memory: memory.as_raw_fd().unsigned_abs(),
            files: self.files.list().to_vec(),
            teacher: self.teacher.clone(),
        }
    }

    /// The DeepSpeed config.
    pub fn config(&self) -> ConfigSource {
        self.config.clone()
    }
}

impl LauncherHandoff {
    /// Reads the handoff; `None` if no launcher started this process.
    pub fn from_environment() -> Result<Option<Self>, InputsError> {
        let Ok(number) = std::env::var(HANDOFF_VARIABLE) else { return Ok(None) };
        let mut text = Vec::new();
        inherited(number.parse().map_err(invalid)?)
            .and_then(|mut file| file.read_to_end(&mut text))
            .map_err(invalid)?;
        Self::read(&text).map(Some)
    }

    /// The same for a rank of another host: files of this one may not be there.
    #[must_use]
    pub fn for_other_host(&self) -> Self {
        Self { caches: None, inputs: None, ..self.clone() }
    }

    /// Reads the text of a handoff.
    pub fn read(text: &[u8]) -> Result<Self, InputsError> {
        serde_json::from_slice(text).map_err(invalid)
    }

    /// The text of the handoff.
    pub fn to_text(&self) -> serde_json::Result<String> {
        serde_json::to_string(self)
    }
}

fn model_config(files: &ModelFiles, origin: &str) -> Result<Map<String, Value>, InputsError> {
    files.config().map_err(|source| InputsError::ModelConfig { origin: origin.to_owned(), source })
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> InputsError {
    InputsError::Handoff(error.into())
}
