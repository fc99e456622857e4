//! Mistral 7B and its relatives: llama without biases, with an attention window.

use crate::architecture::{Architecture, Bias, DecoderFamily, FamilyStacks, WindowedLayers};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_type: "mistral",
    classes: &["MistralForCausalLM"],
    stack: FamilyStacks::Decoder(DecoderFamily {
        kv_heads: Some(8),
        max_positions: 131_072,
        qkv_bias: Bias::Never,
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        windows: WindowedLayers::All,
        ..DecoderFamily::LLAMA
    }),
};
