//! The sizes that activations depend on, without names or parameters: what planning of activations reads.

use crate::ModelConfig;

/// Sizes of what a token leaves behind in a forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActivationShape {
    /// Width of the residual stream.
    pub hidden: u64,
    /// Blocks of the decoder (of the only stack, where there is no encoder).
    pub blocks: u64,
    /// Blocks of the encoder; 0 without one. With an encoder every decoder block attends to its output as well.
    pub encoder_blocks: u64,
    /// Attention heads.
    pub heads: u64,
    /// Heads of keys and values.
    pub kv_heads: u64,
    /// Width of one head.
    pub head_dim: u64,
    /// Inner width of the dense feed-forward part.
    pub ffn: u64,
    /// Whether the feed-forward part has a gate, and so two inner tensors instead of one.
    pub gated: bool,
    /// Width of the logits.
    pub vocab: u64,
    /// The mixture of experts.
    pub experts: Option<ExpertShape>,
}

/// Sizes of a mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertShape {
    /// Experts of a block.
    pub count: u64,
    /// Experts of a token: so many rows each token becomes.
    pub per_token: u64,
    /// Inner width of one expert.
    pub width: u64,
    /// Decoder blocks with experts; the others have the dense feed-forward part.
    pub blocks: u64,
}

impl ModelConfig {
    /// The sizes that activations depend on.
    pub fn activation_shape(&self) -> ActivationShape {
        ActivationShape {
            hidden: self.hidden,
            blocks: self.blocks,
            encoder_blocks: self.encoder_blocks,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            ffn: self.ffn,
            gated: self.gated,
            vocab: self.vocab,
            experts: self.experts.as_ref().map(|experts| ExpertShape {
                count: experts.count,
                per_token: experts.per_token,
                width: experts.width,
                blocks: experts.in_block.iter().filter(|has| **has).count() as u64,
            }),
        }
    }
}
