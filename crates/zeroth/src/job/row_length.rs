//! The longest row of a run that names none.

use zeroth_model::ModelConfig;

/// Default maximum row length.
const LONGEST: u64 = 2048;

/// Maximum tokens of a row: as given, else the model's, at most 2,048.
pub(super) fn longest_row(given: Option<u64>, model: &ModelConfig) -> u64 {
    given.unwrap_or_else(|| model.max_positions.unwrap_or(LONGEST).min(LONGEST))
}
