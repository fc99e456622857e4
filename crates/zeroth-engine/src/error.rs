//! Errors of a running program.

use zeroth_comm::CommError;
use zeroth_graph::Kind;
use zeroth_kernel::DeviceError;
use zeroth_program::{LoweringDifference, World};

/// A run that cannot continue.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what their fields are")]
pub enum RunError {
    #[error("step {step}, {op}: {source}")]
    Device { step: u64, op: String, source: DeviceError },
    #[error("step {step}, {op}: {source}")]
    Comm { step: u64, op: String, source: CommError },
    #[error(
        "ranks did not compile the same program, so they would read each other's numbers at wrong places: {0}. Start all \
         ranks from the same build of zeroth, with the same flags, config, model and data"
    )]
    Lowering(Box<LoweringDifference>),
    #[error(
        "this rank joined {ranks} ranks in groups of {group}, and its program was compiled for {} in groups of {}: join with          the groups of the program",
        .world.ranks, .world.group
    )]
    Mesh { ranks: u64, group: u64, world: World },
    #[error("a micro-batch has {found} {what}, and the model has {expected}")]
    Streams { what: &'static str, found: usize, expected: usize },
    #[error(
        "a further input of the micro-batch should be of kind {expected:?}: Index is i32, Statistic is f32"
    )]
    InputKind { expected: Kind },
    #[error("a micro-batch of {rows} tokens was given to a program that was compiled for at most {most}")]
    Rows { rows: usize, most: u64 },
    #[error("a micro-batch has {found} {what} for {expected} tokens")]
    Batch { what: &'static str, found: usize, expected: usize },
    #[error(
        "a micro-batch has the {what} {number}, and the model has {vocabulary}, numbered from 0: the data or its token cache is \
         of another model, or damaged"
    )]
    Vocabulary { what: &'static str, number: i32, vocabulary: u64 },
    #[error(
        "this program does not compute the logits of whole sequences: it was compiled to train, or to decode after an encoder"
    )]
    NoLogits,
    #[error("this program does not compute the most probable tokens: compile one for a cache of its teacher")]
    NoTopLogProbs,
    #[error("logits of {found} sequences were requested from a program compiled for at most {most}")]
    Sequences { found: usize, most: u64 },
    #[error("this program has no cache of keys and values: decoding needs one that was compiled with it")]
    NoCache,
    #[error(
        "this program has no encoder that runs apart from its decoder: it needs an encoder-decoder that was compiled with a cache"
    )]
    NoEncoder,
    #[error("a token of an encoder-decoder was given no cache rows of its source: encode the source first")]
    NoSource,
    #[error(
        "a micro-batch has {targets} target sequence(s) and {sources} source(s): each target has a source of its own"
    )]
    Sources { targets: usize, sources: usize },
    #[error(
        "a token was given row {row} of the cache of keys and values, which was compiled with {rows} rows"
    )]
    CacheRows { row: u64, rows: u64 },
    #[error(
        "a token at position {position} cannot be decoded with cached keys: dynamic rotary scaling changes the keys of \
         sequences longer than {max_positions} tokens; compute the whole sequence instead"
    )]
    Rescaled { position: u32, max_positions: u64 },
    #[error("a step of {expected} micro-batch(es) was given {found}")]
    MicroBatches { found: usize, expected: u64 },
    #[error("step {step}: the bytes behind {buffer} were written to by instruction {at} of {section}")]
    Canary { step: u64, buffer: String, section: String, at: usize },
    #[error("{0}")]
    Weights(Box<dyn std::error::Error + Send + Sync>),
}

impl RunError {
    /// A device error outside of an instruction.
    pub(super) fn device(step: u64, op: &str) -> impl FnOnce(DeviceError) -> Self + '_ {
        move |source| Self::Device { step, op: op.to_owned(), source }
    }
}

/// A collective that failed.
pub(super) enum CollectiveError {
    Device(DeviceError),
    Comm(CommError),
}
