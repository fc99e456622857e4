//! Launches of distillation.
#![allow(unsafe_code, reason = "operands become slices after they are checked")]

use bytemuck::Pod;
use zeroth_kernel::{
    Control, DeviceError, Element, GradStore, HeadLossDw, Kernel, Launch, Span, TeacherSpans, TiedRowsOut,
};

use super::CpuDevice;
use crate::head_loss::{DistillDw, TeacherRows, TokenRows, distill_loss_backward, top_log_probs};

impl CpuDevice {
    /// Runs `DistillLossBackward` or `TopLogProbs`; nothing where the launch is of another kernel.
    ///
    /// # Safety
    /// The launch has been checked.
    pub(super) unsafe fn run_distill<T: Element + Pod>(&self, launch: &Launch) -> Result<(), DeviceError> {
        let what = launch.kernel.name();
        // SAFETY: the launch has been checked, and each operand below is taken once, with the access that `Kernel::operands`
        // lists.
        unsafe {
            let scratch = self.write::<f32>(launch.scratch)?;
            match launch.kernel {
                Kernel::TopLogProbs { dims, k, temperature, x, w, ids, log_probs } => {
                    if !(1..=dims.vocab).contains(&k) {
                        let problem = format!("the {k} largest of a vocabulary of {}", dims.vocab);
                        return Err(DeviceError::Operands { what, problem });
                    }
                    let (x, w) = (self.read::<T>(x)?, self.read(w)?);
                    let (ids, log_probs) = (self.write(ids)?, self.write(log_probs)?);
                    top_log_probs(&self.pool, dims, k, temperature, x, w, ids, log_probs, scratch);
                }
                Kernel::DistillLossBackward {
                    dims,
                    distillation,
                    teacher,
                    x,
                    w,
                    labels,
                    losses,
                    loss_weights: [ce_weight, kd_weight],
                    control,
                    dx,
                    dw,
                } => {
                    let loss_scale = self.read_one::<Control>(control)?.loss_scale;
                    let scale = |weight: Span| -> Result<f32, DeviceError> {
                        Ok((self.read_one::<f64>(weight)? * loss_scale) as f32)
                    };
                    let scales = [scale(ce_weight)?, scale(kd_weight)?];
                    let teacher = match teacher {
                        TeacherSpans::Hidden { hidden, vocab, row_stride, x, w } => {
                            let (x, w) = (self.read::<T>(x)?, self.read(w)?);
                            TeacherRows::Hidden { hidden, vocab, row_stride, x, w }
                        }
                        TeacherSpans::TopK { k, vocab, tail, ids, log_probs } => {
                            let (ids, log_probs) = (self.read(ids)?, self.read(log_probs)?);
                            TeacherRows::TopK { k, vocab, tail, ids, log_probs }
                        }
                    };
                    let (x, w, labels) = (self.read::<T>(x)?, self.read(w)?, self.read(labels)?);
                    let dx = dx.map(|dx| self.write(dx)).transpose()?;
                    let mut flag = None;
                    let dw = match dw {
                        None => None,
                        Some(HeadLossDw {
                            to,
                            store: GradStore::Round { to: dtype, found_inf },
                            tied_rows,
                        }) if dtype == T::DTYPE => {
                            flag = Some(found_inf);
                            let token_rows = match tied_rows {
                                Some(TiedRowsOut { ids, rows }) => {
                                    Some(TokenRows { ids: self.read(ids)?, rows: self.write(rows)? })
                                }
                                None => None,
                            };
                            Some(DistillDw::Rounded { dw: self.write(to)?, token_rows })
                        }
                        Some(HeadLossDw {
                            to,
                            store: store @ (GradStore::Add | GradStore::Write),
                            tied_rows: None,
                        }) => Some(DistillDw::F32 { dw: self.write(to)?, add: store == GradStore::Add }),
                        Some(HeadLossDw { store, tied_rows, .. }) => {
                            let problem = format!("{store:?} of {} with {tied_rows:?}", T::DTYPE);
                            return Err(DeviceError::Operands { what, problem });
                        }
                    };
                    let (sums, found) = distill_loss_backward(
                        &self.pool,
                        dims,
                        distillation,
                        teacher,
                        x,
                        w,
                        labels,
                        scales,
                        dx,
                        dw,
                        scratch,
                    );
                    if let (Some(flag), true) = (flag, found) {
                        *self.write_one::<u64>(flag)? = 1;
                    }
                    for (loss, sum) in losses.into_iter().zip(sums) {
                        *self.write_one::<f64>(loss)? += sum;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }
}
