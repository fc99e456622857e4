//! The distillation loss with a teacher and with cached log-probabilities, and the k largest log-probabilities.

use bytemuck::{bytes_of, cast_slice};
use zeroth_base::DType;

use super::{Output, Pair, ROWS, WANTED, Wanted};
use crate::{
    Control, DeviceError, DivergenceSpec, GradStore, HeadLossDims, HeadLossDw, Kernel, Span, TeacherSpans,
};

const HIDDEN: usize = 48;
const VOCAB: usize = 203;

impl Pair<'_> {
    pub(super) fn distill(&mut self) -> Result<(), DeviceError> {
        let mut wanted = WANTED.into_iter().chain([Wanted { input: false, weight: false }]).cycle();
        for (beta, temperature, squared) in
            [(0.0, 1.0, false), (0.0, 2.0, true), (0.3, 1.5, true), (1.0, 2.0, false)]
        {
            let distillation = DivergenceSpec { beta, temperature, squared };
            for vocab in [VOCAB, VOCAB + 14, VOCAB - 14] {
                let teacher = |pair: &mut Self| {
                    let hidden = 40;
                    let (x, w) = (pair.random(ROWS * hidden), pair.random(vocab * hidden));
                    TeacherSpans::Hidden { hidden, vocab, row_stride: hidden, x, w }
                };
                self.distill_loss(distillation, teacher, wanted.next().unwrap_or(WANTED[0]))?;
            }
            for (k, vocab, tail) in [(12, VOCAB, true), (12, VOCAB + 14, false), (VOCAB, VOCAB, true)] {
                let teacher = |pair: &mut Self| pair.cached_teacher(k, vocab, tail);
                self.distill_loss(distillation, teacher, wanted.next().unwrap_or(WANTED[0]))?;
            }
        }
        for k in [1, 20, VOCAB] {
            self.top_log_probs(k)?;
        }
        Ok(())
    }

    fn distill_loss(
        &mut self,
        distillation: DivergenceSpec,
        teacher: impl Fn(&mut Self) -> TeacherSpans,
        wanted: Wanted,
    ) -> Result<(), DeviceError> {
        let dims = HeadLossDims::new(ROWS, HIDDEN, VOCAB);
        let label = |row: usize| if row % 5 == 2 { -100 } else { (row * 31 % VOCAB) as i32 };
        let labels: Vec<i32> = (0..ROWS).map(label).collect();
        let labels = self.given(cast_slice(&labels));
        let (x, w) = (self.random(ROWS * HIDDEN), self.random(VOCAB * HIDDEN));
        let teacher = teacher(self);
        let losses = [1.5f64, 2.5].map(|loss| self.given(bytes_of(&loss)));
        let loss_weights = [0.004f64, 0.006].map(|weight| self.given(bytes_of(&weight)));
        let control = self.given(bytes_of(&Control::new(64.0)));
        let dx = wanted.input.then(|| self.like(x));
        let (store, tied_rows) = (GradStore::Add, None);
        let dw = wanted.weight.then(|| HeadLossDw { to: self.words(VOCAB * HIDDEN), store, tied_rows });
        let kernel = Kernel::DistillLossBackward {
            dims,
            distillation,
            teacher,
            x,
            w,
            labels,
            losses,
            loss_weights,
            control,
            dx,
            dw,
        };
        // The gradients of logits are rounded before they are multiplied.
        let gradients = wanted.outputs(Output::RoundedTerms(self.dtype), Output::RoundedTerms(DType::F32));
        self.compare(kernel, &[&[Output::F64; 2], &gradients[..]].concat())
    }

    /// Log-probabilities that sum to less than 1, of distinct tokens, the first of some rows in no vocabulary.
    fn cached_teacher(&mut self, k: usize, vocab: usize, tail: bool) -> TeacherSpans {
        let slots = || (0..ROWS).flat_map(|row| (0..k).map(move |place| (row, place)));
        let id = |(row, place): (usize, usize)| match (row % 7, place) {
            (3, 0) => -1,
            _ => ((row * 11 + place * 5) % vocab) as i32,
        };
        let log_prob =
            |(row, place): (usize, usize)| -(k as f32).ln() - 0.1 - ((row + place * 3) % 7) as f32 * 0.3;
        let ids: Vec<i32> = slots().map(id).collect();
        let log_probs: Vec<f32> = slots().map(log_prob).collect();
        let [ids, log_probs]: [Span; 2] = [self.given(cast_slice(&ids)), self.given(cast_slice(&log_probs))];
        TeacherSpans::TopK { k, vocab, tail, ids, log_probs }
    }

    /// With a hidden size of 1, logits are products: no device rounds their sum in another order, and ids are exact.
    fn top_log_probs(&mut self, k: usize) -> Result<(), DeviceError> {
        let (hidden, dtype) = (1, self.dtype);
        let dims = HeadLossDims::new(ROWS, hidden, VOCAB);
        // Small integers over 8, so that their products are numbers of every dtype, and many are equal.
        let integers = |count: usize, factor: usize| -> Vec<f32> {
            (0..count).map(|at| ((at * factor) % 15) as f32 / 8.0 - 0.875).collect()
        };
        let (x, w) = (super::encode(dtype, &integers(ROWS, 7)), super::encode(dtype, &integers(VOCAB, 11)));
        let (x, w) = (self.given(&x), self.given(&w));
        let (ids, log_probs) = (self.empty(4 * ROWS * k), self.empty(4 * ROWS * k));
        let kernel = Kernel::TopLogProbs { dims, k, temperature: 1.5, x, w, ids, log_probs };
        self.compare(kernel, &[Output::Exact, Output::Rounded(DType::F32)])
    }
}
