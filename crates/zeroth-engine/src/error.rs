//! What goes wrong while a program runs.

use zeroth_comm::CommError;
use zeroth_kernel::DeviceError;

/// A run that cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The device failed.
    #[error("step {step}, {op}: {source}")]
    Device {
        /// The step.
        step: u64,
        /// The instruction, in words.
        op: String,
        /// What the device said.
        source: DeviceError,
    },
    /// Another rank is gone, or ranks do not do the same.
    #[error("step {step}, {op}: {source}")]
    Comm {
        /// The step.
        step: u64,
        /// The instruction, in words.
        op: String,
        /// What was found.
        source: CommError,
    },
    /// A micro-batch that does not fit the program.
    #[error("a micro-batch of {rows} tokens was given to a program that was compiled for at most {most}")]
    Rows {
        /// Tokens of the micro-batch.
        rows: usize,
        /// The most there may be.
        most: u64,
    },
    /// A micro-batch whose parts do not fit each other.
    #[error("a micro-batch has {found} {what} for {expected} tokens")]
    Batch {
        /// Which part.
        what: &'static str,
        /// How many there are.
        found: usize,
        /// How many there should be.
        expected: usize,
    },
    /// A token or a label that the model does not have.
    #[error(
        "a micro-batch has the {what} {number}, and the model has {vocabulary}, numbered from 0: the data or its token cache is \
         of another model, or damaged"
    )]
    Vocabulary {
        /// What it is.
        what: &'static str,
        /// Its number.
        number: i32,
        /// How many there are.
        vocabulary: u64,
    },
    /// Logits were asked of a program that trains.
    #[error("this program was compiled to train: next-token logits need one that was compiled for inference")]
    NoLogits,
    /// More sequences than a program gives logits for.
    #[error("logits of {found} sequences were asked of a program that was compiled for at most {most}")]
    Sequences {
        /// Sequences of the micro-batch.
        found: usize,
        /// The most there may be.
        most: u64,
    },
    /// Not as many micro-batches as the program has sections for.
    #[error("a step of {expected} micro-batch(es) was given {found}")]
    MicroBatches {
        /// How many were given.
        found: usize,
        /// How many a step has.
        expected: u64,
    },
    /// Something wrote behind its buffer, or a buffer was used after its end.
    #[error("step {step}: the bytes behind {buffer} were written to by instruction {at} of {section}")]
    Canary {
        /// The step.
        step: u64,
        /// The buffer.
        buffer: String,
        /// The section.
        section: String,
        /// The instruction after which it was seen.
        at: usize,
    },
    /// Weights that could not be had.
    #[error("{0}")]
    Weights(Box<dyn std::error::Error + Send + Sync>),
}

impl RunError {
    /// A device error outside of any instruction.
    pub(super) fn device(step: u64, op: &str) -> impl FnOnce(DeviceError) -> Self + '_ {
        move |source| Self::Device { step, op: op.to_owned(), source }
    }
}
