//! Mixtral 8x7B and 8x22B: mistral with a mixture of experts in every block.

use zeroth_graph::NormOptions;

use crate::architecture::{Architecture, Bias, DecoderFamily, Mixture, MixtureConfig, FamilyStacks, WindowedLayers};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_type: "mixtral",
    classes: &["MixtralForCausalLM"],
    stack: FamilyStacks::Decoder(DecoderFamily {
        kv_heads: Some(8),
        max_positions: 131_072,
        qkv_bias: Bias::Never,
        output_bias: Bias::Never,
        mlp_bias: Bias::Never,
        windows: WindowedLayers::Given,
        norm: NormOptions::rms(1e-5),
        rope_theta: 1_000_000.0,
        mixture: Some(Mixture {
            module: "block_sparse_moe",
            projections: ["w1", "w3", "w2"],
            config: MixtureConfig::Mixtral,
        }),
        ..DecoderFamily::LLAMA
    }),
};
