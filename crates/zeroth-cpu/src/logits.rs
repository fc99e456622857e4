//! Next-token logits: the last row of each sequence, projected to the vocabulary.
//!
//! Only one row per sequence is projected, so no [tokens, vocab] tensor exists. Logits are the f32 sums of the head loss, never
//! rounded to the storage type.

use super::gemm::{self, MatrixView, gemm_with};
use super::launch::{cpu_kernel, floats};
use super::pool::Pool;
use super::rows::check_rows;
use super::{check_len, check_scratch};
use zeroth_kernel::Element;
use zeroth_kernel::LogitsDims;

/// f32 elements of scratch that [`logits`] needs with a pool of `threads`.
pub fn logits_scratch(dims: LogitsDims, threads: usize) -> usize {
    let LogitsDims { sequences, hidden, vocab, .. } = dims;
    sequences * hidden + gemm::scratch(sequences, vocab, hidden, threads)
}

/// logits[sequences, vocab] = the last row of each sequence · wᵀ, in f32. `starts` holds the first row of each sequence and,
/// last, the end of the last one. A missing or empty sequence gives zeros.
pub fn logits<T: Element>(
    pool: &Pool,
    dims: LogitsDims,
    starts: &[u32],
    x: &[T],
    w: &[T],
    logits: &mut [f32],
    scratch: &mut [f32],
) {
    let LogitsDims { rows, sequences, hidden, vocab, .. } = dims;
    let row_stride = dims.row_stride;
    check_rows("x", x.len(), [rows, hidden], row_stride);
    check_len("w", w.len(), vocab * hidden);
    check_scratch(scratch.len(), logits_scratch(dims, pool.threads()));
    let (last, scratch) = scratch.split_at_mut(sequences * hidden);
    for sequence in 0..sequences {
        let to = &mut last[sequence * hidden..(sequence + 1) * hidden];
        match dims.last_row(starts, sequence) {
            Some(row) => {
                for (to, from) in to.iter_mut().zip(&x[row * row_stride..][..hidden]) {
                    *to = from.to_f32();
                }
            }
            None => to.fill(0.0),
        }
    }
    let (last, w) = (MatrixView::row_major(&*last, hidden), MatrixView::row_major(w, hidden).transposed());
    gemm_with(pool, [sequences, vocab, hidden], last, w, logits, scratch, |_, sums, logits| {
        logits.copy_from_slice(sums);
    });
}

cpu_kernel!(Logits { dims, starts, x, w, logits }, |threads| floats(logits_scratch(dims, threads)), |cx| {
    let (starts, x, w) = (cx.starts(starts)?, cx.read::<T>(x)?, cx.read(w)?);
    self::logits(cx.pool, dims, starts, x, w, cx.write(logits)?, cx.scratch()?);
});

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::rows::apart::{APART, apart, bits, pools, random};

    fn check_padded_rows<T: Element>(pool: &Pool, dims: LogitsDims) {
        let case = format!("{}, {} threads, {}, {dims:?}", pool.isa(), pool.threads(), T::DTYPE);
        let LogitsDims { rows, sequences, hidden, vocab, .. } = dims;
        let (x, w) = (random::<T>(1, rows * hidden), random::<T>(2, vocab * hidden));
        // The second sequence is empty, and the last one ends with the rows.
        let (third, all) = (rows as u32 / 3, rows as u32);
        let starts = [0, third, third, all];
        let padded = LogitsDims { row_stride: hidden + APART, ..dims };
        let both = [(dims, x.clone()), (padded, apart(&x, hidden, f32::NAN))];
        let [expected, found] = both.map(|(dims, x)| {
            let mut found = vec![f32::NAN; sequences * vocab];
            let mut scratch = vec![f32::NAN; logits_scratch(dims, pool.threads())];
            logits(pool, dims, &starts, &x, &w, &mut found, &mut scratch);
            bits(&found)
        });
        assert_eq!(found, expected, "{case}");
    }

    #[test]
    fn padded_rows_have_the_bits_of_contiguous_rows() {
        for pool in pools() {
            for (rows, hidden) in [(1, 1), (50, 70), (40, 128)] {
                let dims = LogitsDims::new(rows, 3, hidden, 90);
                check_padded_rows::<f32>(&pool, dims);
                check_padded_rows::<bf16>(&pool, dims);
                check_padded_rows::<f16>(&pool, dims);
            }
        }
    }
}
