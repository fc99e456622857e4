//! Data that cannot be read as asked for.

use std::io;
use std::path::PathBuf;

use zeroth_data::{ColumnsError, DataError, EncoderError};
use zeroth_train::SplitError;

/// Data that cannot be read as asked for.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum DataRequestError {
    /// A mapping of columns is wrong.
    #[error(transparent)]
    Columns(#[from] ColumnsError),
    /// The tokenizer cannot be used.
    #[error(transparent)]
    Encoder(#[from] EncoderError),
    /// Rows cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Nothing can be held out.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// The file of a system message cannot be read.
    #[error("cannot read --system {given}")]
    SystemFile { given: String, source: io::Error },
    /// A system message without text.
    #[error("--system is empty: leave the flag out for no system message")]
    EmptySystem,
    /// A system message for a model without chat template.
    #[error(
        "--system is for chat templates, and {family} is an encoder-decoder model: --source-prefix puts a text before every \
         source"
    )]
    SystemOfPairs { family: &'static str },
    /// A flag of encoder-decoder models for another one.
    #[error(
        "{flag} is for encoder-decoder models such as t5, and {family} is decoder-only: it reads source and target as one \
         sequence; leave it out ({instead})"
    )]
    NotPairs {
        flag: &'static str,
        family: &'static str,
        /// What to do instead.
        instead: &'static str,
    },
    /// The output's path cannot be resolved.
    #[error(transparent)]
    Output(io::Error),
    /// The output lies among the data.
    #[error(
        "--output {} is inside {flag} {}: a later run would read its files as data; choose a folder outside",
        output.display(),
        folder.display()
    )]
    OutputInside {
        output: PathBuf,
        /// The flag of the data.
        flag: &'static str,
        /// The folder of data.
        folder: PathBuf,
    },
    /// Chat templates cannot be rendered by this program.
    #[error("cannot find this executable to render chat templates")]
    NoExecutable(#[source] io::Error),
}
