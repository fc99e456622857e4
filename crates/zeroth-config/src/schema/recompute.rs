//! `zeroth.recompute`, with what other keys say about it.

use serde_json::Value;

use super::activation::{ActivationCheckpointing, Zeroth};
use super::field::{FieldType, ReadField};

/// Which activations backward recomputes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing.
    Nothing,
    /// Norms and gated activations: cheap to recompute, large to keep.
    NormSwiGlu,
    /// Attention as well.
    Attention,
    /// Whole blocks from their inputs (activation checkpointing).
    Block {
        /// The number of leading blocks, `None` for all; of the others, norms and gated activations.
        blocks: Option<u64>,
        /// The number of block inputs kept, `None` for one per block.
        checkpoints: Option<u64>,
        /// Whether they are offloaded to host memory (`cpu_checkpointing`).
        offloaded: bool,
    },
}

impl Recompute {
    /// All blocks, of which the inputs stay on the device.
    pub const EVERY_BLOCK: Self = Self::Block { blocks: None, checkpoints: None, offloaded: false };
    const ALL: [Self; 4] = [Self::Nothing, Self::NormSwiGlu, Self::Attention, Self::EVERY_BLOCK];
    /// The words, as a file spells them.
    pub const WORDS: &'static [&'static str] =
        &[Self::ALL[0].word(), Self::ALL[1].word(), Self::ALL[2].word(), Self::ALL[3].word()];

    /// The word of this value.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Nothing => "none",
            Self::NormSwiGlu => "norm_swiglu",
            Self::Attention => "attention",
            Self::Block { .. } => "block",
        }
    }

    /// What a config recomputes, by all of its keys.
    pub fn of(zeroth: &Zeroth, activation_checkpointing: &ActivationCheckpointing) -> Self {
        match zeroth.recompute {
            Self::Block { .. } => Self::Block {
                blocks: zeroth.recompute_blocks,
                checkpoints: activation_checkpointing.number_checkpoints,
                offloaded: activation_checkpointing.cpu_checkpointing,
            },
            other => other,
        }
    }
}

impl ReadField for Recompute {
    const TYPE: FieldType = FieldType::Word;

    fn read(value: Option<&Value>) -> Option<Self> {
        let word = value?.as_str()?;
        Self::ALL.into_iter().find(|policy| policy.word() == word)
    }
}
