//! Dropout whose mask is never stored: each element's fate is a pure function of what it belongs to.

use zeroth_base::philox4x32;

use super::check_len;
use super::cut::Chunks;
use super::element::Element;
use super::path::each_path;
use super::pool::Pool;
use super::random::halves;

/// Rows that one task covers.
const ROWS: usize = 32;

/// One use of dropout.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// The chance that an element becomes 0; what stays is divided by 1 - this.
    pub probability: f32,
    /// The run's seed.
    pub seed: u64,
    /// Which dropout of the model this is.
    pub op: u32,
}

/// The token that a row holds.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct RowKey {
    /// The sample in the data.
    pub sample: u64,
    /// The token's place in the sample.
    pub position: u32,
    /// The pass over the data.
    pub epoch: u32,
}

/// y = x · mask / (1 - probability), for x [rows, width]. Backward is the same function of dy.
pub fn dropout<T: Element>(
    pool: &Pool,
    dropout: Dropout,
    keys: &[RowKey],
    width: usize,
    x: &[T],
    y: &mut [T],
) {
    check_len("x", x.len(), keys.len() * width);
    check_len("y", y.len(), keys.len() * width);
    pool.each(Chunks::new(y, ROWS * width), |task, y| {
        let x = &x[task * ROWS * width..];
        drop_rows(pool.path(), dropout, &keys[task * ROWS..], width, x, y);
    });
}

each_path! {
    fn drop_rows<T>(dropout: Dropout, keys: &[RowKey], width: usize, x: &[T], y: &mut [T]) {
        // An element is dropped when its 32 random bits are below this.
        let threshold = (f64::from(dropout.probability) * 4_294_967_296.0) as u64;
        let scale = 1.0 / (1.0 - dropout.probability);
        for ((y, x), key) in y.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(keys) {
            // The whole key is longer than a counter: epoch, op and sample give the key of the row first.
            let [low, high] = halves(key.sample);
            let row = philox4x32([key.epoch, dropout.op, low, high], halves(dropout.seed));
            for (quad, (y, x)) in y.chunks_mut(4).zip(x.chunks(4)).enumerate() {
                let bits = philox4x32([quad as u32, key.position, row[2], row[3]], [row[0], row[1]]);
                for ((y, x), bits) in y.iter_mut().zip(x).zip(bits) {
                    let kept = if u64::from(bits) < threshold { 0.0 } else { scale };
                    *y = T::from_f32(if kept == 0.0 { 0.0 } else { x.to_f32() * kept });
                }
            }
        }
    }
}
