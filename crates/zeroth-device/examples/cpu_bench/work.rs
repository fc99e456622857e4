//! The kernels that are measured, with buffers made before: on cache lines, as arenas have them.
#![allow(clippy::many_single_char_names, reason = "names of the formulas")]

use std::ops::{Deref, DerefMut};
use std::time::Instant;

use zeroth_device::cpu::{
    AttentionDims, AttentionSaved, Element, LinearDims, Pool, attention, attention_backward,
    attention_backward_scratch, attention_scratch, linear, linear_dw, linear_dx, linear_scratch, normal,
};

/// Which product of a linear map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Forward,
    Dx,
    Dw,
}

/// A linear map and its gradients; m rows, n outputs, k inputs of the product asked for.
pub(crate) struct Product<T> {
    pool: Pool,
    form: Form,
    dims: LinearDims,
    x: Buffer<T>,
    w: Buffer<T>,
    y: Buffer<T>,
    dw: Buffer<f32>,
    scratch: Buffer<f32>,
}

/// Numbers that begin on a page.
struct Buffer<T> {
    room: Vec<T>,
    first: usize,
    count: usize,
}

impl<T: Element> Buffer<T> {
    fn zeros(count: usize) -> Self {
        let room = vec![T::default(); count + 4096];
        let first = room.as_ptr().align_offset(4096);
        Self { room, first, count }
    }

    fn random(pool: &Pool, name: u64, count: usize) -> Self {
        let mut buffer = Self::zeros(count);
        normal(pool, 7, name, 0, 1.0, &mut buffer[..]);
        buffer
    }
}

impl<T> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.room[self.first..][..self.count]
    }
}

impl<T> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.room[self.first..][..self.count]
    }
}

impl<T: Element> Product<T> {
    pub(crate) fn new(threads: usize, form: Form, [m, n, k]: [usize; 3]) -> Self {
        let pool = Pool::new(threads);
        let dims = match form {
            Form::Forward => LinearDims { rows: m, inputs: k, outputs: n },
            Form::Dx => LinearDims { rows: m, inputs: n, outputs: k },
            Form::Dw => LinearDims { rows: k, inputs: n, outputs: m },
        };
        let (x, w) = (
            Buffer::random(&pool, 1, dims.rows * dims.inputs),
            Buffer::random(&pool, 2, dims.outputs * dims.inputs),
        );
        let y = Buffer::random(&pool, 3, dims.rows * dims.outputs);
        let dw = Buffer::zeros(w.len());
        let scratch = Buffer::zeros(linear_scratch(dims, threads));
        Self { pool, form, dims, x, w, y, dw, scratch }
    }

    /// Runs it once; returns seconds.
    pub(crate) fn run(&mut self) -> f64 {
        let Self { pool, dims, x, w, y, dw, scratch, .. } = self;
        let start = Instant::now();
        match self.form {
            Form::Forward => linear(pool, *dims, x, w, None, y, scratch),
            Form::Dx => linear_dx(pool, *dims, y, w, x, false, scratch),
            Form::Dw => linear_dw(pool, *dims, y, x, dw, scratch),
        }
        start.elapsed().as_secs_f64()
    }

    /// Operations of a run.
    pub(crate) fn flop(&self) -> f64 {
        2.0 * self.dims.rows as f64 * self.dims.inputs as f64 * self.dims.outputs as f64
    }
}

/// Attention and its gradient over packed sequences.
pub(crate) struct Attention<T> {
    pool: Pool,
    dims: AttentionDims,
    starts: Vec<u32>,
    /// q, k, v, dout.
    inputs: [Buffer<T>; 4],
    /// out, dq, dk, dv.
    outputs: [Buffer<T>; 4],
    lse: Buffer<f32>,
    scratch: Buffer<f32>,
}

impl<T: Element> Attention<T> {
    pub(crate) fn new(
        threads: usize,
        sequences: usize,
        length: usize,
        heads: usize,
        kv_heads: usize,
    ) -> Self {
        let (pool, rows, head_dim) = (Pool::new(threads), sequences * length, 64);
        let dims = AttentionDims { rows, heads, kv_heads, head_dim, window: None, scale: 0.125 };
        let widths = [heads, kv_heads, kv_heads, heads].map(|heads| rows * heads * head_dim);
        let inputs = [0, 1, 2, 3].map(|at| Buffer::random(&pool, at as u64, widths[at]));
        let outputs = [0, 3, 1, 2].map(|at| Buffer::zeros(widths[at]));
        let scratch = attention_scratch(&dims, threads).max(attention_backward_scratch(&dims, threads));
        let starts = (0..=sequences).map(|at| (at * length) as u32).collect();
        Self {
            pool,
            dims,
            starts,
            inputs,
            outputs,
            lse: Buffer::zeros(heads * rows),
            scratch: Buffer::zeros(scratch),
        }
    }

    /// Runs forward once, and backward after it; returns the seconds of each.
    pub(crate) fn run(&mut self) -> [f64; 2] {
        let Self { pool, dims, starts, inputs: [q, k, v, dout], outputs: [out, dq, dk, dv], lse, scratch } =
            self;
        let start = Instant::now();
        attention(pool, dims, starts, q, k, v, out, lse, scratch);
        let forward = start.elapsed().as_secs_f64();
        let start = Instant::now();
        let saved = AttentionSaved { q, k, v, out, lse };
        attention_backward(pool, dims, starts, saved, dout, dq, dk, dv, scratch);
        [forward, start.elapsed().as_secs_f64()]
    }

    /// Operations of forward and of backward: two and five products over the lower half of the scores.
    pub(crate) fn flop(&self) -> [f64; 2] {
        let scores: f64 = self.starts.windows(2).map(|pair| f64::from(pair[1] - pair[0]).powi(2) / 2.0).sum();
        let product = 2.0 * scores * (self.dims.heads * self.dims.head_dim) as f64;
        [2.0 * product, 5.0 * product]
    }
}
