//! Harness of the GPU self-test: allocates operands, runs a kernel twice, and compares its outputs.

use std::time::Instant;

use half::{bf16, f16};
use zeroth_base::DType;
use zeroth_cpu::{self, Pool};
use zeroth_cuda::CudaDevice;
use zeroth_kernel::{Device, DeviceError, Kernel, Launch, Queue, Span};

pub(crate) type Outcome = Result<(), DeviceError>;

/// A named group of tests.
pub(crate) type Group = (&'static str, fn(&mut Harness) -> Outcome);

pub(crate) const ARENA: u64 = 3 << 30;
/// Guard bytes after every output, and their value: NaN in every data type.
const GAP: u64 = 256;
pub(crate) const POISON: u8 = 0xff;
/// Inputs are normally distributed: a smaller result is a difference of larger values, so its error is not relative to its size.
const SMALLEST: f64 = 0.1;

/// The expected contents of an output.
#[derive(Clone)]
pub(crate) enum Expected {
    /// These values, within a relative bound.
    Near(DType, Vec<f64>, f64),
    /// One f64 sum, within a relative bound.
    Sum(f64, f64),
    /// Exactly these bytes.
    Bits(Vec<u8>),
}

#[derive(Clone)]
pub(crate) struct Output {
    pub(crate) span: Span,
    pub(crate) before: Vec<u8>,
    pub(crate) expected: Expected,
}

pub(crate) struct Harness {
    pub(crate) device: CudaDevice,
    pub(crate) pool: Pool,
    pub(crate) dtype: DType,
    pub(crate) seed: u64,
    pub(crate) next: u64,
    pub(crate) failures: usize,
    /// Runs only groups with this word in their name.
    pub(crate) only: Option<String>,
}

pub(crate) fn to_bytes(dtype: DType, values: &[f64]) -> Vec<u8> {
    let narrow = values.iter().map(|&value| value as f32);
    match dtype {
        DType::F32 => narrow.flat_map(f32::to_ne_bytes).collect(),
        DType::Bf16 => narrow.flat_map(|value| bf16::from_f32(value).to_ne_bytes()).collect(),
        DType::F16 => narrow.flat_map(|value| f16::from_f32(value).to_ne_bytes()).collect(),
    }
}

pub(crate) fn from_bytes(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let wide = |two: &[u8]| u16::from_ne_bytes([two[0], two[1]]);
    let four = |four: &[u8]| f32::from_ne_bytes([four[0], four[1], four[2], four[3]]);
    match dtype {
        DType::F32 => bytes.chunks_exact(4).map(|bytes| f64::from(four(bytes))).collect(),
        DType::Bf16 => bytes.chunks_exact(2).map(|bytes| bf16::from_bits(wide(bytes)).to_f64()).collect(),
        DType::F16 => bytes.chunks_exact(2).map(|bytes| f16::from_bits(wide(bytes)).to_f64()).collect(),
    }
}

pub(crate) fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

pub(crate) fn narrow(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&value| value as f32).collect()
}

impl Harness {
    pub(crate) fn new(device: CudaDevice) -> Self {
        let pool = Pool::new(std::thread::available_parallelism().map_or(1, usize::from));
        Self { device, pool, dtype: DType::F32, seed: 0, next: 0, failures: 0, only: None }
    }

    pub(crate) fn runs(&self, group: &str) -> bool {
        self.only.as_ref().is_none_or(|word| group.contains(word.as_str()))
    }

    /// Normally distributed values, rounded to the current data type, so that reference and kernel get the same inputs.
    pub(crate) fn random(&mut self, count: usize) -> Vec<f64> {
        self.random_of(self.dtype, count)
    }

    pub(crate) fn random_of(&mut self, dtype: DType, count: usize) -> Vec<f64> {
        self.seed += 1;
        let mut values = vec![0.0f32; count];
        zeroth_cpu::normal(&self.pool, 77, self.seed, 0, 1.0, &mut values);
        let values: Vec<f64> = values.iter().map(|&value| f64::from(value)).collect();
        from_bytes(dtype, &to_bytes(dtype, &values))
    }

    /// Largest relative L2 error that rounding explains. One rounding to bf16 is off by up to 2^-8 of an element, one to f16 by
    /// 2^-11; a row of a few elements may consist of one that is.
    pub(crate) fn bound(&self, stored: DType) -> f64 {
        match (stored, self.dtype) {
            (DType::Bf16, _) => 4e-3,
            (DType::F16, _) => 5e-4,
            (DType::F32, DType::F32) => 3e-6,
            (DType::F32, _) => 1e-5,
        }
    }

    pub(crate) fn allocate(&mut self, bytes: usize) -> Span {
        let span = Span::device(self.next, bytes as u64);
        self.next = (span.end() + GAP).next_multiple_of(256);
        assert!(self.next <= ARENA, "the self-test needs a larger arena");
        span
    }

    pub(crate) fn upload(&mut self, bytes: &[u8]) -> Result<Span, DeviceError> {
        let span = self.allocate(bytes.len());
        self.device.upload(Queue::Compute, bytes, span)?;
        Ok(span)
    }

    pub(crate) fn upload_values(&mut self, values: &[f64]) -> Result<Span, DeviceError> {
        self.upload(&to_bytes(self.dtype, values))
    }

    pub(crate) fn upload_f32(&mut self, values: &[f64]) -> Result<Span, DeviceError> {
        self.upload(&to_bytes(DType::F32, values))
    }

    /// An output of the current data type that the kernel overwrites.
    pub(crate) fn overwritten(&mut self, expected: Vec<f64>) -> Output {
        self.stored(self.dtype, expected, 1.0)
    }

    /// An output that the kernel overwrites; `factor` scales the error bound.
    pub(crate) fn stored(&mut self, dtype: DType, expected: Vec<f64>, factor: f64) -> Output {
        let bytes = expected.len() * dtype.bytes() as usize;
        let bound = factor * self.bound(dtype);
        let (span, before) = (self.allocate(bytes), vec![POISON; bytes]);
        Output { span, before, expected: Expected::Near(dtype, expected, bound) }
    }

    /// An f32 output that the kernel accumulates to.
    pub(crate) fn accumulated(&mut self, expected: &[f64], factor: f64) -> Output {
        let before = self.random_of(DType::F32, expected.len());
        let mut output = self.stored(DType::F32, add(&before, expected), factor);
        output.before = to_bytes(DType::F32, &before);
        output
    }

    pub(crate) fn exact(&mut self, before: Vec<u8>, expected: Vec<u8>) -> Output {
        Output { span: self.allocate(expected.len()), before, expected: Expected::Bits(expected) }
    }

    /// Runs a kernel twice and compares its outputs. Frees all allocations afterwards.
    pub(crate) fn case(&mut self, shape: &str, kernel: Kernel, outputs: &[Output]) -> Outcome {
        let (name, dtype) = (kernel.name(), self.dtype);
        let scratch = self.allocate(zeroth_cuda::scratch_bytes(&kernel, dtype) as usize);
        let launch = Launch { kernel, dtype, scratch };
        let mut runs = Vec::new();
        for _ in 0..2 {
            let poisoned = vec![POISON; scratch.bytes.min(8 << 20) as usize];
            let part = scratch.part(0, poisoned.len() as u64, 1);
            self.device.upload(Queue::Compute, &poisoned, part)?;
            for output in outputs {
                let behind = Span::device(output.span.end(), GAP);
                self.device.upload(Queue::Compute, &output.before, output.span)?;
                self.device.upload(Queue::Compute, &[POISON; GAP as usize], behind)?;
            }
            let enqueued = self.device.enqueue(Queue::Compute, &launch);
            if let Err(error) = enqueued.and_then(|()| self.device.synchronise()) {
                println!("{name} {dtype} {shape}: FAILED: {error}");
                self.failures += 1;
                self.next = 0;
                return Ok(());
            }
            let mut found = Vec::new();
            for output in outputs {
                let mut bytes = vec![0; (output.span.bytes + GAP) as usize];
                let with_gap = Span { bytes: bytes.len() as u64, ..output.span };
                self.device.download(Queue::Compute, with_gap, &mut bytes)?;
                found.push(bytes);
            }
            runs.push(found);
        }
        for (number, (output, bytes)) in outputs.iter().zip(&runs[0]).enumerate() {
            let (bytes, gap) = bytes.split_at(output.span.bytes as usize);
            let mut problems = Vec::new();
            if gap.iter().any(|&byte| byte != POISON) {
                problems.push("writes past its output");
            }
            if runs[0][number] != runs[1][number] {
                problems.push("not reproducible");
            }
            let error = match &output.expected {
                Expected::Bits(expected) => {
                    let same = bytes == expected.as_slice();
                    if !same {
                        problems.push("bits differ from expected");
                    }
                    f64::from(u8::from(!same))
                }
                Expected::Sum(expected, bound) => {
                    let found = f64::from_ne_bytes(bytes.try_into().expect("an f64"));
                    let error = (found - expected).abs() / expected.abs();
                    // NaN fails, too.
                    if error.is_nan() || error > *bound {
                        problems.push("too far from the reference");
                    }
                    error
                }
                Expected::Near(stored, expected, bound) => {
                    let (distance, largest) = distances(&from_bytes(*stored, bytes), expected);
                    // A single wrong element shows in the maximum, NaN in both.
                    if distance.is_nan() || distance > *bound || largest > 8.0 * bound {
                        problems.push("too far from the reference");
                    }
                    largest
                }
            };
            let verdict = if problems.is_empty() {
                "ok".to_owned()
            } else {
                format!("FAILED: {}", problems.join(", "))
            };
            self.failures += usize::from(!problems.is_empty());
            println!("{name} {dtype} {shape} output {number}: max error {error:.2e} {verdict}");
        }
        self.next = 0;
        Ok(())
    }

    /// Prints the median time of a kernel over several rounds.
    pub(crate) fn time(&mut self, shape: &str, work: Work, kernel: Kernel) -> Outcome {
        let next = self.next;
        let scratch = self.allocate(zeroth_cuda::scratch_bytes(&kernel, self.dtype) as usize);
        let launch = Launch { kernel, dtype: self.dtype, scratch };
        let (runs, mut seconds) = (10, Vec::new());
        for _ in 0..6 {
            let begin = Instant::now();
            for _ in 0..runs {
                self.device.enqueue(Queue::Compute, &launch)?;
            }
            self.device.synchronise()?;
            seconds.push(begin.elapsed().as_secs_f64() / f64::from(runs));
        }
        // The first round warms up.
        seconds[1..].sort_by(f64::total_cmp);
        let median = seconds[3];
        let rate = match work {
            Work::Flops(flops) => format!("{:.0} TFLOP/s", flops / median * 1e-12),
            Work::Bytes(bytes) => format!("{:.0} GB/s", bytes / median * 1e-9),
        };
        println!("{} {} {shape}: {:.3} ms, {rate}", launch.kernel.name(), self.dtype, median * 1e3);
        self.next = next;
        Ok(())
    }
}

/// The work of a kernel, for its rate.
#[derive(Clone, Copy)]
pub(crate) enum Work {
    /// Floating-point operations.
    Flops(f64),
    /// Bytes read and written.
    Bytes(f64),
}

/// Relative L2 error, and maximum error relative to the largest expected value.
fn distances(found: &[f64], expected: &[f64]) -> (f64, f64) {
    let (mut distance, mut length, mut largest, mut peak) = (0.0, 0.0, 0.0f64, 0.0f64);
    for (found, expected) in found.iter().zip(expected) {
        let apart = (found - expected).abs();
        distance += apart * apart;
        length += expected * expected;
        // `max` would ignore NaN.
        largest = if apart <= largest { largest } else { apart };
        peak = peak.max(expected.abs());
    }
    let least = SMALLEST * SMALLEST * expected.len() as f64;
    ((distance / length.max(least)).sqrt(), largest / peak.max(SMALLEST))
}
