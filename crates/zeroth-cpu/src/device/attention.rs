//! Launches of attention and of what belongs to it: biases of positions and the cache of decoding.
#![allow(unsafe_code, reason = "operands become slices after they are checked")]

use bytemuck::Pod;
use zeroth_kernel::{AttentionContext, DeviceError, Element, Kernel, Launch};

use super::CpuDevice;
use crate::attention::{
    AttentionSaved, BiasGradOut, ContextSlices, WeightDropout, attention, attention_backward,
    cached_attention, store_rows,
};
use crate::position_bias::{position_bias, position_bias_backward};

impl CpuDevice {
    /// Runs a kernel of attention; others are not its own.
    ///
    /// # Safety
    /// The launch has been checked.
    pub(super) unsafe fn run_attention<T: Element + Pod>(&self, launch: &Launch) -> Result<(), DeviceError> {
        let pool = &self.pool;
        // SAFETY: the launch has been checked, and each operand below is taken once, with the access that `Kernel::operands`
        // lists.
        unsafe {
            let scratch = || self.write::<f32>(launch.scratch);
            match launch.kernel {
                Kernel::Attention { ref dims, ref context, q, k, v, y, lse } => attention::<T>(
                    pool,
                    dims,
                    &self.context(context)?,
                    self.read(q)?,
                    self.read(k)?,
                    self.read(v)?,
                    self.write(y)?,
                    self.write(lse)?,
                    scratch()?,
                ),
                Kernel::AttentionBackward {
                    ref dims,
                    ref context,
                    q,
                    k,
                    v,
                    y,
                    lse,
                    dy,
                    dq,
                    dk,
                    dv,
                    dbias,
                } => {
                    let saved = AttentionSaved {
                        q: self.read::<T>(q)?,
                        k: self.read(k)?,
                        v: self.read(v)?,
                        out: self.read(y)?,
                        lse: self.read(lse)?,
                    };
                    let (context, dy) = (self.context(context)?, self.read(dy)?);
                    let (dq, dk, dv) = (self.write(dq)?, self.write(dk)?, self.write(dv)?);
                    let dbias = match dbias {
                        Some(dbias) => Some(BiasGradOut { to: self.write(dbias.to)?, add: dbias.add }),
                        None => None,
                    };
                    attention_backward(pool, dims, &context, saved, dy, dq, dk, dv, dbias, scratch()?);
                }
                Kernel::PositionBias { dims, w, table } => {
                    position_bias::<T>(dims, self.read(w)?, self.write(table)?);
                }
                Kernel::PositionBiasBackward { dims, dtable, dw } => {
                    position_bias_backward(dims, self.read(dtable)?, self.write(dw)?);
                }
                Kernel::StoreRows { dims, ranges, x, cache } => {
                    store_rows::<T>(dims, self.read(ranges)?, self.read(x)?, self.write(cache)?);
                }
                Kernel::CachedAttention { ref dims, cached, ranges, bias, q, k, v, y } => {
                    let (ranges, q, kv) = (self.read(ranges)?, self.read(q)?, [self.read(k)?, self.read(v)?]);
                    let bias = bias.map(|bias| self.read(bias)).transpose()?;
                    let (y, scratch) = (self.write(y)?, scratch()?);
                    cached_attention::<T>(pool, dims, cached, ranges, bias, q, kv, y, scratch);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// # Safety
    /// As [`Self::read`], for the operands of a context.
    unsafe fn context<'a>(&self, context: &AttentionContext) -> Result<ContextSlices<'a>, DeviceError> {
        let AttentionContext { starts, kv_starts, bias, dropout } = *context;
        // SAFETY: the caller's promise.
        unsafe {
            let dropout = match dropout {
                Some(dropout) => Some(WeightDropout {
                    probability: dropout.probability,
                    seed: dropout.seed,
                    op: dropout.op,
                    keys: self.read(dropout.keys)?,
                }),
                None => None,
            };
            Ok(ContextSlices {
                starts: self.starts(starts)?,
                kv_starts: kv_starts.map(|starts| self.starts(starts)).transpose()?,
                bias: bias.map(|bias| self.read(bias)).transpose()?,
                dropout,
            })
        }
    }
}
