//! Qwen3 with a mixture of experts.

use crate::architecture::{Architecture, Bias, DecoderFamily, Mixture, MixtureConfig, FamilyStacks, WindowedLayers};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_type: "qwen3_moe",
    classes: &["Qwen3MoeForCausalLM"],
    stack: FamilyStacks::Decoder(DecoderFamily {
        kv_heads: Some(4),
        max_positions: 32_768,
        mlp_bias: Bias::Never,
        qk_norm: true,
        windows: WindowedLayers::Switched,
        mixture: Some(Mixture {
            module: "mlp",
            projections: ["gate_proj", "up_proj", "down_proj"],
            config: MixtureConfig::Qwen,
        }),
        ..DecoderFamily::LLAMA
    }),
};
