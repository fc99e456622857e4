//! Errors of a model folder.

use std::path::{Path, PathBuf};

use zeroth_base::grouped;

/// A model that cannot be described.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message names its fields")]
pub enum ModelError {
    #[error("there is no model folder {}", path.display())]
    NoSuchFolder { path: PathBuf },
    #[error("{} is a file: give the model folder, or the config.json in it", path.display())]
    NotAFolder { path: PathBuf },
    #[error("{} has no config.json: it is not a Hugging Face model folder", folder.display())]
    NoConfig { folder: PathBuf },
    #[error("{} is a run's folder and not a model's: {}", folder.display(), model.advice(run))]
    IsARun {
        /// The folder as given: the run's, or the one of its checkpoints.
        folder: PathBuf,
        run: PathBuf,
        model: ModelOfRun,
    },
    #[error(
        "{0} is a checkpoint and not a model's folder: `zeroth checkpoint export {0} --output MODEL` writes its model to the \
         folder MODEL, which then can be given", folder.display()
    )]
    IsACheckpoint { folder: PathBuf },
    #[error(
        "{} is the folder of a PEFT adapter and not a model's: give {} as --model, and this folder as --adapter; `zeroth \
         checkpoint export {} --merge --output MODEL` merges both to the folder MODEL",
        folder.display(), base.as_deref().map_or("its base".to_owned(), |base| format!("its base {base}")), folder.display()
    )]
    IsAnAdapter { folder: PathBuf, base: Option<String> },
    #[error(
        "there is no folder `{name}`, and no model of that name in the Hugging Face cache {}; {}{}",
        cache.display(), needs.advice(name), did_you_mean(near.as_deref())
    )]
    NotInCache {
        name: String,
        cache: PathBuf,
        /// A model of nearly that name that is there.
        near: Option<String>,
        needs: Needs,
    },
    #[error("the Hugging Face cache knows `{name}` but {problem} ({}); fetch it again with `hf download {name}`", place.display())]
    BrokenCache { name: String, place: PathBuf, problem: &'static str },
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{origin}: line {line}, column {column}: {problem}")]
    Json {
        origin: String,
        /// Where the parser stopped, counted from 1.
        line: usize,
        column: usize,
        problem: String,
    },
    #[error("{origin}: a model's config is a JSON object, this is {found}")]
    NotAnObject { origin: String, found: &'static str },
    #[error("{origin}: {found} is not a model family known here ({known}){}", did_you_mean(*near))]
    UnknownFamily { origin: String, found: String, known: String, near: Option<&'static str> },
    #[error("{origin}: models with `model_type` `{found}` are not yet built; those built are {known}")]
    FamilyNotYet { origin: String, found: &'static str, known: String },
    #[error("{origin}: `architectures` names {found}; of the family {family} only {known} is supported")]
    UnknownArchitecture { origin: String, family: &'static str, found: String, known: &'static str },
    #[error("{origin}: {source}")]
    Field { origin: String, source: FieldError },
}

/// A field of `config.json` that is missing or makes no sense.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "each message names its fields")]
pub enum FieldError {
    #[error("`{field}` is missing{}", did_you_mean(near.as_deref()))]
    Missing {
        field: String,
        /// A key of nearly that name that is there.
        near: Option<String>,
    },
    #[error("`{field}` is {found}: it must be {expected}")]
    WrongType { field: String, found: String, expected: &'static str },
    #[error("`{field}` is {value}: it must be from {least} to {most}")]
    OutOfRange { field: String, value: String, least: u64, most: u64 },
    #[error("`{field}` is `{found}`, which is not one of {known}{}", did_you_mean(*near))]
    UnknownName { field: String, found: String, known: String, near: Option<&'static str> },
    #[error(
        "`num_attention_heads` ({heads}) is not a multiple of `num_key_value_heads` ({kv_heads}{}): every key-value \
         head serves the same number of heads",
        if *defaulted { ", the default of this family" } else { "" }
    )]
    KvHeads {
        heads: u64,
        kv_heads: u64,
        /// Whether the file leaves the key-value heads to the family's default.
        defaulted: bool,
    },
    #[error(
        "`hidden_size` ({hidden}) is not a multiple of `num_attention_heads` ({heads}), and `head_dim` does not say \
         how wide a head is"
    )]
    HeadDim { hidden: u64, heads: u64 },
    #[error("`{field}` is {found}: {why}")]
    Unsupported { field: String, found: String, why: String },
}

/// The part of a model that is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// All of its folder.
    Folder,
    /// Its `config.json`: shapes and no weights.
    Config,
}

impl Needs {
    /// Advice on getting it.
    fn advice(self, name: &str) -> String {
        match self {
            Self::Folder => format!("fetch it with `hf download {name}`, or give a folder"),
            Self::Config => format!(
                "its config.json is enough, no weights are needed: fetch it with `hf download {name} config.json`, or give a \
                 folder that holds one"
            ),
        }
    }
}

/// The end of a sentence about a name that was nearly right; empty without one.
pub(crate) fn did_you_mean(near: Option<&str>) -> String {
    near.map(|name| format!("; did you mean `{name}`?")).unwrap_or_default()
}

/// The location of the model of a run, or advice on exporting it.
/// What a run has trained, and whether it has written it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelOfRun {
    /// A model, in this folder.
    Written(PathBuf),
    /// An adapter.
    Adapter {
        /// Its folder; `None` where checkpoints have it alone.
        folder: Option<PathBuf>,
        /// The base that it names.
        base: Option<String>,
    },
    /// A model that only checkpoints have.
    Unsupported,
}

impl ModelOfRun {
    fn advice(&self, run: &Path) -> String {
        let run = run.display();
        match self {
            Self::Written(model) => format!("the model it has trained is {}", model.display()),
            Self::Adapter { folder, base } => {
                let merge = format!(
                    "`zeroth checkpoint export {run} --merge --output MODEL` merges both to the folder MODEL, which then can be \
                     given"
                );
                match (folder, base) {
                    (Some(folder), Some(base)) => format!(
                        "it has trained an adapter: give --model {base} --adapter {}, or {merge}",
                        folder.display()
                    ),
                    (Some(folder), None) => format!(
                        "it has trained an adapter: give its base as --model, and --adapter {}, or {merge}",
                        folder.display()
                    ),
                    (None, _) => format!("it trains an adapter, and has not written it yet: {merge}"),
                }
            }
            Self::Unsupported => format!(
                "it has written no model yet; `zeroth checkpoint export {run} --output MODEL` writes that of its newest \
                 checkpoint to the folder MODEL"
            ),
        }
    }
}

/// The first problems and the number of others, so that a message stays short.
pub(crate) fn listed<T: std::fmt::Display>(problems: &[T], shown: usize) -> String {
    let mut text = String::new();
    for problem in problems.iter().take(shown) {
        text.push_str(&format!("\n  {problem}"));
    }
    if problems.len() > shown {
        text.push_str(&format!("\n  and {} more", grouped((problems.len() - shown) as u64)));
    }
    text
}
