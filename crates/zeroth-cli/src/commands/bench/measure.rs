//! Runs the benchmarks, with a progress line on terminals.

use std::io::IsTerminal;

use zeroth::base::DType;
use zeroth::bench::{
    CollectivesError, StepBenchError, StepBenchOptions, StepReport, collectives, whole_step,
};
use zeroth::kernel::HeadLossDims;
use zeroth::machine::bench::{
    BenchError, BenchPart, BenchResult, Benchmark, MemoryBoundSizes, attention_benchmarks,
    cpu_peak_benchmarks, disk_benchmarks, gpu_benchmarks, head_loss_benchmarks, matmul_benchmarks, measure,
    memory_bound_benchmarks, optimizer_benchmarks,
};

use super::bench_run::BenchRun;
use crate::exit::Exit;
use crate::output;

/// An error that ends the benchmarks.
pub(super) struct Stopped {
    pub(super) exit: Exit,
    pub(super) message: String,
}

impl From<BenchError> for Stopped {
    fn from(error: BenchError) -> Self {
        let exit = match error {
            BenchError::Device(_) => Exit::Failed,
            BenchError::File { .. } | BenchError::NoRoom { .. } => Exit::Wrong,
        };
        Self { exit, message: error.to_string() }
    }
}

impl From<zeroth::kernel::DeviceError> for Stopped {
    fn from(error: zeroth::kernel::DeviceError) -> Self {
        BenchError::from(error).into()
    }
}

impl From<CollectivesError> for Stopped {
    fn from(error: CollectivesError) -> Self {
        Self { exit: Exit::Failed, message: error.to_string() }
    }
}

impl From<StepBenchError> for Stopped {
    fn from(error: StepBenchError) -> Self {
        let exit =
            if matches!(error, StepBenchError::Memory { .. }) { Exit::DoesNotFit } else { Exit::Failed };
        Self { exit, message: error.to_string() }
    }
}

/// Runs a group of benchmarks; `step` receives the full report of a training step.
pub(super) fn part(
    bench: &BenchRun<'_>,
    part: BenchPart,
    step: &mut Option<StepReport>,
) -> Result<Vec<BenchResult>, Stopped> {
    let arguments = bench.arguments;
    let sizes = if arguments.quick { MemoryBoundSizes::QUICK } else { MemoryBoundSizes::FULL };
    let mut counts = vec![1, bench.threads];
    counts.dedup();
    let rounds = bench.rounds;
    match part {
        BenchPart::Kernels => {
            let mut lines = run(computing(&counts, arguments.quick)?, rounds, "matmuls, attention and head")?;
            lines.extend(run(memory_bound_benchmarks(&counts, sizes)?, rounds, "norms, casts and copies")?);
            let size = if arguments.quick { 2048 } else { 4096 };
            lines.extend(run(gpu_benchmarks(&bench.machine, size)?, rounds, "GPU matmuls")?);
            Ok(lines)
        }
        BenchPart::Optimizer => Ok(run(optimizer_benchmarks(&counts, sizes)?, rounds, "optimizer")?),
        BenchPart::Collectives => {
            let parts: &[usize] = if arguments.quick { &[16 << 20] } else { &[16 << 20, 64 << 20] };
            let progress = ProgressLine::new("collectives", rounds);
            Ok(collectives(arguments.ranks as usize, parts, rounds, &|round| progress.tell(round))?)
        }
        BenchPart::Disk => {
            let bytes = if arguments.quick { 64 << 20 } else { 1 << 30 };
            // A round writes and reads twice as much; more rounds add little.
            Ok(run(disk_benchmarks(&arguments.dir, bytes)?, rounds.min(5), "disk")?)
        }
        BenchPart::Step => {
            let ranks = arguments.ranks as usize;
            let options = StepBenchOptions {
                size: arguments.size.into(),
                stage: arguments.stage,
                dtype: arguments.dtype.into(),
                ranks,
                threads: (bench.threads / ranks).max(1),
                steps: rounds,
                length: arguments.quick.then_some(128),
            };
            let progress = ProgressLine::new("step", rounds + 1);
            let report = whole_step(&options, &|step| progress.tell(step))?;
            let lines = report.lines.to_vec();
            *step = Some(report);
            Ok(lines)
        }
    }
}

/// Compute-bound kernels, and the CPU's limits.
fn computing(counts: &[usize], quick: bool) -> Result<Vec<Benchmark>, Stopped> {
    let shapes: &[[usize; 3]] =
        if quick { &[[1024; 3]] } else { &[[1024; 3], [2048; 3], [4096, 1024, 3072]] };
    let attention: &[(usize, usize, usize)] =
        if quick { &[(2, 512, 4)] } else { &[(2, 512, 4), (1, 2048, 8)] };
    let rows = if quick { 128 } else { 1024 };
    let mut lines = Vec::new();
    for &threads in counts {
        lines.extend(cpu_peak_benchmarks(threads)?);
    }
    for &threads in counts {
        lines.extend(matmul_benchmarks(threads, DType::Bf16, shapes)?);
        lines.extend(matmul_benchmarks(threads, DType::F32, shapes)?);
        lines.extend(attention_benchmarks(threads, attention)?);
        lines.extend(head_loss_benchmarks(threads, HeadLossDims::new(rows, 512, 32_000))?);
    }
    Ok(lines)
}

fn run(lines: Vec<Benchmark>, rounds: usize, what: &'static str) -> Result<Vec<BenchResult>, BenchError> {
    let progress = ProgressLine::new(what, rounds);
    measure(lines, rounds, &mut |round| progress.tell(round))
}

/// A progress line on a terminal, cleared when done.
struct ProgressLine {
    what: &'static str,
    rounds: usize,
    terminal: bool,
}

impl ProgressLine {
    fn new(what: &'static str, rounds: usize) -> Self {
        Self { what, rounds, terminal: std::io::stderr().is_terminal() }
    }

    fn tell(&self, round: usize) {
        if self.terminal {
            output::over(&format!("{}: {round} of {}", self.what, self.rounds));
        }
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        if self.terminal {
            output::over("");
        }
    }
}
