//! Dropout without a stored mask: the mask is a pure function of seed, op, sample, position and column.

use zeroth_base::{philox4x32, philox4x32_lanes};
use zeroth_kernel::RowKey;

use super::check_len;
use super::isa::each_isa;
use super::launch::cpu_kernel;
use super::pool::Pool;
use super::rows::check_rows;
use super::work_partition::Chunks;
use zeroth_base::halves;
use zeroth_kernel::Element;

/// Rows per task.
const ROWS: usize = 32;
/// Groups of four columns whose random numbers are computed together, in vector lanes.
const QUADS: usize = 16;

/// One dropout op of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// The probability that an element is zeroed; the others are divided by 1 - probability.
    pub probability: f32,
    /// The run's seed.
    pub seed: u64,
    /// The number of this op among the model's dropouts.
    pub op: u32,
}

/// y = x · mask / (1 - probability) for x and y [rows, width], whose rows are `stride` apart. Backward is the same function of dy.
pub fn dropout<T: Element>(
    pool: &Pool,
    dropout: Dropout,
    keys: &[RowKey],
    [width, stride]: [usize; 2],
    x: &[T],
    y: &mut [T],
) {
    check_rows("x", x.len(), [keys.len(), width], stride);
    check_len("y", y.len(), x.len());
    pool.each(Chunks::new(y, ROWS * stride), |task, y| {
        let x = &x[task * ROWS * stride..];
        drop_rows(pool.isa(), dropout, &keys[task * ROWS..], width, stride, x, y);
    });
}

each_isa! {
    fn drop_rows<T>(dropout: Dropout, keys: &[RowKey], width: usize, stride: usize, x: &[T], y: &mut [T]) {
        // An element is dropped when its 32 random bits are below this; with a threshold of 0, none is.
        let threshold = (f64::from(dropout.probability) * 4_294_967_296.0) as u64;
        let (drops, last) = (threshold > 0, threshold.saturating_sub(1) as u32);
        let scale = 1.0 / (1.0 - dropout.probability);
        for ((y, x), key) in y.chunks_exact_mut(stride).zip(x.chunks_exact(stride)).zip(keys) {
            // The whole key is longer than a Philox counter: epoch, op and sample give the key of the row.
            let [low, high] = halves(key.sample);
            let row = philox4x32([key.epoch, dropout.op, low, high], halves(dropout.seed));
            let blocks = y[..width].chunks_mut(4 * QUADS).zip(x[..width].chunks(4 * QUADS));
            for (block, (y, x)) in blocks.enumerate() {
                let quads = std::array::from_fn(|quad| (block * QUADS + quad) as u32);
                let counters = [quads, [key.position; QUADS], [row[2]; QUADS], [row[3]; QUADS]];
                let words = philox4x32_lanes(counters, [row[0], row[1]]);
                // The words of a counter belong to four neighbouring columns.
                let bits: [u32; 4 * QUADS] = std::array::from_fn(|column| words[column % 4][column / 4]);
                for ((y, x), bits) in y.iter_mut().zip(x).zip(bits) {
                    let kept = x.to_f32() * scale;
                    *y = T::from_f32(if drops && bits <= last { 0.0 } else { kept });
                }
            }
        }
    }
}

cpu_kernel!(Dropout { probability, seed, op, width, row_stride, keys, x, y }, |_| 0, |cx| {
    let (keys, sizes) = (cx.read(keys)?, [width, row_stride]);
    let masked = Dropout { probability, seed, op };
    dropout::<T>(cx.pool, masked, keys, sizes, cx.read(x)?, cx.write(y)?);
});

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::rows::apart::{APART, apart, bits, pools, random};

    fn strided_rows_match_contiguous_rows<T: Element>(pool: &Pool, rows: usize, width: usize) {
        let case =
            format!("{}, {} threads, {}, {rows} rows of {width}", pool.isa(), pool.threads(), T::DTYPE);
        let one = Dropout { probability: 0.4, seed: 5, op: 2 };
        let key = |row| RowKey { sample: u64::from(row) / 3, position: row % 3, epoch: 1 };
        let keys: Vec<_> = (0..rows as u32).map(key).collect();
        let x = random::<T>(1, rows * width);
        let mut y = x.clone();
        dropout(pool, one, &keys, [width, width], &x, &mut y);
        let mut found = vec![T::from_f32(-f32::NAN); rows * (width + APART)];
        let sizes = [width, width + APART];
        dropout(pool, one, &keys, sizes, &apart(&x, width, f32::NAN), &mut found);
        assert_eq!(bits(&found), bits(&apart(&y, width, -f32::NAN)), "{case}");
    }

    #[test]
    fn row_stride_changes_no_bits_and_padding_is_untouched() {
        for pool in pools() {
            for (rows, width) in [(1, 1), (77, 30), (32, 64), (0, 8)] {
                strided_rows_match_contiguous_rows::<f32>(&pool, rows, width);
                strided_rows_match_contiguous_rows::<bf16>(&pool, rows, width);
                strided_rows_match_contiguous_rows::<f16>(&pool, rows, width);
            }
        }
    }

    #[test]
    #[should_panic(expected = "`y` has 8 elements; the sizes given need 10")]
    fn both_operands_must_have_one_stride() {
        let one = Dropout { probability: 0.4, seed: 5, op: 2 };
        dropout(&Pool::new(1), one, &[RowKey::default(); 2], [4, 5], &[0.0f32; 10], &mut [0.0; 8]);
    }
}
