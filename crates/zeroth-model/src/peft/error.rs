//! Errors of an adapter folder.

use std::io;
use std::path::{Path, PathBuf};

use super::{ADAPTER_CONFIG, ADAPTER_PICKLE, ADAPTER_WEIGHTS};
use crate::error::{FieldError, did_you_mean, listed};
use crate::lora::LoraError;
use crate::safetensors::WeightsError;

/// An adapter that cannot be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message names its fields")]
pub enum AdapterError {
    #[error("{} has no {ADAPTER_CONFIG}: it is not a PEFT adapter folder{}", folder.display(), inside(model.as_deref()))]
    NoConfig {
        folder: PathBuf,
        /// The adapter of a run, where the folder is the run's.
        model: Option<PathBuf>,
    },
    #[error("there is no adapter folder {}", folder.display())]
    NoSuchFolder { folder: PathBuf },
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}: {problem}", path.display())]
    Json { path: PathBuf, problem: String },
    #[error("{}: {source}", path.display())]
    Field { path: PathBuf, source: FieldError },
    #[error("the adapter in {} does not fit the base model: {source}", folder.display())]
    Targets { folder: PathBuf, source: LoraError },
    #[error("{} has no {ADAPTER_WEIGHTS}: copy the whole folder that PEFT or zeroth wrote", folder.display())]
    NoWeights { folder: PathBuf },
    #[error(
        "{} has its matrices as {ADAPTER_PICKLE}, a Python pickle, which is not read: convert it once with PEFT, \
         `PeftModel.from_pretrained(BASE, DIR)` and then `save_pretrained(NEW_DIR)`, which writes {ADAPTER_WEIGHTS}",
        folder.display()
    )]
    Pickle { folder: PathBuf },
    #[error(
        "the adapter in {} has matrices for each expert (`{name}`), as PEFT wrote them before transformers 5, which are not yet \
         read: convert it once with PEFT 0.21, `PeftModel.from_pretrained(BASE, DIR)` and then `save_pretrained(NEW_DIR)`",
        folder.display()
    )]
    SingleExperts { folder: PathBuf, name: String },
    #[error("the adapter in {} does not fit the base model:{}", folder.display(), listed(problems, 12))]
    DoNotFit { folder: PathBuf, problems: Vec<AdapterProblem> },
    #[error(transparent)]
    Weights(#[from] WeightsError),
}

/// A problem with the matrices of an adapter.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message names its fields")]
pub enum AdapterProblem {
    #[error("`{name}` is missing{}", if *has_other { ": the other matrix of its adapter is there" } else { "" })]
    Missing {
        name: String,
        /// Whether the other matrix of the same module is there.
        has_other: bool,
    },
    #[error("`{name}` is in {ADAPTER_WEIGHTS}, and `target_modules` names no module of the base for it{}", did_you_mean(near.as_deref()))]
    Extra { name: String, near: Option<String> },
    #[error(
        "`{name}` has the shape {found:?}: the base model and `r` of {ADAPTER_CONFIG} ask for {expected:?}"
    )]
    Shape { name: String, found: Vec<u64>, expected: Vec<u64> },
    #[error("{problem}")]
    File { problem: String },
}

impl AdapterError {
    /// The error of a folder without `adapter_config.json`.
    pub(super) fn no_config(folder: &Path) -> Self {
        let model = folder.join("model");
        let folder = folder.to_owned();
        if !folder.exists() {
            return Self::NoSuchFolder { folder };
        }
        Self::NoConfig { folder, model: model.join(ADAPTER_CONFIG).is_file().then_some(model) }
    }
}

fn inside(model: Option<&Path>) -> String {
    model.map(|model| format!("; {} is one", model.display())).unwrap_or_default()
}
