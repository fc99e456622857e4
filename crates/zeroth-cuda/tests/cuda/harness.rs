//! What the self-test of a card stands on: operands in the arena, a kernel run twice, and the comparison.

use std::time::Instant;

use half::{bf16, f16};
use zeroth_base::DType;
use zeroth_cpu::{self, Pool};
use zeroth_cuda::CudaDevice;
use zeroth_kernel::{Device, DeviceError, Kernel, Launch, Queue, Span};

pub(crate) type Outcome = Result<(), DeviceError>;

/// A name, and what runs under it.
pub(crate) type Group = (&'static str, fn(&mut Bench) -> Outcome);

pub(crate) const ARENA: u64 = 3 << 30;
/// Bytes behind every output that nobody may touch, and what they hold: NaN in every type.
const GAP: u64 = 256;
pub(crate) const POISON: u8 = 0xff;
/// Inputs are normal numbers: a result smaller than this is the difference of larger ones, and its own size says nothing
/// about how exact it can be.
const SMALLEST: f64 = 0.1;

/// What an output must be.
#[derive(Clone)]
pub(crate) enum Expected {
    /// These numbers, as near as rounding explains.
    Near(DType, Vec<f64>, f64),
    /// One f64, a sum of numbers, as near as this.
    Sum(f64, f64),
    /// These bytes.
    Bits(Vec<u8>),
}

#[derive(Clone)]
pub(crate) struct Output {
    pub(crate) span: Span,
    pub(crate) before: Vec<u8>,
    pub(crate) expected: Expected,
}

pub(crate) struct Bench {
    pub(crate) device: CudaDevice,
    pub(crate) pool: Pool,
    pub(crate) dtype: DType,
    pub(crate) seed: u64,
    pub(crate) next: u64,
    pub(crate) wrong: usize,
    /// A word that the names of groups must hold.
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

impl Bench {
    pub(crate) fn new(device: CudaDevice) -> Self {
        let pool = Pool::new(std::thread::available_parallelism().map_or(1, usize::from));
        Self { device, pool, dtype: DType::F32, seed: 0, next: 0, wrong: 0, only: None }
    }

    pub(crate) fn wants(&self, group: &str) -> bool {
        self.only.as_ref().is_none_or(|word| group.contains(word.as_str()))
    }

    /// Normal numbers as the type at hand stores them: the reference gets what the kernel gets.
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

    /// Largest distance, relative to the length of the result, that rounding explains.
    pub(crate) fn bound(&self, stored: DType) -> f64 {
        match (stored, self.dtype) {
            (DType::Bf16, _) => 3e-3,
            (DType::F16, _) => 5e-4,
            (DType::F32, DType::F32) => 3e-6,
            (DType::F32, _) => 1e-5,
        }
    }

    pub(crate) fn place(&mut self, bytes: usize) -> Span {
        let span = Span::device(self.next, bytes as u64);
        self.next = (span.end() + GAP).next_multiple_of(256);
        assert!(self.next <= ARENA, "the arena of the self-test is too small");
        span
    }

    pub(crate) fn given(&mut self, bytes: &[u8]) -> Result<Span, DeviceError> {
        let span = self.place(bytes.len());
        self.device.upload(Queue::Compute, bytes, span)?;
        Ok(span)
    }

    pub(crate) fn input(&mut self, values: &[f64]) -> Result<Span, DeviceError> {
        self.given(&to_bytes(self.dtype, values))
    }

    pub(crate) fn floats(&mut self, values: &[f64]) -> Result<Span, DeviceError> {
        self.given(&to_bytes(DType::F32, values))
    }

    /// An output in the type at hand, written whole.
    pub(crate) fn written(&mut self, expected: Vec<f64>) -> Output {
        self.stored(self.dtype, expected, 1.0)
    }

    /// An output that is written whole; `factor` widens what is allowed.
    pub(crate) fn stored(&mut self, dtype: DType, expected: Vec<f64>, factor: f64) -> Output {
        let bytes = expected.len() * dtype.bytes() as usize;
        let bound = factor * self.bound(dtype);
        let (span, before) = (self.place(bytes), vec![POISON; bytes]);
        Output { span, before, expected: Expected::Near(dtype, expected, bound) }
    }

    /// An output in f32 that is added to.
    pub(crate) fn added(&mut self, expected: &[f64], factor: f64) -> Output {
        let before = self.random_of(DType::F32, expected.len());
        let mut output = self.stored(DType::F32, add(&before, expected), factor);
        output.before = to_bytes(DType::F32, &before);
        output
    }

    pub(crate) fn exact(&mut self, before: Vec<u8>, expected: Vec<u8>) -> Output {
        Output { span: self.place(expected.len()), before, expected: Expected::Bits(expected) }
    }

    /// Runs a kernel twice and compares. Everything placed before is forgotten afterwards.
    pub(crate) fn case(&mut self, shape: &str, kernel: Kernel, outputs: &[Output]) -> Outcome {
        let (name, dtype) = (kernel.name(), self.dtype);
        let scratch = self.place(zeroth_cuda::scratch_bytes(&kernel, dtype) as usize);
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
                self.wrong += 1;
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
                problems.push("writes behind its output");
            }
            if runs[0][number] != runs[1][number] {
                problems.push("other bits in the second run");
            }
            let error = match &output.expected {
                Expected::Bits(expected) => {
                    let same = bytes == expected.as_slice();
                    if !same {
                        problems.push("other bits than expected");
                    }
                    f64::from(u8::from(!same))
                }
                Expected::Sum(expected, bound) => {
                    let found = f64::from_ne_bytes(bytes.try_into().expect("an f64"));
                    let error = (found - expected).abs() / expected.abs();
                    // NaN is too far as well.
                    if error.is_nan() || error > *bound {
                        problems.push("too far from the reference");
                    }
                    error
                }
                Expected::Near(stored, expected, bound) => {
                    let (distance, largest) = distances(&from_bytes(*stored, bytes), expected);
                    // A single wrong element shows in the largest, and NaN in both.
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
            self.wrong += usize::from(!problems.is_empty());
            println!("{name} {dtype} {shape} output {number}: max error {error:.2e} {verdict}");
        }
        self.next = 0;
        Ok(())
    }

    /// Says how long a kernel takes: the median of rounds, each of it over and over.
    pub(crate) fn time(&mut self, shape: &str, work: Work, kernel: Kernel) -> Outcome {
        let next = self.next;
        let scratch = self.place(zeroth_cuda::scratch_bytes(&kernel, self.dtype) as usize);
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

/// What a kernel must do.
#[derive(Clone, Copy)]
pub(crate) enum Work {
    /// So many operations.
    Flops(f64),
    /// So many bytes to and from memory.
    Bytes(f64),
}

/// The distance relative to the length of what is expected, and the largest relative to its largest.
fn distances(found: &[f64], expected: &[f64]) -> (f64, f64) {
    let (mut distance, mut length, mut largest, mut peak) = (0.0, 0.0, 0.0f64, 0.0f64);
    for (found, expected) in found.iter().zip(expected) {
        let apart = (found - expected).abs();
        distance += apart * apart;
        length += expected * expected;
        // `max` would pass over NaN.
        largest = if apart <= largest { largest } else { apart };
        peak = peak.max(expected.abs());
    }
    let least = SMALLEST * SMALLEST * expected.len() as f64;
    ((distance / length.max(least)).sqrt(), largest / peak.max(SMALLEST))
}
