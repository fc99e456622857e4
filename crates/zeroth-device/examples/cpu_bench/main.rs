//! How fast the CPU kernels are beside what the processor can do.
//!
//!     cargo run --release -p zeroth-device --example cpu_bench            # everything; `gemm` or `attention` for a part
//!     cargo run --release -p zeroth-device --example cpu_bench -- serve   # for benches/peers/gemm.py
//!
//! Clocks of processors with tiles change within milliseconds, so all lines are measured in turn, many short bursts
//! each, and the best and the median of each are set beside the limit's.
#![allow(clippy::print_stdout, reason = "it is a program for a terminal")]

#[cfg(target_arch = "x86_64")]
mod limits;
mod work;

use std::io::BufRead;

use half::bf16;
use work::{Attention, Form, Product};
use zeroth_device::cpu::{Element, Path};

/// One line of the table: what it is, the line that limits it, and the rates of its bursts in GFLOP/s.
struct Line {
    name: String,
    limit: Option<&'static str>,
    burst: Box<dyn FnMut() -> f64>,
    rates: Vec<f64>,
}

fn rates(mut seconds: impl FnMut() -> f64 + 'static, flop: f64) -> Box<dyn FnMut() -> f64> {
    Box::new(move || flop / seconds() / 1e9)
}

fn product<T: Element>(threads: usize, form: Form, shape: [usize; 3], limit: Option<&'static str>) -> Line {
    let mut product = Product::<T>::new(threads, form, shape);
    let [m, n, k] = shape;
    let name = format!("{} {form:?} {m}x{n}x{k}, {threads} thread(s)", T::DTYPE);
    let flop = product.flop();
    Line { name, limit, burst: rates(move || product.run(), flop), rates: Vec::new() }
}

fn attention_lines<T: Element>(
    lines: &mut Vec<Line>,
    sequences: usize,
    length: usize,
    kv_heads: usize,
    limit: &'static str,
) {
    for backward in [false, true] {
        let mut attention = Attention::<T>::new(1, sequences, length, 8, kv_heads);
        let flop = attention.flop()[usize::from(backward)];
        let what = if backward { "backward" } else { "forward" };
        let name = format!(
            "{} attention {what} {sequences}x{length}, 8 heads of 64, {kv_heads} kv, 1 thread(s)",
            T::DTYPE
        );
        let burst = rates(move || attention.run()[usize::from(backward)], flop);
        lines.push(Line { name, limit: Some(limit), burst, rates: Vec::new() });
    }
}

const REGISTERS: &str = "tiles in registers, 1 thread(s)";
const SECOND_CACHE: &str = "tiles from L2, 1 thread(s)";
const F32: &str = "f32 in registers, 1 thread(s)";

#[cfg(target_arch = "x86_64")]
fn limit_lines(lines: &mut Vec<Line>) {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Instant;

    use limits::Limits;
    use zeroth_device::cpu::Pool;

    if !Path::available().contains(&Path::Amx) {
        return;
    }
    let mut add = |name: &str, threads: usize, flop: fn(&Limits) -> f64| {
        let (pool, limits, barrier) = (Pool::new(threads), Limits::new(), Barrier::new(threads));
        let burst = move || {
            let start = Instant::now();
            let done = AtomicU64::new(0);
            pool.run(threads, |_, _| {
                // So that no thread takes two of the parts.
                barrier.wait();
                done.fetch_add(flop(&limits) as u64, Ordering::Relaxed);
            });
            done.into_inner() as f64 / start.elapsed().as_secs_f64() / 1e9
        };
        lines.push(Line {
            name: format!("{name}, {threads} thread(s)"),
            limit: None,
            burst: Box::new(burst),
            rates: Vec::new(),
        });
    };
    for threads in [1, 2] {
        add("tiles in registers", threads, Limits::tiles_in_registers);
        add("tiles from L2", threads, Limits::tiles_from_second_cache);
    }
    add("f32 in registers", 1, |_| Limits::f32_in_registers());
}

#[cfg(not(target_arch = "x86_64"))]
fn limit_lines(_: &mut Vec<Line>) {}

fn main() {
    let part = std::env::args().nth(1).unwrap_or_default();
    if part == "serve" {
        serve();
        return;
    }
    let mut lines = Vec::new();
    limit_lines(&mut lines);
    if part != "attention" {
        for shape in [[1024, 1024, 1024], [2048, 2048, 2048], [4096, 3072, 1024]] {
            for threads in [1, 2] {
                lines.push(product::<bf16>(threads, Form::Forward, shape, Some(SECOND_CACHE)));
            }
        }
        for form in [Form::Dx, Form::Dw] {
            lines.push(product::<bf16>(1, form, [1024, 1024, 1024], Some(SECOND_CACHE)));
        }
        for shape in [[1024, 512, 1536], [1000, 1500, 500], [1024, 1536, 512]] {
            for form in [Form::Forward, Form::Dx, Form::Dw] {
                lines.push(product::<bf16>(1, form, shape, Some(SECOND_CACHE)));
            }
        }
        lines.push(product::<f32>(1, Form::Forward, [1024; 3], Some(F32)));
        lines.push(product::<f32>(1, Form::Dw, [1024; 3], Some(F32)));
    }
    if part != "gemm" {
        for (sequences, length, kv_heads) in [(2, 512, 4), (1, 2048, 8)] {
            attention_lines::<bf16>(&mut lines, sequences, length, kv_heads, REGISTERS);
            attention_lines::<f32>(&mut lines, sequences, length, kv_heads, F32);
        }
    }
    let rounds = std::env::args().nth(2).and_then(|rounds| rounds.parse().ok()).unwrap_or(40);
    for _ in 0..rounds {
        for line in &mut lines {
            let rate = (line.burst)();
            line.rates.push(rate);
        }
    }
    report(&mut lines);
}

fn report(lines: &mut [Line]) {
    for line in &mut *lines {
        line.rates.sort_by(f64::total_cmp);
    }
    let of = |line: &Line| (line.rates.last().copied().unwrap_or(0.0), line.rates[line.rates.len() / 2]);
    println!("path: {}", Path::chosen().map_or_else(|error| error.to_string(), |path| path.to_string()));
    println!("{:<62} {:>9} {:>9}   percent of the limit, best and median", "GFLOP/s", "best", "median");
    for line in &*lines {
        let (best, median) = of(line);
        let limit = line.limit.and_then(|limit| lines.iter().find(|other| other.name == limit));
        let share = limit.map_or_else(String::new, |limit| {
            let (limit_best, limit_median) = of(limit);
            format!(
                "{:5.1} {:5.1} of {}",
                100.0 * best / limit_best,
                100.0 * median / limit_median,
                limit.name
            )
        });
        println!("{:<62} {best:>9.1} {median:>9.1}   {share}", line.name);
    }
}

/// Reads lines of `type form m n k threads bursts`; then runs once for every line, and answers with the seconds.
fn serve() {
    let mut lines = std::io::stdin().lock().lines().map_while(Result::ok);
    while let Some(line) = lines.next() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [stored, form, numbers @ ..] = &words[..] else { continue };
        let numbers: Vec<usize> = numbers.iter().filter_map(|word| word.parse().ok()).collect();
        let &[m, n, k, threads, bursts] = &numbers[..] else { continue };
        let form = match *form {
            "dx" => Form::Dx,
            "dw" => Form::Dw,
            _ => Form::Forward,
        };
        let mut burst: Box<dyn FnMut() -> f64> = if *stored == "f32" {
            let mut product = Product::<f32>::new(threads, form, [m, n, k]);
            Box::new(move || product.run())
        } else {
            let mut product = Product::<bf16>::new(threads, form, [m, n, k]);
            Box::new(move || product.run())
        };
        burst();
        for _ in 0..bursts {
            if lines.next().is_none() {
                return;
            }
            println!("{}", burst());
        }
    }
}
