//! Mistral 7B and its relatives: llama without biases, with an attention window.

use crate::architecture::{Architecture, Bias, Decoder, Stack, Windows};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_type: "mistral",
    classes: &["MistralForCausalLM"],
    stack: Stack::Decoder(Decoder {
        kv_heads: Some(8),
        max_positions: 131_072,
        qkv_bias: Bias::Never,
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        windows: Windows::All,
        ..Decoder::LLAMA
    }),
};
