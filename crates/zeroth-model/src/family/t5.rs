//! T5, T5 v1.1 and Flan-T5: encoder and decoder.

use crate::architecture::{Architecture, EncoderDecoderFamily, FamilyStacks};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_type: "t5",
    // The second is the class that the first published checkpoints name.
    classes: &["T5ForConditionalGeneration", "T5WithLMHeadModel"],
    stack: FamilyStacks::EncoderDecoder(EncoderDecoderFamily { feed_forward: "relu", scales_head: true }),
};
