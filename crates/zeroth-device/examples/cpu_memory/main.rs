//! How near the kernels that move more than they compute come to the memory of the machine at hand.
//!
//!     cargo run --release -p zeroth-device --example cpu_memory [-- <bursts> [<beginning of a kernel's name>]]
//!
//! One line a kernel and number of threads: GB/s as the kernel's operands are counted (each read or written once), best
//! and median of the bursts, in percent of the triad with stores past the caches in the same run, best of best and
//! median of median. Bursts of all lines take turns, so that a slow moment of the machine hits all alike.
#![allow(clippy::print_stdout, reason = "the report of a program that is run by hand")]

mod limits;

use std::time::Instant;

use half::bf16;
use zeroth_device::cpu::{
    Arena, EmbeddingDims, Moments, Pool, RmsNormDims, RopeDims, block_squares, convert, convert_and_look,
    copy, embedding_backward, fill, optimize, rms_norm_backward, rms_norm_residual, rms_norm_scratch,
    rope_from, sum_ranks, swiglu, swiglu_backward,
};
use zeroth_device::{Optimizer, Recipe, Span, StepNumbers, Tier};

/// Parameters of the optimizer, and elements of the limits' arrays.
const PARAMETERS: usize = 24 << 20;
/// Activations: tokens and their width, and how many heads that is.
const ROWS: usize = 8192;
const WIDTH: usize = 2048;
const ACTIVATIONS: usize = ROWS * WIDTH;
const HEAD: usize = 128;
const VOCABULARY: usize = 32_000;
const EMBEDDING: usize = 512;
/// Ranks whose gradients are added.
const RANKS: usize = 2;

/// Memory that all lines share, filled with random numbers.
struct Buffers {
    floats: Vec<Arena>,
    halves: Vec<Arena>,
    ids: Vec<i32>,
}

/// The arena of floats that no line reads the numbers of another line from.
const SPARE: usize = 4;

/// What is measured: its name, the bytes it reads and writes, and one run of it.
type Line = (&'static str, usize, fn(&Pool, &mut Buffers));

/// The line that the others are compared with.
const LIMIT: &str = "limit: triad, past the caches";

const LINES: [Line; 18] = [
    (LIMIT, 12 * PARAMETERS, |pool, b| {
        let (to, [x, y]) = b.spare_and_two();
        limits::triad(pool, x, y, to, true);
    }),
    ("limit: triad, ordinary stores", 12 * PARAMETERS, |pool, b| {
        let (to, [x, y]) = b.spare_and_two();
        limits::triad(pool, x, y, to, false);
    }),
    ("limit: copy, past the caches", 8 * PARAMETERS, |pool, b| {
        let (to, [from, _]) = b.spare_and_two();
        limits::copy(pool, from, to, true);
    }),
    ("limit: copy, ordinary stores", 8 * PARAMETERS, |pool, b| {
        let (to, [from, _]) = b.spare_and_two();
        limits::copy(pool, from, to, false);
    }),
    ("adamw, bf16 gradient, bf16 weight", 28 * PARAMETERS, |pool, b| adamw(pool, b)),
    ("adamw, f32 gradient, bf16 weight", 30 * PARAMETERS, |pool, b| {
        let (floats, halves) = b.both();
        let [gradients, master, first, second] = all(floats, PARAMETERS);
        let [weights] = all(halves, PARAMETERS);
        let moments = Moments { first: Some(first), second: Some(second), rounding: None };
        optimize::<f32, f32, bf16>(
            pool,
            Optimizer::AdamW,
            &numbers(),
            gradients,
            master,
            moments,
            Some(weights),
        );
    }),
    ("convert f32 to bf16", 6 * PARAMETERS, |pool, b| {
        let (floats, halves) = b.both();
        let ([from], [to]): ([&mut [f32]; 1], [&mut [bf16]; 1]) =
            (all(floats, PARAMETERS), all(halves, PARAMETERS));
        convert(pool, from, to);
    }),
    ("convert f32 to bf16 and look", 6 * PARAMETERS, |pool, b| {
        let (floats, halves) = b.both();
        let ([from], [to]): ([&mut [f32]; 1], [&mut [bf16]; 1]) =
            (all(floats, PARAMETERS), all(halves, PARAMETERS));
        assert!(!convert_and_look(pool, from, to), "random numbers are finite");
    }),
    ("copy", 8 * PARAMETERS, |pool, b| {
        let (to, [from, _]) = b.spare_and_two();
        copy(pool, from, to);
    }),
    ("zero", 4 * PARAMETERS, |pool, b| fill(pool, 0u8, bytemuck::cast_slice_mut(b.spare()))),
    ("sum of two ranks, bf16 to f32", (2 * RANKS + 4) * (PARAMETERS / RANKS), |pool, b| {
        let (floats, halves) = b.both();
        let ([parts], [to]): ([&mut [bf16]; 1], [&mut [f32]; 1]) =
            (all(halves, PARAMETERS), all(&mut floats[SPARE..], PARAMETERS));
        sum_ranks(pool, parts, &mut to[..PARAMETERS / RANKS], false);
    }),
    ("squares of bf16", 2 * PARAMETERS, |pool, b| {
        let (_, halves) = b.both();
        let [values] = all::<bf16, 1>(halves, PARAMETERS);
        let mut sums = vec![0.0; PARAMETERS.div_ceil(zeroth_device::cpu::BLOCK)];
        block_squares(pool, values, &mut sums);
    }),
    ("residual and rms_norm", 2 * 4 * ACTIVATIONS, |pool, b| {
        let (floats, halves) = b.both();
        let [x, residual, h, y] = all::<bf16, 4>(halves, ACTIVATIONS);
        let [rstd] = all::<f32, 1>(&mut floats[SPARE..], ROWS);
        let w = vec![bf16::from_f32(0.9); WIDTH];
        rms_norm_residual(pool, NORM, x, residual, &w, h, y, rstd);
    }),
    ("rms_norm backward", 2 * 4 * ACTIVATIONS, |pool, b| {
        let (floats, halves) = b.both();
        let [dy, h, grad, dh] = all::<bf16, 4>(halves, ACTIVATIONS);
        let [scratch] = all::<f32, 1>(&mut floats[SPARE..], rms_norm_scratch(NORM));
        let (w, rstd, mut dw) = (vec![bf16::from_f32(0.9); WIDTH], vec![1.5; ROWS], vec![0.0; WIDTH]);
        rms_norm_backward(pool, NORM, dy, h, &rstd, &w, Some(grad), dh, &mut dw, scratch);
    }),
    ("swiglu", 2 * 3 * ACTIVATIONS, |pool, b| {
        let (_, halves) = b.both();
        let [gate, up, y] = all::<bf16, 3>(halves, ACTIVATIONS);
        swiglu(pool, gate, up, y);
    }),
    ("swiglu backward", 2 * 5 * ACTIVATIONS, |pool, b| {
        let (_, halves) = b.both();
        let [dy, gate, up, dgate, dup] = all::<bf16, 5>(halves, ACTIVATIONS);
        swiglu_backward(pool, dy, gate, up, dgate, dup);
    }),
    ("rope", 2 * 2 * ACTIVATIONS + 4 * ROWS * HEAD, |pool, b| {
        let (floats, halves) = b.both();
        let [x, y] = all::<bf16, 2>(halves, ACTIVATIONS);
        let [cos, sin] = all::<f32, 2>(floats, ROWS * HEAD / 2);
        let dims = RopeDims { rows: ROWS, heads: WIDTH / HEAD, head_dim: HEAD, rotated: HEAD };
        rope_from(pool, dims, cos, sin, false, x, y);
    }),
    ("embedding gradient", (2 + 4 + 4) * ROWS * EMBEDDING, |pool, b| {
        let dims = EmbeddingDims { vocab: VOCABULARY, width: EMBEDDING };
        let ids = std::mem::take(&mut b.ids);
        let (floats, halves) = b.both();
        let [dy] = all::<bf16, 1>(halves, ROWS * EMBEDDING);
        let [table] = all::<f32, 1>(&mut floats[SPARE..], VOCABULARY * EMBEDDING);
        embedding_backward(pool, dims, &ids, dy, table);
        b.ids = ids;
    }),
];

const NORM: RmsNormDims = RmsNormDims { rows: ROWS, width: WIDTH, eps: 1e-6 };

fn adamw(pool: &Pool, buffers: &mut Buffers) {
    let (floats, halves) = buffers.both();
    let [_, master, first, second] = all(floats, PARAMETERS);
    let [weights, gradients] = all::<bf16, 2>(halves, PARAMETERS);
    let moments = Moments { first: Some(first), second: Some(second), rounding: None };
    optimize::<bf16, f32, bf16>(
        pool,
        Optimizer::AdamW,
        &numbers(),
        gradients,
        master,
        moments,
        Some(weights),
    );
}

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

/// The first elements of each of the first arenas.
fn all<T: bytemuck::Pod, const N: usize>(arenas: &mut [Arena], count: usize) -> [&mut [T]; N] {
    let (first, _) = arenas.split_at_mut(N);
    let mut first = first.iter_mut();
    std::array::from_fn(|_| {
        let span = Span { tier: Tier::Device, at: 0, bytes: (size_of::<T>() * count) as u64 };
        let arena = first.next().expect("as many as are split off");
        bytemuck::cast_slice_mut(arena.bytes_mut(span).expect("arenas hold the largest operand"))
    })
}

impl Buffers {
    fn new() -> Self {
        let arena = |bytes: usize| Arena::new("device", bytes as u64).expect("memory for the measurement");
        let mut buffers = Self {
            floats: (0..5).map(|_| arena(4 * PARAMETERS)).collect(),
            halves: (0..5).map(|_| arena(2 * PARAMETERS)).collect(),
            ids: Vec::new(),
        };
        let mut state = 1u32;
        let mut next = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        for (at, values) in all::<f32, 4>(&mut buffers.floats, PARAMETERS).into_iter().enumerate() {
            // The second moments are the last ones, and positive.
            let (low, scale) = if at == 3 { (0.0, 1e-3) } else { (-0.5, 1.0) };
            for value in values {
                *value = (next() as f32 / 16_777_216.0 + low) * scale;
            }
        }
        for values in all::<bf16, 5>(&mut buffers.halves, PARAMETERS) {
            for value in values {
                *value = bf16::from_f32(next() as f32 / 16_777_216.0 - 0.5);
            }
        }
        buffers.spare().fill(0.0);
        buffers.ids = (0..ROWS).map(|_| (next() as usize % VOCABULARY) as i32).collect();
        buffers
    }

    fn both(&mut self) -> (&mut [Arena], &mut [Arena]) {
        (&mut self.floats, &mut self.halves)
    }

    /// Floats to write that no other line reads, and floats to read.
    fn spare_and_two(&mut self) -> (&mut [f32], [&mut [f32]; 2]) {
        let (read, spare) = self.floats.split_at_mut(SPARE);
        let [spare] = all(spare, PARAMETERS);
        (spare, all(read, PARAMETERS))
    }

    /// Floats that no line reads.
    fn spare(&mut self) -> &mut [f32] {
        let [spare] = all(&mut self.floats[SPARE..], PARAMETERS);
        spare
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let bursts: usize = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(15);
    let wanted = arguments.next().unwrap_or_default();
    let lines: Vec<Line> = LINES
        .into_iter()
        .filter(|(name, ..)| name.starts_with("limit") || name.starts_with(&wanted))
        .collect();
    let (pools, mut buffers) = ([Pool::new(1), Pool::new(2)], Buffers::new());
    let mut seconds = vec![[const { Vec::new() }; 2]; lines.len()];
    for _ in 0..bursts {
        for ((_, _, run), seconds) in lines.iter().zip(&mut seconds) {
            for (pool, seconds) in pools.iter().zip(seconds) {
                let begin = Instant::now();
                run(pool, &mut buffers);
                seconds.push(begin.elapsed().as_secs_f64());
            }
        }
    }
    println!(
        "{:<36} {:>7} {:>10} {:>10} {:>7} {:>7}",
        "", "threads", "best GB/s", "median", "best %", "med. %"
    );
    let mut limits = [[0.0; 2]; 2];
    for ((name, bytes, _), seconds) in lines.iter().zip(&mut seconds) {
        for (at, seconds) in seconds.iter_mut().enumerate() {
            seconds.sort_by(f64::total_cmp);
            let rates = [seconds[0], seconds[seconds.len() / 2]].map(|time| *bytes as f64 / time / 1e9);
            if *name == LIMIT {
                limits[at] = rates;
            }
            let [best, median] = [0, 1].map(|kind: usize| 100.0 * rates[kind] / limits[at][kind]);
            let [first, second] = rates;
            println!("{name:<36} {:>7} {first:>10.1} {second:>10.1} {best:>7.0} {median:>7.0}", at + 1);
        }
    }
}
