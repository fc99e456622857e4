//! mT5: T5 v1.1 with a large vocabulary and other defaults.

use crate::architecture::{Architecture, EncoderDecoder, Stack};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    model_type: "mt5",
    classes: &["MT5ForConditionalGeneration"],
    stack: Stack::EncoderDecoder(EncoderDecoder { feed_forward: "gated-gelu", scales_head: false }),
};
