//! Launches of the head and its gradients.

use zeroth_kernel::{Control, DeviceError, GradStore, HeadLossDw, TiedRowsOut};

use super::{
    TokenRows, head_loss, head_loss_backward, head_loss_backward_rounded, head_loss_rounded_scratch,
    head_loss_scratch,
};
use crate::launch::{cpu_kernel, floats};

cpu_kernel!(
    HeadLoss { dims, x, w, labels, loss },
    |threads| floats(head_loss_scratch(dims, threads)),
    |cx| {
        let (x, w, labels) = (cx.read::<T>(x)?, cx.read(w)?, cx.read(labels)?);
        *cx.write_one::<f64>(loss)? += head_loss(cx.pool, dims, x, w, labels, cx.scratch()?);
    }
);

cpu_kernel!(
    HeadLossBackward { dims, x, w, labels, loss, loss_weight, control, dx, dw },
    |threads| match dw {
        Some(HeadLossDw { store: GradStore::Round { .. }, .. }) => {
            floats(head_loss_rounded_scratch(dims, threads))
        }
        Some(HeadLossDw { store: GradStore::Add | GradStore::Write, .. }) | None => {
            floats(head_loss_scratch(dims, threads))
        }
    },
    |cx| {
        let weight = cx.read_one::<f64>(loss_weight)?;
        let scale = (weight * cx.read_one::<Control>(control)?.loss_scale) as f32;
        let (x, w, labels) = (cx.read::<T>(x)?, cx.read(w)?, cx.read(labels)?);
        let (dx, s) = (dx.map(|dx| cx.write(dx)).transpose()?, cx.scratch()?);
        let sum = match dw {
            None => head_loss_backward(cx.pool, dims, x, w, labels, scale, dx, None, false, s),
            Some(HeadLossDw { to: dw, store: GradStore::Round { to, found_inf }, tied_rows })
                if to == T::DTYPE =>
            {
                let own = match tied_rows {
                    Some(TiedRowsOut { ids, rows }) => {
                        Some(TokenRows { ids: cx.read(ids)?, rows: cx.write(rows)? })
                    }
                    None => None,
                };
                let dw = cx.write(dw)?;
                let (sum, found) =
                    head_loss_backward_rounded(cx.pool, dims, x, w, labels, scale, dx, dw, own, s);
                if found {
                    *cx.write_one::<u64>(found_inf)? = 1;
                }
                sum
            }
            Some(HeadLossDw {
                to: dw,
                store: store @ (GradStore::Add | GradStore::Write),
                tied_rows: None,
            }) => {
                let (dw, add) = (Some(cx.write(dw)?), store == GradStore::Add);
                head_loss_backward(cx.pool, dims, x, w, labels, scale, dx, dw, add, s)
            }
            Some(HeadLossDw { store, tied_rows, .. }) => {
                let problem = format!("{store:?} of {} with {tied_rows:?}", T::DTYPE);
                return Err(DeviceError::Operands { what: cx.what, problem });
            }
        };
        *cx.write_one::<f64>(loss)? += sum;
    }
);
