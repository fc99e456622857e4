//! Padded rows have the bits of contiguous rows.

use half::{bf16, f16};

use super::*;
use crate::rows::apart::{bits, pools, random, spread};
use zeroth_kernel::AttentionDims;

fn nan<T: Element>(count: usize) -> Vec<T> {
    vec![T::from_f32(f32::NAN); count]
}

/// Outputs of attention and its gradient: out, dq, dk, dv and lse.
type Results<T> = ([Vec<T>; 4], Vec<f32>);

fn forward_and_backward<T: Element>(
    pool: &Pool,
    dims: &AttentionDims,
    starts: &[u32],
    [q, k, v, dout]: [&[T]; 4],
) -> Results<T> {
    let needed = [attention_scratch(dims, pool.threads()), attention_backward_scratch(dims, pool.threads())];
    let [mut scratch, mut back_scratch] = needed.map(|count| vec![f32::NAN; count]);
    let (mut out, mut lse) = (nan(q.len()), vec![f32::NAN; dims.heads * dims.rows]);
    attention(pool, dims, &ContextSlices::new(starts), q, k, v, &mut out, &mut lse, &mut scratch);
    let saved = AttentionSaved { q, k, v, out: &out, lse: &lse };
    let [mut dq, mut dk, mut dv] = [q, k, v].map(|of| nan(of.len()));
    let context = &ContextSlices::new(starts);
    attention_backward(pool, dims, context, saved, dout, &mut dq, &mut dk, &mut dv, None, &mut back_scratch);
    ([out, dq, dk, dv], lse)
}

fn check_padded_rows<T: Element>(pool: &Pool, dims: &AttentionDims, starts: &[u32]) {
    let (isa, threads) = (pool.isa(), pool.threads());
    let case = format!("{isa}, {threads} threads, {}, {dims:?}, {starts:?}", T::DTYPE);
    let (q_width, kv_width) = (dims.q_width(), dims.kv_width());
    // A different stride for each width, not a multiple of a cache line.
    let (q_stride, kv_stride) = (q_width + 8, kv_width + 5);
    let [q, dout] = [1, 2].map(|name| random::<T>(name, dims.rows * q_width));
    let [k, v] = [3, 4].map(|name| random::<T>(name, dims.rows * kv_width));
    let (contiguous, lse) = forward_and_backward(pool, dims, starts, [&q, &k, &v, &dout]);

    let [q, dout] = [q, dout].map(|values| spread(&values, [q_width, q_stride], f32::NAN));
    let [k, v] = [k, v].map(|values| spread(&values, [kv_width, kv_stride], f32::NAN));
    let dims = &AttentionDims { q_stride, kv_stride, ..*dims };
    let (padded, padded_lse) = forward_and_backward(pool, dims, starts, [&q, &k, &v, &dout]);
    assert_eq!(bits(&padded_lse), bits(&lse), "lse: {case}");
    let of_q = (q_width, q_stride);
    let of_kv = (kv_width, kv_stride);
    let outputs = ["out", "dq", "dk", "dv"].into_iter().zip([of_q, of_q, of_kv, of_kv]);
    for ((name, (width, row_stride)), (contiguous, padded)) in outputs.zip(contiguous.iter().zip(&padded)) {
        // The rows are equal, and the padding is unchanged.
        assert_eq!(bits(padded), bits(&spread(contiguous, [width, row_stride], f32::NAN)), "{name}: {case}");
        assert!(contiguous.iter().all(|value| value.to_f32().is_finite()), "{name}: {case}");
    }
}

#[test]
fn padded_rows_have_the_same_bits_and_padding_is_not_written() {
    let dims = |rows, heads, kv_heads, head_dim, window| {
        AttentionDims::new(rows, heads, kv_heads, head_dim, window, 0.3)
    };
    let cases: [(AttentionDims, &[u32]); 5] = [
        (dims(70, 4, 2, 24, None), &[0, 5, 44, 45, 63]),
        (dims(130, 2, 1, 64, Some(40)), &[0, 101, 130]),
        (dims(290, 2, 2, 32, None), &[3, 290]),
        (dims(3, 2, 1, 8, None), &[]),
        (dims(0, 2, 1, 8, None), &[0]),
    ];
    for (dims, starts) in &cases {
        for pool in pools() {
            check_padded_rows::<f32>(&pool, dims, starts);
            check_padded_rows::<bf16>(&pool, dims, starts);
            check_padded_rows::<f16>(&pool, dims, starts);
        }
    }
}

/// Attention over three rows, two heads of dimension 4 and one kv head, without padding.
fn with_lengths(q: usize, k: usize, v: usize, out: usize) {
    let dims = AttentionDims::new(3, 2, 1, 4, None, 1.0);
    let [q, k, v, mut out] = [q, k, v, out].map(|count| vec![0.0f32; count]);
    let mut scratch = vec![0.0; attention_scratch(&dims, 1)];
    attention(
        &Pool::new(1),
        &dims,
        &ContextSlices::new(&[0, 3]),
        &q,
        &k,
        &v,
        &mut out,
        &mut [0.0; 6],
        &mut scratch,
    );
}

#[test]
#[should_panic(expected = "`q` has 21 elements; 3 rows that are 8 apart need 24")]
fn a_short_q_is_refused() {
    with_lengths(21, 12, 12, 24);
}

#[test]
#[should_panic(expected = "`v` has 15 elements; the sizes given need 12")]
fn v_has_the_row_stride_of_k() {
    with_lengths(24, 12, 15, 24);
}

#[test]
#[should_panic(expected = "`q` has 27 elements; 3 rows that are 8 apart need 24")]
fn a_long_q_is_refused_even_if_it_has_another_whole_stride() {
    with_lengths(27, 12, 12, 27);
}
