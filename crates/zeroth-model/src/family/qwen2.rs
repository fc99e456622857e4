//! Qwen2 and Qwen2.5: llama with biases on q, k and v.

use crate::architecture::{Architecture, Bias, Decoder, Stack, Windows};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_type: "qwen2",
    classes: &["Qwen2ForCausalLM"],
    stack: Stack::Decoder(Decoder {
        kv_heads: Some(32),
        max_positions: 32_768,
        qkv_bias: Bias::Always,
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        windows: Windows::SwitchedLayerTypes,
        ..Decoder::LLAMA
    }),
};
