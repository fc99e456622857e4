//! How much of a key's range of values a run implements.

/// The values of a key that a run implements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    /// Every value.
    Full,
    /// None. Such a key tunes or reports: a run without it trains the same.
    None,
    /// These alone. Any other asks for something that a run would not do.
    Only {
        /// The values, as a file writes them, texts without quotes.
        values: &'static [&'static str],
        /// What to write instead of another.
        instead: &'static str,
    },
}
