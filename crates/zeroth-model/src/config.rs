//! A model as its `config.json` describes it: what its shapes, its parameter table and its forward pass depend on.

use zeroth_base::DType;
use zeroth_graph::NormOptions;

use crate::family::Family;
use crate::layer::{AttentionModule, Layer};

/// A model as its `config.json` describes it, written by transformers 4 or 5. Where a field is absent it has the
/// value that transformers gives it.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The family it belongs to.
    pub family: Family,
    /// Width of the residual stream.
    pub hidden: u64,
    /// The blocks of the decoder (of the only stack, where there is no encoder); at least one.
    pub layers: Vec<Layer>,
    /// The blocks of the encoder; none without one.
    pub encoder_layers: Vec<Layer>,
    /// Inner width of dense feed-forward parts; given where no block has one, too.
    pub ffn: u64,
    /// Rows of the embedding.
    pub vocab: u64,
    /// Whether the head is the embedding. Where [`ModelConfig::from_folder`] finds weights of a T5, they decide:
    /// transformers 5 writes `tie_word_embeddings: true` for every T5, those with a head of their own included.
    pub tied_head: bool,
    /// Whether the head's input is scaled by `hidden^-0.5` (T5, not v1.1).
    pub scaled_head: bool,
    /// How all norms of the residual stream are computed.
    pub norm: NormOptions,
    /// The longest sequence the model is meant for; T5 has no such limit.
    pub max_positions: Option<u64>,
    /// The coefficient of the auxiliary loss that balances the experts, where it is trained: `router_aux_loss_coef` with
    /// `output_router_logits`.
    pub aux_loss: Option<f64>,
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

impl ModelConfig {
    /// The attention of the first block of the decoder, to its own tokens.
    ///
    /// # Panics
    ///
    /// If the decoder has no block, which no config that was read allows.
    pub fn first_attention(&self) -> &AttentionModule {
        self.layers
            .first()
            .and_then(Layer::attention)
            .expect("decoders begin with a block that has attention")
    }

    /// For each block of the decoder, how many positions back it attends; `None` is all of them.
    pub fn windows(&self) -> Vec<Option<u64>> {
        self.layers.iter().map(|layer| layer.attention().and_then(|attention| attention.window)).collect()
    }

    /// How many blocks encoder and decoder have.
    pub const fn blocks(&self) -> u64 {
        (self.encoder_layers.len() + self.layers.len()) as u64
    }

    /// The blocks of encoder and decoder.
    pub fn all_layers(&self) -> impl Iterator<Item = &Layer> {
        self.encoder_layers.iter().chain(&self.layers)
    }
}
