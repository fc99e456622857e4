//! What happens while a job is resolved, for those who watch.

use zeroth_config::file_values::FileValues;
use zeroth_config::resolve::Resolved;
use zeroth_data::{Prepared, TokenizeProgress};

/// A step of resolving a job.
#[derive(Debug)]
pub enum ResolveEvent<'a> {
    /// The config is resolved with its batch sizes, before the data is read.
    Config {
        /// The values of the file.
        file: &'a FileValues,
        /// All values.
        resolved: &'a Resolved,
        /// Ranks of the run.
        ranks: u64,
    },
    /// A remark on the data.
    Note(&'a str),
    /// Rows are being tokenised.
    Tokenising(TokenizeProgress),
    /// Rows are tokenised, or were found in the cache.
    Tokenised(&'a Prepared),
}

/// Receives the events, tokenisation's from several threads.
pub type OnEvent<'a> = &'a (dyn Fn(ResolveEvent<'_>) + Sync);
