//! The gradient of attention: scores are computed again tile by tile from q, k and the saved lse.
//!
//! Two passes, so that no two tasks add to one place: dq by tiles of queries, then dk and dv by tiles of keys, where the
//! heads that share a key head are added in order.

use std::ops::Range;

use super::attention::{AttentionDims, KEYS, QUERIES, TileAt, pieces, tiles};
use super::cut::Grid;
use super::element::Element;
use super::matmul::{View, block, pack_len};
use super::path::each_path;
use super::pool::Pool;
use super::{check_len, check_scratch, math};

/// What forward read and wrote, and backward reads again.
#[derive(Clone, Copy)]
pub struct AttentionSaved<'a, T> {
    /// [rows, heads · head_dim].
    pub q: &'a [T],
    /// [rows, kv_heads · head_dim].
    pub k: &'a [T],
    /// [rows, kv_heads · head_dim].
    pub v: &'a [T],
    /// [rows, heads · head_dim].
    pub out: &'a [T],
    /// [heads, rows].
    pub lse: &'a [f32],
}

const fn max(a: usize, b: usize) -> usize {
    if a > b { a } else { b }
}

const fn thread_scratch(dims: &AttentionDims) -> usize {
    let head = dims.head_dim;
    let pack = max(pack_len(KEYS, head), max(pack_len(head, KEYS), pack_len(head, QUERIES)));
    2 * QUERIES * KEYS + 2 * max(KEYS, QUERIES) * head + pack
}

/// f32 elements of scratch that [`attention_backward`] needs with a pool of `threads`.
pub const fn attention_backward_scratch(dims: &AttentionDims, threads: usize) -> usize {
    dims.heads * dims.rows + thread_scratch(dims) * threads
}

/// Writes dq, dk and dv from dout. Rows of padding get zeros.
pub fn attention_backward<T: Element>(
    pool: &Pool,
    dims: &AttentionDims,
    starts: &[u32],
    saved: AttentionSaved<T>,
    dout: &[T],
    dq: &mut [T],
    dk: &mut [T],
    dv: &mut [T],
    scratch: &mut [f32],
) {
    let (rows, head_dim, q_width, kv_width) = (dims.rows, dims.head_dim, dims.q_width(), dims.kv_width());
    dims.check(starts);
    check_len("q", saved.q.len(), rows * q_width);
    check_len("k", saved.k.len(), rows * kv_width);
    check_len("v", saved.v.len(), rows * kv_width);
    check_len("out", saved.out.len(), rows * q_width);
    check_len("lse", saved.lse.len(), dims.heads * rows);
    check_len("dout", dout.len(), rows * q_width);
    check_len("dq", dq.len(), rows * q_width);
    check_len("dk", dk.len(), rows * kv_width);
    check_len("dv", dv.len(), rows * kv_width);
    check_scratch(scratch.len(), attention_backward_scratch(dims, pool.threads()));
    let (delta, scratch) = scratch.split_at_mut(dims.heads * rows);
    pool.each(Grid::new(delta, rows, 1, QUERIES), |_, mut delta| {
        let (head, first) = (delta.first_row(), delta.first_column());
        for (row, delta) in delta.row(0).iter_mut().enumerate() {
            let place = (first + row) * q_width + head * head_dim;
            let (out, dout) = (&saved.out[place..][..head_dim], &dout[place..][..head_dim]);
            *delta = math::sum(head_dim, |i| out[i].to_f32() * dout[i].to_f32());
        }
    });
    let job = Job { pool, dims, saved, dout, delta };
    pool.each_with(Grid::new(dq, q_width, QUERIES, head_dim), scratch, |task, mut dq, scratch| {
        let head = task % dims.heads;
        let (weights, scratch) = scratch.split_at_mut(QUERIES * KEYS);
        let (grads, scratch) = scratch.split_at_mut(QUERIES * KEYS);
        let (sums, pack) = scratch.split_at_mut(QUERIES * head_dim);
        sums.fill(0.0);
        let first = dq.first_row();
        for (sequence, queries) in pieces(starts, first..first + dq.rows()) {
            let seen = dims.first_key(sequence.start, queries.start)..queries.end;
            for keys in tiles(sequence.start, seen, KEYS) {
                job.tile(head, sequence.start, &queries, &keys, weights, grads, pack);
                let sums = &mut sums[(queries.start - first) * head_dim..];
                let k = dims.view(saved.k, kv_width, keys.start, head / dims.group());
                let grads = View::rows(&*grads, KEYS);
                block(
                    pool.path(),
                    [queries.len(), head_dim, keys.len()],
                    grads,
                    k,
                    sums,
                    head_dim,
                    true,
                    pack,
                );
            }
        }
        for (row, sums) in sums.chunks_exact(head_dim).take(dq.rows()).enumerate() {
            round(sums, dq.row(row));
        }
    });
    let parts = (Grid::new(dk, kv_width, KEYS, head_dim), Grid::new(dv, kv_width, KEYS, head_dim));
    pool.each_with(parts, scratch, |task, (mut dk, mut dv), scratch| {
        let kv_head = task % dims.kv_heads;
        let (weights, scratch) = scratch.split_at_mut(QUERIES * KEYS);
        let (grads, scratch) = scratch.split_at_mut(QUERIES * KEYS);
        let (k_sums, scratch) = scratch.split_at_mut(KEYS * head_dim);
        let (v_sums, pack) = scratch.split_at_mut(KEYS * head_dim);
        k_sums.fill(0.0);
        v_sums.fill(0.0);
        let first = dk.first_row();
        for (sequence, keys) in pieces(starts, first..first + dk.rows()) {
            let place = (keys.start - first) * head_dim;
            let last = dims
                .window
                .map_or(sequence.end, |window| sequence.end.min((keys.end - 1).saturating_add(window)));
            for head in kv_head * dims.group()..(kv_head + 1) * dims.group() {
                for queries in tiles(sequence.start, keys.start..last, QUERIES) {
                    job.tile(head, sequence.start, &queries, &keys, weights, grads, pack);
                    let shape = [keys.len(), head_dim, queries.len()];
                    let q = dims.view(saved.q, q_width, queries.start, head);
                    let grads = View::rows(&*grads, KEYS).transposed();
                    block(pool.path(), shape, grads, q, &mut k_sums[place..], head_dim, true, pack);
                    let dout = dims.view(dout, q_width, queries.start, head);
                    let weights = View::rows(&*weights, KEYS).transposed();
                    block(pool.path(), shape, weights, dout, &mut v_sums[place..], head_dim, true, pack);
                }
            }
        }
        let sums = k_sums.chunks_exact(head_dim).zip(v_sums.chunks_exact(head_dim));
        for (row, (k_sums, v_sums)) in sums.take(dk.rows()).enumerate() {
            round(k_sums, dk.row(row));
            round(v_sums, dv.row(row));
        }
    });
}

fn round<T: Element>(sums: &[f32], out: &mut [T]) {
    for (out, &sum) in out.iter_mut().zip(sums) {
        *out = T::from_f32(sum);
    }
}

/// What every tile of a call reads.
struct Job<'a, T> {
    pool: &'a Pool,
    dims: &'a AttentionDims,
    saved: AttentionSaved<'a, T>,
    dout: &'a [T],
    delta: &'a [f32],
}

impl<T: Element> Job<'_, T> {
    /// The softmax weights of a tile, and the gradients of its raw scores. Keys that a query does not see get zeros.
    fn tile(
        &self,
        head: usize,
        sequence: usize,
        queries: &Range<usize>,
        keys: &Range<usize>,
        weights: &mut [f32],
        grads: &mut [f32],
        pack: &mut [f32],
    ) {
        let (dims, path) = (self.dims, self.pool.path());
        let kv_head = head / dims.group();
        let shape = [queries.len(), keys.len(), dims.head_dim];
        let q = dims.view(self.saved.q, dims.q_width(), queries.start, head);
        let k = dims.view(self.saved.k, dims.kv_width(), keys.start, kv_head).transposed();
        block(path, shape, q, k, weights, KEYS, false, pack);
        let dout = dims.view(self.dout, dims.q_width(), queries.start, head);
        let v = dims.view(self.saved.v, dims.kv_width(), keys.start, kv_head).transposed();
        block(path, shape, dout, v, grads, KEYS, false, pack);
        let rows = head * dims.rows + queries.start..head * dims.rows + queries.end;
        let (lse, delta) = (&self.saved.lse[rows.clone()], &self.delta[rows]);
        let tile = TileAt { sequence, first_query: queries.start, keys: keys.clone() };
        differentiate(path, dims, tile, lse, delta, weights, grads);
    }
}

each_path! {
    fn differentiate(
        dims: &AttentionDims,
        tile: TileAt,
        lse: &[f32],
        delta: &[f32],
        weights: &mut [f32],
        grads: &mut [f32],
    ) {
        let TileAt { sequence, first_query, keys } = tile;
        for (row, (&lse, &delta)) in lse.iter().zip(delta).enumerate() {
            let query = first_query + row;
            let weights = &mut weights[row * KEYS..][..keys.len()];
            let grads = &mut grads[row * KEYS..][..keys.len()];
            let to = (query + 1).clamp(keys.start, keys.end) - keys.start;
            let from = (dims.first_key(sequence, query).clamp(keys.start, keys.end) - keys.start).min(to);
            for hidden in [0..from, to..keys.len()] {
                weights[hidden.clone()].fill(0.0);
                grads[hidden].fill(0.0);
            }
            for (weight, grad) in weights[from..to].iter_mut().zip(&mut grads[from..to]) {
                *weight = math::exp(*weight * dims.scale - lse);
                *grad = *weight * (*grad - delta) * dims.scale;
            }
        }
    }
}
