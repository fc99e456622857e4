//! What is decided once, before ranks meet, and told to all of them: they must not find different answers by themselves.

use std::path::PathBuf;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use zeroth::comm::launch::handed_over;
use zeroth::config::read::Source;
use zeroth::device::Rates;
use zeroth::model::{locate, read_config};
use zeroth::train::Budget;

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
    pub(super) inputs: Option<Inputs>,
    /// What every rank must come to.
    pub(super) agreement: Map<String, Value>,
}

/// What a command names, as it was when it was read: files may change while a run goes on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Inputs {
    /// The config's name and text.
    config: (String, String),
    /// The model's folder.
    pub(super) folder: PathBuf,
    /// Its config.json, and how messages call it.
    pub(super) model: Map<String, Value>,
    pub(super) origin: String,
}

impl Inputs {
    pub(super) fn read(arguments: &TrainArgs) -> anyhow::Result<Self> {
        let config = config_file::read(&arguments.deepspeed)?;
        let folder = locate(&arguments.model)?;
        let (model, origin) = read_config(&folder)?;
        Ok(Self { config: (config.name().to_owned(), config.text().to_owned()), folder, model, origin })
    }

    pub(super) fn config(&self) -> Source {
        Source::from_text(&*self.config.0, &*self.config.1)
    }
}

impl Told {
    /// What this rank was told; none where nobody started it as a rank.
    pub(super) fn from_environment() -> anyhow::Result<Option<Self>> {
        let bytes = handed_over(TOLD)
            .with_context(|| format!("{TOLD} is not ours: a launcher sets it for its ranks, unset it"))?;
        bytes.as_deref().map(Self::read).transpose()
    }

    pub(super) fn read(text: &[u8]) -> anyhow::Result<Self> {
        serde_json::from_slice(text)
            .with_context(|| format!("{TOLD} is not ours: a launcher sets it for its ranks, unset it"))
    }

    pub(super) fn to_text(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string(self)?)
    }
}
