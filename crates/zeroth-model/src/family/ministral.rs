//! Ministral 8B: Mistral with an attention window in the layers that `layer_types` names.

use crate::architecture::{Architecture, Bias, DecoderFamily, FamilyStacks, WindowedLayers};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_type: "ministral",
    classes: &["MinistralForCausalLM"],
    stack: FamilyStacks::Decoder(DecoderFamily {
        kv_heads: Some(8),
        max_positions: 131_072,
        qkv_bias: Bias::Never,
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        windows: WindowedLayers::LayerTypes,
        ..DecoderFamily::LLAMA
    }),
};
