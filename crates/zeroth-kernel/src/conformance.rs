//! The test every device must pass: each kernel against a reference device, on the same random inputs.
//!
//! The reference is the CPU, whose kernels are compared with f64 references by its own self test. Results may differ by their
//! roundings: the L2 distance bounds the error of a tensor, the maximum error that of every element, because one wrong element
//! of many does not move the L2 distance. Outputs hold NaN before the launch, and everything that a kernel writes is compared.

mod distill;
mod encoder_decoder;
mod experts;
mod optimizer_step;
mod unpack;

use bytemuck::{bytes_of, cast_slice};
use half::{bf16, f16};
use zeroth_base::{ActivationFn, DType, normal_at};

use crate::{
    Access, AttentionContext, AttentionDims, CacheRange, Control, Device, DeviceError, EmbeddingDims,
    GradStore, HeadLossDims, HeadLossDw, HeadNormRopeDims, Kernel, Launch, LinearDims, LogitsDims, Queue,
    RmsNormDims, RopeDims, RowKey, Span, StoreRowsDims,
};

/// Bytes of device arena that the test needs.
pub const ARENA: u64 = 160 << 20;

/// The comparison of one output of a kernel with its reference.
#[derive(Debug, Clone, PartialEq)]
pub struct SelfTest {
    /// Kernel, output and dtype.
    pub name: String,
    /// Relative L2 distance from the reference: see [`Deviation::l2`].
    pub error: f64,
    /// Largest error of an element: see [`Deviation::max`].
    pub max_error: f64,
    /// Whether both errors are within their bounds.
    pub ok: bool,
}

/// How far a result is from its reference. NaN exceeds every bound.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Deviation {
    /// L2 norm of the difference over the L2 norm of the reference.
    pub l2: f64,
    /// Largest difference of an element, over the greater of the reference's magnitude there and its root mean square.
    pub max: f64,
}

impl Deviation {
    /// Compares a result with its reference.
    pub fn of(found: &[f64], expected: &[f64]) -> Self {
        if found.len() != expected.len() {
            return Self { l2: f64::NAN, max: f64::NAN };
        }
        let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
        let total = squares(&mut expected.iter().copied());
        let rms = (total / expected.len().max(1) as f64).sqrt().max(f64::MIN_POSITIVE);
        // Equal infinities do not differ.
        let errors = || found.iter().zip(expected).map(|(a, b)| if a == b { 0.0 } else { (a - b).abs() });
        // Unlike f64::max, keeps a NaN.
        let worst = |worst: f64, error: f64| if worst >= error || worst.is_nan() { worst } else { error };
        Self {
            l2: (squares(&mut errors()) / total.max(f64::MIN_POSITIVE)).sqrt(),
            max: errors()
                .zip(expected)
                .map(|(error, expected)| error / expected.abs().max(rms))
                .fold(0.0, worst),
        }
    }

    /// Whether no error exceeds its bound.
    pub fn is_within(self, bound: Self) -> bool {
        self.l2 <= bound.l2 && self.max <= bound.max
    }
}

/// Rows of most kernels: a prime, so that no tile size divides it.
const ROWS: usize = 83;

/// Compares every kernel of `device` with that of `reference`. Both have at least [`ARENA`] bytes of device memory.
pub fn conformance(
    device: &mut dyn Device,
    reference: &mut dyn Device,
) -> Result<Vec<SelfTest>, DeviceError> {
    let mut pair = Pair {
        device,
        reference,
        dtype: DType::F32,
        seed: 0,
        next: 0,
        filled: Vec::new(),
        tests: Vec::new(),
    };
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        pair.dtype = dtype;
        pair.matmuls()?;
        pair.row_kernels()?;
        pair.attention()?;
        pair.encoder_decoder()?;
        pair.elementwise()?;
        pair.unpack()?;
        pair.head()?;
        pair.distill()?;
        pair.optimizer_step()?;
        pair.experts()?;
    }
    Ok(pair.tests)
}

/// How an output is compared.
#[derive(Clone, Copy)]
enum Output {
    /// Elements of a dtype, each rounded once or twice.
    Rounded(DType),
    /// Elements of a dtype that sum terms rounded to the run's dtype.
    RoundedTerms(DType),
    /// The bits must be equal.
    Exact,
    /// One f64.
    F64,
}

/// Which gradients of an op with a weight have a destination: one of a frozen weight, or of an input below which nothing is
/// trained, has none.
#[derive(Clone, Copy)]
struct Wanted {
    input: bool,
    weight: bool,
}

const WANTED: [Wanted; 3] = [
    Wanted { input: true, weight: true },
    Wanted { input: true, weight: false },
    Wanted { input: false, weight: true },
];

impl Wanted {
    fn outputs(self, input: Output, weight: Output) -> Vec<Output> {
        let both = [(self.input, input), (self.weight, weight)];
        both.into_iter().filter(|(wanted, _)| *wanted).map(|(_, output)| output).collect()
    }
}

/// Both devices, and the operands of the next launch.
struct Pair<'a> {
    device: &'a mut dyn Device,
    reference: &'a mut dyn Device,
    dtype: DType,
    seed: u64,
    next: u64,
    /// Contents of operands before the launch.
    filled: Vec<(Span, Vec<u8>)>,
    tests: Vec<SelfTest>,
}

impl Pair<'_> {
    fn place(&mut self, bytes: usize) -> Span {
        let span = Span::device(self.next, bytes as u64);
        self.next = span.end().next_multiple_of(256);
        span
    }

    fn given(&mut self, bytes: &[u8]) -> Span {
        let span = self.place(bytes.len());
        self.filled.push((span, bytes.to_vec()));
        span
    }

    /// Normal numbers.
    fn random_of(&mut self, dtype: DType, count: usize) -> Span {
        self.seed += 1;
        let values: Vec<f32> =
            (0..count as u64).map(|at| (normal_at(4096, self.seed, at) * f64::from(0.7f32)) as f32).collect();
        self.given(&encode(dtype, &values))
    }

    fn random(&mut self, count: usize) -> Span {
        self.random_of(self.dtype, count)
    }

    fn words(&mut self, count: usize) -> Span {
        self.random_of(DType::F32, count)
    }

    /// An output, filled with NaN of every dtype.
    fn empty(&mut self, bytes: usize) -> Span {
        self.given(&vec![0xff; bytes])
    }

    fn like(&mut self, other: Span) -> Span {
        self.empty(other.bytes as usize)
    }

    fn ids(&mut self, count: usize, below: usize) -> Span {
        let ids: Vec<i32> = (0..count).map(|at| (at * 7919 % below) as i32).collect();
        self.given(cast_slice(&ids))
    }

    /// Runs a kernel on both devices and compares its outputs, in the order of its operands.
    fn compare(&mut self, kernel: Kernel, outputs: &[Output]) -> Result<(), DeviceError> {
        let name = kernel.name();
        let [scratch, other] =
            [&*self.device, &*self.reference].map(|device| device.scratch_bytes(&kernel, self.dtype));
        let scratch = self.place(scratch.max(other) as usize);
        let (mut written, dtype) = (Vec::new(), self.dtype);
        kernel.operands(|span, access| {
            if access == Access::Write {
                written.push(span);
            }
        });
        debug_assert_eq!(written.len(), outputs.len(), "{name}");
        let launch = Launch { kernel, dtype, scratch };
        let mut found: [Vec<Vec<u8>>; 2] = [Vec::new(), Vec::new()];
        let devices: [&mut dyn Device; 2] = [self.device, self.reference];
        for (device, found) in devices.into_iter().zip(&mut found) {
            for (span, bytes) in &self.filled {
                device.upload(Queue::Compute, bytes, *span)?;
            }
            device.enqueue(Queue::Compute, &launch)?;
            for span in &written {
                let mut bytes = vec![0; span.bytes as usize];
                device.download(Queue::Compute, *span, &mut bytes)?;
                found.push(bytes);
            }
        }
        let [found, expected] = found;
        for (index, ((found, expected), output)) in found.iter().zip(&expected).zip(outputs).enumerate() {
            let deviation = match output {
                Output::Exact => Deviation { l2: f64::from(u8::from(found != expected)), max: 0.0 },
                Output::F64 => Deviation::of(&read_f64(found), &read_f64(expected)),
                Output::Rounded(stored) | Output::RoundedTerms(stored) => {
                    Deviation::of(&read(*stored, found), &read(*stored, expected))
                }
            };
            let bound = match output {
                Output::Exact => Deviation { l2: 0.0, max: 0.0 },
                Output::F64 => bound(DType::F32, dtype),
                Output::Rounded(stored) => bound(*stored, dtype),
                Output::RoundedTerms(_) => {
                    let Deviation { l2, max } = bound(dtype, dtype);
                    Deviation { l2: 2.0 * l2, max: 2.0 * max }
                }
            };
            let Deviation { l2: error, max: max_error } = deviation;
            let (name, ok) = (format!("{name} {index} {dtype}"), deviation.is_within(bound));
            self.tests.push(SelfTest { name, error, max_error, ok });
        }
        (self.next, self.filled) = (0, Vec::new());
        Ok(())
    }

    fn matmuls(&mut self) -> Result<(), DeviceError> {
        let (inputs, outputs, dtype) = (72, 104, self.dtype);
        let dims = LinearDims::new(ROWS, inputs, outputs);
        let (x, w) = (self.random(ROWS * inputs), self.random(outputs * inputs));
        let (bias, y) = (self.random(outputs), self.empty(ROWS * outputs * dtype.bytes() as usize));
        self.compare(Kernel::Linear { dims, x, w, bias: Some(bias), y }, &[Output::Rounded(dtype)])?;
        for add in [false, true] {
            let (dy, w, dx) =
                (self.random(ROWS * outputs), self.random(outputs * inputs), self.random(ROWS * inputs));
            let kernel = Kernel::LinearDx { dims, scale: 1.0, dy, w, dx, add };
            self.compare(kernel, &[Output::Rounded(dtype)])?;
        }
        for store in [GradStore::Add, GradStore::Write] {
            let (dy, x, dw) =
                (self.random(ROWS * outputs), self.random(ROWS * inputs), self.words(outputs * inputs));
            let kernel = Kernel::LinearDw { dims, scale: 1.0, dy, x, dw, store };
            self.compare(kernel, &[Output::Rounded(DType::F32)])?;
        }
        let (dy, x, dw) =
            (self.random(ROWS * outputs), self.random(ROWS * inputs), self.random(outputs * inputs));
        let store = GradStore::Round { to: dtype, found_inf: self.given(bytes_of(&0u64)) };
        let kernel = Kernel::LinearDw { dims, scale: 1.0, dy, x, dw, store };
        self.compare(kernel, &[Output::Rounded(dtype), Output::Exact])?;
        let (dy, db) = (self.random(ROWS * outputs), self.words(outputs));
        self.compare(Kernel::LinearDb { dims, dy, db }, &[Output::Rounded(DType::F32)])?;
        // Ranks with rows of whole vectors and others.
        [16, 3].into_iter().try_for_each(|rank| self.adapter(rank))
    }

    /// The matmuls of a low-rank adapter, with its scale.
    fn adapter(&mut self, rank: usize) -> Result<(), DeviceError> {
        let (outputs, scale, dtype) = (104, 0.3, self.dtype);
        let dims = LinearDims::new(ROWS, rank, outputs);
        let (x, w, y) = (self.random(ROWS * rank), self.random(outputs * rank), self.random(ROWS * outputs));
        self.compare(Kernel::LinearAdd { dims, scale, x, w, y }, &[Output::Rounded(dtype)])?;
        let (dy, w) = (self.random(ROWS * outputs), self.random(outputs * rank));
        let dx = self.empty(ROWS * rank * dtype.bytes() as usize);
        let kernel = Kernel::LinearDx { dims, scale, dy, w, dx, add: false };
        self.compare(kernel, &[Output::Rounded(dtype)])?;
        let (dy, x, dw) =
            (self.random(ROWS * outputs), self.random(ROWS * rank), self.random(outputs * rank));
        let store = GradStore::Round { to: dtype, found_inf: self.given(bytes_of(&0u64)) };
        let kernel = Kernel::LinearDw { dims, scale, dy, x, dw, store };
        self.compare(kernel, &[Output::Rounded(dtype), Output::Exact])?;
        let (dy, x, dw) = (self.random(ROWS * outputs), self.random(ROWS * rank), self.words(outputs * rank));
        let kernel = Kernel::LinearDw { dims, scale, dy, x, dw, store: GradStore::Add };
        self.compare(kernel, &[Output::Rounded(DType::F32)])
    }

    fn row_kernels(&mut self) -> Result<(), DeviceError> {
        let (width, vocab, dtype) = (120, 61, self.dtype);
        let dims = EmbeddingDims::new(vocab, width);
        let (ids, table, y) = (self.ids(ROWS, vocab), self.random(vocab * width), self.random(ROWS * width));
        self.compare(Kernel::Embedding { dims, rows: ROWS, ids, table, y }, &[Output::Exact])?;
        let (ids, dy, dtable) = (self.ids(ROWS, vocab), self.random(ROWS * width), self.words(vocab * width));
        let kernel = Kernel::EmbeddingBackward { dims, rows: ROWS, ids, dy, dtable, tied_rows: None };
        self.compare(kernel, &[Output::Rounded(DType::F32)])?;
        let dims = RmsNormDims::new(ROWS, width, 1e-6);
        let (x, w, rstd) = (self.random(ROWS * width), self.random(width), self.empty(4 * ROWS));
        let y = self.like(x);
        self.compare(
            Kernel::RmsNorm { dims, x, w, y, rstd },
            &[Output::Rounded(dtype), Output::Rounded(DType::F32)],
        )?;
        let (x, residual, w) = (self.random(ROWS * width), self.random(ROWS * width), self.random(width));
        let (h, y, rstd) = (self.like(x), self.like(x), self.empty(4 * ROWS));
        let kernel = Kernel::AddRmsNorm { dims, x, residual, w, h, y, rstd };
        self.compare(kernel, &[Output::Rounded(dtype), Output::Rounded(dtype), Output::Rounded(DType::F32)])?;
        for wanted in WANTED {
            let [dy, h, residual] = [0; 3].map(|_| self.random(ROWS * width));
            let w = self.random(width);
            let rstd: Vec<f32> = (0..ROWS).map(|row| 0.5 + row as f32 / 100.0).collect();
            let rstd = self.given(cast_slice(&rstd));
            let (dh, dw) = self.norm_gradients(wanted, h, width);
            // The gradient of later uses belongs to dh.
            let residual = dh.map(|_| residual);
            let kernel = Kernel::RmsNormBackward { dims, dy, h, rstd, w, residual, dh, dw };
            let outputs = wanted.outputs(Output::Rounded(dtype), Output::Rounded(DType::F32));
            self.compare(kernel, &outputs)?;
        }
        for back in [false, true] {
            let dims = RopeDims::new(ROWS, 3, 40, 32);
            let (cos, sin) = (self.words(ROWS * 16), self.words(ROWS * 16));
            let x = self.random(ROWS * 120);
            let y = self.like(x);
            self.compare(Kernel::Rope { dims, cos, sin, x, y, back }, &[Output::Rounded(dtype)])?;
        }
        // Heads rotated in part, and whole, for which a device may have another kernel.
        for (head_dim, rotated) in [(40, 32), (64, 64)] {
            let rope = RopeDims::new(ROWS, 3, head_dim, rotated);
            let dims = HeadNormRopeDims { rope, eps: 1e-6 };
            let (elements, rstds, angles) = (ROWS * 3 * head_dim, 3 * ROWS, ROWS * rotated / 2);
            let (x, w) = (self.random(elements), self.random(head_dim));
            let (cos, sin) = (self.words(angles), self.words(angles));
            let (y, rstd) = (self.like(x), self.empty(4 * rstds));
            let kernel = Kernel::HeadNormRope { dims, x, w, cos, sin, y, rstd };
            self.compare(kernel, &[Output::Rounded(dtype), Output::Rounded(DType::F32)])?;
            for wanted in WANTED {
                let (dy, h, w) = (self.random(elements), self.random(elements), self.random(head_dim));
                let (cos, sin) = (self.words(angles), self.words(angles));
                let rstd: Vec<f32> = (0..rstds).map(|row| 0.5 + row as f32 / 300.0).collect();
                let rstd = self.given(cast_slice(&rstd));
                let (dh, dw) = self.norm_gradients(wanted, h, head_dim);
                let kernel = Kernel::HeadNormRopeBackward { dims, dy, h, rstd, w, cos, sin, dh, dw };
                let outputs = wanted.outputs(Output::Rounded(dtype), Output::Rounded(DType::F32));
                self.compare(kernel, &outputs)?;
            }
        }
        let starts = self.given(cast_slice(&[4u32, 0, 30, 31, ROWS as u32]));
        let dims = LogitsDims::new(ROWS, 3, width, vocab);
        let (x, w, logits) =
            (self.random(ROWS * width), self.random(vocab * width), self.empty(4 * 3 * vocab));
        self.compare(Kernel::Logits { dims, starts, x, w, logits }, &[Output::Rounded(DType::F32)])
    }

    fn attention(&mut self) -> Result<(), DeviceError> {
        let rows = ROWS as u32;
        // The last has sequences of one length, for which a device may have another kernel.
        for (head_dim, window, starts, length) in [
            (64, None, [4u32, 0, 30, 31, rows], None),
            (40, Some(20), [4, 0, 30, 31, rows], None),
            (64, None, [2, 0, rows, 0, 0], Some(ROWS)),
        ] {
            let dims = AttentionDims::new(ROWS, 4, 2, head_dim, window, 0.125);
            self.device.equal_sequences(length);
            let operands = |pair: &mut Self| {
                let starts = pair.given(cast_slice(&starts));
                let q = pair.random(ROWS * 4 * head_dim);
                [starts, q, pair.random(ROWS * 2 * head_dim), pair.random(ROWS * 2 * head_dim)]
            };
            let [starts_at, q, k, v] = operands(self);
            let (y, lse) = (self.like(q), self.empty(4 * 4 * ROWS));
            let forward =
                Kernel::Attention { dims, context: AttentionContext::new(starts_at), q, k, v, y, lse };
            let dtype = self.dtype;
            // Backward must read outputs of its own forward: those of the reference.
            let [seed, made] = [self.seed - 3, self.seed];
            self.compare(forward.clone(), &[Output::Rounded(dtype), Output::Rounded(DType::F32)])?;
            let [y_bytes, lse_bytes] = [y, lse].map(|span| {
                let mut bytes = vec![0; span.bytes as usize];
                let downloaded = self.reference.download(Queue::Compute, span, &mut bytes);
                downloaded.map(|()| bytes)
            });
            self.seed = seed;
            let [starts, q, k, v] = operands(self);
            debug_assert_eq!(self.seed, made, "the same inputs again");
            let (y, lse) = (self.given(&y_bytes?), self.given(&lse_bytes?));
            let dy = self.random(ROWS * 4 * head_dim);
            let (dq, dk, dv) = (self.like(q), self.like(k), self.like(v));
            let context = AttentionContext::new(starts);
            let dbias = None;
            let kernel = Kernel::AttentionBackward { dims, context, q, k, v, y, lse, dy, dq, dk, dv, dbias };
            self.compare(kernel, &[Output::Rounded(dtype); 3])?;
        }
        self.device.equal_sequences(None);
        self.cached_attention()
    }

    fn cached_attention(&mut self) -> Result<(), DeviceError> {
        // A key, several tiles of keys, and padding.
        let (rows, cached) = (5, 410);
        let ranges = [(0, 1), (1, 310), (0, 0), (310, 330), (330, 410)];
        let ranges = ranges.map(|(first, end)| CacheRange { first, end });
        for (head_dim, window) in [(64, None), (40, Some(20)), (200, None)] {
            let dims = AttentionDims::new(rows, 4, 2, head_dim, window, 0.125);
            let ranges_at = self.given(cast_slice(&ranges));
            let q = self.random(rows * 4 * head_dim);
            let (k, v) = (self.random(cached * 2 * head_dim), self.random(cached * 2 * head_dim));
            let y = self.like(q);
            let kernel = Kernel::CachedAttention { dims, cached, ranges: ranges_at, bias: None, q, k, v, y };
            self.compare(kernel, &[Output::Rounded(self.dtype)])?;
            let dims = StoreRowsDims::new(rows, 2 * head_dim, cached);
            let kernel = Kernel::StoreRows {
                dims,
                ranges: self.given(cast_slice(&ranges)),
                x: self.random(rows * dims.width),
                cache: self.random(cached * dims.width),
            };
            self.compare(kernel, &[Output::Exact])?;
        }
        Ok(())
    }

    fn elementwise(&mut self) -> Result<(), DeviceError> {
        let (count, dtype) = (5_003, self.dtype);
        for activation in ActivationFn::ALL {
            let (gate, up) = (self.random(count), self.random(count));
            let y = self.like(gate);
            let kernel = Kernel::GatedActivation { activation, gate, up, y };
            self.compare(kernel, &[Output::Rounded(dtype)])?;
            let [dy, gate, up] = [0; 3].map(|_| self.random(count));
            let (dgate, dup) = (self.like(gate), self.like(gate));
            let kernel = Kernel::GatedActivationBackward { activation, dy, gate, up, dgate, dup };
            self.compare(kernel, &[Output::Rounded(dtype); 2])?;
        }
        let (a, b) = (self.random(count), self.random(count));
        let y = self.like(a);
        self.compare(Kernel::Sum { a, b, y }, &[Output::Exact])?;
        let keys: Vec<RowKey> = (0..7).map(|row| RowKey { sample: 3 * row, position: 5, epoch: 1 }).collect();
        let (keys, x) = (self.given(cast_slice(&keys)), self.random(7 * 100));
        let y = self.like(x);
        let (probability, row_stride) = (0.25, 100);
        let kernel = Kernel::Dropout { probability, seed: 9, op: 2, width: 100, row_stride, keys, x, y };
        self.compare(kernel, &[Output::Exact])?;
        let to = self.random(count);
        self.compare(Kernel::Zero { to }, &[Output::Exact])?;
        for to_type in [DType::F32, DType::Bf16, DType::F16] {
            let (from, found_inf) = (self.random(count), self.given(bytes_of(&0u64)));
            let to = self.empty(count * to_type.bytes() as usize);
            let kernel = Kernel::Convert { from, from_type: dtype, to, to_type, found_inf: Some(found_inf) };
            self.compare(kernel, &[Output::Exact; 2])?;
        }
        let (values, found_inf) = (self.random(count), self.given(bytes_of(&0u64)));
        self.compare(Kernel::CheckFinite { values, value_type: dtype, found_inf }, &[Output::Exact])?;
        let (parts, to) = (self.random(3 * count), self.words(count));
        let sum = |parts, to, to_type| Kernel::SumRanks {
            ranks: 3,
            parts,
            from_type: dtype,
            to,
            to_type,
            add: true,
        };
        self.compare(sum(parts, to, DType::F32), &[Output::Exact])?;
        let (parts, to) = (self.random(3 * count), self.random(count));
        self.compare(sum(parts, to, dtype), &[Output::Exact])
    }

    fn head(&mut self) -> Result<(), DeviceError> {
        let (hidden, vocab, dtype) = (48, 203, self.dtype);
        let dims = HeadLossDims::new(ROWS, hidden, vocab);
        let operands = |pair: &mut Self| {
            let labels: Vec<i32> =
                (0..ROWS).map(|row| if row % 5 == 2 { -100 } else { (row * 31 % vocab) as i32 }).collect();
            let labels = pair.given(cast_slice(&labels));
            let (x, w) = (pair.random(ROWS * hidden), pair.random(vocab * hidden));
            [x, w, labels, pair.given(bytes_of(&1.5f64))]
        };
        let [x, w, labels, loss] = operands(self);
        self.compare(Kernel::HeadLoss { dims, x, w, labels, loss }, &[Output::F64])?;
        for wanted in WANTED.into_iter().chain([Wanted { input: false, weight: false }]) {
            let [x, w, labels, loss] = operands(self);
            let loss_weight = self.given(bytes_of(&0.01f64));
            let control = self.given(bytes_of(&Control::new(64.0)));
            let dx = wanted.input.then(|| self.like(x));
            let (store, tied_rows) = (GradStore::Write, None);
            let dw = wanted.weight.then(|| HeadLossDw { to: self.words(vocab * hidden), store, tied_rows });
            let kernel = Kernel::HeadLossBackward { dims, x, w, labels, loss, loss_weight, control, dx, dw };
            // The gradients of logits are rounded before they are multiplied.
            let gradients = wanted.outputs(Output::RoundedTerms(dtype), Output::RoundedTerms(DType::F32));
            self.compare(kernel, &[&[Output::F64], &gradients[..]].concat())?;
        }
        Ok(())
    }

    /// Destinations of the gradients of a norm: of its input, like `h`, and of its weight.
    fn norm_gradients(&mut self, wanted: Wanted, h: Span, width: usize) -> (Option<Span>, Option<Span>) {
        (wanted.input.then(|| self.like(h)), wanted.weight.then(|| self.words(width)))
    }
}

/// Bounds for two results of one computation that differ by their roundings.
///
/// The largest maximum errors between the portable kernels and AMX are 2.6e-6 in f32, 1.8e-2 in bf16 and 9e-4 in f16, all in
/// attention, whose terms cancel.
const fn bound(stored: DType, dtype: DType) -> Deviation {
    match (stored, dtype) {
        (DType::Bf16, _) => Deviation { l2: 1e-2, max: 4e-2 },
        (DType::F16, _) => Deviation { l2: 1.5e-3, max: 6e-3 },
        (DType::F32, DType::F32) => Deviation { l2: 1e-5, max: 5e-5 },
        (DType::F32, _) => Deviation { l2: 3e-3, max: 2e-2 },
    }
}

/// Numbers as a dtype stores them.
fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F32 => cast_slice(values).to_vec(),
        DType::Bf16 => values.iter().flat_map(|value| bf16::from_f32(*value).to_ne_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|value| f16::from_f32(*value).to_ne_bytes()).collect(),
    }
}

fn read(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let half = |two: &[u8]| u16::from_ne_bytes([two[0], two[1]]);
    match dtype {
        DType::F32 => {
            bytes.chunks_exact(4).map(|four| f64::from(bytemuck::pod_read_unaligned::<f32>(four))).collect()
        }
        DType::Bf16 => bytes.chunks_exact(2).map(|two| bf16::from_bits(half(two)).to_f64()).collect(),
        DType::F16 => bytes.chunks_exact(2).map(|two| f16::from_bits(half(two)).to_f64()).collect(),
    }
}

fn read_f64(bytes: &[u8]) -> Vec<f64> {
    bytes.chunks_exact(8).map(bytemuck::pod_read_unaligned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_and_different_lengths_exceed_every_bound() {
        let any = Deviation { l2: f64::INFINITY, max: f64::INFINITY };
        assert!(!Deviation::of(&[1.0, f64::NAN, 1.0], &[1.0; 3]).is_within(any));
        assert!(!Deviation::of(&[1.0], &[1.0; 2]).is_within(any));
        assert!(Deviation::of(&[1.0, f64::INFINITY], &[1.0, f64::INFINITY]).max == 0.0);
    }

    #[test]
    fn errors_beyond_the_rounding_of_a_dtype_are_found() {
        assert!(Deviation::of(&[1.02], &[1.0]).l2 > bound(DType::Bf16, DType::Bf16).l2);
        assert!(Deviation::of(&[1.0001], &[1.0]).l2 > bound(DType::F32, DType::F32).l2);
        assert!(Deviation::of(&[1.0], &[1.0]).is_within(Deviation { l2: 0.0, max: 0.0 }));
    }

    #[test]
    fn one_wrong_element_among_21_000_is_found() {
        let expected: Vec<f64> = (0..21_000).map(|at| normal_at(1, 2, at)).collect();
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            for wrong in [0, 10_500, 20_999] {
                let mut found = expected.clone();
                found[wrong] += 0.5;
                let deviation = Deviation::of(&found, &expected);
                assert!(!deviation.is_within(bound(dtype, dtype)), "{dtype}: {deviation:?}");
            }
        }
        // The L2 distance alone misses it in bf16.
        let mut found = expected.clone();
        found[10_500] += 0.5;
        assert!(Deviation::of(&found, &expected).l2 < bound(DType::Bf16, DType::Bf16).l2);
    }
}
