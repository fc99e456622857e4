//! The properties in which families of models differ, as plain data: one file of `family/` fills one [`Architecture`].

use zeroth_graph::NormOptions;

/// A family's names in `config.json`, and the properties of its models.
#[derive(Debug)]
pub(crate) struct Architecture {
    /// The `model_type` of its configs.
    pub(crate) model_type: &'static str,
    /// Its language-model classes in `architectures`; the first is the current name.
    pub(crate) classes: &'static [&'static str],
    pub(crate) stack: FamilyStacks,
}

/// The stacks of transformer blocks of a model.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "one constant a family")]
pub(crate) enum FamilyStacks {
    /// Decoder only, in the manner of llama.
    Decoder(DecoderFamily),
    /// Encoder and decoder, in the manner of T5.
    EncoderDecoder(EncoderDecoderFamily),
}

/// A decoder-only family: rotary positions, grouped-query attention and a gated MLP, with these differences.
#[derive(Debug)]
pub(crate) struct DecoderFamily {
    /// `num_key_value_heads` where a config has none; `None`: one for each head.
    pub(crate) kv_heads: Option<u64>,
    /// `head_dim` where a config has none; `None`: the hidden size divided by the heads.
    pub(crate) head_dim: Option<u64>,
    /// `max_position_embeddings` where a config has none.
    pub(crate) max_positions: u64,
    pub(crate) qkv_bias: Bias,
    pub(crate) output_bias: Bias,
    pub(crate) mlp_bias: Bias,
    /// RMSNorm on each head of q and k.
    pub(crate) qk_norm: bool,
    pub(crate) windows: WindowedLayers,
    /// The norms; their eps where a config has no `rms_norm_eps`.
    pub(crate) norm: NormOptions,
    /// The weight of a new norm.
    pub(crate) norm_weight: f32,
    /// The field that scores are divided by the root of; the head's width where a config has none.
    pub(crate) score_width: &'static str,
    /// The base of rotary frequencies where a config has none.
    pub(crate) rope_theta: f64,
    /// The mixture of experts, where blocks may have one.
    pub(crate) mixture: Option<Mixture>,
}

impl DecoderFamily {
    /// Llama, the family that the others vary.
    pub(crate) const LLAMA: Self = Self {
        kv_heads: None,
        head_dim: None,
        max_positions: 2048,
        qkv_bias: Bias::Field("attention_bias"),
        output_bias: Bias::Field("attention_bias"),
        mlp_bias: Bias::Field("mlp_bias"),
        qk_norm: false,
        windows: WindowedLayers::None,
        norm: NormOptions::rms(1e-6),
        norm_weight: 1.0,
        score_width: "head_dim",
        rope_theta: 10_000.0,
        mixture: None,
    };
}

/// A mixture of experts: its names in a folder per expert, and what its configs say of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mixture {
    /// The module of router and experts inside a block.
    pub(crate) module: &'static str,
    /// An expert's gate, up and down projections.
    pub(crate) projections: [&'static str; 3],
    pub(crate) config: MixtureConfig,
}

/// The fields of a config that describe its experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MixtureConfig {
    /// As qwen3_moe: experts have a width of their own, some blocks none, and `norm_topk_prob` scales their weights.
    Qwen,
    /// As mixtral: every block has experts, as wide as `intermediate_size`, and their weights always sum to one.
    Mixtral,
}

/// Whether linear layers have a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bias {
    Never,
    Always,
    /// Where this field of the config is true.
    Field(&'static str),
}

/// Which layers attend to a window of `sliding_window` positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WindowedLayers {
    None,
    All,
    /// All, where a config gives a window.
    Given,
    /// Those that `layer_types` names; all where a config has no such list.
    LayerTypes,
    /// All, where `use_sliding_window` is true.
    Switched,
    /// Where `use_sliding_window` is true: those that `layer_types` names, else all from `max_window_layers` on.
    SwitchedLayerTypes,
}

/// A family in the manner of T5: learned biases of relative positions.
#[derive(Debug)]
pub(crate) struct EncoderDecoderFamily {
    /// `feed_forward_proj` where a config has none.
    pub(crate) feed_forward: &'static str,
    /// Whether `scale_decoder_outputs` scales the head's input; its default is whether the head is tied.
    pub(crate) scales_head: bool,
}
