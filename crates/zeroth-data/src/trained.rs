//! Whether samples train anything, and why they do not.

use std::path::PathBuf;

use zeroth_base::counted;

use super::rows::Rows;
use super::{DataError, Encode, IGNORED, PrepareOptions, Samples, Totals};

/// Refuses samples that train nothing: training on them changes no weight, and evaluation gives a loss of 0. They were
/// prepared from these files, with this encoder and these options.
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
    let why = if longest == 1 {
        "and a row of one token has none before it to be predicted from".to_owned()
    } else if truncated > 0 {
        format!(
            "and what is trained of them is beyond the {} they were cut to: raise --max-length, or cut the other end with \
             --truncation-strategy",
            counted(options.max_length, "token")
        )
    } else {
        let first = || Rows::new(files).next().ok().flatten()?.content.into_object().ok();
        let part = first().map_or("", |row| encoder.trained_part(&row));
        format!("and every label after the first is {IGNORED}: {part}")
    };
    Err(DataError::NothingTrained { files: files.to_vec(), rows, tokens, why })
}
