//! Compute-bound kernels: matmuls, attention, and the head with its loss.
#![allow(clippy::many_single_char_names, reason = "names of the formulas: m, n and k; q, k and v")]

use std::time::Instant;

use half::{bf16, f16};
use zeroth_base::DType;

use super::operands::{Operands, of, random};
use super::{Benchmark, RateUnit, TILES, matmul_limit};
use zeroth_cpu::{
    AttentionSaved, ContextSlices, Dropout, Isa, Pool, attention, attention_backward,
    attention_backward_scratch, attention_scratch, dropout, head_loss_backward, head_loss_backward_rounded,
    head_loss_rounded_scratch, head_loss_scratch, linear, linear_add, linear_dw, linear_dw_rounded,
    linear_dx, linear_scratch, row_stride,
};
use zeroth_kernel::DeviceError;
use zeroth_kernel::{AttentionDims, Element, HeadLossDims, LinearDims, RowKey};

/// Which matmul of a linear layer, or of an adapter beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatmulKind {
    /// y = x · wᵀ.
    Forward,
    /// dx = dy · w.
    Dx,
    /// dw += dyᵀ · x.
    Dw,
    /// dw = dyᵀ · x, rounded to the operands' dtype: that of a step of one micro-batch.
    DwRounded,
    /// y += scale · x · wᵀ.
    Add,
}

impl MatmulKind {
    /// Those of a linear layer.
    pub const ALL: [Self; 3] = [Self::Forward, Self::Dx, Self::Dw];

    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Dx => "dx",
            Self::Dw => "dw",
            Self::DwRounded => "dw rounded",
            Self::Add => "add",
        }
    }
}

/// A matmul of a linear layer: the result is [m, n] with k terms per element.
pub struct MatmulBench<T> {
    pool: Pool,
    form: MatmulKind,
    dims: LinearDims,
    /// x [rows, inputs], w [outputs, inputs], y [rows, outputs], dw, scratch.
    operands: Operands<5>,
    stored: std::marker::PhantomData<T>,
}

impl<T: Element> MatmulBench<T> {
    /// A matmul of these sizes with random operands.
    pub fn new(threads: usize, form: MatmulKind, [m, n, k]: [usize; 3]) -> Result<Self, DeviceError> {
        let pool = Pool::start(threads)?;
        let dims = match form {
            MatmulKind::Forward | MatmulKind::Add => LinearDims::new(m, k, n),
            MatmulKind::Dx => LinearDims::new(m, n, k),
            MatmulKind::Dw | MatmulKind::DwRounded => LinearDims::new(k, n, m),
        };
        // Rows have the stride of a step.
        let [x_stride, y_stride] = [dims.inputs, dims.outputs].map(|width| row_stride(width, T::DTYPE));
        let dims = LinearDims { x_stride, y_stride, ..dims };
        let (size, weights) = (size_of::<T>(), dims.outputs * dims.inputs);
        let mut operands = Operands::new([
            size * dims.rows * x_stride,
            size * weights,
            size * dims.rows * y_stride,
            4 * weights,
            4 * linear_scratch(dims, threads),
        ])?;
        let [x, w, y, ..] = operands.split();
        for (name, operand) in [x, w, y].into_iter().enumerate() {
            random::<T>(name as u64, operand);
        }
        Ok(Self { pool, form, dims, operands, stored: std::marker::PhantomData })
    }

    /// Runs it once; returns the seconds.
    pub fn run(&mut self) -> f64 {
        let Self { pool, dims, operands, .. } = self;
        let [x, w, y, dw, scratch] = operands.split();
        let (x, w, y) = (of::<T>(x), of::<T>(w), of::<T>(y));
        let scratch = of(scratch);
        let start = Instant::now();
        match self.form {
            MatmulKind::Forward => linear(pool, *dims, x, w, None, y, scratch),
            MatmulKind::Dx => linear_dx(pool, *dims, 1.0, y, w, x, false, scratch),
            MatmulKind::Dw => linear_dw(pool, *dims, 1.0, y, x, of(dw), scratch),
            MatmulKind::DwRounded => {
                let rounded = &mut of::<T>(dw)[..dims.outputs * dims.inputs];
                linear_dw_rounded(pool, *dims, 1.0, y, x, rounded, scratch);
            }
            MatmulKind::Add => linear_add(pool, *dims, 0.3, x, w, y, scratch),
        }
        start.elapsed().as_secs_f64()
    }

    /// Floating-point operations of a run.
    pub fn flop(&self) -> f64 {
        2.0 * self.dims.rows as f64 * self.dims.inputs as f64 * self.dims.outputs as f64
    }
}

/// All three matmuls of these shapes [m, n, k] at a dtype.
pub fn matmul_benchmarks(
    threads: usize,
    dtype: DType,
    shapes: &[[usize; 3]],
) -> Result<Vec<Benchmark>, DeviceError> {
    match dtype {
        DType::Bf16 => lines_of::<bf16>(threads, shapes),
        DType::F16 => lines_of::<f16>(threads, shapes),
        DType::F32 => lines_of::<f32>(threads, shapes),
    }
}

fn lines_of<T: Element>(threads: usize, shapes: &[[usize; 3]]) -> Result<Vec<Benchmark>, DeviceError> {
    let limit = matmul_limit(Isa::chosen()?, T::DTYPE);
    let mut lines = Vec::new();
    for &shape in shapes {
        for form in MatmulKind::ALL {
            let mut matmul = MatmulBench::<T>::new(threads, form, shape)?;
            let [m, n, k] = shape;
            let name = format!("{} {} {m}x{n}x{k}", T::DTYPE, form.name());
            let run = move || Ok(matmul.run());
            let flop = 2.0 * m as f64 * n as f64 * k as f64;
            lines.push(Benchmark::of_seconds(name, threads, RateUnit::Gflops, flop, run).limited_by(limit));
        }
    }
    Ok(lines)
}

/// The ops of a low-rank adapter in bf16. A small rank makes its matmuls memory-bound: their rate is that of the wide
/// operand, [rows, width], which the sum and dropout read and write and the others read.
pub fn adapter_benchmarks(
    threads: usize,
    [rows, width, rank]: [usize; 3],
) -> Result<Vec<Benchmark>, DeviceError> {
    let bytes = (2 * rows * width) as f64;
    let mut lines = Vec::new();
    for (name, form, shape, bytes) in [
        ("u = x · Aᵀ", MatmulKind::Forward, [rows, rank, width], bytes),
        ("y += u · Bᵀ", MatmulKind::Add, [rows, width, rank], 2.0 * bytes),
        ("du = dy · B", MatmulKind::Dx, [rows, rank, width], bytes),
        ("dB = dyᵀ · u", MatmulKind::Dw, [width, rank, rows], bytes),
        ("dA = duᵀ · x", MatmulKind::Dw, [rank, width, rows], bytes),
    ] {
        let mut matmul = MatmulBench::<bf16>::new(threads, form, shape)?;
        let name = format!("bf16 adapter {name} {rows}x{width}, rank {rank}");
        let run = move || Ok(matmul.run());
        lines.push(Benchmark::of_seconds(name, threads, RateUnit::Gigabytes, bytes, run));
    }
    let key = |row| RowKey { sample: row, position: 0, epoch: 0 };
    let keys: Vec<RowKey> = (0..rows as u64).map(key).collect();
    let (pool, row_stride) = (Pool::start(threads)?, row_stride(width, DType::Bf16));
    let mut operands = Operands::new([2 * rows * row_stride; 2])?;
    let [x, _] = operands.split();
    random::<bf16>(1, x);
    let run = move || {
        let [x, y] = operands.split().map(of::<bf16>);
        let start = Instant::now();
        let setting = Dropout { probability: 0.05, seed: 1, op: 0 };
        dropout(&pool, setting, &keys, [width, row_stride], x, y);
        Ok(start.elapsed().as_secs_f64())
    };
    let name = format!("bf16 adapter dropout {rows}x{width}");
    lines.push(Benchmark::of_seconds(name, threads, RateUnit::Gigabytes, 2.0 * bytes, run));
    Ok(lines)
}

/// Attention and its gradient over packed sequences.
struct Attention {
    pool: Pool,
    dims: AttentionDims,
    starts: Vec<u32>,
    /// q, k, v, dy; y, dq, dk, dv; lse, scratch.
    operands: Operands<10>,
}

impl Attention {
    fn new(
        threads: usize,
        sequences: usize,
        length: usize,
        heads: usize,
        kv_heads: usize,
    ) -> Result<Self, DeviceError> {
        let (pool, rows, head_dim) = (Pool::start(threads)?, sequences * length, 64);
        let [q_stride, kv_stride] = [heads, kv_heads].map(|heads| row_stride(heads * head_dim, DType::Bf16));
        let contiguous = AttentionDims::new(rows, heads, kv_heads, head_dim, None, 0.125);
        let dims = AttentionDims { q_stride, kv_stride, ..contiguous };
        let [wide, narrow] = [q_stride, kv_stride].map(|stride| 2 * rows * stride);
        let scratch = attention_scratch(&dims, threads).max(attention_backward_scratch(&dims, threads));
        let mut operands = Operands::new([
            wide,
            narrow,
            narrow,
            wide,
            wide,
            wide,
            narrow,
            narrow,
            4 * heads * rows,
            4 * scratch,
        ])?;
        for (name, operand) in operands.split().into_iter().take(4).enumerate() {
            random::<bf16>(name as u64, operand);
        }
        let starts = (0..=sequences).map(|at| (at * length) as u32).collect();
        Ok(Self { pool, dims, starts, operands })
    }

    /// Runs forward, and backward where `backward`; returns the seconds of the latter.
    fn run(&mut self, backward: bool) -> f64 {
        let Self { pool, dims, starts, operands } = self;
        let [q, k, v, dy, y, dq, dk, dv, lse, scratch] = operands.split();
        let [q, k, v, dy, y, dq, dk, dv] = [q, k, v, dy, y, dq, dk, dv].map(of::<bf16>);
        let (lse, scratch) = (of(lse), of(scratch));
        let start = Instant::now();
        attention(pool, dims, &ContextSlices::new(starts), q, k, v, y, lse, scratch);
        if !backward {
            return start.elapsed().as_secs_f64();
        }
        let start = Instant::now();
        let saved = AttentionSaved { q, k, v, out: y, lse };
        attention_backward(pool, dims, &ContextSlices::new(starts), saved, dy, dq, dk, dv, None, scratch);
        start.elapsed().as_secs_f64()
    }
}

/// Attention of 8 heads of 64, forward and backward, over (sequences, length, heads of keys and values).
pub fn attention_benchmarks(
    threads: usize,
    shapes: &[(usize, usize, usize)],
) -> Result<Vec<Benchmark>, DeviceError> {
    let heads = 8;
    let limit = match Isa::chosen()? {
        Isa::Amx => TILES,
        path => matmul_limit(path, DType::Bf16),
    };
    let mut lines = Vec::new();
    for &(sequences, length, kv_heads) in shapes {
        // A matmul over the lower half of the scores; forward has two, backward five.
        let matmul = (sequences * length * length * heads * 64) as f64;
        for (backward, what, matmuls) in [(false, "forward", 2.0), (true, "backward", 5.0)] {
            let mut attention = Attention::new(threads, sequences, length, heads, kv_heads)?;
            let name = format!("bf16 attention {what} {sequences}x{length}, {heads} heads, {kv_heads} kv");
            let run = move || Ok(attention.run(backward));
            lines.push(
                Benchmark::of_seconds(name, threads, RateUnit::Gflops, matmuls * matmul, run)
                    .limited_by(limit),
            );
        }
    }
    Ok(lines)
}

/// The head with its loss and both gradients; that of w is rounded directly where a step does so.
pub fn head_loss_benchmarks(threads: usize, dims: HeadLossDims) -> Result<Vec<Benchmark>, DeviceError> {
    let HeadLossDims { rows, hidden, vocab, .. } = dims;
    let dims = HeadLossDims { row_stride: row_stride(hidden, DType::Bf16), ..dims };
    let pool = Pool::start(threads)?;
    let once = dims.is_one_slice(DType::Bf16);
    let (dw, scratch) = if once {
        (2 * vocab * hidden, head_loss_rounded_scratch(dims, threads))
    } else {
        (4 * vocab * hidden, head_loss_scratch(dims, threads))
    };
    // x, w; dx, dw; scratch.
    let of_rows = 2 * rows * dims.row_stride;
    let mut operands = Operands::new([of_rows, 2 * vocab * hidden, of_rows, dw, 4 * scratch])?;
    let [x, w, ..] = operands.split();
    random::<bf16>(1, x);
    random::<bf16>(2, w);
    // Logits of realistic size: with larger ones most exponentials underflow.
    let part = (hidden as f32).sqrt().recip();
    for weight in of::<bf16>(w) {
        *weight = bf16::from_f32(weight.to_f32() * part);
    }
    let labels: Vec<i32> = (0..rows).map(|row| (row * 7919 % vocab) as i32).collect();
    let limit = matmul_limit(Isa::chosen()?, DType::Bf16);
    // Logits, and the gradients of both operands.
    let flop = 3.0 * 2.0 * (rows * hidden) as f64 * vocab as f64;
    let run = move || {
        let [x, w, dx, dw, scratch] = operands.split();
        let (x, w, dx) = (of::<bf16>(x), of::<bf16>(w), of::<bf16>(dx));
        let start = Instant::now();
        let scale = 1.0 / rows as f32;
        if once {
            let dw = of::<bf16>(dw);
            head_loss_backward_rounded(&pool, dims, x, w, &labels, scale, Some(dx), dw, None, of(scratch));
        } else {
            head_loss_backward(&pool, dims, x, w, &labels, scale, Some(dx), Some(of(dw)), true, of(scratch));
        }
        Ok(start.elapsed().as_secs_f64())
    };
    let name = format!("bf16 head_loss with gradients {rows}x{hidden}x{vocab}");
    Ok(vec![Benchmark::of_seconds(name, threads, RateUnit::Gflops, flop, run).limited_by(limit)])
}

#[cfg(test)]
mod tests {
    use super::super::{cpu_peak_benchmarks, measure};
    use super::*;

    #[test]
    fn every_compute_benchmark_has_a_rate_and_a_limit() {
        let mut lines = cpu_peak_benchmarks(2).unwrap();
        lines.extend(matmul_benchmarks(2, DType::Bf16, &[[48, 40, 33]]).unwrap());
        lines.extend(matmul_benchmarks(2, DType::F32, &[[48, 40, 33]]).unwrap());
        lines.extend(adapter_benchmarks(2, [48, 40, 3]).unwrap());
        lines.extend(attention_benchmarks(2, &[(2, 24, 4)]).unwrap());
        // One slice of rows, and several.
        for rows in [20, 1100] {
            let dims = HeadLossDims::new(rows, 32, 100);
            assert_eq!(dims.is_one_slice(DType::Bf16), rows == 20);
            lines.extend(head_loss_benchmarks(2, dims).unwrap());
        }
        let measured = measure(lines, 2, &mut |_| {}).unwrap();
        let limited: Vec<_> = measured.iter().filter(|line| line.limit.is_some()).collect();
        assert_eq!(limited.len(), 3 + 3 + 2 + 2);
        assert!(measured.iter().all(|line| line.best >= line.median && line.median > 0.0), "{measured:?}");
    }

    #[test]
    fn flop_counts_multiplications_and_additions() {
        for form in MatmulKind::ALL {
            assert_eq!(MatmulBench::<f32>::new(1, form, [6, 5, 4]).unwrap().flop(), 240.0);
        }
    }
}
