//! The launch of the gradients of the head.
#![allow(unsafe_code, reason = "operands become slices after they are checked")]

use bytemuck::Pod;
use zeroth_kernel::{Control, DeviceError, Element, GradStore, HeadLossDw, Kernel, Launch, TiedRowsOut};

use super::CpuDevice;
use crate::head_loss::{TokenRows, head_loss_backward, head_loss_backward_rounded};

impl CpuDevice {
    /// Runs `HeadLossBackward`; nothing where the launch is of another kernel.
    ///
    /// # Safety
    /// The launch has been checked.
    pub(super) unsafe fn run_head_loss_backward<T: Element + Pod>(
        &self,
        launch: &Launch,
    ) -> Result<(), DeviceError> {
        let Kernel::HeadLossBackward { dims, x, w, labels, loss, loss_weight, control, dx, dw } =
            launch.kernel
        else {
            return Ok(());
        };
        let pool = &self.pool;
        // SAFETY: the launch has been checked, and each operand below is taken once, with the access that `Kernel::operands`
        // lists.
        unsafe {
            let scratch = || self.write::<f32>(launch.scratch);
            let weight = self.read_one::<f64>(loss_weight)?;
            let scale = (weight * self.read_one::<Control>(control)?.loss_scale) as f32;
            let (x, w, labels) = (self.read::<T>(x)?, self.read(w)?, self.read(labels)?);
            let (dx, s) = (dx.map(|dx| self.write(dx)).transpose()?, scratch()?);
            let sum = match dw {
                None => head_loss_backward(pool, dims, x, w, labels, scale, dx, None, false, s),
                Some(HeadLossDw { to: dw, store: GradStore::Round { to, found_inf }, tied_rows })
                    if to == T::DTYPE =>
                {
                    let own = match tied_rows {
                        Some(TiedRowsOut { ids, rows }) => {
                            Some(TokenRows { ids: self.read(ids)?, rows: self.write(rows)? })
                        }
                        None => None,
                    };
                    let dw = self.write(dw)?;
                    let (sum, found) =
                        head_loss_backward_rounded(pool, dims, x, w, labels, scale, dx, dw, own, s);
                    if found {
                        *self.write_one::<u64>(found_inf)? = 1;
                    }
                    sum
                }
                Some(HeadLossDw {
                    to: dw,
                    store: store @ (GradStore::Add | GradStore::Write),
                    tied_rows: None,
                }) => {
                    let (dw, add) = (Some(self.write(dw)?), store == GradStore::Add);
                    head_loss_backward(pool, dims, x, w, labels, scale, dx, dw, add, s)
                }
                Some(HeadLossDw { store, tied_rows, .. }) => {
                    let problem = format!("{store:?} of {} with {tied_rows:?}", T::DTYPE);
                    return Err(DeviceError::Operands { what: launch.kernel.name(), problem });
                }
            };
            *self.write_one::<f64>(loss)? += sum;
        }
        Ok(())
    }
}
