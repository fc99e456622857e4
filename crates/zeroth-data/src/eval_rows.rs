//! Evaluation rows for generation: each is split at its last trained span into a prompt and the expected answer.

use std::num::NonZeroU64;
use std::ops::ControlFlow;
use std::path::PathBuf;

use super::find_files::check;
use super::pipeline::{BlockSizes, each_row};
use super::{DataError, Encode, IGNORED, RowLocation, RowProblem};

/// A prompt and its expected answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EvalRow {
    /// The file and row it comes from.
    pub place: RowLocation,
    /// Tokens before the answer, including earlier turns; the source of a pair.
    pub prompt: Vec<i32>,
    /// Tokens that were truncated from the source of a pair.
    pub truncated: usize,
    /// Tokens of the answer, including its end token; the trained labels of a pair.
    pub expected: Vec<i32>,
}

/// Reads all rows, or the first `max_samples`, in any training format.
///
/// The answer is the last trained span: an answer, a completion, or the last assistant turn. Stops at the first invalid
/// row, like training; rows without a prompt or answer are invalid.
pub fn eval_rows(
    files: &[PathBuf],
    encoder: &dyn Encode,
    max_samples: Option<NonZeroU64>,
) -> Result<Vec<EvalRow>, DataError> {
    check(files)?;
    let mut rows = Vec::new();
    let sizes = BlockSizes::for_samples(max_samples.map(u64::from));
    let is_paired = encoder.pairs().is_some();
    each_row(files, encoder, sizes, None, &|_, _| (), |outcome| {
        let split = outcome.row.and_then(|(ids, labels)| {
            if is_paired {
                return Ok((ids.to_vec(), targets(labels)?));
            }
            split(ids, labels).map(|(prompt, expected)| (prompt.to_vec(), expected.to_vec()))
        });
        let (prompt, expected) = split.map_err(|problem| DataError::Row {
            path: files[outcome.file].clone(),
            at: outcome.at,
            problem,
        })?;
        let (place, [truncated, _]) = (RowLocation { file: outcome.file, at: outcome.at }, outcome.cut);
        rows.push(EvalRow { place, prompt, truncated, expected });
        let enough = max_samples.is_some_and(|most| rows.len() as u64 >= most.get());
        Ok(if enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    Ok(rows)
}

/// The trained labels of a pair.
fn targets(labels: &[i32]) -> Result<Vec<i32>, RowProblem> {
    let trained: Vec<i32> = labels.iter().copied().filter(|label| *label != IGNORED).collect();
    if trained.is_empty() { Err(RowProblem::NoAnswer) } else { Ok(trained) }
}

/// The tokens before the last trained span, and the labels of that span.
fn split<'a>(ids: &'a [i32], labels: &'a [i32]) -> Result<(&'a [i32], &'a [i32]), RowProblem> {
    let is_trained = |label: &i32| *label != IGNORED;
    let end = labels.iter().rposition(is_trained).ok_or(RowProblem::NoAnswer)? + 1;
    let begin = labels[..end].iter().rposition(|label| !is_trained(label)).ok_or(RowProblem::NoPrompt)? + 1;
    Ok((&ids[..begin], &labels[begin..end]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_is_the_last_trained_span() {
        let ids = [1, 2, 3, 4, 5, 6, 7];
        let whole = split(&ids, &[-100, -100, -100, 4, 5, 6, 7]);
        assert_eq!(whole, Ok((&[1, 2, 3][..], &[4, 5, 6, 7][..])));
        // Earlier turns are part of the prompt, and tokens after the turn's end are omitted.
        let turns = split(&ids, &[-100, 2, 3, -100, 5, 6, -100]);
        assert_eq!(turns, Ok((&[1, 2, 3, 4][..], &[5, 6][..])));
        assert_eq!(split(&ids, &[-100; 7]), Err(RowProblem::NoAnswer));
        assert_eq!(split(&ids, &[1, 2, 3, 4, 5, 6, -100]), Err(RowProblem::NoPrompt));
    }
}
