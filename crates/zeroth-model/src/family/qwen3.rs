//! Qwen3, dense: llama with norms on q and k.

use crate::architecture::{Architecture, Bias, DecoderFamily, FamilyStacks, WindowedLayers};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_type: "qwen3",
    classes: &["Qwen3ForCausalLM"],
    stack: FamilyStacks::Decoder(DecoderFamily {
        kv_heads: Some(32),
        head_dim: Some(128),
        max_positions: 32_768,
        mlp_bias: Bias::Never,
        qk_norm: true,
        windows: WindowedLayers::SwitchedLayerTypes,
        ..DecoderFamily::LLAMA
    }),
};
