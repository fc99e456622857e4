//! Distillation.

use zeroth_graph::DistillSpec;
use zeroth_graph::reference::{TeacherRows, distill_loss};
use zeroth_kernel::{DivergenceSpec, Element, HeadLossDims};

use super::{SelfTester, wide};
use crate::{
    DistillDw, TeacherSlices, distill_loss_backward, distill_loss_scratch, top_log_probs,
    top_log_probs_scratch,
};

const ROWS: usize = 40;
/// Tokens of a row that are cached.
const K: usize = 12;

impl<T: Element> SelfTester<'_, T> {
    /// The loss with a teacher of another vocabulary, and with the teacher's most likely tokens.
    pub(super) fn distill_loss(&mut self) {
        let (dims, hidden, vocab) = (HeadLossDims::new(ROWS, 50, 301), 30, 290);
        let labels: Vec<i32> = (0..ROWS as i32).map(|i| if i % 4 == 0 { -100 } else { i * 7 }).collect();
        let (x, w) = (self.random(ROWS * 50), self.random(301 * 50));
        let (teacher_x, teacher_w) = (self.random(ROWS * hidden), self.random(vocab * hidden));
        let (wide_x, wide_w) = (wide(&teacher_x), wide(&teacher_w));
        for (name, beta) in [("forward", 0.0), ("mixed", 0.5), ("reverse", 1.0)] {
            let distillation = DivergenceSpec { beta, temperature: 2.0, squared: true };
            let (mut ids, mut log_probs) = (vec![0; ROWS * K], vec![0.0; ROWS * K]);
            let of_teacher = HeadLossDims::new(ROWS, hidden, vocab);
            let mut scratch = vec![0.0; top_log_probs_scratch(of_teacher, K, self.pool.threads())];
            top_log_probs(
                self.pool,
                of_teacher,
                K,
                2.0,
                &teacher_x,
                &teacher_w,
                &mut ids,
                &mut log_probs,
                &mut scratch,
            );
            let (wide_ids, wide_probs): (Vec<i64>, _) =
                (ids.iter().map(|id| i64::from(*id)).collect(), wide(&log_probs));
            let row_stride = hidden;
            let online = TeacherSlices::Hidden { hidden, vocab, row_stride, x: &teacher_x, w: &teacher_w };
            let cached = TeacherSlices::TopK { k: K, vocab, tail: true, ids: &ids, log_probs: &log_probs };
            let references = [
                TeacherRows::Hidden { x: &wide_x, w: &wide_w },
                TeacherRows::TopK { ids: &wide_ids, log_probs: &wide_probs, vocab, tail: true },
            ];
            for ((teacher, reference), kind) in
                [online, cached].into_iter().zip(references).zip(["online", "cached"])
            {
                let threads = self.pool.threads();
                let mut scratch = vec![0.0; distill_loss_scratch(dims, teacher.dims(), threads, false)];
                let (mut dx, mut dw) = (vec![T::default(); x.len()], vec![0.0f32; w.len()]);
                let (losses, _) = distill_loss_backward(
                    self.pool,
                    dims,
                    distillation,
                    teacher,
                    &x,
                    &w,
                    &labels,
                    [0.0625, 0.125],
                    Some(&mut dx),
                    Some(DistillDw::F32 { dw: &mut dw, add: false }),
                    &mut scratch,
                );
                let spec = DistillSpec { beta: f64::from(beta), temperature: 2.0, squared: true };
                let labels: Vec<i64> = labels.iter().map(|label| i64::from(*label)).collect();
                let (expected, [expected_dx, expected_dw]) =
                    distill_loss(&wide(&x), &wide(&w), &labels, &reference, spec, [0.0625, 0.125]);
                self.compare(
                    &format!("distill_loss {name} {kind}"),
                    &losses.map(|loss| loss as f32),
                    &expected,
                );
                self.compare(&format!("distill_loss dx {name} {kind}"), &dx, &expected_dx);
                self.compare(&format!("distill_loss dw {name} {kind}"), &dw, &expected_dw);
            }
        }
    }
}
