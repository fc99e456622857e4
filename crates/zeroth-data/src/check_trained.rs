//! Checks that samples train anything.

use std::path::PathBuf;

use zeroth_base::counted;

use super::rows::RowReader;
use super::{DataError, Encode, IGNORED, PrepareOptions, Samples, Totals};

/// Rejects samples without trained tokens: training would change no weight, and evaluation would give a loss of 0.
/// They were prepared from these files with this encoder and these options.
pub fn check_trained(
    samples: &Samples,
    files: &[PathBuf],
    encoder: &dyn Encode,
    options: &PrepareOptions,
) -> Result<(), DataError> {
    let Totals { samples: rows, tokens, trained_tokens, longest, truncated, .. } = samples.totals();
    if trained_tokens > 0 {
        return Ok(());
    }
    let is_paired = samples.is_paired();
    let why = if longest == 1 && !is_paired {
        "and rows of one token have no context to predict it from".to_owned()
    } else if truncated > 0 && !is_paired {
        format!(
            "and all trained tokens are beyond the {} they were truncated to: raise --max-length, or truncate the other end with \
             --truncation-strategy",
            counted(options.max_length, "token")
        )
    } else {
        let first =
            || RowReader::new(files, encoder.columns()).next().ok().flatten()?.content.into_object().ok();
        let part = first().map_or("", |row| encoder.trained_part(&row));
        let labels = if is_paired { "label" } else { "label after the first" };
        format!("and every {labels} is {IGNORED}: {part}")
    };
    Err(DataError::NothingTrained { files: files.to_vec(), rows, tokens, why })
}
