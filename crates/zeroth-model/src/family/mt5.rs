//! mT5: T5 v1.1 with a large vocabulary and other defaults.

use crate::architecture::{Architecture, EncoderDecoderFamily, FamilyStacks};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_type: "mt5",
    classes: &["MT5ForConditionalGeneration"],
    stack: FamilyStacks::EncoderDecoder(EncoderDecoderFamily { feed_forward: "gated-gelu", scales_head: false }),
};
