//! Attention over cached keys and values, for decoding: each row is one query and attends to the cached rows of its sequence.
//!
//! A task is one row and one kv head. The q heads that share it are the rows of its matmuls, so that a tile of keys is packed
//! once for all of them. Tiles, softmax and order of sums are those of the portable forward: where that one runs (every dtype
//! but bf16 with AMX), a token has the bits of a forward over its whole sequence.

use zeroth_kernel::{AttentionDims, CacheRange, Element, StoreRowsDims};

use super::blocking::KEYS;
use super::context::{HeadContext, Sequence, bias_of_head, check_heads};
use super::portable::online_softmax;
use super::tasks::{ScoreTile, aligned_tiles, head_view, scale_and_round};
use crate::gemm::{MatrixView, gemm_serial, pack_len};
use crate::pool::Pool;
use crate::work_partition::Grid;
use crate::{check_len, check_scratch, math, rows};

/// f32 elements of scratch that [`cached_attention`] needs with a pool of `threads`: for each q head of a group the scores of a
/// tile, the accumulators, a running maximum and a running sum; and packed keys or values.
pub fn cached_attention_scratch(dims: &AttentionDims, threads: usize) -> usize {
    let pack = pack_len(KEYS, dims.head_dim).max(pack_len(dims.head_dim, KEYS));
    threads * (dims.group() * (KEYS + dims.head_dim + 2) + pack)
}

/// Copies row i of `x` to row `ranges[i].end - 1` of `cache`; rows with an empty range are not copied.
///
/// # Panics
/// When a range ends beyond the cache.
pub fn store_rows<T: Element>(dims: StoreRowsDims, ranges: &[CacheRange], x: &[T], cache: &mut [T]) {
    let StoreRowsDims { rows, width, cached, .. } = dims;
    check_len("ranges", ranges.len(), rows);
    let row_stride = dims.row_stride;
    rows::check_rows("x", x.len(), [rows, width], row_stride);
    check_len("cache", cache.len(), cached * row_stride);
    for (range, x) in ranges.iter().zip(x.chunks(row_stride.max(1))) {
        if range.first < range.end {
            cache[(range.end as usize - 1) * row_stride..][..width].copy_from_slice(&x[..width]);
        }
    }
}

/// out = softmax(scale · q · kᵀ + bias) · v of each row over the cached rows of its range, limited to the sliding window. `k` and
/// `v` hold `cached` rows. The query of a row has the position of the last key of its range. An empty range gives zeros.
///
/// # Panics
/// When a range ends beyond the cache.
pub fn cached_attention<T: Element>(
    pool: &Pool,
    dims: &AttentionDims,
    cached: usize,
    ranges: &[CacheRange],
    bias: Option<&[f32]>,
    q: &[T],
    [k, v]: [&[T]; 2],
    out: &mut [T],
    scratch: &mut [f32],
) {
    check_heads(dims, bias);
    check_len("ranges", ranges.len(), dims.rows);
    let AttentionDims { q_stride, kv_stride, .. } = *dims;
    rows::check_rows("q", q.len(), [dims.rows, dims.q_width()], q_stride);
    rows::check_rows("k", k.len(), [cached, dims.kv_width()], kv_stride);
    check_len("v", v.len(), k.len());
    check_len("out", out.len(), q.len());
    check_scratch(scratch.len(), cached_attention_scratch(dims, pool.threads()));
    let (isa, head_dim, group) = (pool.isa(), dims.head_dim, dims.group());
    let fma = math::has_fma(isa);
    let parts = Grid::with_row_stride(out, [dims.q_width(), q_stride], 1, group * head_dim);
    pool.each_with(parts, scratch, |task, mut out, scratch| {
        let (row, kv_head, out) = (task / dims.kv_heads, task % dims.kv_heads, out.row(0));
        let [first, end] = [ranges[row].first as usize, ranges[row].end as usize];
        if first >= end {
            out.fill(T::default());
            return;
        }
        assert!(end <= cached, "row {row} attends to cached rows {first} to {end}, and there are {cached}");
        let (scores, scratch) = scratch.split_at_mut(group * KEYS);
        let (sums, scratch) = scratch.split_at_mut(group * head_dim);
        let (running_max, scratch) = scratch.split_at_mut(group);
        let (running_sum, pack) = scratch.split_at_mut(group);
        sums.fill(0.0);
        running_max.fill(f32::NEG_INFINITY);
        running_sum.fill(0.0);
        let (query, sequence) = (end - 1, Sequence { queries: first..end, keys: first..end });
        // [group, head_dim]
        let q = MatrixView::row_major(&q[row * q_stride + kv_head * group * head_dim..], head_dim);
        let first_key = first + dims.visible_keys(query - first, end - first).start;
        for keys in aligned_tiles(first, first_key..end, KEYS) {
            let shape = [group, keys.len(), head_dim];
            let tile_k = head_view(dims, k, kv_stride, keys.start, kv_head).transposed();
            gemm_serial(isa, shape, q, tile_k, scores, KEYS, false, pack);
            let tile = ScoreTile { sequence: &sequence, queries: query..end, keys: keys.clone() };
            for head in 0..group {
                let bias = bias.map(|bias| bias_of_head(dims, bias, kv_head * group + head));
                online_softmax(
                    isa,
                    fma,
                    dims,
                    &tile,
                    HeadContext { bias, dropout: None },
                    &mut scores[head * KEYS..],
                    &mut running_max[head..],
                    &mut running_sum[head..],
                    &mut sums[head * head_dim..],
                );
            }
            let weights = MatrixView::row_major(&*scores, KEYS);
            let tile_v = head_view(dims, v, kv_stride, keys.start, kv_head);
            let shape = [group, head_dim, keys.len()];
            gemm_serial(isa, shape, weights, tile_v, sums, head_dim, true, pack);
        }
        for (head, out) in out.chunks_exact_mut(head_dim.max(1)).enumerate() {
            scale_and_round(isa, &sums[head * head_dim..][..head_dim], 1.0 / running_sum[head], out);
        }
    });
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use zeroth_kernel::{Deviation, Element};

    use super::super::{ContextSlices, attention, attention_scratch};
    use super::*;
    use crate::reference;
    use crate::rows::apart::{bits, pools, random, spread};

    fn wide<T: Element>(values: &[T]) -> Vec<f64> {
        values.iter().map(|value| f64::from(value.to_f32())).collect()
    }

    fn attend<T: Element>(
        pool: &Pool,
        dims: &AttentionDims,
        cached: usize,
        ranges: &[CacheRange],
        q: &[T],
        kv: [&[T]; 2],
    ) -> Vec<T> {
        let mut out = vec![T::from_f32(f32::NAN); q.len()];
        let mut scratch = vec![f32::NAN; cached_attention_scratch(dims, pool.threads())];
        cached_attention(pool, dims, cached, ranges, None, q, kv, &mut out, &mut scratch);
        out
    }

    fn check<T: Element>(pool: &Pool, dims: &AttentionDims, bound: f64) {
        let case = format!("{}, {} threads, {}, {dims:?}", pool.isa(), pool.threads(), T::DTYPE);
        // Sequences of 1 key, of a tile, of several, and padding.
        let ranges = [(0, 1), (1, 65), (70, 300), (0, 0), (300, 431), (431, 440)]
            .map(|(first, end)| CacheRange { first, end });
        let cached = 440;
        let [q_width, kv_width] = [dims.q_width(), dims.kv_width()];
        let q = random::<T>(1, dims.rows * q_width);
        let [k, v] = [2, 3].map(|name| random::<T>(name, cached * kv_width));
        let found = attend(pool, dims, cached, &ranges, &q, [&k, &v]);
        let expected = reference::cached_attention(dims, &ranges, None, &wide(&q), &wide(&k), &wide(&v));
        let deviation = Deviation::of(&wide(&found), &expected);
        assert!(deviation.is_within(Deviation { l2: bound, max: 25.0 * bound }), "{case}: {deviation:?}");
        let zeros = &found[3 * q_width..4 * q_width];
        assert!(zeros.iter().all(|value| value.to_f32() == 0.0), "{case}");
        // Padded rows have the bits of contiguous rows, and the padding of `out` is not written.
        let q = spread(&q, [q_width, q_width + 8], f32::NAN);
        let [k, v] = [k, v].map(|values| spread(&values, [kv_width, kv_width + 5], f32::NAN));
        let dims = &AttentionDims { q_stride: q_width + 8, kv_stride: kv_width + 5, ..*dims };
        let padded = attend(pool, dims, cached, &ranges, &q, [&k, &v]);
        assert_eq!(bits(&padded), bits(&spread(&found, [q_width, q_width + 8], f32::NAN)), "{case}");
    }

    #[test]
    fn cached_attention_matches_its_reference() {
        for (heads, kv_heads, head_dim, window) in
            [(4, 2, 24, None), (3, 3, 8, Some(40)), (6, 1, 64, None), (2, 2, 33, Some(1))]
        {
            let dims = AttentionDims::new(6, heads, kv_heads, head_dim, window, 0.3);
            for pool in pools() {
                check::<f32>(&pool, &dims, 2e-6);
                check::<bf16>(&pool, &dims, 3.5e-3);
                check::<f16>(&pool, &dims, 4e-4);
            }
        }
    }

    /// Every row of packed sequences, as if it were the newest token of its sequence.
    fn check_bits<T: Element>(pool: &Pool, window: Option<usize>) {
        let dims = AttentionDims::new(300, 4, 2, 24, window, 0.3);
        let starts = [0u32, 7, 290];
        let q = random::<T>(1, 300 * 96);
        let [k, v] = [2, 3].map(|name| random::<T>(name, 300 * 48));
        let (mut expected, mut lse) = (vec![T::default(); q.len()], vec![0.0; 4 * 300]);
        let mut scratch = vec![0.0; attention_scratch(&dims, pool.threads())];
        attention(
            pool,
            &dims,
            &ContextSlices::new(&starts),
            &q,
            &k,
            &v,
            &mut expected,
            &mut lse,
            &mut scratch,
        );
        let range = |row: u32| match starts.iter().rev().find(|start| **start <= row) {
            Some(first) if row < 290 => CacheRange { first: *first, end: row + 1 },
            _ => CacheRange::default(),
        };
        let ranges: Vec<CacheRange> = (0..300).map(range).collect();
        let found = attend(pool, &dims, 300, &ranges, &q, [&k, &v]);
        assert_eq!(bits(&found), bits(&expected), "{}, {}, {window:?}", pool.isa(), T::DTYPE);
    }

    #[test]
    fn a_token_has_the_bits_of_a_forward_over_its_sequence() {
        for pool in pools() {
            for window in [None, Some(100)] {
                check_bits::<f32>(&pool, window);
                check_bits::<f16>(&pool, window);
            }
        }
    }

    #[test]
    fn rows_are_stored_at_the_ends_of_their_ranges() {
        let dims = StoreRowsDims { row_stride: 3, ..StoreRowsDims::new(3, 2, 4) };
        let ranges = [(0, 3), (0, 0), (3, 4)].map(|(first, end)| CacheRange { first, end });
        let x = [1.0f32, 2.0, -1.0, 3.0, 4.0, -1.0, 5.0, 6.0, -1.0];
        let mut cache = [0.0f32; 12];
        store_rows(dims, &ranges, &x, &mut cache);
        assert_eq!(cache, [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 0.0, 5.0, 6.0, 0.0]);
    }

    #[test]
    #[should_panic(expected = "row 0 attends to cached rows 0 to 3, and there are 2")]
    fn a_range_beyond_the_cache_panics() {
        let dims = AttentionDims::new(1, 1, 1, 2, None, 1.0);
        attend(&Pool::new(1), &dims, 2, &[CacheRange { first: 0, end: 3 }], &[0.0f32; 2], [&[0.0; 4]; 2]);
    }
}
