//! Dropout without a stored mask: the mask is a pure function of seed, op, sample, position and column.

use zeroth_base::philox4x32;
use zeroth_kernel::RowKey;

use super::check_len;
use super::isa::each_isa;
use super::pool::Pool;
use super::rows::check_rows;
use super::work_partition::Chunks;
use zeroth_base::halves;
use zeroth_kernel::Element;

/// Rows per task.
const ROWS: usize = 32;

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
        // An element is dropped when its 32 random bits are below this.
        let threshold = (f64::from(dropout.probability) * 4_294_967_296.0) as u64;
        let scale = 1.0 / (1.0 - dropout.probability);
        for ((y, x), key) in y.chunks_exact_mut(stride).zip(x.chunks_exact(stride)).zip(keys) {
            // The whole key is longer than a Philox counter: epoch, op and sample give the key of the row.
            let [low, high] = halves(key.sample);
            let row = philox4x32([key.epoch, dropout.op, low, high], halves(dropout.seed));
            for (quad, (y, x)) in y[..width].chunks_mut(4).zip(x[..width].chunks(4)).enumerate() {
                let bits = philox4x32([quad as u32, key.position, row[2], row[3]], [row[0], row[1]]);
                for ((y, x), bits) in y.iter_mut().zip(x).zip(bits) {
                    let kept = if u64::from(bits) < threshold { 0.0 } else { scale };
                    *y = T::from_f32(if kept == 0.0 { 0.0 } else { x.to_f32() * kept });
                }
            }
        }
    }
}

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
