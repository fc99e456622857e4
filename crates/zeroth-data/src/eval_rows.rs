//! Rows to answer: each is split where its last trained part begins, into a prompt and the expected answer.

use std::num::NonZeroU64;
use std::ops::ControlFlow;
use std::path::PathBuf;

use super::lines::check;
use super::pipeline::{Cuts, each_row};
use super::{DataError, Encode, IGNORED, RowPlace, RowProblem};

/// A row that a model is to answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EvalRow {
    /// Where it is.
    pub place: RowPlace,
    /// Tokens before the answer, earlier turns included.
    pub prompt: Vec<i32>,
    /// Tokens of the answer, the one that ends it included.
    pub expected: Vec<i32>,
}

/// Reads rows of any format that training takes, all of them or the first `max_samples`.
///
/// The answer is the last trained part of a row: the answer, the completion, or the last turn of an assistant. Like
/// training, it stops at the first row that is wrong; a row without a prompt or an answer is.
pub fn eval_rows(
    files: &[PathBuf],
    encoder: &dyn Encode,
    max_samples: Option<NonZeroU64>,
) -> Result<Vec<EvalRow>, DataError> {
    check(files)?;
    let mut rows = Vec::new();
    let cuts = Cuts::for_samples(max_samples.map(u64::from));
    each_row(files, encoder, cuts, &|_, _| (), |outcome| {
        let split = outcome.row.and_then(|(ids, labels)| split(ids, labels));
        let (prompt, expected) = split.map_err(|problem| DataError::Row {
            path: files[outcome.file].clone(),
            at: outcome.at,
            problem,
        })?;
        rows.push(EvalRow {
            place: RowPlace { file: outcome.file, at: outcome.at },
            prompt: prompt.to_vec(),
            expected: expected.to_vec(),
        });
        let enough = max_samples.is_some_and(|most| rows.len() as u64 >= most.get());
        Ok(if enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    Ok(rows)
}

/// The tokens before the last trained part, and the labels of that part.
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
    fn the_answer_is_the_last_trained_part() {
        let ids = [1, 2, 3, 4, 5, 6, 7];
        let whole = split(&ids, &[-100, -100, -100, 4, 5, 6, 7]);
        assert_eq!(whole, Ok((&[1, 2, 3][..], &[4, 5, 6, 7][..])));
        // An earlier turn is part of the prompt, and what follows the end of a turn is left out.
        let turns = split(&ids, &[-100, 2, 3, -100, 5, 6, -100]);
        assert_eq!(turns, Ok((&[1, 2, 3, 4][..], &[5, 6][..])));
        assert_eq!(split(&ids, &[-100; 7]), Err(RowProblem::NoAnswer));
        assert_eq!(split(&ids, &[1, 2, 3, 4, 5, 6, -100]), Err(RowProblem::NoPrompt));
    }
}
