//! Launches of routing and of the kernels of experts.
#![allow(unsafe_code, reason = "operands become slices after they are checked")]

use bytemuck::Pod;
use zeroth_base::DType;
use zeroth_kernel::{Balance, Control, DeviceError, Element, GradStore, Kernel, Launch};

use super::CpuDevice;
use crate::balance_loss::{balance_loss, balance_loss_backward};
use crate::expert_rows::{combine_rows, gather_rows};
use crate::gated_rows::{gated_rows, gated_rows_backward};
use crate::grouped::{
    grouped_linear, grouped_linear_add, grouped_linear_dw, grouped_linear_dw_rounded, grouped_linear_dx,
};
use crate::route::{BalanceSums, Routed, route, route_backward};

impl CpuDevice {
    /// Runs a kernel of routing or of experts; others are not its own.
    ///
    /// # Safety
    /// The launch has been checked.
    pub(super) unsafe fn run_experts<T: Element + Pod>(&self, launch: &Launch) -> Result<(), DeviceError> {
        let pool = &self.pool;
        // SAFETY: the launch has been checked, and each operand below is taken once, with the access that `Kernel::operands`
        // lists.
        unsafe {
            let scratch = || self.write::<f32>(launch.scratch);
            match launch.kernel {
                Kernel::Route { dims, starts, logits, experts, weights, order, places, offsets, balance } => {
                    let starts = starts.map(|starts| self.starts(starts)).transpose()?;
                    let routed = Routed {
                        experts: self.write(experts)?,
                        weights: self.write(weights)?,
                        order: self.write(order)?,
                        places: self.write(places)?,
                        offsets: self.write(offsets)?,
                    };
                    let balance = match balance {
                        Some(Balance { before, after }) => Some(BalanceSums {
                            before: before.map(|before| self.read(before)).transpose()?,
                            after: self.write(after)?,
                        }),
                        None => None,
                    };
                    route::<T>(pool, dims, starts, self.read(logits)?, routed, balance, scratch()?);
                }
                Kernel::RouteBackward {
                    dims,
                    starts,
                    logits,
                    experts,
                    weights,
                    dweights,
                    slopes,
                    dlogits,
                } => route_backward::<T>(
                    pool,
                    dims,
                    starts.map(|starts| self.starts(starts)).transpose()?,
                    self.read(logits)?,
                    self.read(experts)?,
                    self.read(weights)?,
                    dweights.map(|dweights| self.read(dweights)).transpose()?,
                    slopes.map(|slopes| self.read(slopes)).transpose()?,
                    self.write(dlogits)?,
                    scratch()?,
                ),
                Kernel::GatherRows { dims, order, offsets, x, y } => {
                    let (order, offsets) = (self.read(order)?, self.read(offsets)?);
                    gather_rows::<T>(pool, dims, order, offsets, self.read(x)?, self.write(y)?);
                }
                Kernel::CombineRows { dims, places, offsets, x, y } => {
                    let (places, offsets) = (self.read(places)?, self.read(offsets)?);
                    combine_rows::<T>(pool, dims, places, offsets, self.read(x)?, self.write(y)?);
                }
                Kernel::GroupedLinear { dims, offsets, x, w, y } => {
                    let (offsets, x, w) = (self.read(offsets)?, self.read::<T>(x)?, self.read(w)?);
                    grouped_linear(pool, dims, offsets, x, w, self.write(y)?, scratch()?);
                }
                Kernel::GroupedLinearAdd { dims, scale, offsets, x, w, y } => {
                    let (offsets, x, w) = (self.read(offsets)?, self.read::<T>(x)?, self.read(w)?);
                    grouped_linear_add(pool, dims, scale, offsets, x, w, self.write(y)?, scratch()?);
                }
                Kernel::GroupedLinearDx { dims, scale, offsets, dy, w, dx, add } => {
                    let (offsets, dy, w) = (self.read(offsets)?, self.read::<T>(dy)?, self.read(w)?);
                    grouped_linear_dx(pool, dims, scale, offsets, dy, w, self.write(dx)?, add, scratch()?);
                }
                Kernel::GroupedLinearDw { dims, scale, offsets, dy, x, dw, store } => {
                    let (at, dy, x) = (self.read(offsets)?, self.read::<T>(dy)?, self.read(x)?);
                    let s = scratch()?;
                    match store {
                        GradStore::Add => grouped_linear_dw(pool, dims, scale, at, dy, x, self.write(dw)?, s),
                        GradStore::Write => {
                            let dw = self.write::<f32>(dw)?;
                            grouped_linear_dw_rounded(pool, dims, scale, at, dy, x, dw, s);
                        }
                        GradStore::Round { to, found_inf } => {
                            let found = if to == DType::F32 {
                                let dw = self.write::<f32>(dw)?;
                                grouped_linear_dw_rounded(pool, dims, scale, at, dy, x, dw, s)
                            } else if to == T::DTYPE {
                                let dw = self.write::<T>(dw)?;
                                grouped_linear_dw_rounded(pool, dims, scale, at, dy, x, dw, s)
                            } else {
                                let problem = format!("matmuls of {} are not rounded to {to}", T::DTYPE);
                                return Err(DeviceError::Operands { what: launch.kernel.name(), problem });
                            };
                            if found {
                                *self.write_one::<u64>(found_inf)? = 1;
                            }
                        }
                    }
                }
                Kernel::GatedRows { activation, dims, order, offsets, weights, gate_up, y } => {
                    let (order, offsets, weights) =
                        (self.read(order)?, self.read(offsets)?, self.read(weights)?);
                    let (gate_up, y) = (self.read::<T>(gate_up)?, self.write(y)?);
                    gated_rows(pool, activation, dims, order, offsets, weights, gate_up, y);
                }
                Kernel::GatedRowsBackward {
                    activation,
                    dims,
                    order,
                    offsets,
                    weights,
                    gate_up,
                    dy,
                    dgate_up,
                    dweights,
                } => gated_rows_backward::<T>(
                    pool,
                    activation,
                    dims,
                    self.read(order)?,
                    self.read(offsets)?,
                    self.read(weights)?,
                    self.read(gate_up)?,
                    self.read(dy)?,
                    self.write(dgate_up)?,
                    dweights.map(|dweights| self.write(dweights)).transpose()?,
                    scratch()?,
                ),
                Kernel::BalanceLoss { dims, starts, balance, labels, loss } => {
                    let (starts, labels) = (self.starts(starts)?, self.read(labels)?);
                    let sum = balance_loss(dims, starts, self.read(balance)?, labels);
                    *self.write_one::<f64>(loss)? += sum;
                }
                Kernel::BalanceLossBackward {
                    dims,
                    starts,
                    balance,
                    labels,
                    loss,
                    loss_weight,
                    control,
                    slopes,
                } => {
                    let weight = self.read_one::<f64>(loss_weight)?;
                    let scale = weight * self.read_one::<Control>(control)?.loss_scale;
                    let (starts, balance, labels) =
                        (self.starts(starts)?, self.read(balance)?, self.read(labels)?);
                    let slopes = self.write(slopes)?;
                    let sum = balance_loss_backward(dims, starts, balance, labels, scale, slopes);
                    *self.write_one::<f64>(loss)? += sum;
                }
                _ => {
                    let problem = "it is no kernel of routing or of experts".to_owned();
                    return Err(DeviceError::Operands { what: launch.kernel.name(), problem });
                }
            }
        }
        Ok(())
    }
}
