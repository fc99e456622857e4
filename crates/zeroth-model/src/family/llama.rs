//! Llama 1 to 3.

use crate::architecture::{Architecture, Decoder, Stack};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_type: "llama",
    classes: &["LlamaForCausalLM"],
    stack: Stack::Decoder(Decoder::LLAMA),
};
