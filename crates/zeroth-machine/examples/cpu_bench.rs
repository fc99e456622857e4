//! The lines of `zeroth bench kernels` for those who work on kernels: it builds without the rest of zeroth.
//!
//!     cargo run --release -p zeroth-machine --example cpu_bench [-- PART [ROUNDS [THREADS]]]
//!     # parts: gemm adapter grouped attention head memory adamw; `uniform` is the equal shares of `grouped` alone
//!     cargo run --release -p zeroth-machine --example cpu_bench -- serve   # for benches/peers/gemm.py
#![allow(clippy::print_stdout, reason = "it is a program for a terminal")]

use std::io::BufRead;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use half::bf16;
use zeroth_base::DType;
use zeroth_cpu::{Isa, Pool};
use zeroth_kernel::DeviceError;
use zeroth_kernel::HeadLossDims;
use zeroth_machine::bench::{
    BenchError, BenchResult, Benchmark, F32, MatmulBench, MatmulKind, MemoryBoundSizes, RowSplit, TILES,
    TILES_FROM_L2, adapter_benchmarks, attention_benchmarks, cpu_peak_benchmarks, grouped_benchmarks,
    head_loss_benchmarks, matmul_benchmarks, measure, memory_bound_benchmarks, optimizer_benchmarks,
    run_peak_loop,
};

/// Shapes of models, beside the square ones: m50's, and odd ones.
const SHAPES: [[usize; 3]; 6] =
    [[1024; 3], [2048; 3], [4096, 1024, 3072], [1024, 512, 1536], [1024, 1536, 512], [1000, 1500, 500]];

/// Experts; rows of all experts, outputs, inputs. 128 rows an expert.
const EXPERTS: [(usize, [usize; 3]); 2] = [(16, [2048, 1536, 2048]), (32, [4096, 1024, 1024])];

fn main() -> Result<(), BenchError> {
    let part = std::env::args().nth(1).unwrap_or_default();
    if part == "serve" {
        return serve();
    }
    let rounds = std::env::args().nth(2).and_then(|rounds| rounds.parse().ok()).unwrap_or(20);
    let wanted = |name: &str| part.is_empty() || part == name;
    let mut computing = Vec::new();
    let counts =
        std::env::args().nth(3).and_then(|threads| threads.parse().ok()).map_or(vec![1, 2], |one| vec![one]);
    for &threads in &counts {
        if wanted("gemm") {
            computing.extend(matmul_benchmarks(threads, DType::Bf16, &SHAPES)?);
            computing.extend(matmul_benchmarks(threads, DType::F32, &SHAPES[..1])?);
        }
        if wanted("adapter") {
            computing.extend(matmul_benchmarks(threads, DType::Bf16, &[[2048, 768, 768]])?);
            computing.extend(adapter_benchmarks(threads, [2048, 768, 16])?);
        }
        if wanted("grouped") {
            let (experts, shape) = EXPERTS[0];
            computing.extend(grouped_benchmarks(threads, experts, shape, &RowSplit::ALL)?);
        }
        if part == "uniform" {
            for (experts, shape) in EXPERTS {
                computing.extend(grouped_benchmarks(threads, experts, shape, &[RowSplit::Uniform])?);
            }
        }
        if wanted("attention") {
            computing.extend(attention_benchmarks(threads, &[(2, 512, 4), (1, 2048, 8)])?);
        }
        if wanted("head") {
            computing.extend(head_loss_benchmarks(threads, HeadLossDims::new(1024, 512, 32_000))?);
        }
    }
    if !computing.is_empty() {
        let mut lines = Vec::new();
        for &threads in counts.iter().filter(|_| part != "uniform") {
            lines.extend(cpu_peak_benchmarks(threads)?);
        }
        lines.extend(computing);
        report(lines, rounds)?;
    }
    if wanted("memory") {
        report(memory_bound_benchmarks(&[1, 2], MemoryBoundSizes::FULL)?, rounds)?;
    }
    if wanted("adamw") {
        report(optimizer_benchmarks(&[1, 2], MemoryBoundSizes::FULL)?, rounds)?;
    }
    Ok(())
}

fn report(lines: Vec<Benchmark>, rounds: usize) -> Result<(), BenchError> {
    println!("path: {}", Isa::chosen().map_or_else(|error| error.to_string(), |path| path.to_string()));
    println!(
        "{:<48} {:>7} {:>9} {:>9}   percent of the limit, best and median",
        "", "threads", "best", "median"
    );
    let lines = measure(lines, rounds, &mut |_| {})?;
    for line in &lines {
        let share = match (&line.percent, &line.limit) {
            (Some(percent), Some(limit)) => {
                format!("{:5.1} {:5.1} of {}", percent.best, percent.median, limit.name)
            }
            _ => String::new(),
        };
        let unit = line.unit.name();
        println!(
            "{:<48} {:>7} {:>9.1} {:>9.1} {unit:<7}  {share}",
            line.name, line.threads, line.best, line.median
        );
    }
    scaling(&lines);
    Ok(())
}

/// How many times one thread's rate two threads reach, beside the same of the loop that stays in registers.
fn scaling(lines: &[BenchResult]) {
    let of = |name: &str| {
        let rate = |threads| lines.iter().find(|line| line.name == name && line.threads == threads);
        rate(1).zip(rate(2)).map(|(one, two)| [two.best / one.best, two.median / one.median])
    };
    for line in lines.iter().filter(|line| line.threads == 1) {
        let registers = match line.limit.as_ref().map(|limit| limit.name.as_str()) {
            Some(TILES | TILES_FROM_L2) => TILES,
            Some(F32) => F32,
            _ => continue,
        };
        if let Some((own, limit)) = of(&line.name).zip(of(registers)) {
            println!(
                "{:<48} 2 threads: {:.2} {:.2} times one; {registers} {:.2} {:.2}; share {:.2} {:.2}",
                line.name,
                own[0],
                own[1],
                limit[0],
                limit[1],
                own[0] / limit[0],
                own[1] / limit[1]
            );
        }
    }
}

/// Reads a line of `type form m n k threads`, or of `limit registers|l2|f32 threads`; then, for every line that says how long,
/// runs until so many seconds have passed, and answers with those of each run, for a limit with those of 10^9 operations.
/// It says nothing meanwhile: whoever reads it would be woken up, on a processor that it may be running on.
fn serve() -> Result<(), BenchError> {
    let mut lines = std::io::stdin().lock().lines().map_while(Result::ok);
    let Some(line) = lines.next() else { return Ok(()) };
    let refuse = || {
        println!(
            "`{line}`: write `bf16|f32 forward|dx|dw m n k threads` or `limit registers|l2|f32 threads`"
        );
        Ok(())
    };
    let words: Vec<&str> = line.split_whitespace().collect();
    let [stored, form, numbers @ ..] = &words[..] else { return refuse() };
    let numbers: Vec<usize> = numbers.iter().filter_map(|word| word.parse().ok()).collect();
    let known = MatmulKind::ALL.into_iter().find(|known| known.name() == *form);
    let mut run: Box<dyn FnMut() -> f64> = match (*stored, known, &numbers[..]) {
        ("limit", None, &[threads]) => match limit(form, threads)? {
            Some(run) => run,
            None => return refuse(),
        },
        ("f32", Some(form), &[m, n, k, threads]) => {
            let mut product = MatmulBench::<f32>::new(threads, form, [m, n, k])?;
            Box::new(move || product.run())
        }
        ("bf16", Some(form), &[m, n, k, threads]) => {
            let mut product = MatmulBench::<bf16>::new(threads, form, [m, n, k])?;
            Box::new(move || product.run())
        }
        _ => return refuse(),
    };
    run();
    for line in lines {
        let (wanted, start) = (line.trim().parse().unwrap_or(0.0), Instant::now());
        let mut runs = vec![run()];
        while start.elapsed().as_secs_f64() < wanted {
            runs.push(run());
        }
        println!("{}", runs.iter().map(f64::to_string).collect::<Vec<_>>().join(" "));
    }
    Ok(())
}

/// A loop of the processor at its limit, on as many threads at the same time; `None` where there is no such name.
fn limit(name: &str, threads: usize) -> Result<Option<Box<dyn FnMut() -> f64>>, BenchError> {
    let path = Isa::chosen().map_err(DeviceError::from)?;
    let name = match name {
        "registers" if path == Isa::Amx => TILES,
        "l2" if path == Isa::Amx => TILES_FROM_L2,
        "registers" | "l2" | "f32" => F32,
        _ => return Ok(None),
    };
    let (pool, barrier) = (Pool::new(threads), Barrier::new(threads));
    Ok(Some(Box::new(move || {
        let (start, done) = (Instant::now(), AtomicU64::new(0));
        pool.run(threads, |_, _| {
            // So that no thread takes two of the parts.
            barrier.wait();
            done.fetch_add(run_peak_loop(path, name) as u64, Ordering::Relaxed);
        });
        1e9 * start.elapsed().as_secs_f64() / done.into_inner() as f64
    })))
}
