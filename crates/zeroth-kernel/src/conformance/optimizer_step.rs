//! The cases of control and the optimizers.

use bytemuck::{Zeroable, bytes_of, cast_slice};
use zeroth_base::DType;

use super::{Output, Pair};
use crate::{
    Control, DeviceError, ExactSum, GROUPS, Kernel, MasterForm, Moment, Optimizer, RATES, Recipe,
    ReportLayout, StepInput, StepNumbers,
};

impl Pair<'_> {
    pub(super) fn optimizer_step(&mut self) -> Result<(), DeviceError> {
        let (count, dtype) = (9_001, self.dtype);
        let (values, sum) = (self.random(count), self.empty(size_of::<ExactSum>()));
        self.compare(Kernel::Squares { values, value_type: dtype, sum }, &[Output::Exact])?;
        let offsets = self.given(cast_slice(&[0i32, 3, 3, 800]));
        let mut weights = [0.5f32; 800];
        (weights[0], weights[257], weights[799]) = (f32::NAN, f32::NEG_INFINITY, f32::INFINITY);
        let (weights, counts) = (self.given(cast_slice(&weights)), self.given(cast_slice(&[5u32, 6, 7, 8])));
        let kernel = Kernel::CountTokens { experts: 3, slots: 800, offsets, weights, counts };
        self.compare(kernel, &[Output::Exact])?;
        let recipe = Recipe { max_norm: 1.0, t_alpha: 50, t_beta3: 50, ..Recipe::default() };
        let input = StepInput {
            loss_means: [0.1, 0.2, 0.0, 0.0],
            loss_weights: [0.1, 0.3, 0.0, 0.0],
            rates: [1e-3; RATES],
            ..StepInput::zeroed()
        };
        let start = Control::start(&recipe);
        for losses in [&[12.5][..], &[12.5, 0.75]] {
            // Three counts, and the padding after them.
            let layout = ReportLayout { losses: losses.len(), flats: 1, counts: 3 };
            let mut report = cast_slice(losses).to_vec();
            let mut squares = ExactSum::default();
            squares.add(30.25);
            report.extend([bytes_of(&squares), bytes_of(&0u64), bytes_of(&[7u32, 0, 9, 5])].concat());
            let (recipe, input) = (self.given(bytes_of(&recipe)), self.given(bytes_of(&input)));
            let (reports, record) = (self.given(&report), self.empty(layout.record_bytes()));
            let control = self.given(bytes_of(&start));
            let kernel = Kernel::Control { ranks: 1, layout, recipe, input, reports, control, record };
            self.compare(kernel, &[Output::Exact; 2])?;
        }
        for &optimizer in Optimizer::ALL {
            let numbers = StepNumbers::new(&Recipe { momentum: 0.9, ..recipe }, 0, 3, 1e-3, 1.0, 0.5);
            let decided =
                Control { apply: 1, applied: 2, numbers: [numbers; GROUPS], ..Control::start(&recipe) };
            let control = self.given(bytes_of(&decided));
            let (grads, master) = (self.random(count), self.words(count));
            let squares: Vec<f32> = (0..count).map(|at| at as f32 / 5_000.0).collect();
            let moments = optimizer.each_moment(|moment| match moment {
                Moment::Second => self.given(cast_slice(&squares)),
                Moment::First | Moment::Third => self.words(count),
            });
            let weights = Some(self.empty(count * dtype.bytes() as usize));
            let kernel = Kernel::Optimize {
                optimizer,
                group: 0,
                control,
                grads,
                grad_type: dtype,
                master,
                master_form: MasterForm::F32,
                moments,
                moment_type: DType::F32,
                rounding: None,
                weights,
            };
            let outputs = vec![Output::Exact; 2 + optimizer.moments().len()];
            self.compare(kernel, &outputs)?;
        }
        Ok(())
    }
}
