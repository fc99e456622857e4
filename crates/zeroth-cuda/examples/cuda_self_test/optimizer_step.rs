//! The end of a training step on the GPU against the CPU, bit by bit: squares, control, casts with overflow check, optimizers.

use bytemuck::{Zeroable, bytes_of, cast_slice};
use zeroth_base::DType;
use zeroth_cpu::{self, CpuDevice, Pool};
use zeroth_kernel::{ByTier, ExactSum};
use zeroth_kernel::{
    Control, Device, DeviceError, Kernel, Launch, MasterForm, Moment, Optimizer, Queue, Recipe, ReportLayout,
    Rounding, Span, StepInput, StepNumbers,
};

use crate::harness::{Expected, Harness, Outcome, Output, POISON, narrow, to_bytes};

/// A buffer and its contents before the kernel.
type Buffer = (Span, Vec<u8>);

fn exact_sum(pool: &Pool, values: &[f64]) -> ExactSum {
    let values = narrow(values);
    let mut sums = vec![0.0; values.len().div_ceil(zeroth_kernel::BLOCK)];
    zeroth_cpu::block_squares(pool, &values, &mut sums);
    let mut total = ExactSum::zeroed();
    for sum in sums {
        total.add(sum);
    }
    total
}

impl Harness {
    pub(crate) fn optimizer_step(&mut self) -> Outcome {
        for count in [1, 2047, 2048, 9001] {
            let (values, value_type) = (self.random(count), self.dtype);
            let expected = exact_sum(&self.pool, &values);
            let output = self.exact(vec![POISON; size_of::<ExactSum>()], bytes_of(&expected).to_vec());
            let values = self.upload_values(&values)?;
            self.case(
                &count.to_string(),
                Kernel::Squares { values, value_type, sum: output.span },
                &[output],
            )?;
        }
        self.casts_with_overflow_check()?;
        for &optimizer in Optimizer::ALL {
            for moment_type in [DType::F32, DType::Bf16] {
                for stochastic in [false, true] {
                    self.optimizer(optimizer, moment_type, stochastic)?;
                }
            }
        }
        Ok(())
    }

    fn buffer(&mut self, bytes: Vec<u8>) -> Buffer {
        (self.allocate(bytes.len()), bytes)
    }

    /// Runs a kernel on the CPU first; the GPU must produce the same `written` buffers.
    fn compare_with_cpu(
        &mut self,
        shape: &str,
        kernel: Kernel,
        read: &[Buffer],
        written: &[Buffer],
    ) -> Outcome {
        let mut cpu = CpuDevice::new(2, ByTier::on_device(self.next))?;
        for (span, bytes) in read {
            self.device.upload(Queue::Compute, bytes, *span)?;
        }
        for (span, bytes) in read.iter().chain(written) {
            cpu.upload(Queue::Compute, bytes, *span)?;
        }
        let launch = Launch { kernel, dtype: self.dtype, scratch: Span::device(0, 0) };
        cpu.enqueue(Queue::Compute, &launch)?;
        let mut outputs = Vec::new();
        for (span, before) in written {
            let mut expected = vec![0; before.len()];
            cpu.download(Queue::Compute, *span, &mut expected)?;
            outputs.push(Output { span: *span, before: before.clone(), expected: Expected::Bits(expected) });
        }
        self.case(shape, launch.kernel, &outputs)
    }

    fn casts_with_overflow_check(&mut self) -> Outcome {
        // Finite in all types, infinite in f16, infinite in all types.
        for (largest, place) in [(1.0, 0), (70_000.0, 4999), (f64::INFINITY, 255)] {
            for to_type in [DType::F32, DType::Bf16, DType::F16] {
                let (mut values, from_type) = (self.random(5000), self.dtype);
                values[place] = largest;
                let from = self.buffer(to_bytes(from_type, &values));
                let to = self.buffer(vec![POISON; 5000 * to_type.bytes() as usize]);
                let flag = self.buffer(7u64.to_ne_bytes().to_vec());
                let kernel =
                    Kernel::Convert { from: from.0, from_type, to: to.0, to_type, found_inf: Some(flag.0) };
                self.compare_with_cpu(&format!("to {to_type}, {largest}"), kernel, &[from], &[to, flag])?;
            }
            let (mut values, value_type) = (self.random(5000), self.dtype);
            values[place] = largest;
            let values = self.buffer(to_bytes(value_type, &values));
            let flag = self.buffer(7u64.to_ne_bytes().to_vec());
            let kernel = Kernel::CheckFinite { values: values.0, value_type, found_inf: flag.0 };
            self.compare_with_cpu(&format!("{largest}"), kernel, &[values], &[flag])?;
        }
        Ok(())
    }

    fn optimizer(&mut self, optimizer: Optimizer, moment_type: DType, stochastic: bool) -> Outcome {
        self.optimizer_on(MasterForm::F32, optimizer, moment_type, stochastic)?;
        if self.dtype == DType::Bf16 {
            self.optimizer_on(MasterForm::LowBits, optimizer, moment_type, stochastic)?;
        }
        Ok(())
    }

    fn optimizer_on(
        &mut self,
        master_form: MasterForm,
        optimizer: Optimizer,
        moment_type: DType,
        stochastic: bool,
    ) -> Outcome {
        let momentum = Recipe { momentum: 0.9, nesterov: 1, ..Recipe::default() };
        let decay = Recipe { weight_decay: [0.0, 0.1], dampening: 0.2, lr_decay: 0.1, ..Recipe::default() };
        let plain = Recipe { bias_correction: 0, ..Recipe::default() };
        let cases = [
            (1, 1, 1, momentum),
            (9001, 1, 7, Recipe { momentum: 0.9, ..decay }),
            (9001, 1, 7, plain),
            (9001, 1, 7, Recipe { t_alpha: 9, t_beta3: 8, ..decay }),
            (300, 0, 7, momentum),
        ];
        for (count, apply, t, recipe) in cases {
            let (grads, master) = (self.random(count), self.random_of(DType::F32, count));
            let [first, mut second, third] = Moment::ALL.map(|_| self.random_of(moment_type, count));
            for square in &mut second {
                *square = square.abs();
            }
            let mut control = Control { apply, applied: t, ..Control::new(8.0) };
            control.numbers[1] = StepNumbers::new(&recipe, 1, t, 1e-2, 0.125, 0.3);
            let grad_type = self.dtype;
            let read = [self.buffer(bytes_of(&control).to_vec()), self.buffer(to_bytes(grad_type, &grads))];
            // Low-order bits may be any 16 bits; they need weights.
            let (master_type, weights) = match master_form {
                MasterForm::F32 => (DType::F32, vec![POISON; count * self.dtype.bytes() as usize]),
                MasterForm::LowBits => {
                    (DType::Bf16, to_bytes(DType::Bf16, &self.random_of(DType::Bf16, count)))
                }
            };
            let written = [
                self.buffer(to_bytes(master_type, &master)),
                self.buffer(to_bytes(moment_type, &first)),
                self.buffer(to_bytes(moment_type, &second)),
                self.buffer(to_bytes(moment_type, &third)),
                self.buffer(weights),
            ];
            // Crosses the element index at which the counter's high word changes.
            let rounding = Rounding { seed: 1 << 40 | 9, flat: 5, first: (1 << 32) - 4000 };
            let kernel = Kernel::Optimize {
                optimizer,
                group: 1,
                control: read[0].0,
                grads: read[1].0,
                grad_type,
                master: written[0].0,
                master_form,
                moments: [1, 2, 3].map(|index: usize| Some(written[index].0)),
                moment_type,
                rounding: stochastic.then_some(rounding),
                weights: Some(written[4].0),
            };
            let shape = format!(
                "{optimizer:?} {count}, {master_form:?}, moments {moment_type}, stochastic {stochastic}, apply {apply}"
            );
            self.compare_with_cpu(&shape, kernel, &read, &written)?;
        }
        Ok(())
    }

    /// Three ranks and 300 flats, more than a block has threads, over several steps.
    pub(crate) fn controls(&mut self) -> Outcome {
        let recipe = Recipe {
            beta2: 0.95,
            weight_decay: [0.1, 0.0],
            max_norm: 0.5,
            momentum: 0.9,
            ..Recipe::default()
        };
        let fixed = Recipe { loss_scale: 64.0, tolerated: 1, bias_correction: 0, ..recipe };
        let moving = Recipe { dynamic: 1, loss_scale: 64.0, scale_window: 2, min_scale: 16.0, ..recipe };
        let consecutive = Recipe { consecutive_hysteresis: 1, hysteresis: 3, nesterov: 1, ..moving };
        let no_hysteresis =
            Recipe { hysteresis: 1, t_alpha: 9, t_beta3: 9, lr_decay: 0.5, dampening: 0.1, ..moving };
        for (name, recipe, steps) in [
            ("fixed", fixed, "..s.l.."),
            ("moving", moving, ".....ff..s...fffffff."),
            ("consecutive", consecutive, "..ff.ffff....lll.fff"),
            ("no hysteresis", no_hysteresis, "...f..ffffff."),
        ] {
            let mut control = Control { applied: 7, ..Control::start(&recipe) };
            for (at, step) in steps.chars().enumerate() {
                let shape = format!("3 ranks, 300 flats, {name}, step {at} {step:?}");
                control = self.control(&shape, recipe, control, step)?;
            }
        }
        Ok(())
    }

    /// `f`: flagged gradients; `s`: a non-finite sum; `l`: a non-finite loss.
    fn control(
        &mut self,
        shape: &str,
        recipe: Recipe,
        control: Control,
        step: char,
    ) -> Result<Control, DeviceError> {
        let (ranks, flats) = (3, 300);
        let layout = ReportLayout { losses: 2, flats, counts: 301 };
        let (loss_means, loss_weights) = ([0.01, 0.02, 0.0, 0.0], [0.01, 0.5, 0.0, 0.0]);
        let mut input = StepInput { loss_means, loss_weights, first_rate: 5, ..StepInput::zeroed() };
        input.rates.iter_mut().enumerate().for_each(|(place, rate)| *rate = 1e-3 / (place + 1) as f64);
        let mut reports = Vec::new();
        for rank in 0..ranks {
            let lost = step == 'l' && rank == 1;
            let loss = if lost { f64::NAN } else { 10.0 + f64::from(rank) };
            reports.extend_from_slice(cast_slice(&[loss, 0.25 * f64::from(rank)]));
            for flat in 0..flats {
                let mut sum = exact_sum(&self.pool, &[0.1 * f64::from(rank + 1), 1e-3 * flat as f64]);
                if step == 's' && rank == 1 && flat >= 270 {
                    sum.add(f64::INFINITY);
                }
                reports.extend_from_slice(bytes_of(&sum));
            }
            for flat in 0..flats {
                let flagged = step == 'f' && (rank == 0 && flat == 290 || rank > 0 && flat == 3 + 256);
                reports.extend_from_slice(&u64::from(flagged).to_ne_bytes());
            }
            let counts: Vec<u32> = (0..302).map(|place| place * 7 + rank as u32).collect();
            reports.extend_from_slice(cast_slice(&counts));
        }
        let read =
            [bytes_of(&recipe).to_vec(), bytes_of(&input).to_vec(), reports].map(|bytes| self.buffer(bytes));
        let before = bytes_of(&control).to_vec();
        let written = [before, vec![POISON; layout.record_bytes()]].map(|bytes| self.buffer(bytes));
        let kernel = Kernel::Control {
            ranks: ranks as usize,
            layout,
            recipe: read[0].0,
            input: read[1].0,
            reports: read[2].0,
            control: written[0].0,
            record: written[1].0,
        };
        let place = written[0].0;
        self.compare_with_cpu(shape, kernel, &read, &written)?;
        let mut after = vec![0; place.bytes as usize];
        self.device.download(Queue::Compute, place, &mut after)?;
        Ok(*bytemuck::from_bytes(&after))
    }
}
