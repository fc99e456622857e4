//! Builds the forward graph of a model.
//!
//! The residual add of one part and the norm of the next are one op, so a part ends with its branch and the sum so far, and the
//! next begins with both.

mod blocks;
mod decoder;
mod encoder_decoder;
mod error;
mod params;

use zeroth_graph::{Builder, Graph};

use crate::{ModelConfig, Parameter, ParameterTable};

pub(crate) use decoder::DecoderForward;
use encoder_decoder::EncoderDecoderForward;
pub use error::ForwardError;

/// The micro-batches a forward is written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchTokens {
    /// Tokens (rows) of a micro-batch; those of the sources, of an encoder-decoder.
    pub tokens: u64,
    /// Tokens of the targets, of an encoder-decoder. Others have none.
    pub target_tokens: u64,
}

impl BatchTokens {
    /// So many tokens; an encoder-decoder has as many of sources and of targets.
    pub const fn of_tokens(tokens: u64) -> Self {
        Self { tokens, target_tokens: tokens }
    }

    /// Pairs for an encoder-decoder, with these numbers of source and target tokens.
    pub const fn of_pairs(source_tokens: u64, target_tokens: u64) -> Self {
        Self { tokens: source_tokens, target_tokens }
    }
}

/// The forward of a model; `table` is the model's own and says which parameters are trained.
pub fn forward(
    config: &ModelConfig,
    table: &ParameterTable,
    batch: BatchTokens,
) -> Result<Graph, ForwardError> {
    forward_training(config, table, batch, |parameter| parameter.trained)
}

/// [`forward`] of a model of which only the parameters that `is_trained` names are trained; the others are frozen.
pub fn forward_training(
    config: &ModelConfig,
    table: &ParameterTable,
    batch: BatchTokens,
    is_trained: impl Fn(&Parameter) -> bool,
) -> Result<Graph, ForwardError> {
    if config.family.is_encoder_decoder() {
        let mut b = Builder::new(&[batch.tokens, batch.target_tokens]);
        EncoderDecoderForward::new(config, table).add(&mut b, &is_trained)?;
        return Ok(b.finish()?);
    }
    let mut b = Builder::new(&[batch.tokens]);
    let output = DecoderForward::new(config, table).add(&mut b, &is_trained)?;
    b.head_loss(output.normed, output.head)?;
    output.aux_loss(&mut b, config)?;
    Ok(b.finish()?)
}
