//! A model's `config.json`, read: what its shapes, its parameter table and its forward pass depend on.

use std::path::Path;

use serde_json::{Map, Value};
use zeroth_base::DType;

use crate::fields::Fields;
use crate::folder::{model_folder, parse, read_config};
use crate::safetensors::weights_include;
use crate::{Family, FieldError, ModelError, Rope, decoder, t5};

// Limits far beyond any model: within them no count overflows 64 bits and no table is larger than a few hundred MB.
pub(crate) const MAX_WIDTH: u64 = 1 << 20;
pub(crate) const MAX_VOCAB: u64 = 1 << 28;
pub(crate) const MAX_BLOCKS: u64 = 1 << 12;
pub(crate) const MAX_EXPERTS: u64 = 1 << 12;
pub(crate) const MAX_EXPERTS_OF_ALL_BLOCKS: u64 = 1 << 18;
pub(crate) const MAX_POSITIONS: u64 = 1 << 40;
/// Parameters of a model: their bytes in every type, on all ranks together, are counted in 64 bits.
pub const MAX_PARAMETERS: u64 = 1 << 46;

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
    /// The standard deviation of new weights.
    pub initializer_range: f64,
    /// The share of attention weights that transformers would drop in training. Here none are.
    pub attention_dropout: f64,
    /// The type its weights were saved in, if the file says so.
    pub dtype: Option<DType>,
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Experts {
    /// Experts of a block.
    pub count: u64,
    /// How many of them a token goes to.
    pub per_token: u64,
    /// Inner width of one expert.
    pub width: u64,
    /// Whether the weights of a token's experts are scaled to sum to one.
    pub normalized: bool,
    /// For each block, whether it has experts; a block without them has the dense feed-forward part.
    pub in_block: Vec<bool>,
}

impl ModelConfig {
    /// Reads the `config.json` in a model folder, or at that very path. See [`crate::locate`] for names.
    pub fn from_folder(path: &Path) -> Result<Self, ModelError> {
        let (map, origin) = read_config(path)?;
        let mut config = Self::from_map(&map, &origin)?;
        if config.family.is_encoder_decoder() && config.tied_head {
            config.tied_head = weights_include(&model_folder(path)?, "lm_head.weight") != Some(true);
        }
        Ok(config)
    }

    /// Reads the text of a `config.json`; `origin` is what messages call it.
    pub fn from_json(text: &str, origin: &str) -> Result<Self, ModelError> {
        Self::from_map(&parse(text.as_bytes(), origin)?, origin)
    }

    /// Reads a `config.json` that is parsed already, as [`read_config`] returns it.
    pub fn from_map(map: &Map<String, Value>, origin: &str) -> Result<Self, ModelError> {
        let fields = Fields::new(map);
        let family = Family::of(&fields, origin)?;
        let read = if family.is_encoder_decoder() { t5::read } else { decoder::read };
        read(family, &fields)
            .and_then(check_parameters)
            .map_err(|source| ModelError::Field { origin: origin.to_owned(), source })
    }

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

/// The type the weights were saved in: `dtype` since transformers 4.56, `torch_dtype` before.
pub(crate) fn read_dtype(fields: &Fields<'_>) -> Result<Option<DType>, FieldError> {
    let mut field = "dtype";
    let mut name = fields.text(field)?;
    if name.is_none() {
        field = "torch_dtype";
        name = fields.text(field)?;
    }
    let Some(name) = name else { return Ok(None) };
    match DType::from_name(name) {
        Some(dtype) => Ok(Some(dtype)),
        None => Err(fields.unknown_name(field, name, ["float32", "bfloat16", "float16"].into_iter())),
    }
}

/// Refuses sizes that are each within limits and together give more parameters than any model has.
fn check_parameters(config: ModelConfig) -> Result<ModelConfig, FieldError> {
    let [hidden, vocab, ffn] = [config.hidden, config.vocab, config.ffn].map(u128::from);
    let attention = 2 * u128::from(config.attention_width() + config.kv_width()) * hidden;
    // A decoder's block beside an encoder has two attentions; biases and norms are less than one width of each.
    let block = 2 * (attention + 4 * hidden) + 3 * ffn * (hidden + 1);
    let blocks = u128::from(config.blocks + config.encoder_blocks) * block;
    let experts = config.experts.as_ref().map_or(0, |experts| {
        let of_block = u128::from(experts.count) * u128::from(3 * experts.width + 1) * hidden;
        u128::from(config.blocks) * of_block
    });
    let total = 2 * vocab * hidden + blocks + experts;
    if total <= u128::from(MAX_PARAMETERS) {
        return Ok(config);
    }
    let (field, value) = ("number of parameters".to_owned(), format!("about {total}"));
    Err(FieldError::OutOfRange { field, value, least: 1, most: MAX_PARAMETERS })
}

/// Refuses heads that are wider together than any model.
pub(crate) fn check_attention_width(
    fields: &Fields<'_>,
    (heads_field, heads): (&str, u64),
    (width_field, width): (&str, u64),
) -> Result<(), FieldError> {
    // Both are at most 2^20.
    let both = heads * width;
    if both <= MAX_WIDTH {
        return Ok(());
    }
    let field = format!("{} × {}", fields.path(heads_field), width_field);
    Err(FieldError::OutOfRange { field, value: both.to_string(), least: 1, most: MAX_WIDTH })
}
