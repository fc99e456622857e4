//! Next-token logits: the last row of each sequence, projected to the vocabulary.
//!
//! Only as many rows as there are sequences are projected, so that no [tokens, vocab] tensor exists here either. The
//! sums are those of the head's loss: in f32, and never rounded to the stored type.

use super::matmul::{self, View, matmul};
use super::pool::Pool;
use super::rows::stride as pitch;
use super::{check_len, check_scratch};
use zeroth_kernel::Element;
use zeroth_kernel::LogitsDims;

/// f32 elements of scratch that [`logits`] needs with a pool of `threads`.
pub fn logits_scratch(dims: LogitsDims, threads: usize) -> usize {
    let LogitsDims { sequences, hidden, vocab, .. } = dims;
    sequences * hidden + matmul::scratch(sequences, vocab, hidden, threads)
}

/// logits[sequences, vocab] = the last row of each sequence · wᵀ, in f32. `starts` says where each sequence begins and,
/// last, where the last one ends; a sequence that it lacks or that is empty gives zeros.
pub fn logits<T: Element>(
    pool: &Pool,
    dims: LogitsDims,
    starts: &[u32],
    x: &[T],
    w: &[T],
    logits: &mut [f32],
    scratch: &mut [f32],
) {
    let LogitsDims { rows, sequences, hidden, vocab } = dims;
    let pitch = pitch("x", x.len(), [rows, hidden]);
    check_len("w", w.len(), vocab * hidden);
    check_scratch(scratch.len(), logits_scratch(dims, pool.threads()));
    let (last, scratch) = scratch.split_at_mut(sequences * hidden);
    for sequence in 0..sequences {
        let to = &mut last[sequence * hidden..(sequence + 1) * hidden];
        match dims.last_row(starts, sequence) {
            Some(row) => {
                for (to, from) in to.iter_mut().zip(&x[row * pitch..][..hidden]) {
                    *to = from.to_f32();
                }
            }
            None => to.fill(0.0),
        }
    }
    let (last, w) = (View::rows(&*last, hidden), View::rows(w, hidden).transposed());
    matmul(pool, [sequences, vocab, hidden], last, w, logits, scratch, |_, sums, logits| {
        logits.copy_from_slice(sums);
    });
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::rows::apart::{apart, bits, pools, random};

    fn rows_apart_are_rows<T: Element>(pool: &Pool, dims: LogitsDims) {
        let case = format!("{}, {} threads, {}, {dims:?}", pool.isa(), pool.threads(), T::DTYPE);
        let LogitsDims { rows, sequences, hidden, vocab } = dims;
        let (x, w) = (random::<T>(1, rows * hidden), random::<T>(2, vocab * hidden));
        // The second sequence is empty, and the last one ends with the rows.
        let (third, all) = (rows as u32 / 3, rows as u32);
        let starts = [0, third, third, all];
        let [expected, found] = [x.clone(), apart(&x, hidden, f32::NAN)].map(|x| {
            let mut found = vec![f32::NAN; sequences * vocab];
            let mut scratch = vec![f32::NAN; logits_scratch(dims, pool.threads())];
            logits(pool, dims, &starts, &x, &w, &mut found, &mut scratch);
            bits(&found)
        });
        assert_eq!(found, expected, "{case}");
    }

    #[test]
    fn rows_may_be_further_apart_than_they_are_long() {
        for pool in pools() {
            for (rows, hidden) in [(1, 1), (50, 70), (40, 128)] {
                let dims = LogitsDims { rows, sequences: 3, hidden, vocab: 90 };
                rows_apart_are_rows::<f32>(&pool, dims);
                rows_apart_are_rows::<bf16>(&pool, dims);
                rows_apart_are_rows::<f16>(&pool, dims);
            }
        }
    }
}
