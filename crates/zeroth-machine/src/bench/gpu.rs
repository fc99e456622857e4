//! Matmuls of a GPU against its datasheet peak, and a memory-bound kernel.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Instant;

use zeroth_base::DType;

use super::{BenchError, Benchmark, MatmulKind, RateUnit, fill_random};
use crate::{Gpus, Machine, known_gpu};
use zeroth_cuda::CudaDevice;
use zeroth_kernel::{ByTier, LinearDims};
use zeroth_kernel::{Device, DeviceError, GradStore, Kernel, Launch, Queue, Span};

/// Launches per burst.
const REPEATS: usize = 8;

/// Matmuls of `size`³ and a conversion on the first GPU; empty without a GPU.
pub fn gpu_benchmarks(machine: &Machine, size: usize) -> Result<Vec<Benchmark>, BenchError> {
    let Gpus::Found { devices, .. } = &machine.gpus else { return Ok(Vec::new()) };
    let Some(name) = devices.first().map(|gpu| gpu.name.clone()) else { return Ok(Vec::new()) };
    let elements = (size * size) as u64;
    let dims = LinearDims::new(size, size, size);
    // x, w and y in f32 at most; then dw; then scratch.
    let operand = |at: u64, bytes: u64| Span::device(at * 4 * elements, bytes * elements);
    let kernels = |dtype: DType| {
        let wide = dtype.bytes();
        let [x, w, y] = [0, 1, 2].map(|at| operand(at, wide));
        let dw = operand(3, 4);
        [
            Kernel::Linear { dims, x, w, bias: None, y },
            Kernel::LinearDx { dims, scale: 1.0, dy: y, w, dx: x, add: false },
            Kernel::LinearDw { dims, scale: 1.0, dy: y, x, dw, store: GradStore::Add },
        ]
    };
    let all = || {
        [DType::Bf16, DType::F32].into_iter().flat_map(|dtype| kernels(dtype).map(|kernel| (dtype, kernel)))
    };
    let scratch = all().map(|(dtype, kernel)| zeroth_cuda::scratch_bytes(&kernel, dtype)).max().unwrap_or(0);
    let scratch = Span::device(16 * elements, scratch);
    let device = Rc::new(RefCell::new(CudaDevice::open(0, ByTier::on_device(scratch.end()))?));
    fill(&mut device.borrow_mut(), elements as usize)?;

    let known = known_gpu(&name).ok().and_then(|gpu| Some((gpu.name, gpu.bf16_tflops?)));
    let datasheet = known.map(|(gpu, _)| format!("bf16 peak of the datasheet ({gpu})"));
    let mut lines = Vec::new();
    if let (Some(title), Some((_, tflops))) = (&datasheet, known) {
        lines.push(Benchmark::new(title.clone(), 1, RateUnit::Gflops, move || Ok(1e3 * tflops)));
    }
    let flop = REPEATS as f64 * 2.0 * (size as f64).powi(3);
    for (at, (dtype, kernel)) in all().enumerate() {
        let form = MatmulKind::ALL[at % MatmulKind::ALL.len()];
        let launch = Launch { kernel, dtype, scratch };
        let title = format!("{name}: {dtype} {} {size}x{size}x{size}", form.name());
        let line = Benchmark::of_seconds(title, 1, RateUnit::Gflops, flop, burst(&device, launch));
        lines.push(match &datasheet {
            Some(limit) if dtype == DType::Bf16 => line.limited_by(limit.clone()),
            _ => line,
        });
    }
    let convert = Kernel::Convert {
        from: operand(1, 4),
        from_type: DType::F32,
        to: operand(2, 2),
        to_type: DType::Bf16,
        found_inf: None,
    };
    let launch = Launch { kernel: convert, dtype: DType::Bf16, scratch };
    let bytes = (REPEATS as u64 * 6 * elements) as f64;
    let title = format!("{name}: convert f32 to bf16");
    lines.push(Benchmark::of_seconds(title, 1, RateUnit::Gigabytes, bytes, burst(&device, launch)));
    Ok(lines)
}

/// Fills x, w and y with random bf16, which are finite and not zero when read as f32 too.
fn fill(device: &mut CudaDevice, elements: usize) -> Result<(), DeviceError> {
    let mut numbers = vec![half::bf16::ZERO; 2 * elements];
    for at in 0..3 {
        fill_random(at, &mut numbers);
        let to = Span::device(at * 4 * elements as u64, 4 * elements as u64);
        device.upload(Queue::Compute, bytemuck::cast_slice(&numbers), to)?;
    }
    device.synchronise()
}

/// Enqueues a kernel [`REPEATS`] times and waits; returns the seconds.
fn burst(
    device: &Rc<RefCell<CudaDevice>>,
    launch: Launch,
) -> impl FnMut() -> Result<f64, BenchError> + use<> {
    let device = Rc::clone(device);
    move || {
        let mut device = device.borrow_mut();
        device.synchronise()?;
        let start = Instant::now();
        for _ in 0..REPEATS {
            device.enqueue(Queue::Compute, &launch)?;
        }
        device.synchronise()?;
        Ok(start.elapsed().as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::super::measure;
    use super::*;
    use crate::probe;

    #[test]
    fn without_a_gpu_there_are_no_gpu_benchmarks() {
        let machine = probe();
        let lines = gpu_benchmarks(&machine, 256).unwrap();
        let measured = measure(lines, 1, &mut |_| {}).unwrap();
        assert_eq!(measured.is_empty(), !matches!(machine.gpus, Gpus::Found { .. }));
    }
}
