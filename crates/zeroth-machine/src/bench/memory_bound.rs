//! Memory-bound kernels and the optimizer, against a STREAM triad.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Instant;

use half::bf16;
use zeroth_base::ActivationFn;

use super::memory::{copy as copy_past, triad};
use super::operands::{Operands, of, random};
use super::{Benchmark, COPY, RateUnit, TRIAD};
use zeroth_cpu::{
    Master, Moments, Pool, block_squares, convert, convert_and_check_finite, copy, embedding_backward, fill,
    gated_activation, gated_activation_backward, optimize, rms_norm_backward, rms_norm_residual,
    rms_norm_scratch, rope_from, sum_ranks,
};
use zeroth_kernel::{BLOCK, Element, EmbeddingDims, RmsNormDims, RopeDims};
use zeroth_kernel::{DeviceError, Optimizer, Recipe, StepNumbers};

/// Width of activations, and of a head.
const WIDTH: usize = 2048;
const HEAD: usize = 128;
/// The table of the embedding's gradient.
const VOCABULARY: usize = 32_000;
const EMBEDDING: usize = 512;
/// Ranks whose gradients are added.
const RANKS: usize = 2;

/// Array sizes: larger than the caches, so that rates are those of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryBoundSizes {
    /// Parameters of the optimizer, and elements of the triad's arrays.
    pub parameters: usize,
    /// Tokens.
    pub rows: usize,
}

impl MemoryBoundSizes {
    /// Arrays of 96 MiB.
    pub const FULL: Self = Self { parameters: 24 << 20, rows: 8192 };
    /// Arrays of 16 MiB.
    pub const QUICK: Self = Self { parameters: 4 << 20, rows: 2048 };

    const fn activations(self) -> usize {
        self.rows * WIDTH
    }

    const fn norm(self) -> RmsNormDims {
        RmsNormDims::new(self.rows, WIDTH, 1e-6)
    }
}

/// Buffers that all benchmarks share, filled with random numbers.
struct Buffers {
    sizes: MemoryBoundSizes,
    /// Three of random numbers, one of positive ones (second moments), and one that is only written.
    floats: Operands<5>,
    halves: Operands<5>,
    ids: Vec<i32>,
}

impl Buffers {
    fn new(sizes: MemoryBoundSizes) -> Result<Self, DeviceError> {
        // The last is also the embedding's gradient and the norm's scratch.
        let spare = sizes.parameters.max(VOCABULARY * EMBEDDING).max(rms_norm_scratch(sizes.norm()));
        let [one, spare] = [sizes.parameters.max(sizes.rows * HEAD), spare].map(|count| 4 * count);
        let halves = 2 * sizes.parameters.max(sizes.activations());
        let mut buffers = Self {
            sizes,
            floats: Operands::new([one, one, one, one, spare])?,
            halves: Operands::new([halves; 5])?,
            ids: Vec::new(),
        };
        for (name, values) in buffers.floats.split().into_iter().take(4).enumerate() {
            random::<f32>(name as u64, values);
            if name == 3 {
                for value in of::<f32>(values) {
                    *value = 1e-3 * value.abs();
                }
            }
        }
        for (name, values) in buffers.halves.split().into_iter().enumerate() {
            random::<bf16>(8 + name as u64, values);
        }
        of::<f32>(buffers.floats.split()[4]).fill(0.0);
        buffers.ids = (0..sizes.rows).map(|row| (row * 7919 % VOCABULARY) as i32).collect();
        Ok(buffers)
    }

    /// The first `count` elements of every f32 and every bf16 array.
    fn first(&mut self, count: usize) -> ([&mut [f32]; 5], [&mut [bf16]; 5]) {
        let floats = self.floats.split().map(|bytes| {
            let values = of::<f32>(bytes);
            let count = count.min(values.len());
            &mut values[..count]
        });
        (floats, self.halves.split().map(|bytes| &mut of::<bf16>(bytes)[..count]))
    }
}

/// A kernel: name, bytes read and written, one run.
type Kernel = (&'static str, fn(MemoryBoundSizes) -> usize, fn(&Pool, &mut Buffers));

const LIMITS: [Kernel; 2] = [
    (
        TRIAD,
        |s| 12 * s.parameters,
        |pool, b| {
            let ([x, y, _, _, to], _) = b.first(b.sizes.parameters);
            triad(pool, x, y, to);
        },
    ),
    (
        COPY,
        |s| 8 * s.parameters,
        |pool, b| {
            let ([from, _, _, _, to], _) = b.first(b.sizes.parameters);
            copy_past(pool, from, to);
        },
    ),
];

const OPTIMIZER: [Kernel; 4] = [
    (
        "adamw, bf16 gradient, bf16 weight",
        |s| 28 * s.parameters,
        |pool, b| {
            let ([_, master, first, second, _], [weights, gradients, ..]) = b.first(b.sizes.parameters);
            adamw(pool, gradients, Master::F32(master), [first, second], weights);
        },
    ),
    (
        "adamw, f32 gradient, bf16 weight",
        |s| 30 * s.parameters,
        |pool, b| {
            let ([gradients, master, first, second, _], [weights, ..]) = b.first(b.sizes.parameters);
            adamw(pool, gradients, Master::F32(master), [first, second], weights);
        },
    ),
    (
        "adamw, bf16 gradient, bf16 weight and rest",
        |s| 26 * s.parameters,
        |pool, b| {
            let ([_, _, first, second, _], [weights, gradients, low_bits, ..]) = b.first(b.sizes.parameters);
            let low_bits = Master::LowBits(bytemuck::cast_slice_mut(low_bits));
            adamw(pool, gradients, low_bits, [first, second], weights);
        },
    ),
    (
        "adamw, f32 gradient, bf16 weight and rest",
        |s| 28 * s.parameters,
        |pool, b| {
            let ([gradients, _, first, second, _], [weights, _, low_bits, ..]) = b.first(b.sizes.parameters);
            let low_bits = Master::LowBits(bytemuck::cast_slice_mut(low_bits));
            adamw(pool, gradients, low_bits, [first, second], weights);
        },
    ),
];

fn adamw<G: Element>(
    pool: &Pool,
    gradients: &[G],
    master: Master<'_>,
    [first, second]: [&mut [f32]; 2],
    weights: &mut [bf16],
) {
    let moments = Moments { buffers: [Some(first), Some(second), None], rounding: None };
    optimize::<G, f32, bf16>(pool, Optimizer::AdamW, &numbers(), gradients, master, moments, Some(weights));
}

const KERNELS: [Kernel; 12] = [
    (
        "convert f32 to bf16",
        |s| 6 * s.parameters,
        |pool, b| {
            let ([from, ..], [to, ..]) = b.first(b.sizes.parameters);
            convert(pool, from, to);
        },
    ),
    (
        "convert f32 to bf16 and look",
        |s| 6 * s.parameters,
        |pool, b| {
            let ([from, ..], [to, ..]) = b.first(b.sizes.parameters);
            assert!(!convert_and_check_finite(pool, from, to), "random numbers are finite");
        },
    ),
    (
        "copy",
        |s| 8 * s.parameters,
        |pool, b| {
            let ([from, .., to], _) = b.first(b.sizes.parameters);
            copy(pool, from, to);
        },
    ),
    (
        "zero",
        |s| 4 * s.parameters,
        |pool, b| {
            let ([.., to], _) = b.first(b.sizes.parameters);
            fill(pool, 0u8, bytemuck::cast_slice_mut(to));
        },
    ),
    (
        "sum of two ranks, bf16 to f32",
        |s| (2 * RANKS + 4) * (s.parameters / RANKS),
        |pool, b| {
            let own = b.sizes.parameters / RANKS;
            let ([.., to], [parts, ..]) = b.first(RANKS * own);
            sum_ranks(pool, parts, &mut to[..own], false);
        },
    ),
    (
        "squares of bf16",
        |s| 2 * s.parameters,
        |pool, b| {
            let (_, [values, ..]) = b.first(b.sizes.parameters);
            let mut sums = vec![0.0; values.len().div_ceil(BLOCK)];
            block_squares(pool, values, &mut sums);
        },
    ),
    (
        "residual and rms_norm",
        |s| 2 * 4 * s.activations(),
        |pool, b| {
            let dims = b.sizes.norm();
            let ([.., rstd], [x, residual, h, y, _]) = b.first(b.sizes.activations());
            let w = vec![bf16::from_f32(0.9); WIDTH];
            rms_norm_residual(pool, dims, x, residual, &w, h, y, &mut rstd[..dims.rows]);
        },
    ),
    (
        "rms_norm backward",
        |s| 2 * 4 * s.activations(),
        |pool, b| {
            let dims = b.sizes.norm();
            let [.., scratch] = b.floats.split();
            let count = b.sizes.activations();
            let [dy, h, residual, dh, _] = b.halves.split().map(|bytes| &mut of::<bf16>(bytes)[..count]);
            let (w, rstd, mut dw) =
                (vec![bf16::from_f32(0.9); WIDTH], vec![1.5; dims.rows], vec![0.0; WIDTH]);
            rms_norm_backward(
                pool,
                dims,
                dy,
                h,
                &rstd,
                &w,
                Some(residual),
                Some(dh),
                Some(&mut dw),
                of(scratch),
            );
        },
    ),
    (
        "swiglu",
        |s| 2 * 3 * s.activations(),
        |pool, b| {
            let (_, [gate, up, y, ..]) = b.first(b.sizes.activations());
            gated_activation(pool, ActivationFn::Silu, gate, up, y);
        },
    ),
    (
        "swiglu backward",
        |s| 2 * 5 * s.activations(),
        |pool, b| {
            let (_, [dy, gate, up, dgate, dup]) = b.first(b.sizes.activations());
            gated_activation_backward(pool, ActivationFn::Silu, dy, gate, up, dgate, dup);
        },
    ),
    (
        "rope",
        |s| 2 * 2 * s.activations() + 4 * s.rows * HEAD,
        |pool, b| {
            let rows = b.sizes.rows;
            let ([cos, sin, ..], [x, y, ..]) = b.first(b.sizes.activations());
            let angles = rows * HEAD / 2;
            let dims = RopeDims::new(rows, WIDTH / HEAD, HEAD, HEAD);
            rope_from(pool, dims, &cos[..angles], &sin[..angles], false, x, y);
        },
    ),
    (
        "embedding gradient",
        |s| (2 + 4 + 4) * s.rows * EMBEDDING,
        |pool, b| {
            let dims = EmbeddingDims::new(VOCABULARY, EMBEDDING);
            let [.., table] = b.floats.split();
            let table = &mut of::<f32>(table)[..VOCABULARY * EMBEDDING];
            let [dy, ..] = b.halves.split();
            embedding_backward(pool, dims, &b.ids, &of::<bf16>(dy)[..b.ids.len() * EMBEDDING], table);
        },
    ),
];

fn numbers() -> StepNumbers {
    let recipe = Recipe {
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: [0.1, 0.0],
        bias_correction: 1,
        ..Recipe::default()
    };
    StepNumbers::new(&recipe, 0, 100, 1e-4, 1.0, 1.0)
}

/// Norms, casts, copies and other memory-bound kernels, with the limits of memory.
pub fn memory_bound_benchmarks(
    threads: &[usize],
    sizes: MemoryBoundSizes,
) -> Result<Vec<Benchmark>, DeviceError> {
    benchmarks(threads, sizes, &KERNELS)
}

/// AdamW, with the limits of memory.
pub fn optimizer_benchmarks(
    threads: &[usize],
    sizes: MemoryBoundSizes,
) -> Result<Vec<Benchmark>, DeviceError> {
    benchmarks(threads, sizes, &OPTIMIZER)
}

fn benchmarks(
    threads: &[usize],
    sizes: MemoryBoundSizes,
    kernels: &[Kernel],
) -> Result<Vec<Benchmark>, DeviceError> {
    let buffers = Rc::new(RefCell::new(Buffers::new(sizes)?));
    let start = |threads: &usize| Pool::start(*threads).map(Rc::new);
    let pools: Vec<Rc<Pool>> = threads.iter().map(start).collect::<Result<_, _>>()?;
    let mut benchmarks = Vec::new();
    for (name, bytes, run) in LIMITS.iter().chain(kernels) {
        for pool in &pools {
            let (own, buffers, run) = (Rc::clone(pool), Rc::clone(&buffers), *run);
            let burst = move || {
                let mut buffers = buffers.borrow_mut();
                let start = Instant::now();
                run(&own, &mut buffers);
                Ok(start.elapsed().as_secs_f64())
            };
            let bytes = bytes(sizes) as f64;
            let line = Benchmark::of_seconds(*name, pool.threads(), RateUnit::Gigabytes, bytes, burst);
            benchmarks.push(match *name {
                TRIAD | COPY => line,
                "copy" => line.limited_by(COPY),
                _ => line.limited_by(TRIAD),
            });
        }
    }
    Ok(benchmarks)
}

#[cfg(test)]
mod tests {
    use super::super::measure;
    use super::*;

    #[test]
    fn every_kernel_has_a_limit_on_any_number_of_threads() {
        let sizes = MemoryBoundSizes { parameters: 10_000, rows: 3 };
        let mut all = memory_bound_benchmarks(&[1, 2], sizes).unwrap();
        all.extend(optimizer_benchmarks(&[1, 2], sizes).unwrap());
        let measured = measure(all, 1, &mut |_| {}).unwrap();
        let limited = measured.iter().filter(|line| line.percent.is_some()).count();
        assert_eq!(limited, 2 * (KERNELS.len() + OPTIMIZER.len()));
    }
}
