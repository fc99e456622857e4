//! Compares every CUDA kernel with its f64 reference, or bit by bit with the CPU kernel.
//!
//!     cargo run --release -p zeroth-cuda --example cuda_self_test [-- quick] [portable] [timings] [ranks] [only=WORD]
//!
//! Needs an NVIDIA GPU and no other file of this repository: the binary can be copied to the machine with the GPU. Outputs are
//! poisoned with NaN, each kernel runs twice and must be bitwise reproducible, and the bytes after an output must not change.
//! Prints one line per kernel; exits with 1 if one fails. `quick` skips the timings, `timings` runs only them, `ranks` only tests the
//! transports with a single rank, and `portable` uses kernels without architecture-specific features. `only=norm` runs the groups
//! with that word in their name; the group `conformance` is the test of `zeroth doctor`.
#![allow(clippy::print_stdout, reason = "the report of a program that is run by hand")]
#![allow(
    clippy::many_single_char_names,
    clippy::similar_names,
    reason = "names of the formulas: q, k and v; dx and dw; p, m and v"
)]

use std::process::ExitCode;
use std::time::Instant;

use bytemuck::{bytes_of, cast_slice};
use zeroth_base::{ActivationFn, DType};
use zeroth_cpu::{self, Dropout, reference};
use zeroth_cuda::CudaDevice;
use zeroth_kernel::{
    AttentionContext, AttentionDims, ByTier, EmbeddingDims, HeadLossDims, LinearDims, LogitsDims,
    RmsNormDims, RowKey,
};
use zeroth_kernel::{Control, Device, DeviceError, GradStore, HeadLossDw, Kernel, Launch, Queue, Span, Tier};

mod captured_experts;
mod cudnn_attention;
mod distill;
mod encoder_decoder;
mod encoder_decoder_timings;
mod expert_timings;
mod experts;
mod harness;
mod linears;
mod optimizer_step;
mod ranks;
mod rope;
mod timings;
use harness::{ARENA, Expected, Group, Harness, Outcome, Output, POISON, add, from_bytes, narrow, to_bytes};

/// Bytes of the host arena.
const HOST: u64 = 32 << 20;

fn main() -> ExitCode {
    let begin = Instant::now();
    let has_argument = |word: &str| std::env::args().any(|argument| argument == word);
    let open = if has_argument("portable") { CudaDevice::open_portable } else { CudaDevice::open };
    let device = match open(0, ByTier::on_device(ARENA).with(Tier::Host, HOST)) {
        Ok(device) => device,
        Err(error) => {
            println!("FAILED to open: {error}");
            return ExitCode::FAILURE;
        }
    };
    println!(
        "{}: opened, kernels compiled or loaded from the cache, in {:.2} s",
        device.name(),
        begin.elapsed().as_secs_f64()
    );
    let mut harness = Harness::new(device);
    harness.only = std::env::args().find_map(|argument| argument.strip_prefix("only=").map(str::to_owned));
    let result = match (has_argument("timings"), has_argument("ranks")) {
        (_, true) => harness.ranks(),
        (true, false) => Ok(()),
        (false, false) => harness.all(),
    };
    let is_done = has_argument("quick") || has_argument("ranks");
    let result = result.and_then(|()| if is_done { Ok(()) } else { harness.timings() });
    if let Err(error) = result {
        println!("FAILED: {error}");
        return ExitCode::FAILURE;
    }
    println!("{} failures, {:.1} s", harness.failures, begin.elapsed().as_secs_f64());
    if harness.failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

impl Harness {
    fn all(&mut self) -> Outcome {
        let groups: [Group; 14] = [
            ("linear", Self::linears),
            ("norm", |harness| harness.each_row(Self::norm)),
            ("elementwise", |harness| harness.each_row(Self::elementwise)),
            ("embedding", |harness| harness.each_row(Self::embedding)),
            ("rope", Self::rope),
            ("head_norm_rope", Self::head_norm_rope),
            ("attention", Self::attentions),
            ("encoder_decoder", Self::encoder_decoder),
            ("head_loss", Self::heads),
            ("distill", Self::distill),
            ("experts", Self::experts),
            ("grouped", Self::grouped_linears),
            ("captured_experts", Self::captured_experts),
            ("optimizer_step", Self::optimizer_step),
        ];
        if self.runs("queues") {
            self.queues()?;
        }
        if self.runs("ranks") {
            self.ranks()?;
        }
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            self.dtype = dtype;
            for (name, group) in groups {
                if self.runs(name) {
                    group(self)?;
                }
            }
        }
        if self.runs("optimizer_step") {
            self.controls()?;
        }
        if self.runs("conformance") {
            self.conformance()?;
        }
        self.dtype = DType::Bf16;
        if self.runs("linear") {
            // Large enough for autotuning.
            self.linear(LinearDims::new(640, 1032, 2056), "cuBLASLt")?;
        }
        if self.runs("head_loss") {
            // Two slices of logits.
            self.dtype = DType::F32;
            self.head(HeadLossDims::new(900, 8, 200_003))?;
        }
        Ok(())
    }

    fn each_row(&mut self, case: fn(&mut Self, usize, usize) -> Outcome) -> Outcome {
        ROWS.iter().try_for_each(|&(rows, width)| case(self, rows, width))
    }

    fn attentions(&mut self) -> Outcome {
        for (rows, heads, kv_heads, head_dim, window, starts) in ATTENTION {
            let (heads, kv_heads, head_dim) = (*heads, *kv_heads, *head_dim);
            let scale = 0.8 / (head_dim as f32).sqrt();
            let dims = AttentionDims::new(*rows, heads, kv_heads, head_dim, *window, scale);
            self.attention(dims, starts)?;
        }
        self.cudnn_attentions()?;
        for head_dim in [36, 64, 128, 256] {
            self.packed_elsewhere(4, 2, head_dim, None)?;
            self.packed_elsewhere(2, 2, head_dim, Some(100))?;
        }
        Ok(())
    }

    fn heads(&mut self) -> Outcome {
        for (rows, hidden, vocab) in [(1, 20, 37), (5, 36, 101), (33, 64, 50), (200, 20, 1003)] {
            self.head(HeadLossDims::new(rows, hidden, vocab))?;
            self.logits(rows, hidden, vocab)?;
        }
        Ok(())
    }

    /// Uploads on one queue, copies to the host arena on another, and downloads on a third; each waits for the previous one.
    fn queues(&mut self) -> Outcome {
        let values = self.random(5_000_001);
        let (bytes, from_type) = (to_bytes(DType::F32, &values), DType::F32);
        let (from, to) =
            (self.allocate(bytes.len()), Span { tier: Tier::Host, at: 256, bytes: bytes.len() as u64 });
        let kernel = Kernel::Convert { from, from_type, to, to_type: DType::F32, found_inf: None };
        let launch = Launch { kernel, dtype: DType::F32, scratch: Span::device(0, 0) };
        let mut found = vec![0; bytes.len()];
        self.device.reserve_events(2)?;
        self.device.upload(Queue::Upload, &bytes, from)?;
        self.device.record_event(Queue::Upload, 0)?;
        self.device.wait_event(Queue::Compute, 0)?;
        self.device.enqueue(Queue::Compute, &launch)?;
        self.device.record_event(Queue::Compute, 1)?;
        self.device.wait_event(Queue::Download, 1)?;
        self.device.download(Queue::Download, to, &mut found)?;
        let beyond = Span::device(ARENA - 4, 8);
        let refused = self.device.record_event(Queue::Comm, 2).is_err()
            && self.device.upload(Queue::Upload, &[0; 8], beyond).is_err()
            && self.device.capacity(Tier::Host) == HOST;
        let verdict = if found == bytes && refused { "ok" } else { "FAILED" };
        self.failures += usize::from(verdict != "ok");
        println!("queues, events and arenas, {} bytes: {verdict}", bytes.len());
        self.next = 0;
        Ok(())
    }

    fn norm(&mut self, rows: usize, width: usize) -> Outcome {
        let (dims, shape) = (RmsNormDims::new(rows, width, 1e-5), format!("{rows}x{width}"));
        let (x, residual, w) = (self.random(rows * width), self.random(rows * width), self.random(width));
        let [y, rstd] = reference::rms_norm(dims, &x, &w);
        // y is rounded twice, as in transformers.
        let outputs = [self.stored(self.dtype, y, 2.0), self.stored(DType::F32, rstd.clone(), 1.0)];
        let (x_span, w_span) = (self.upload_values(&x)?, self.upload_values(&w)?);
        let kernel =
            Kernel::RmsNorm { dims, x: x_span, w: w_span, y: outputs[0].span, rstd: outputs[1].span };
        self.case(&shape, kernel, &outputs)?;
        // The sum is rounded before it is normalized.
        let h = from_bytes(self.dtype, &to_bytes(self.dtype, &add(&x, &residual)));
        let [y, h_rstd] = reference::rms_norm(dims, &h, &w);
        let outputs =
            [self.overwritten(h), self.stored(self.dtype, y, 2.0), self.stored(DType::F32, h_rstd, 1.0)];
        let (x_span, residual, w_span) =
            (self.upload_values(&x)?, self.upload_values(&residual)?, self.upload_values(&w)?);
        let [h, y, rstd_span] = [0, 1, 2].map(|number| outputs[number].span);
        let kernel = Kernel::AddRmsNorm { dims, x: x_span, residual, w: w_span, h, y, rstd: rstd_span };
        self.case(&shape, kernel, &outputs)?;
        let (dy, past) = (self.random(rows * width), self.random(rows * width));
        let [dh, dw] = reference::rms_norm_backward(dims, &x, &w, &dy);
        for with in [false, true] {
            let outputs = [
                self.overwritten(if with { add(&dh, &past) } else { dh.clone() }),
                self.accumulated(&dw, 1.0),
            ];
            let kernel = Kernel::RmsNormBackward {
                dims,
                dy: self.upload_values(&dy)?,
                h: self.upload_values(&x)?,
                rstd: self.upload_f32(&rstd)?,
                w: self.upload_values(&w)?,
                residual: if with { Some(self.upload_values(&past)?) } else { None },
                dh: Some(outputs[0].span),
                dw: Some(outputs[1].span),
            };
            self.case(&format!("{shape}, residual {with}"), kernel, &outputs)?;
        }
        Ok(())
    }

    fn elementwise(&mut self, rows: usize, width: usize) -> Outcome {
        let (count, shape) = (rows * width, format!("{rows}x{width}"));
        let (a, b, dy) = (self.random(count), self.random(count), self.random(count));
        let y = self.overwritten(add(&a, &b));
        let (a_span, b_span) = (self.upload_values(&a)?, self.upload_values(&b)?);
        self.case(&shape, Kernel::Sum { a: a_span, b: b_span, y: y.span }, &[y])?;
        for activation in ActivationFn::ALL {
            let y = self.overwritten(reference::gated_activation(activation, &a, &b));
            let (gate, up) = (self.upload_values(&a)?, self.upload_values(&b)?);
            self.case(&shape, Kernel::GatedActivation { activation, gate, up, y: y.span }, &[y])?;
            let grads = reference::gated_activation_backward(activation, &a, &b, &dy);
            let [dgate, dup] = grads.map(|grads| self.overwritten(grads));
            let (gate, up, dy) = (self.upload_values(&a)?, self.upload_values(&b)?, self.upload_values(&dy)?);
            let (to_dgate, to_dup) = (dgate.span, dup.span);
            let kernel =
                Kernel::GatedActivationBackward { activation, dy, gate, up, dgate: to_dgate, dup: to_dup };
            self.case(&shape, kernel, &[dgate, dup])?;
        }
        let key = |row: usize| RowKey { sample: (row as u64 / 9) << 31, position: row as u32 % 9, epoch: 3 };
        let keys: Vec<RowKey> = (0..rows).map(key).collect();
        let (probability, seed, op) = (0.3, 1 << 40 | 5, 9);
        let y = self.overwritten(reference::dropout(Dropout { probability, seed, op }, &keys, width, &a));
        let (keys, x) = (self.upload(cast_slice(&keys))?, self.upload_values(&a)?);
        let row_stride = width;
        let kernel = Kernel::Dropout { probability, seed, op, width, row_stride, keys, x, y: y.span };
        self.case(&shape, kernel, &[y])?;
        let zeros = self.exact(to_bytes(self.dtype, &a), vec![0; count * self.dtype.bytes() as usize]);
        self.case(&shape, Kernel::Zero { to: zeros.span }, &[zeros])?;
        for to_type in [DType::F32, DType::Bf16, DType::F16] {
            let from_type = self.dtype;
            let expected = to_bytes(to_type, &a);
            let output = self.exact(vec![POISON; expected.len()], expected);
            let from = self.upload_values(&a)?;
            let kernel = Kernel::Convert { from, from_type, to: output.span, to_type, found_inf: None };
            self.case(&format!("{count} to {to_type}"), kernel, &[output])?;
        }
        for add_to in [false, true] {
            let third = self.random(count);
            let sum = |at: usize| (a[at] as f32 + b[at] as f32) + third[at] as f32;
            let before = vec![0.5f32; count];
            let sums: Vec<f32> =
                (0..count).map(|at| if add_to { before[at] + sum(at) } else { sum(at) }).collect();
            let before = if add_to { cast_slice(&before).to_vec() } else { vec![POISON; 4 * count] };
            let output = self.exact(before, cast_slice(&sums).to_vec());
            let parts = self.upload_values(&[a.as_slice(), &b, &third].concat())?;
            let (ranks, from_type) = (3, self.dtype);
            let kernel = Kernel::SumRanks {
                ranks,
                parts,
                from_type,
                to: output.span,
                to_type: DType::F32,
                add: add_to,
            };
            self.case(&format!("3 of {count}, add {add_to}"), kernel, &[output])?;
            let narrow =
                |values: &[f32]| values.iter().flat_map(|v| half::bf16::from_f32(*v).to_ne_bytes()).collect();
            let before = if add_to { narrow(&vec![0.5; count]) } else { vec![POISON; 2 * count] };
            let output = self.exact(before, narrow(&sums));
            let kernel = Kernel::SumRanks {
                ranks,
                parts,
                from_type,
                to: output.span,
                to_type: DType::Bf16,
                add: add_to,
            };
            self.case(&format!("3 of {count} to bf16, add {add_to}"), kernel, &[output])?;
        }
        Ok(())
    }

    fn embedding(&mut self, rows: usize, width: usize) -> Outcome {
        let (dims, shape) = (EmbeddingDims::new(50, width), format!("{rows} of 50x{width}"));
        let ids: Vec<i32> =
            (0..rows as i32).map(|i| if i % 10 == 9 { -1 } else { i.wrapping_mul(i) % 50 }).collect();
        let (table, dy) = (self.random(50 * width), self.random(rows * width));
        let expected = to_bytes(self.dtype, &reference::embedding(dims, &ids, &table));
        let y = self.exact(vec![POISON; expected.len()], expected);
        let (ids_span, table) = (self.upload(cast_slice(&ids))?, self.upload_values(&table)?);
        self.case(&shape, Kernel::Embedding { dims, rows, ids: ids_span, table, y: y.span }, &[y])?;
        let mut dtable = narrow(&self.random_of(DType::F32, 50 * width));
        let before = cast_slice(&dtable).to_vec();
        zeroth_cpu::embedding_backward(&self.pool, dims, &ids, &narrow(&dy), &mut dtable);
        let output = self.exact(before, cast_slice(&dtable).to_vec());
        let (ids, dy) = (self.upload(cast_slice(&ids))?, self.upload_values(&dy)?);
        let kernel = Kernel::EmbeddingBackward { dims, rows, ids, dy, dtable: output.span, tied_rows: None };
        self.case(&shape, kernel, &[output])
    }

    fn attention(&mut self, dims: AttentionDims, starts: &[u32]) -> Outcome {
        let AttentionDims { rows, heads, kv_heads, head_dim, window, .. } = dims;
        let shape = format!("{rows} rows, {heads}/{kv_heads} heads of {head_dim}, {window:?}, {starts:?}");
        let end = starts.last().map_or(0, |&end| end as usize);
        // Padding rows must not affect results.
        let padded = |values: &[f64], heads: usize| {
            let mut values = values.to_vec();
            values[end * heads * head_dim..].fill(f64::NAN);
            values
        };
        let q = self.random(rows * heads * head_dim);
        let (k, v) = (self.random(rows * kv_heads * head_dim), self.random(rows * kv_heads * head_dim));
        let dy = self.random(rows * heads * head_dim);
        // The count, the entries, and unused capacity after them.
        let table: Vec<u32> = std::iter::once(starts.len() as u32).chain(starts.iter().copied()).collect();
        let table = [table.as_slice(), &[7, 3]].concat();
        let [y, lse] = reference::attention(&dims, starts, &q, &k, &v);
        let outputs = [self.stored(self.dtype, y.clone(), 2.0), self.stored(DType::F32, lse.clone(), 2.0)];
        let kernel = Kernel::Attention {
            dims,
            context: AttentionContext::new(self.upload(cast_slice(&table))?),
            q: self.upload_values(&padded(&q, heads))?,
            k: self.upload_values(&padded(&k, kv_heads))?,
            v: self.upload_values(&padded(&v, kv_heads))?,
            y: outputs[0].span,
            lse: outputs[1].span,
        };
        self.case(&shape, kernel, &outputs)?;
        let grads = reference::attention_backward(&dims, starts, &q, &k, &v, &dy);
        let [dq, dk, dv] = grads.map(|grads| self.stored(self.dtype, grads, 2.0));
        let kernel = Kernel::AttentionBackward {
            dims,
            context: AttentionContext::new(self.upload(cast_slice(&table))?),
            q: self.upload_values(&padded(&q, heads))?,
            k: self.upload_values(&padded(&k, kv_heads))?,
            v: self.upload_values(&padded(&v, kv_heads))?,
            y: self.upload_values(&y)?,
            lse: self.upload_f32(&lse)?,
            dy: self.upload_values(&padded(&dy, heads))?,
            dq: dq.span,
            dk: dk.span,
            dv: dv.span,
            dbias: None,
        };
        self.case(&shape, kernel, &[dq, dk, dv])
    }

    /// Results of a sequence must not depend on its position in the pack.
    fn packed_elsewhere(
        &mut self,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        window: Option<usize>,
    ) -> Outcome {
        let (length, before, seed) = (300, 37, self.seed);
        let widths = [heads, kv_heads, kv_heads, heads].map(|heads| heads * head_dim);
        let tensors = widths.map(|width| self.random(length * width));
        let others = widths.map(|width| self.random(before * width));
        // Later cases draw the same random numbers with and without this one.
        self.seed = seed;
        let scale = 0.8 / (head_dim as f32).sqrt();
        let dims = AttentionDims::new(length, heads, kv_heads, head_dim, window, scale);
        let alone = self.run_attention(dims, &[2, 0, length as u32], &tensors)?;
        let mut behind = others;
        behind.iter_mut().zip(&tensors).for_each(|(all, tensor)| all.extend(tensor));
        let rows = before + length;
        let starts = [3, 0, before as u32, rows as u32];
        let packed = self.run_attention(AttentionDims { rows, kv_rows: rows, ..dims }, &starts, &behind)?;
        // lse is stored by head, everything else by row.
        let statistics = |rows: usize, all: &[u8]| {
            let of_head = all.chunks(4 * rows).map(|head| head[4 * (rows - length)..].to_vec());
            of_head.collect::<Vec<_>>().concat()
        };
        let same = alone.iter().zip(&packed).skip(1).all(|(one, other)| other.ends_with(one))
            && statistics(length, &alone[0]) == statistics(rows, &packed[0]);
        let verdict = if same { "ok" } else { "FAILED: results depend on the position in the pack" };
        self.failures += usize::from(!same);
        println!(
            "attention {} at another position, {heads}/{kv_heads} heads of {head_dim}, {window:?}: {verdict}",
            self.dtype
        );
        Ok(())
    }

    /// Runs forward and backward; returns lse, y, dq, dk and dv.
    fn run_attention(
        &mut self,
        dims: AttentionDims,
        starts: &[u32],
        [q, k, v, dy]: &[Vec<f64>; 4],
    ) -> Result<Vec<Vec<u8>>, DeviceError> {
        let context = AttentionContext::new(self.upload(cast_slice(starts))?);
        let (q, k, v, dy) =
            (self.upload_values(q)?, self.upload_values(k)?, self.upload_values(v)?, self.upload_values(dy)?);
        let lse = self.allocate(4 * dims.heads * dims.rows);
        let [y, dq, dk, dv] = [q, q, k, v].map(|like| self.allocate(like.bytes as usize));
        let forward = Kernel::Attention { dims, context, q, k, v, y, lse };
        let backward =
            Kernel::AttentionBackward { dims, context, q, k, v, y, lse, dy, dq, dk, dv, dbias: None };
        for kernel in [forward, backward] {
            let dtype = self.dtype;
            let scratch = self.allocate(zeroth_cuda::scratch_bytes(&kernel, dtype) as usize);
            self.device.enqueue(Queue::Compute, &Launch { kernel, dtype, scratch })?;
        }
        let mut found = Vec::new();
        for span in [lse, y, dq, dk, dv] {
            let mut bytes = vec![0; span.bytes as usize];
            self.device.download(Queue::Compute, span, &mut bytes)?;
            found.push(bytes);
        }
        self.next = 0;
        Ok(found)
    }

    fn head(&mut self, dims: HeadLossDims) -> Outcome {
        let HeadLossDims { rows, hidden, vocab, .. } = dims;
        let shape = format!("{rows}x{hidden}x{vocab}");
        let label = |row: usize| if row % 4 == 1 { -100 } else { (row * 7 % vocab) as i32 };
        let labels: Vec<i32> = (0..rows).map(label).collect();
        let (x, w) = (self.random(rows * hidden), self.random(vocab * hidden));
        let (loss_weight, loss_scale) = (0.125, 1024.0);
        let (loss, [dx, dw]) = reference::head_loss(dims, &x, &w, &labels, loss_weight * loss_scale);
        // Logits and their gradients are rounded to the data type. The rounding error of a logit of 6 is that of six roundings of a
        // gradient.
        let (near, wider) =
            if self.dtype == DType::F32 { (1e-5, 1.0) } else { (self.bound(self.dtype), 4.0) };
        let loss = Output {
            span: Span::device(0, 8),
            before: 3.0f64.to_ne_bytes().to_vec(),
            expected: Expected::Sum(3.0 + loss, near),
        };
        let evaluated = Output { span: self.allocate(8), ..loss.clone() };
        let kernel = Kernel::HeadLoss {
            dims,
            x: self.upload_values(&x)?,
            w: self.upload_values(&w)?,
            labels: self.upload(cast_slice(&labels))?,
            loss: evaluated.span,
        };
        self.case(&shape, kernel, &[evaluated])?;
        let rounded = wider * self.bound(self.dtype) / self.bound(DType::F32);
        for add in [false, true] {
            let trained = Output { span: self.allocate(8), ..loss.clone() };
            let dw = if add {
                self.accumulated(&dw, rounded)
            } else {
                self.stored(DType::F32, dw.clone(), rounded)
            };
            let outputs = [trained, self.stored(self.dtype, dx.clone(), 2.0 * wider), dw];
            let kernel = Kernel::HeadLossBackward {
                dims,
                x: self.upload_values(&x)?,
                w: self.upload_values(&w)?,
                labels: self.upload(cast_slice(&labels))?,
                loss: outputs[0].span,
                loss_weight: self.upload(bytes_of(&loss_weight))?,
                control: self.upload(bytes_of(&Control::new(loss_scale)))?,
                dx: Some(outputs[1].span),
                dw: Some(HeadLossDw {
                    to: outputs[2].span,
                    store: if add { GradStore::Add } else { GradStore::Write },
                    tied_rows: None,
                }),
            };
            self.case(&format!("{shape}, add {add}"), kernel, &outputs)?;
        }
        Ok(())
    }

    /// Two sequences, the first of which is empty if there is one row, and a missing third one.
    fn logits(&mut self, rows: usize, hidden: usize, vocab: usize) -> Outcome {
        let dims = LogitsDims::new(rows, 3, hidden, vocab);
        let starts = [0, rows as u32 / 2, rows as u32];
        let (x, w) = (self.random(rows * hidden), self.random(vocab * hidden));
        let output = self.stored(DType::F32, reference::logits(dims, &starts, &x, &w), 1.0);
        let kernel = Kernel::Logits {
            dims,
            starts: self.upload(cast_slice(&[&[3], &starts[..]].concat()))?,
            x: self.upload_values(&x)?,
            w: self.upload_values(&w)?,
            logits: output.span,
        };
        self.case(&format!("{rows}x{hidden}x{vocab}"), kernel, &[output])
    }
}

/// Rows and widths: multiples of the vector size and others, and more rows than one pass compares.
const ROWS: &[(usize, usize)] =
    &[(1, 6), (5, 20), (33, 36), (200, 77), (130, 1000), (300, 128), (7, 5120), (2500, 16)];

type AttentionCase = (usize, usize, usize, usize, Option<usize>, &'static [u32]);

/// Rows, heads, kv heads, head_dim, window, and sequence starts.
const ATTENTION: &[AttentionCase] = &[
    (1, 2, 2, 6, None, &[0, 1]),
    (5, 4, 1, 20, None, &[0, 5]),
    (33, 4, 2, 24, Some(7), &[0, 10, 33]),
    (200, 4, 4, 36, None, &[0, 7, 7, 130, 190]),
    (330, 4, 2, 64, Some(50), &[0, 7, 7, 210, 320]),
    (200, 2, 1, 128, None, &[0, 200]),
    (140, 2, 2, 160, Some(70), &[0, 3, 140]),
    (70, 3, 1, 256, None, &[0, 1, 2, 3, 65]),
    // Several tiles of queries and keys.
    (600, 2, 1, 64, None, &[0, 600]),
    (300, 2, 2, 40, Some(129), &[0, 280]),
    (700, 4, 2, 128, None, &[0, 260, 261, 650]),
    (500, 4, 1, 120, Some(130), &[0, 400, 500]),
    (300, 2, 1, 256, None, &[0, 300]),
];
