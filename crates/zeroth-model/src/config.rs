//! A model as its `config.json` describes it: what its shapes, its parameter table and its forward pass depend on.

use zeroth_base::DType;

use crate::family::Family;
use crate::rope::Rope;

/// A model as its `config.json` describes it, written by transformers 4 or 5. Where a field is absent it has the
/// value that transformers gives it.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The family it belongs to.
    pub family: Family,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Blocks of the decoder (of the only stack, where there is no encoder).
    pub blocks: u64,
    /// Blocks of the encoder; 0 without one.
    pub encoder_blocks: u64,
    /// Attention heads.
    pub heads: u64,
    /// Heads of keys and values; each serves `heads / kv_heads` heads.
    pub kv_heads: u64,
    /// Width of one head.
    pub head_dim: u64,
    /// Inner width of the dense feed-forward part.
    pub ffn: u64,
    /// Whether the feed-forward part has a gate: two matrices in and one out, instead of one in.
    pub gated: bool,
    /// The function between the feed-forward matrices.
    pub activation: Activation,
    /// Rows of the embedding.
    pub vocab: u64,
    /// Whether the head is the embedding. Where [`ModelConfig::from_folder`] finds weights of a T5, they decide:
    /// transformers 5 writes `tie_word_embeddings: true` for every T5, those with a head of their own included.
    pub tied_head: bool,
    /// Whether the head's input is scaled by `hidden^-0.5` (T5, not v1.1).
    pub scaled_head: bool,
    /// What the norms add to the variance.
    pub norm_eps: f64,
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// Bias on the attention's output.
    pub output_bias: bool,
    /// Biases in the feed-forward part.
    pub mlp_bias: bool,
    /// Norms on each head of q and k.
    pub qk_norm: bool,
    /// For each of the `blocks`, how many positions back it attends; `None` is all of them.
    pub windows: Vec<Option<u64>>,
    /// How attention knows where a token stands.
    pub positions: Positions,
    /// The longest sequence the model is meant for; T5 has no such limit.
    pub max_positions: Option<u64>,
    /// The mixture of experts.
    pub experts: Option<Experts>,
    /// The standard deviation of new weights of a decoder-only model.
    pub initializer_range: f64,
    /// The factor of new weights of an encoder-decoder, whose standard deviations follow from its sizes; 1 elsewhere.
    pub initializer_factor: f64,
    /// The share of attention weights that transformers would drop in training of a decoder-only model. Here none are.
    pub attention_dropout: f64,
    /// The probability of dropout in training, everywhere in an encoder-decoder; 0 elsewhere.
    pub dropout_rate: f64,
    /// The tokens that frame the targets of an encoder-decoder; `None` elsewhere.
    pub target_tokens: Option<TargetTokens>,
    /// The type its weights were saved in, if the file says so.
    pub dtype: Option<DType>,
}

/// The tokens that frame the targets of an encoder-decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TargetTokens {
    /// The first input of the decoder, before the first token of a target: `decoder_start_token_id`, else `pad_token_id`.
    pub start: u64,
    /// The input in place of a token that is not trained: `pad_token_id`.
    pub pad: Option<u64>,
    /// The end of a target, the first where there are several: `eos_token_id`.
    pub eos: Option<u64>,
}

/// A function between the matrices of a feed-forward part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// `max(x, 0)`.
    Relu,
    /// Gelu by the error function.
    Gelu,
    /// Gelu by its tanh approximation.
    GeluTanh,
}

impl Activation {
    /// The names transformers has for them.
    pub(crate) const WORDS: [(&'static str, Self); 6] = [
        ("silu", Self::Silu),
        ("swish", Self::Silu),
        ("relu", Self::Relu),
        ("gelu", Self::Gelu),
        ("gelu_new", Self::GeluTanh),
        ("gelu_pytorch_tanh", Self::GeluTanh),
    ];
}

/// How attention knows where a token stands.
#[derive(Debug, Clone, PartialEq)]
pub enum Positions {
    /// Queries and keys are rotated.
    Rope(Rope),
    /// A learned bias for each head and bucket of distances (T5).
    Relative {
        /// Rows of the table.
        buckets: u64,
        /// All larger distances share the last bucket.
        max_distance: u64,
    },
}

/// A mixture of experts.
#[derive(Debug, Clone, PartialEq)]
pub struct Experts {
    /// Experts of a block.
    pub count: u64,
    /// How many of them a token goes to.
    pub per_token: u64,
    /// Inner width of one expert.
    pub width: u64,
    /// Whether the weights of a token's experts are scaled to sum to one.
    pub normalized: bool,
    /// The coefficient of the auxiliary loss that balances the experts, where it is trained: `router_aux_loss_coef` with
    /// `output_router_logits`.
    pub aux_loss: Option<f64>,
    /// For each block, whether it has experts; a block without them has the dense feed-forward part.
    pub in_block: Vec<bool>,
}

impl ModelConfig {
    /// Width of all heads together: rows of q.
    pub const fn attention_width(&self) -> u64 {
        self.heads * self.head_dim
    }

    /// Width of all key-value heads together: rows of k and of v.
    pub const fn kv_width(&self) -> u64 {
        self.kv_heads * self.head_dim
    }

    /// Whether that block has experts instead of a dense feed-forward part.
    pub fn has_experts(&self, block: u64) -> bool {
        let in_block = |experts: &Experts| experts.in_block.get(block as usize) == Some(&true);
        self.experts.as_ref().is_some_and(in_block)
    }
}
