//! What is decided once, before ranks meet, and told to all of them: they must not find different answers by themselves.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use zeroth::comm::launch::inherited;
use zeroth::config::read::Source;
use zeroth::machine::Rates;
use zeroth::model::{locate, read_config};
use zeroth::train::{Budget, ModelFiles};

use super::super::config_file;
use crate::cli::TrainArgs;

/// The variable that names it.
pub(super) const TOLD: &str = "ZEROTH_TOLD";

/// What a rank is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Told {
    /// Memory that a rank may take: what is free changes as ranks start.
    pub(super) budget: Budget,
    /// What the machine can do for an update of state in host memory; none where nothing is to be chosen by it.
    pub(super) rates: Option<Rates>,
    /// The token cache of the data.
    pub(super) samples: PathBuf,
    /// That of the evaluation's data.
    pub(super) evaluation: Option<PathBuf>,
    /// The checkpoint to go on from; it has been verified.
    pub(super) resume: Option<PathBuf>,
    /// What the launcher has read, for the ranks that it starts, now or later. Ranks of another launcher have files of their
    /// own, which may differ.
    pub(super) inputs: Option<HandedOver>,
    /// What every rank must come to.
    pub(super) agreement: Map<String, Value>,
}

/// What a command names, as it was when it was read: files may change while a run goes on.
#[derive(Debug, Clone)]
pub(super) struct Inputs {
    config: Source,
    /// The model's folder.
    pub(super) folder: PathBuf,
    /// What its config.json says, and how messages call it.
    pub(super) model: Map<String, Value>,
    pub(super) origin: String,
    /// That file, and those of the tokenizer.
    pub(super) files: ModelFiles,
}

/// The same for another process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct HandedOver {
    /// The config's name and text.
    config: (String, String),
    folder: PathBuf,
    origin: String,
    /// The descriptor of the model's files in memory, and which they are.
    memory: u32,
    files: Vec<(String, u64)>,
}

impl Inputs {
    /// Reads it; of the model's files all that a checkpoint carries, where this process `writes` any.
    pub(super) fn read(arguments: &TrainArgs, writes: bool) -> anyhow::Result<Self> {
        let config = config_file::read(&arguments.deepspeed)?;
        let folder = locate(&arguments.model)?;
        let (_, origin) = read_config(&folder)?;
        let files = if writes { ModelFiles::read(&folder)? } else { ModelFiles::read_config(&folder)? };
        let model = files.config().with_context(|| origin.clone())?;
        Ok(Self { config, folder, model, origin, files })
    }

    /// What the launcher has read.
    pub(super) fn handed_over(handed: &HandedOver) -> anyhow::Result<Self> {
        let HandedOver { config: (name, text), folder, origin, memory, files } = handed.clone();
        let files =
            inherited(memory).and_then(|memory| ModelFiles::of_memory(memory, files)).context(NOT_OURS)?;
        let model = files.config().with_context(|| origin.clone())?;
        Ok(Self { config: Source::from_text(name, text), folder, model, origin, files })
    }

    /// For ranks that inherit `memory`, that of the model's files.
    pub(super) fn hand_over(&self, memory: &File) -> HandedOver {
        HandedOver {
            config: (self.config.name().to_owned(), self.config.text().to_owned()),
            folder: self.folder.clone(),
            origin: self.origin.clone(),
            memory: memory.as_raw_fd().unsigned_abs(),
            files: self.files.list().to_vec(),
        }
    }

    pub(super) fn config(&self) -> Source {
        self.config.clone()
    }
}

impl Told {
    /// What this rank was told; none where nobody started it as a rank.
    pub(super) fn from_environment() -> anyhow::Result<Option<Self>> {
        let Ok(number) = std::env::var(TOLD) else { return Ok(None) };
        let mut text = Vec::new();
        inherited(number.parse().context(NOT_OURS)?)
            .and_then(|mut file| file.read_to_end(&mut text))
            .context(NOT_OURS)?;
        Self::read(&text).map(Some)
    }

    pub(super) fn read(text: &[u8]) -> anyhow::Result<Self> {
        serde_json::from_slice(text).context(NOT_OURS)
    }

    pub(super) fn to_text(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string(self)?)
    }
}

const NOT_OURS: &str = "ZEROTH_TOLD is not ours: a launcher sets it for its ranks, unset it";
