//! The lines of `zeroth bench kernels` for those who work on kernels: it builds without the rest of zeroth.
//!
//!     cargo run --release -p zeroth-device --example cpu_bench [-- gemm|attention|head|memory|adamw [rounds]]
//!     cargo run --release -p zeroth-device --example cpu_bench -- serve   # for benches/peers/gemm.py
#![allow(clippy::print_stdout, reason = "it is a program for a terminal")]

use std::io::BufRead;

use half::bf16;
use zeroth_base::DType;
use zeroth_device::bench::{
    BenchError, Form, Line, MovingSizes, Product, attention_lines, head_lines, measure, moving_lines,
    optimizer_lines, processor_lines, product_lines,
};
use zeroth_device::cpu::{HeadLossDims, Path};

/// Shapes of models, beside the square ones: m50's, and odd ones.
const SHAPES: [[usize; 3]; 6] =
    [[1024; 3], [2048; 3], [4096, 1024, 3072], [1024, 512, 1536], [1024, 1536, 512], [1000, 1500, 500]];

fn main() -> Result<(), BenchError> {
    let part = std::env::args().nth(1).unwrap_or_default();
    if part == "serve" {
        return serve();
    }
    let rounds = std::env::args().nth(2).and_then(|rounds| rounds.parse().ok()).unwrap_or(20);
    let wanted = |name: &str| part.is_empty() || part == name;
    let mut computing = Vec::new();
    for threads in [1, 2] {
        if wanted("gemm") {
            computing.extend(product_lines(threads, DType::Bf16, &SHAPES)?);
            computing.extend(product_lines(threads, DType::F32, &SHAPES[..1])?);
        }
        if wanted("attention") {
            computing.extend(attention_lines(threads, &[(2, 512, 4), (1, 2048, 8)])?);
        }
        if wanted("head") {
            computing.extend(head_lines(threads, HeadLossDims { rows: 1024, hidden: 512, vocab: 32_000 })?);
        }
    }
    if !computing.is_empty() {
        let mut lines = processor_lines(1)?;
        lines.extend(processor_lines(2)?);
        lines.extend(computing);
        report(lines, rounds)?;
    }
    if wanted("memory") {
        report(moving_lines(&[1, 2], MovingSizes::FULL)?, rounds)?;
    }
    if wanted("adamw") {
        report(optimizer_lines(&[1, 2], MovingSizes::FULL)?, rounds)?;
    }
    Ok(())
}

fn report(lines: Vec<Line>, rounds: usize) -> Result<(), BenchError> {
    println!("path: {}", Path::chosen().map_or_else(|error| error.to_string(), |path| path.to_string()));
    println!(
        "{:<48} {:>7} {:>9} {:>9}   percent of the limit, best and median",
        "", "threads", "best", "median"
    );
    for line in measure(lines, rounds, &mut |_| {})? {
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
    Ok(())
}

/// Reads lines of `type form m n k threads bursts`; then runs once for every line, and answers with the seconds.
fn serve() -> Result<(), BenchError> {
    let mut lines = std::io::stdin().lock().lines().map_while(Result::ok);
    while let Some(line) = lines.next() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [stored, form, numbers @ ..] = &words[..] else { continue };
        let numbers: Vec<usize> = numbers.iter().filter_map(|word| word.parse().ok()).collect();
        let &[m, n, k, threads, bursts] = &numbers[..] else { continue };
        let form = Form::ALL.into_iter().find(|known| known.name() == *form).unwrap_or(Form::Forward);
        let mut burst: Box<dyn FnMut() -> f64> = if *stored == "f32" {
            let mut product = Product::<f32>::new(threads, form, [m, n, k])?;
            Box::new(move || product.run())
        } else {
            let mut product = Product::<bf16>::new(threads, form, [m, n, k])?;
            Box::new(move || product.run())
        };
        burst();
        for _ in 0..bursts {
            if lines.next().is_none() {
                return Ok(());
            }
            println!("{}", burst());
        }
    }
    Ok(())
}
