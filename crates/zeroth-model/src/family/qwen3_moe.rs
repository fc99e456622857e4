//! Qwen3 with a mixture of experts.

use crate::architecture::{Architecture, Bias, Decoder, Mixture, MixtureConfig, Stack, Windows};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_type: "qwen3_moe",
    classes: &["Qwen3MoeForCausalLM"],
    stack: Stack::Decoder(Decoder {
        kv_heads: Some(4),
        max_positions: 32_768,
        mlp_bias: Bias::Never,
        qk_norm: true,
        windows: Windows::Switched,
        mixture: Some(Mixture {
            module: "mlp",
            projections: ["gate_proj", "up_proj", "down_proj"],
            config: MixtureConfig::Qwen,
        }),
        ..Decoder::LLAMA
    }),
};
