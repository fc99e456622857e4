//! Distillation against its f64 reference, the k largest log-probabilities against the CPU's, and timings of both.

use bytemuck::{bytes_of, cast_slice};
use zeroth_base::DType;
use zeroth_cpu::{Pool, top_log_probs, top_log_probs_scratch};
use zeroth_graph::DistillSpec;
use zeroth_graph::reference::{TeacherRows, distill_loss};
use zeroth_kernel::{
    Control, DeviceError, DivergenceSpec, GradStore, HeadLossDims, HeadLossDw, Kernel, Span, TeacherSpans,
};

use crate::harness::{Expected, Harness, Outcome, Output, Work};

/// Divergence, temperature, and whether it is multiplied by its square.
const CASES: [(f32, f32, bool); 5] =
    [(0.0, 1.0, false), (0.0, 2.0, true), (0.25, 2.0, false), (0.75, 1.0, false), (1.0, 2.0, true)];

/// A student's head and labels.
struct Head {
    dims: HeadLossDims,
    x: Vec<f64>,
    w: Vec<f64>,
    labels: Vec<i32>,
}

/// A teacher's numbers.
enum Source {
    Hidden { hidden: usize, vocab: usize, x: Vec<f64>, w: Vec<f64> },
    TopK { k: usize, vocab: usize, tail: bool, ids: Vec<i32>, log_probs: Vec<f64> },
}

impl Harness {
    pub(crate) fn distill(&mut self) -> Outcome {
        for (beta, temperature, squared) in CASES {
            let distillation = DivergenceSpec { beta, temperature, squared };
            for (rows, hidden, vocab, of_teacher) in
                [(5, 36, 101, 101), (33, 64, 50, 61), (70, 20, 1003, 990)]
            {
                let head = self.student(HeadLossDims::new(rows, hidden, vocab));
                let (x, w) = (self.random(rows * 24), self.random(of_teacher * 24));
                let teacher = Source::Hidden { hidden: 24, vocab: of_teacher, x, w };
                self.distill_case(&head, distillation, &teacher)?;
                for (k, tail) in [(4, true), (4, false), (of_teacher, true)] {
                    let teacher = cached(rows, k, of_teacher, tail);
                    self.distill_case(&head, distillation, &teacher)?;
                }
            }
            // A student that is its teacher.
            let head = self.student(HeadLossDims::new(40, 64, 1003));
            let (x, w) = (head.x.clone(), head.w.clone());
            self.distill_case(&head, distillation, &Source::Hidden { hidden: 64, vocab: 1003, x, w })?;
        }
        if self.dtype == DType::F32 {
            // Several slices of logits.
            let head = self.student(HeadLossDims::new(900, 8, 200_003));
            let (x, w) = (self.random(900 * 8), self.random(200_000 * 8));
            let distillation = DivergenceSpec { beta: 0.0, temperature: 2.0, squared: false };
            let teacher = Source::Hidden { hidden: 8, vocab: 200_000, x, w };
            self.distill_case(&head, distillation, &teacher)?;
        }
        for (vocab, k) in
            [(37, 1), (37, 37), (5003, 20), (5003, 2048), (5003, 2049), (5003, 5003), (151_936, 20)]
        {
            self.top(vocab, k)?;
        }
        Ok(())
    }

    fn student(&mut self, dims: HeadLossDims) -> Head {
        let HeadLossDims { rows, hidden, vocab, .. } = dims;
        let label = |row: usize| if row % 4 == 1 { -100 } else { (row * 7 % vocab) as i32 };
        // Logits of about 2, so that neither distribution is one token.
        let narrower = 2.0 / (hidden as f64).sqrt();
        let x: Vec<f64> = self.random(rows * hidden).iter().map(|x| x * narrower).collect();
        let x = crate::from_bytes(self.dtype, &crate::to_bytes(self.dtype, &x));
        Head { dims, x, w: self.random(vocab * hidden), labels: (0..rows).map(label).collect() }
    }

    fn distill_case(&mut self, head: &Head, distillation: DivergenceSpec, teacher: &Source) -> Outcome {
        let Head { dims, x, w, labels } = head;
        let HeadLossDims { rows, hidden, vocab, .. } = *dims;
        let (weights, loss_scale) = ([0.25, 0.125], 64.0);
        let labels_wide: Vec<i64> = labels.iter().map(|label| i64::from(*label)).collect();
        let DivergenceSpec { beta, temperature, squared } = distillation;
        let spec = DistillSpec { beta: f64::from(beta), temperature: f64::from(temperature), squared };
        let of_ids: Vec<i64>;
        let rows_of_teacher = match teacher {
            Source::Hidden { x, w, .. } => TeacherRows::Hidden { x, w },
            Source::TopK { vocab, tail, ids, log_probs, .. } => {
                of_ids = ids.iter().map(|id| i64::from(*id)).collect();
                TeacherRows::TopK { ids: &of_ids, log_probs, vocab: *vocab, tail: *tail }
            }
        };
        let scales = weights.map(|weight| weight * loss_scale);
        let (sums, [dx, dw]) = distill_loss(x, w, &labels_wide, &rows_of_teacher, spec, scales);
        // Logits and their gradients are rounded to the data type.
        let (near, wider) =
            if self.dtype == DType::F32 { (2e-5, 2.0) } else { (2.0 * self.bound(self.dtype), 4.0) };
        let losses = sums.map(|sum| Output {
            span: self.allocate(8),
            before: 3.0f64.to_ne_bytes().to_vec(),
            expected: Expected::Sum(3.0 + sum, near),
        });
        let rounded = wider * self.bound(self.dtype) / self.bound(DType::F32);
        let [ce, kd] = losses;
        let outputs = [ce, kd, self.stored(self.dtype, dx, 2.0 * wider), self.accumulated(&dw, rounded)];
        let (teacher, shape) = match teacher {
            Source::Hidden { hidden, vocab, x, w } => {
                let (x, w) = (self.upload_values(x)?, self.upload_values(w)?);
                let spans =
                    TeacherSpans::Hidden { hidden: *hidden, vocab: *vocab, row_stride: *hidden, x, w };
                (spans, format!("teacher {hidden}x{vocab}"))
            }
            Source::TopK { k, vocab, tail, ids, log_probs } => {
                let (ids, log_probs) = (self.upload(cast_slice(ids))?, self.upload_f32(log_probs)?);
                let spans = TeacherSpans::TopK { k: *k, vocab: *vocab, tail: *tail, ids, log_probs };
                (spans, format!("{k} of {vocab}, tail {tail}"))
            }
        };
        let kernel = Kernel::DistillLossBackward {
            dims: *dims,
            distillation,
            teacher,
            x: self.upload_values(x)?,
            w: self.upload_values(w)?,
            labels: self.upload(cast_slice(labels))?,
            losses: [outputs[0].span, outputs[1].span],
            loss_weights: [self.upload(bytes_of(&weights[0]))?, self.upload(bytes_of(&weights[1]))?],
            control: self.upload(bytes_of(&Control::new(loss_scale)))?,
            dx: Some(outputs[2].span),
            dw: Some(HeadLossDw { to: outputs[3].span, store: GradStore::Add, tied_rows: None }),
        };
        let case = format!("{rows}x{hidden}x{vocab}, {shape}, beta {beta}, temperature {temperature}");
        self.case(&case, kernel, &outputs)
    }

    /// With a hidden size of 1 and few bits, logits are exact products, many of them equal: ids must be exact.
    fn top(&mut self, vocab: usize, k: usize) -> Outcome {
        let dims = HeadLossDims::new(9, 1, vocab);
        let x = [1.0, 0.5, -1.0, 2.0, 0.0, -0.5, 0.25, 1.0, -2.0];
        let w: Vec<f64> = (0..vocab).map(|at| ((at * 7919) % 127) as f64 / 16.0 - 4.0).collect();
        let (narrow_x, narrow_w) = (x.map(|x| x as f32), crate::narrow(&w));
        let (mut ids, mut log_probs) = (vec![0; 9 * k], vec![0.0f32; 9 * k]);
        let mut scratch = vec![0.0; top_log_probs_scratch(dims, k, 1)];
        let pool = Pool::new(1);
        top_log_probs(&pool, dims, k, 2.0, &narrow_x, &narrow_w, &mut ids, &mut log_probs, &mut scratch);
        let log_probs: Vec<f64> = log_probs.into_iter().map(f64::from).collect();
        let ids: Vec<u8> = cast_slice(&ids).to_vec();
        let outputs = [self.exact(vec![0; ids.len()], ids), self.stored(DType::F32, log_probs, 1.0)];
        let kernel = Kernel::TopLogProbs {
            dims,
            k,
            temperature: 2.0,
            x: self.upload_values(&x)?,
            w: self.upload_values(&w)?,
            ids: outputs[0].span,
            log_probs: outputs[1].span,
        };
        self.case(&format!("{k} of {vocab}"), kernel, &outputs)
    }

    /// A student of 0.6B and a teacher of 8B; then the same logits by almost no matmul.
    pub(crate) fn time_distill(&mut self) -> Outcome {
        let (rows, vocab) = (8192, 151_936);
        let traffic = Work::Bytes(14.0 * (rows * vocab) as f64);
        for beta in [0.0, 0.5, 1.0] {
            let distillation = DivergenceSpec { beta, temperature: 2.0, squared: true };
            let kernel = self.timed_distill(rows, [8, 8], vocab, distillation, false)?;
            self.time(&format!("{rows}x8x{vocab}, beta {beta}, logits alone"), traffic, kernel)?;
            self.next = 0;
        }
        let distillation = DivergenceSpec { beta: 0.0, temperature: 2.0, squared: true };
        let kernel = self.timed_distill(rows, [1024, 4096], vocab, distillation, true)?;
        let flops = (6.0 * 1024.0 + 2.0 * 4096.0) * (rows * vocab) as f64;
        self.time(&format!("{rows}x1024x{vocab}, teacher of 4096"), Work::Flops(flops), kernel)?;
        self.next = 0;
        let (dims, k) = (HeadLossDims::new(rows, 1024, vocab), 20);
        let (x, w) = (self.filled(DType::Bf16, rows * 1024)?, self.filled(DType::Bf16, vocab * 1024)?);
        let (ids, log_probs) = (self.allocate(4 * rows * k), self.allocate(4 * rows * k));
        let kernel = Kernel::TopLogProbs { dims, k, temperature: 2.0, x, w, ids, log_probs };
        self.time(&format!("20 of {rows}x1024x{vocab}"), Work::Bytes(2.0 * (rows * vocab) as f64), kernel)
    }

    fn timed_distill(
        &mut self,
        rows: usize,
        [hidden, of_teacher]: [usize; 2],
        vocab: usize,
        distillation: DivergenceSpec,
        gradients: bool,
    ) -> Result<Kernel, DeviceError> {
        let labels: Vec<i32> = (0..rows as i32).map(|row| row * 17).collect();
        let [x, w, teacher_x, teacher_w]: [Span; 4] = [
            self.filled(DType::Bf16, rows * hidden)?,
            self.filled(DType::Bf16, vocab * hidden)?,
            self.filled(DType::Bf16, rows * of_teacher)?,
            self.filled(DType::Bf16, vocab * of_teacher)?,
        ];
        let teacher = TeacherSpans::Hidden {
            hidden: of_teacher,
            vocab,
            row_stride: of_teacher,
            x: teacher_x,
            w: teacher_w,
        };
        let dx = self.allocate(2 * rows * hidden);
        let dw = if gradients {
            let (to, store, tied_rows) = (self.filled(DType::F32, vocab * hidden)?, GradStore::Write, None);
            Some(HeadLossDw { to, store, tied_rows })
        } else {
            None
        };
        Ok(Kernel::DistillLossBackward {
            dims: HeadLossDims::new(rows, hidden, vocab),
            distillation,
            teacher,
            x,
            w,
            labels: self.upload(cast_slice(&labels))?,
            losses: [self.upload(&[0; 8])?, self.upload(&[0; 8])?],
            loss_weights: [self.upload(bytes_of(&0.5f64))?, self.upload(bytes_of(&0.5f64))?],
            control: self.upload(bytes_of(&Control::new(1.0)))?,
            // Without any gradient the last pass is not run.
            dx: Some(dx),
            dw,
        })
    }
}

/// Distinct tokens with probabilities that sum to less than 1.
fn cached(rows: usize, k: usize, vocab: usize, tail: bool) -> Source {
    let slots = || (0..rows).flat_map(|row| (0..k).map(move |place| (row, place)));
    let ids = slots().map(|(row, place)| ((row * 11 + place * (vocab - 1)) % vocab) as i32).collect();
    let log_prob =
        |(row, place): (usize, usize)| -(k as f32).ln() - 0.1 - ((row + place * 3) % 7) as f32 * 0.3;
    let log_probs = slots().map(log_prob).map(f64::from).collect();
    Source::TopK { k, vocab, tail, ids, log_probs }
}
