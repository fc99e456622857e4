//! What is decided once, before ranks meet, and told to all of them: they must not find different answers by themselves.

use std::path::PathBuf;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use zeroth::device::Rates;
use zeroth::train::Budget;

/// The variable that carries it.
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
}

impl Told {
    /// What this rank was told; none where nobody started it as a rank.
    pub(super) fn from_environment() -> anyhow::Result<Option<Self>> {
        match std::env::var(TOLD) {
            Err(_) => Ok(None),
            Ok(text) => Self::read(text.as_bytes()).map(Some),
        }
    }

    pub(super) fn read(text: &[u8]) -> anyhow::Result<Self> {
        serde_json::from_slice(text)
            .with_context(|| format!("{TOLD} is not ours: a launcher sets it for its ranks, unset it"))
    }

    pub(super) fn to_text(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string(self)?)
    }
}
