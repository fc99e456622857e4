//! Decisions that the launcher makes once and passes to all ranks, which might otherwise decide differently.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use zeroth::comm::launch::inherited;
use zeroth::config::checked;
use zeroth::config::read::Source;
use zeroth::machine::Rates;
use zeroth::model::{locate, read_config};
use zeroth::train::{Budget, ModelFiles};

use crate::cli::TrainArgs;

/// The environment variable with the handoff's file descriptor.
pub(super) const HANDOFF_VARIABLE: &str = "ZEROTH_TOLD";

/// Passed from the launcher to every rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LauncherHandoff {
    /// Memory budget of a rank. Fixed once, as free memory changes while ranks start.
    pub(super) budget: Budget,
    /// Measured rates for placing the optimizer update of offloaded state; `None` if nothing depends on them.
    pub(super) rates: Option<Rates>,
    /// CPU threads of a rank that memory is planned for: the scratch of kernels grows with them, and every arena must have
    /// one layout.
    pub(super) threads: usize,
    /// Token cache of the training data.
    pub(super) samples: PathBuf,
    /// Token cache of the evaluation data.
    pub(super) evaluation: Option<PathBuf>,
    /// The checkpoint to resume from, already verified.
    pub(super) resume: Option<PathBuf>,
    /// Inputs as read by the launcher, for the ranks it starts. Under an external launcher, ranks read their own files,
    /// which may differ.
    pub(super) inputs: Option<InheritedInputs>,
    /// Settings that every rank must agree on.
    pub(super) agreement: Map<String, Value>,
}

/// Input files as read at start, as they may change during a run.
#[derive(Debug, Clone)]
pub(super) struct Inputs {
    config: Source,
    /// The model folder.
    pub(super) folder: PathBuf,
    /// Its config.json, and that file's name for messages.
    pub(super) model: Map<String, Value>,
    pub(super) origin: String,
    /// Config and tokenizer files.
    pub(super) files: ModelFiles,
    /// The teacher's config.json, if there is a teacher.
    pub(super) teacher: Option<TeacherConfig>,
}

/// The config.json of a teacher.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) struct TeacherConfig {
    /// The teacher's folder.
    pub(in super::super) folder: PathBuf,
    pub(in super::super) map: Map<String, Value>,
    /// That file's name for messages.
    pub(in super::super) origin: String,
}

impl TeacherConfig {
    /// Reads it.
    pub(in super::super) fn read(name: &str) -> anyhow::Result<Self> {
        let folder = locate(name).context("--teacher")?;
        let (map, origin) = read_config(&folder).context("--teacher")?;
        Ok(Self { folder, map, origin })
    }
}

/// The same inputs, serialised for another process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct InheritedInputs {
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
    pub(super) fn read(arguments: &TrainArgs, writes: bool) -> anyhow::Result<Self> {
        let config = checked::read_config(&arguments.deepspeed)?;
        let folder = locate(&arguments.model)?;
        let (_, origin) = read_config(&folder)?;
        let files = if writes { ModelFiles::read(&folder)? } else { ModelFiles::read_config(&folder)? };
        let model = files.config().with_context(|| origin.clone())?;
        Ok(Self { config, folder, model, origin, files, teacher: None })
    }

    /// Takes over the inputs that the launcher has read.
    pub(super) fn inherit(inherited_inputs: &InheritedInputs) -> anyhow::Result<Self> {
        let InheritedInputs { config: (name, text), folder, origin, memory, files, teacher } =
            inherited_inputs.clone();
        let files = inherited(memory)
            .and_then(|memory| ModelFiles::of_memory(memory, files))
            .context(INVALID_HANDOFF)?;
        let model = files.config().with_context(|| origin.clone())?;
        Ok(Self { config: Source::from_text(name, text), folder, model, origin, files, teacher })
    }

    /// Serialises the inputs for ranks that inherit the memfd `memory`.
    pub(super) fn for_ranks(&self, memory: &File) -> InheritedInputs {
        InheritedInputs {
            config: (self.config.name().to_owned(), self.config.text().to_owned()),
            folder: self.folder.clone(),
            origin: self.origin.clone(),
            memory: memory.as_raw_fd().unsigned_abs(),
            files: self.files.list().to_vec(),
            teacher: self.teacher.clone(),
        }
    }

    pub(super) fn config(&self) -> Source {
        self.config.clone()
    }
}

impl LauncherHandoff {
    /// Reads the handoff; `None` if no launcher started this process.
    pub(super) fn from_environment() -> anyhow::Result<Option<Self>> {
        let Ok(number) = std::env::var(HANDOFF_VARIABLE) else { return Ok(None) };
        let mut text = Vec::new();
        inherited(number.parse().context(INVALID_HANDOFF)?)
            .and_then(|mut file| file.read_to_end(&mut text))
            .context(INVALID_HANDOFF)?;
        Self::read(&text).map(Some)
    }

    pub(super) fn read(text: &[u8]) -> anyhow::Result<Self> {
        serde_json::from_slice(text).context(INVALID_HANDOFF)
    }

    pub(super) fn to_text(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string(self)?)
    }
}

const INVALID_HANDOFF: &str =
    "ZEROTH_TOLD is invalid: it is set by zeroth's launcher for its ranks; unset it";
