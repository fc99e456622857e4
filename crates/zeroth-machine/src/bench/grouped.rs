//! Grouped matmuls of experts beside a dense matmul with as many rows.

use std::time::Instant;

use half::bf16;
use zeroth_base::DType;
use zeroth_cpu::{
    Pool, grouped_linear, grouped_linear_dw, grouped_linear_dw_rounded, grouped_linear_dx,
    grouped_linear_scratch, row_stride,
};
use zeroth_kernel::{DeviceError, GroupedLinearDims};

use super::operands::{Operands, of, random};
use super::{Benchmark, MatmulBench, MatmulKind, RateUnit};

/// How rows are split over experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowSplit {
    /// Each expert has as many.
    Uniform,
    /// The n-th expert has 1/n of the rows of the first.
    Zipf,
    /// One expert has all of them.
    One,
}

impl RowSplit {
    /// All splits.
    pub const ALL: [Self; 3] = [Self::Uniform, Self::Zipf, Self::One];

    const fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Zipf => "zipf",
            Self::One => "one expert",
        }
    }

    /// The first row of each expert, then all rows.
    fn offsets(self, rows: usize, experts: usize) -> Vec<i32> {
        let share = |expert: usize| match self {
            Self::Uniform => 1.0,
            Self::Zipf => 1.0 / (expert + 1) as f64,
            Self::One => f64::from(u8::from(expert == experts / 2)),
        };
        let total: f64 = (0..experts).map(share).sum();
        let before = |end: usize| (0..end).map(share).sum::<f64>() / total;
        (0..=experts).map(|expert| (before(expert) * rows as f64).round() as i32).collect()
    }
}

/// The matmuls of experts in bf16, [rows, outputs, inputs] in all, each of these splits behind the dense matmul of that shape,
/// which is its limit.
pub fn grouped_benchmarks(
    threads: usize,
    experts: usize,
    shape: [usize; 3],
    splits: &[RowSplit],
) -> Result<Vec<Benchmark>, DeviceError> {
    let [rows, outputs, inputs] = shape;
    let mut lines = Vec::new();
    for form in MatmulKind::ALL.into_iter().chain([MatmulKind::DwRounded]) {
        let [m, n, k] = match form {
            MatmulKind::Forward | MatmulKind::Add => shape,
            MatmulKind::Dx => [rows, inputs, outputs],
            MatmulKind::Dw | MatmulKind::DwRounded => [outputs, inputs, rows],
        };
        let mut dense = MatmulBench::<bf16>::new(threads, form, [m, n, k])?;
        let (name, flop) = (format!("bf16 dense {} {m}x{n}x{k}", form.name()), dense.flop());
        let run = move || Ok(dense.run());
        lines.push(Benchmark::of_seconds(name.clone(), threads, RateUnit::Gflops, flop, run));
        for &split in splits {
            lines.push(grouped(threads, form, split, experts, shape)?.limited_by(name.as_str()));
        }
    }
    Ok(lines)
}

fn grouped(
    threads: usize,
    form: MatmulKind,
    split: RowSplit,
    experts: usize,
    [rows, outputs, inputs]: [usize; 3],
) -> Result<Benchmark, DeviceError> {
    let pool = Pool::start(threads)?;
    let [x_stride, y_stride] = [inputs, outputs].map(|width| row_stride(width, DType::Bf16));
    let dims =
        GroupedLinearDims { x_stride, y_stride, ..GroupedLinearDims::new(rows, experts, inputs, outputs) };
    let weights = experts * outputs * inputs;
    // x [rows, inputs], w [experts, outputs, inputs], y [rows, outputs], dw, scratch.
    let mut operands = Operands::new([
        2 * rows * x_stride,
        2 * weights,
        2 * rows * y_stride,
        match form {
            MatmulKind::Dw => 4 * weights,
            MatmulKind::DwRounded => 2 * weights,
            _ => 0,
        },
        4 * grouped_linear_scratch(dims, threads),
    ])?;
    let [x, w, y, dw, _] = operands.split();
    for (name, operand) in [x, w, y].into_iter().enumerate() {
        random::<bf16>(name as u64, operand);
    }
    random::<bf16>(4, dw);
    let offsets = split.offsets(rows, experts);
    let run = move || {
        let [x, w, y, dw, scratch] = operands.split();
        let (x, w, y) = (of::<bf16>(x), of::<bf16>(w), of::<bf16>(y));
        let scratch = of::<f32>(scratch);
        let start = Instant::now();
        match form {
            MatmulKind::Forward | MatmulKind::Add => grouped_linear(&pool, dims, &offsets, x, w, y, scratch),
            MatmulKind::Dx => grouped_linear_dx(&pool, dims, 1.0, &offsets, y, w, x, false, scratch),
            MatmulKind::Dw => grouped_linear_dw(&pool, dims, 1.0, &offsets, y, x, of(dw), scratch),
            MatmulKind::DwRounded => {
                grouped_linear_dw_rounded(&pool, dims, 1.0, &offsets, y, x, of::<bf16>(dw), scratch);
            }
        }
        Ok(start.elapsed().as_secs_f64())
    };
    let name = format!("bf16 grouped {} {experts} experts, {}", form.name(), split.name());
    let flop = 2.0 * rows as f64 * inputs as f64 * outputs as f64;
    Ok(Benchmark::of_seconds(name, threads, RateUnit::Gflops, flop, run))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::measure;

    #[test]
    fn every_split_has_all_rows() {
        for split in RowSplit::ALL {
            let offsets = split.offsets(1000, 7);
            assert!(offsets.len() == 8 && offsets[0] == 0 && offsets[7] == 1000, "{split:?}: {offsets:?}");
            assert!(offsets.is_sorted(), "{split:?}: {offsets:?}");
        }
    }

    #[test]
    fn grouped_matmuls_are_measured_beside_dense_ones() {
        let measured =
            measure(grouped_benchmarks(2, 3, [48, 40, 24], &RowSplit::ALL).unwrap(), 2, &mut |_| {}).unwrap();
        assert_eq!(measured.len(), 16);
        assert!(measured.iter().all(|line| line.best >= line.median && line.median > 0.0), "{measured:?}");
    }
}
