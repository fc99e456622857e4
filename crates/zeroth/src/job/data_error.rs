//! Data that cannot be read as asked for.

use std::io;
use std::path::PathBuf;

use zeroth_data::{ColumnsError, DataError, EncoderError};
use zeroth_train::SplitError;

/// Data that cannot be read as asked for.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum DataRequestError {
    #[error(transparent)]
    Columns(#[from] ColumnsError),
    #[error(transparent)]
    Encoder(#[from] EncoderError),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Split(#[from] SplitError),
    #[error("cannot read --system {given}")]
    SystemFile { given: String, source: io::Error },
    #[error("--system is empty: leave the flag out for no system message")]
    EmptySystem,
    #[error(
        "--system is for chat templates, and {family} is an encoder-decoder model: --source-prefix puts a text before every \
         source"
    )]
    SystemOfPairs { family: &'static str },
    #[error(
        "{flag} is for encoder-decoder models such as t5, and {family} is decoder-only: it reads source and target as one \
         sequence; leave it out ({instead})"
    )]
    NotPairs { flag: &'static str, family: &'static str, instead: &'static str },
    #[error(transparent)]
    Output(io::Error),
    #[error(
        "--output {} is inside {flag} {}: a later run would read its files as data; choose a folder outside",
        output.display(),
        folder.display()
    )]
    OutputInside { output: PathBuf, flag: &'static str, folder: PathBuf },
    #[error("cannot find this executable to render chat templates")]
    NoExecutable(#[source] io::Error),
}
