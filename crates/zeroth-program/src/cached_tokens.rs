//! What the cache of an inference program holds.

/// The tokens whose keys and values the cache of an inference program holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CachedTokens {
    /// Tokens that are decoded, their prompts included; 0 without a cache.
    pub tokens: u64,
    /// Tokens of the sources of an encoder-decoder, which cross attention reads.
    pub source_tokens: u64,
}

/// Those of a model without an encoder.
impl From<u64> for CachedTokens {
    fn from(tokens: u64) -> Self {
        Self { tokens, source_tokens: 0 }
    }
}
