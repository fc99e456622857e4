//! Qwen2 and Qwen2.5: llama with biases on q, k and v.

use crate::architecture::{Architecture, Bias, DecoderFamily, FamilyStacks, WindowedLayers};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_type: "qwen2",
    classes: &["Qwen2ForCausalLM"],
    stack: FamilyStacks::Decoder(DecoderFamily {
        kv_heads: Some(32),
        max_positions: 32_768,
        qkv_bias: Bias::Always,
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        windows: WindowedLayers::SwitchedLayerTypes,
        ..DecoderFamily::LLAMA
    }),
};
