//! Launches of distillation.

use zeroth_kernel::{Control, DeviceError, GradStore, HeadLossDw, Span, TeacherSpans, TiedRowsOut};

use super::{DistillDw, TeacherSlices, distill_loss_backward, distill_loss_scratch};
use crate::head_loss::{TokenRows, top_log_probs, top_log_probs_scratch};
use crate::launch::{cpu_kernel, floats};

cpu_kernel!(
    TopLogProbs { dims, k, temperature, x, w, ids, log_probs },
    |threads| floats(top_log_probs_scratch(dims, k, threads)),
    |cx| {
        if !(1..=dims.vocab).contains(&k) {
            let problem = format!("the {k} largest of a vocabulary of {}", dims.vocab);
            return Err(DeviceError::Operands { what: cx.what, problem });
        }
        let (x, w) = (cx.read::<T>(x)?, cx.read(w)?);
        let (ids, log_probs) = (cx.write(ids)?, cx.write(log_probs)?);
        top_log_probs(cx.pool, dims, k, temperature, x, w, ids, log_probs, cx.scratch()?);
    }
);

cpu_kernel!(
    DistillLossBackward { dims, distillation, teacher, x, w, labels, losses, loss_weights, control, dx, dw },
    |threads| {
        let rounds = matches!(dw, Some(HeadLossDw { store: GradStore::Round { .. }, .. }));
        floats(distill_loss_scratch(dims, (&teacher).into(), threads, rounds))
    },
    |cx| {
        let [ce_weight, kd_weight] = loss_weights;
        let loss_scale = cx.read_one::<Control>(control)?.loss_scale;
        let scale = |weight: Span| -> Result<f32, DeviceError> {
            Ok((cx.read_one::<f64>(weight)? * loss_scale) as f32)
        };
        let scales = [scale(ce_weight)?, scale(kd_weight)?];
        let teacher = match teacher {
            TeacherSpans::Hidden { hidden, vocab, row_stride, x, w } => {
                let (x, w) = (cx.read::<T>(x)?, cx.read(w)?);
                TeacherSlices::Hidden { hidden, vocab, row_stride, x, w }
            }
            TeacherSpans::TopK { k, vocab, tail, ids, log_probs } => {
                let (ids, log_probs) = (cx.read(ids)?, cx.read(log_probs)?);
                TeacherSlices::TopK { k, vocab, tail, ids, log_probs }
            }
        };
        let (x, w, labels) = (cx.read::<T>(x)?, cx.read(w)?, cx.read(labels)?);
        let dx = dx.map(|dx| cx.write(dx)).transpose()?;
        let mut flag = None;
        let dw = match dw {
            None => None,
            Some(HeadLossDw { to, store: GradStore::Round { to: dtype, found_inf }, tied_rows })
                if dtype == T::DTYPE =>
            {
                flag = Some(found_inf);
                let token_rows = match tied_rows {
                    Some(TiedRowsOut { ids, rows }) => {
                        Some(TokenRows { ids: cx.read(ids)?, rows: cx.write(rows)? })
                    }
                    None => None,
                };
                Some(DistillDw::Rounded { dw: cx.write(to)?, token_rows })
            }
            Some(HeadLossDw { to, store: store @ (GradStore::Add | GradStore::Write), tied_rows: None }) => {
                Some(DistillDw::F32 { dw: cx.write(to)?, add: store == GradStore::Add })
            }
            Some(HeadLossDw { store, tied_rows, .. }) => {
                let problem = format!("{store:?} of {} with {tied_rows:?}", T::DTYPE);
                return Err(DeviceError::Operands { what: cx.what, problem });
            }
        };
        let (sums, found) = distill_loss_backward(
            cx.pool,
            dims,
            distillation,
            teacher,
            x,
            w,
            labels,
            scales,
            dx,
            dw,
            cx.scratch()?,
        );
        if let (Some(flag), true) = (flag, found) {
            *cx.write_one::<u64>(flag)? = 1;
        }
        for (loss, sum) in losses.into_iter().zip(sums) {
            *cx.write_one::<f64>(loss)? += sum;
        }
    }
);
