//! Llama 1 to 3.

use crate::architecture::{Architecture, DecoderFamily, FamilyStacks};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_type: "llama",
    classes: &["LlamaForCausalLM"],
    stack: FamilyStacks::Decoder(DecoderFamily::LLAMA),
};
