//! Rows of tokens gathered in the order of their experts, and expert rows added up for each token.
//!
//! Each is the gradient of the other, so that no gradient is scattered. Expert rows from `offsets[experts]` on belong to
//! padding tokens: they are neither read nor written.

use super::check_len;
use super::isa::each_isa;
use super::launch::cpu_kernel;
use super::pool::Pool;
use super::rows::check_rows;
use super::work_partition::Chunks;
use zeroth_kernel::{Element, ExpertRowsDims};

/// Rows per task.
const BLOCK: usize = 16;
/// Columns that are added at a time, in registers and L1.
const COLUMNS: usize = 256;

/// Expert rows that are routed: the last of `offsets`.
#[track_caller]
pub(super) fn routed_slots(offsets: &[i32], slots: usize) -> usize {
    let routed = offsets.last().map_or(0, |end| *end as usize);
    assert!(routed <= slots, "{routed} of {slots} slots are routed");
    routed
}

/// y[p] = x[order[p] / k] for every routed place p.
pub fn gather_rows<T: Element>(
    pool: &Pool,
    dims: ExpertRowsDims,
    order: &[i32],
    offsets: &[i32],
    x: &[T],
    y: &mut [T],
) {
    let ExpertRowsDims { rows, k, width, row_stride, .. } = dims;
    check_rows("x", x.len(), [rows, width], row_stride);
    check_rows("y", y.len(), [rows * k, width], row_stride);
    check_len("order", order.len(), rows * k);
    let routed = routed_slots(offsets, rows * k);
    pool.each(Chunks::new(&mut y[..routed * row_stride], BLOCK * row_stride), |block, y| {
        for (slot, y) in order[block * BLOCK..].iter().zip(y.chunks_exact_mut(row_stride)) {
            y[..width].copy_from_slice(&x[*slot as usize / k * row_stride..][..width]);
        }
    });
}

/// y[t] = the sum of x[places[t, j]] over j, in f32 in this order, rounded once. Places that are not routed add nothing.
pub fn combine_rows<T: Element>(
    pool: &Pool,
    dims: ExpertRowsDims,
    places: &[i32],
    offsets: &[i32],
    x: &[T],
    y: &mut [T],
) {
    let ExpertRowsDims { rows, k, width, row_stride, .. } = dims;
    check_rows("x", x.len(), [rows * k, width], row_stride);
    check_rows("y", y.len(), [rows, width], row_stride);
    check_len("places", places.len(), rows * k);
    let routed = routed_slots(offsets, rows * k);
    let x = &x[..routed * row_stride];
    pool.each(Chunks::new(y, BLOCK * row_stride), |block, y| {
        let places = places[block * BLOCK * k..].chunks_exact(k);
        for (places, y) in places.zip(y.chunks_exact_mut(row_stride)) {
            combine_row(pool.isa(), places, x, row_stride, &mut y[..width]);
        }
    });
}

each_isa! {
    fn combine_row<T>(places: &[i32], x: &[T], row_stride: usize, y: &mut [T]) {
        let routed = x.len() / row_stride;
        for (at, y) in y.chunks_mut(COLUMNS).enumerate() {
            let mut sums = [0.0f32; COLUMNS];
            for &place in places.iter().filter(|place| (**place as usize) < routed) {
                let row = &x[place as usize * row_stride + at * COLUMNS..][..y.len()];
                for (sum, x) in sums.iter_mut().zip(row) {
                    *sum += x.to_f32();
                }
            }
            for (y, sum) in y.iter_mut().zip(sums) {
                *y = T::from_f32(sum);
            }
        }
    }
}

cpu_kernel!(GatherRows { dims, order, offsets, x, y }, |_| 0, |cx| {
    gather_rows::<T>(cx.pool, dims, cx.read(order)?, cx.read(offsets)?, cx.read(x)?, cx.write(y)?);
});

cpu_kernel!(CombineRows { dims, places, offsets, x, y }, |_| 0, |cx| {
    combine_rows::<T>(cx.pool, dims, cx.read(places)?, cx.read(offsets)?, cx.read(x)?, cx.write(y)?);
});
