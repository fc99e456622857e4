//! Timings of kernels, for information, with the shapes of a 0.6B model and 16,384 tokens.

use bytemuck::{Zeroable, bytes_of, cast_slice};
use zeroth_base::{ActivationFn, DType};
use zeroth_kernel::{
    AttentionContext, AttentionDims, EmbeddingDims, ExactSum, HeadLossDims, HeadNormRopeDims, LinearDims,
    RmsNormDims, RopeDims, RowKey,
};
use zeroth_kernel::{
    Control, Device, DeviceError, GradStore, HeadLossDw, Kernel, MasterForm, Optimizer, Queue, Span,
    StepNumbers,
};

use crate::harness::{Group, Harness, Outcome, Work, to_bytes};

const ROWS: usize = 16_384;
const HIDDEN: usize = 1024;

impl Harness {
    pub(crate) fn timings(&mut self) -> Outcome {
        self.dtype = DType::Bf16;
        let parts: [Group; 13] = [
            ("linear", Self::time_matmuls),
            ("adapter", Self::time_adapters),
            ("attention", Self::time_attention),
            ("norm", Self::time_norms),
            ("head_norm_rope", Self::time_head_norm_rope),
            ("elementwise", Self::time_elementwise),
            ("embedding", Self::time_embedding),
            ("head_loss", Self::time_head),
            ("distill", Self::time_distill),
            ("encoder_decoder", Self::time_encoder_decoder),
            ("experts", Self::time_experts),
            ("grouped", Self::time_grouped),
            ("optimizer_step", Self::time_update),
        ];
        for (name, part) in parts {
            self.next = 0;
            if self.runs(name) {
                part(self)?;
            }
        }
        Ok(())
    }

    /// A repeated pattern of a million random numbers.
    pub(crate) fn filled(&mut self, dtype: DType, count: usize) -> Result<Span, DeviceError> {
        let numbers = self.random_of(dtype, 1 << 20);
        let bytes = to_bytes(dtype, &numbers);
        let span = self.allocate(count * dtype.bytes() as usize);
        for at in (0..span.bytes).step_by(bytes.len()) {
            let length = (span.bytes - at).min(bytes.len() as u64);
            self.device.upload(Queue::Compute, &bytes[..length as usize], span.part(at, length, 1))?;
        }
        Ok(span)
    }

    fn time_matmuls(&mut self) -> Outcome {
        let bf16 = DType::Bf16;
        for (rows, inputs, outputs) in [(4096, 4096, 4096), (ROWS, HIDDEN, 3072), (ROWS, 3072, HIDDEN)] {
            let dims = LinearDims::new(rows, inputs, outputs);
            let (x, w) = (self.filled(bf16, rows * inputs)?, self.filled(bf16, inputs * outputs)?);
            let (y, dw) = (self.filled(bf16, rows * outputs)?, self.filled(DType::F32, inputs * outputs)?);
            let dx = self.allocate(2 * rows * inputs);
            let flops = || Work::Flops(2.0 * (rows * inputs) as f64 * outputs as f64);
            let shape = format!("{rows}x{inputs}x{outputs}");
            self.time(&shape, flops(), Kernel::LinearDx { dims, scale: 1.0, dy: y, w, dx, add: false })?;
            self.time(
                &shape,
                flops(),
                Kernel::LinearDw { dims, scale: 1.0, dy: y, x, dw, store: GradStore::Add },
            )?;
            self.time(&shape, flops(), Kernel::Linear { dims, x, w, bias: None, y })?;
            self.next = 0;
        }
        Ok(())
    }

    /// The matmuls of a low-rank adapter beside one of its base: by bytes, because the rank is small.
    fn time_adapters(&mut self) -> Outcome {
        let (bf16, scale, rows, width) = (DType::Bf16, 2.0, 8192, 4096);
        for rank in [8, 16, 64, 5] {
            let dims = LinearDims::new(rows, rank, width);
            let (x, w) = (self.filled(bf16, rows * rank)?, self.filled(bf16, width * rank)?);
            let (y, dw) = (self.filled(bf16, rows * width)?, self.filled(bf16, width * rank)?);
            let dx = self.allocate(2 * rows * rank);
            let store = GradStore::Round { to: bf16, found_inf: self.allocate(8) };
            let shape = format!("{rows}x{rank}x{width}");
            let bytes = (2 * rows * width) as f64;
            self.time(&shape, Work::Bytes(2.0 * bytes), Kernel::LinearAdd { dims, scale, x, w, y })?;
            let kernel = Kernel::LinearDx { dims, scale, dy: y, w, dx, add: false };
            self.time(&shape, Work::Bytes(bytes), kernel)?;
            self.time(&shape, Work::Bytes(bytes), Kernel::LinearDw { dims, scale, dy: y, x, dw, store })?;
            let dims = LinearDims::new(rows, width, rank);
            self.time(&shape, Work::Bytes(bytes), Kernel::Linear { dims, x: y, w, bias: None, y: dx })?;
            self.next = 0;
        }
        Ok(())
    }

    fn time_attention(&mut self) -> Outcome {
        for dtype in [DType::Bf16, DType::F16] {
            self.dtype = dtype;
            for (sequences, length, heads, kv_heads, head_dim) in [
                (1, 4096, 32, 32, 128),
                (8, 2048, 16, 8, 128),
                (4, 4096, 32, 8, 128),
                (16, 1024, 16, 8, 128),
                (1, 4096, 16, 8, 128),
                (4, 4096, 32, 32, 64),
            ] {
                let rows = sequences * length;
                let scale = 1.0 / (head_dim as f32).sqrt();
                let dims = AttentionDims::new(rows, heads, kv_heads, head_dim, None, scale);
                let (wide, narrow) = (rows * heads * head_dim, rows * kv_heads * head_dim);
                let (q, dy) = (self.filled(dtype, wide)?, self.filled(dtype, wide)?);
                let (k, v) = (self.filled(dtype, narrow)?, self.filled(dtype, narrow)?);
                let table: Vec<u32> = std::iter::once(sequences as u32 + 1)
                    .chain((0..=sequences).map(|sequence| (sequence * length) as u32))
                    .collect();
                let context = AttentionContext::new(self.upload(cast_slice(&table))?);
                let (y, lse) = (self.allocate(2 * wide), self.allocate(4 * rows * heads));
                // Two matmuls over half of [length, length, head_dim] per head and sequence.
                let flops = 2.0 * (rows * length) as f64 * (heads * head_dim) as f64;
                let shape = format!("{sequences}x{length}, {heads}/{kv_heads} heads of {head_dim}");
                let forward = Kernel::Attention { dims, context, q, k, v, y, lse };
                self.device.equal_sequences(Some(length));
                let has_cudnn = self.device.check_cudnn().is_ok();
                for cudnn in [true, false].into_iter().filter(|cudnn| has_cudnn || !cudnn) {
                    self.device.use_cudnn_attention(cudnn);
                    let by = if cudnn { "cuDNN" } else { "own kernel" };
                    self.time(&format!("{shape} by {by}"), Work::Flops(flops), forward.clone())?;
                }
                self.device.equal_sequences(None);
                let (dq, dk, dv) =
                    (self.allocate(2 * wide), self.allocate(2 * narrow), self.allocate(2 * narrow));
                let dbias = None;
                let kernel =
                    Kernel::AttentionBackward { dims, context, q, k, v, y, lse, dy, dq, dk, dv, dbias };
                self.time(&shape, Work::Flops(2.5 * flops), kernel)?;
                self.next = 0;
            }
        }
        self.dtype = DType::Bf16;
        Ok(())
    }

    fn time_norms(&mut self) -> Outcome {
        for (rows, width) in [(ROWS, HIDDEN), (ROWS * 16, 128), (ROWS / 4, 4096)] {
            let dims = RmsNormDims::new(rows, width, 1e-6);
            let elements = rows * width;
            let (x, residual) = (self.filled(DType::Bf16, elements)?, self.filled(DType::Bf16, elements)?);
            let (w, dy) = (self.filled(DType::Bf16, width)?, self.filled(DType::Bf16, elements)?);
            let (h, y) = (self.allocate(2 * elements), self.allocate(2 * elements));
            let (rstd, dw) = (self.allocate(4 * rows), self.filled(DType::F32, width)?);
            let (shape, bytes) = (format!("{rows}x{width}"), 2.0 * elements as f64);
            self.time(&shape, Work::Bytes(2.0 * bytes), Kernel::RmsNorm { dims, x, w, y, rstd })?;
            let kernel = Kernel::AddRmsNorm { dims, x, residual, w, h, y, rstd };
            self.time(&shape, Work::Bytes(4.0 * bytes), kernel)?;
            let (dh, dw, residual) = (Some(y), Some(dw), Some(residual));
            let kernel = Kernel::RmsNormBackward { dims, dy, h, rstd, w, residual, dh, dw };
            self.time(&shape, Work::Bytes(4.0 * bytes), kernel)?;
            self.next = 0;
        }
        Ok(())
    }

    /// The fused kernels, and the separate ones.
    fn time_head_norm_rope(&mut self) -> Outcome {
        for heads in [16, 8] {
            let rope = RopeDims::new(ROWS, heads, 128, 128);
            let dims = HeadNormRopeDims { rope, eps: 1e-6 };
            let (norm, count, angles) = (dims.norm(), ROWS * heads * 128, ROWS * 64);
            let (cos, sin) = (self.filled(DType::F32, angles)?, self.filled(DType::F32, angles)?);
            let (x, dy) = (self.filled(DType::Bf16, count)?, self.filled(DType::Bf16, count)?);
            let (w, dw) = (self.filled(DType::Bf16, 128)?, self.filled(DType::F32, 128)?);
            let [y, dh, between] = [(); 3].map(|()| self.allocate(2 * count));
            let (rstd, shape) = (self.allocate(4 * norm.rows), format!("16384x{heads}x128"));
            // Every tensor once, plus the angles.
            let bytes = |tensors: usize, of_angles: usize| {
                Work::Bytes((2 * tensors * count + 8 * of_angles * angles) as f64)
            };
            let kernels = [
                (bytes(2, 0), Kernel::RmsNorm { dims: norm, x, w, y: between, rstd }),
                (bytes(2, 1), Kernel::Rope { dims: rope, cos, sin, x: between, y, back: false }),
                (bytes(2, 1), Kernel::HeadNormRope { dims, x, w, cos, sin, y, rstd }),
                (bytes(2, 1), Kernel::Rope { dims: rope, cos, sin, x: dy, y: between, back: true }),
                (
                    bytes(3, 0),
                    Kernel::RmsNormBackward {
                        dims: norm,
                        dy: between,
                        h: x,
                        rstd,
                        w,
                        residual: None,
                        dh: Some(dh),
                        dw: Some(dw),
                    },
                ),
                (
                    bytes(3, 1),
                    Kernel::HeadNormRopeBackward {
                        dims,
                        dy,
                        h: x,
                        rstd,
                        w,
                        cos,
                        sin,
                        dh: Some(dh),
                        dw: Some(dw),
                    },
                ),
            ];
            for (work, kernel) in kernels {
                self.time(&shape, work, kernel)?;
            }
            self.next = 0;
        }
        Ok(())
    }

    fn time_elementwise(&mut self) -> Outcome {
        let dims = RopeDims::new(ROWS, 16, 128, 128);
        let (count, angles) = (ROWS * 16 * 128, ROWS * 64);
        let (cos, sin) = (self.filled(DType::F32, angles)?, self.filled(DType::F32, angles)?);
        let (x, y) = (self.filled(DType::Bf16, count)?, self.allocate(2 * count));
        let bytes = Work::Bytes((4 * count + 8 * angles) as f64);
        self.time("16384x16x128", bytes, Kernel::Rope { dims, cos, sin, x, y, back: false })?;
        self.next = 0;
        let count = ROWS * 3072;
        let (gate, up) = (self.filled(DType::Bf16, count)?, self.filled(DType::Bf16, count)?);
        let [dy, dgate, dup] = [(); 3].map(|()| self.allocate(2 * count));
        for activation in ActivationFn::ALL {
            let kernel = Kernel::GatedActivation { activation, gate, up, y: dy };
            self.time("16384x3072", Work::Bytes(6.0 * count as f64), kernel)?;
            let kernel = Kernel::GatedActivationBackward { activation, dy, gate, up, dgate, dup };
            self.time("16384x3072", Work::Bytes(10.0 * count as f64), kernel)?;
        }
        let bytes = Work::Bytes(6.0 * count as f64);
        self.time("16384x3072", bytes, Kernel::Sum { a: gate, b: up, y: dgate })?;
        let keys: Vec<RowKey> =
            (0..ROWS as u64).map(|row| RowKey { sample: row, position: 1, epoch: 0 }).collect();
        let (keys, probability, width) = (self.upload(cast_slice(&keys))?, 0.05, 3072);
        let (x, y, row_stride) = (gate, dgate, width);
        let kernel = Kernel::Dropout { probability, seed: 1, op: 0, width, row_stride, keys, x, y };
        self.time("16384x3072", Work::Bytes(4.0 * count as f64), kernel)?;
        self.next = 0;
        let from = self.filled(DType::F32, count)?;
        let (to, found_inf) = (self.allocate(2 * count), Some(self.upload(&[0; 8])?));
        let (from_type, to_type) = (DType::F32, DType::Bf16);
        let kernel = Kernel::Convert { from, from_type, to, to_type, found_inf };
        self.time("f32 to bf16", Work::Bytes(6.0 * count as f64), kernel)?;
        let kernel = Kernel::SumRanks {
            ranks: 1,
            parts: to,
            from_type: to_type,
            to: from,
            to_type: from_type,
            add: true,
        };
        self.time("bf16 accumulated to f32", Work::Bytes(10.0 * count as f64), kernel)
    }

    fn time_embedding(&mut self) -> Outcome {
        let dims = EmbeddingDims::new(151_936, HIDDEN);
        // Distributed as in text: few ids are frequent, most are rare.
        let id = |row: usize| ((row * 7919 % ROWS) as f64 / ROWS as f64).powi(6) * 151_935.0;
        let ids: Vec<i32> = (0..ROWS).map(|row| id(row) as i32).collect();
        let ids = self.upload(cast_slice(&ids))?;
        let (table, y) =
            (self.filled(DType::Bf16, 151_936 * HIDDEN)?, self.filled(DType::Bf16, ROWS * HIDDEN)?);
        let dtable = self.filled(DType::F32, 151_936 * HIDDEN)?;
        let bytes = (ROWS * HIDDEN) as f64;
        let (rows, dy) = (ROWS, y);
        self.time(
            "16384 of 151936x1024",
            Work::Bytes(2.0 * bytes),
            Kernel::EmbeddingBackward { dims, rows, ids, dy, dtable, tied_rows: None },
        )?;
        self.time(
            "16384 of 151936x1024",
            Work::Bytes(4.0 * bytes),
            Kernel::Embedding { dims, rows, ids, table, y },
        )
    }

    fn time_head(&mut self) -> Outcome {
        let (rows, hidden, vocab) = (4096, HIDDEN, 151_936);
        let dims = HeadLossDims::new(rows, hidden, vocab);
        let labels: Vec<i32> = (0..rows as i32).map(|row| row * 37).collect();
        let x = self.filled(DType::Bf16, rows * hidden)?;
        let kernel = Kernel::HeadLossBackward {
            dims,
            x,
            w: self.filled(DType::Bf16, vocab * hidden)?,
            labels: self.upload(cast_slice(&labels))?,
            loss: self.upload(&[0; 8])?,
            loss_weight: self.upload(bytes_of(&1.0f64))?,
            control: self.upload(bytes_of(&Control::new(1.0)))?,
            dx: Some(self.allocate(2 * rows * hidden)),
            dw: Some(HeadLossDw {
                to: self.filled(DType::F32, vocab * hidden)?,
                store: GradStore::Write,
                tied_rows: None,
            }),
        };
        let flops = 6.0 * (rows * hidden) as f64 * vocab as f64;
        self.time("4096x1024x151936", Work::Flops(flops), kernel)
    }

    fn time_update(&mut self) -> Outcome {
        let count = 64 << 20;
        let grads = self.filled(DType::F32, count)?;
        let sum = self.allocate(size_of::<ExactSum>());
        let kernel = Kernel::Squares { values: grads, value_type: DType::F32, sum };
        self.time("64 Mi of f32", Work::Bytes(4.0 * count as f64), kernel)?;
        let numbers = StepNumbers {
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            rate: 1e-3,
            adam_rate: 1e-3,
            ..StepNumbers::zeroed()
        };
        let numbers = StepNumbers { root_correction: 0.9, unscale: 1.0, clip: 1.0, ..numbers };
        let control = Control { apply: 1, numbers: [numbers; 2], ..Control::new(1.0) };
        let kernel = Kernel::Optimize {
            optimizer: Optimizer::AdamW,
            group: 0,
            control: self.upload(bytes_of(&control))?,
            grads,
            grad_type: DType::F32,
            master: self.filled(DType::F32, count)?,
            master_form: MasterForm::F32,
            moments: [Some(self.filled(DType::F32, count)?), Some(self.filled(DType::F32, count)?), None],
            moment_type: DType::F32,
            rounding: None,
            weights: Some(self.allocate(2 * count)),
        };
        self.time("AdamW, 64 Mi", Work::Bytes(30.0 * count as f64), kernel)
    }
}
