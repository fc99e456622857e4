//! Launches of attention and of the cache of decoding.

use zeroth_kernel::{AttentionContext, DeviceError};

use super::{
    AttentionSaved, BiasGradOut, ContextSlices, WeightDropout, attention, attention_backward,
    attention_backward_scratch, attention_scratch, cached_attention, cached_attention_scratch, store_rows,
};
use crate::launch::{CpuLaunch, cpu_kernel, floats};

cpu_kernel!(
    Attention { dims, context, q, k, v, y, lse },
    |threads| floats(attention_scratch(&dims, threads)),
    |cx| {
        let (context, q, k, v) = (slices(cx, context)?, cx.read::<T>(q)?, cx.read(k)?, cx.read(v)?);
        let (y, lse, scratch) = (cx.write(y)?, cx.write(lse)?, cx.scratch()?);
        attention(cx.pool, &dims, &context, q, k, v, y, lse, scratch);
    }
);

cpu_kernel!(
    AttentionBackward { dims, context, q, k, v, y, lse, dy, dq, dk, dv, dbias },
    |threads| floats(attention_backward_scratch(&dims, threads)),
    |cx| {
        let saved = AttentionSaved {
            q: cx.read::<T>(q)?,
            k: cx.read(k)?,
            v: cx.read(v)?,
            out: cx.read(y)?,
            lse: cx.read(lse)?,
        };
        let (context, dy) = (slices(cx, context)?, cx.read(dy)?);
        let (dq, dk, dv) = (cx.write(dq)?, cx.write(dk)?, cx.write(dv)?);
        let dbias = match dbias {
            Some(dbias) => Some(BiasGradOut { to: cx.write(dbias.to)?, add: dbias.add }),
            None => None,
        };
        attention_backward(cx.pool, &dims, &context, saved, dy, dq, dk, dv, dbias, cx.scratch()?);
    }
);

cpu_kernel!(StoreRows { dims, ranges, x, cache }, |_| 0, |cx| {
    store_rows::<T>(dims, cx.read(ranges)?, cx.read(x)?, cx.write(cache)?);
});

cpu_kernel!(
    CachedAttention { dims, cached, ranges, bias, q, k, v, y },
    |threads| floats(cached_attention_scratch(&dims, threads)),
    |cx| {
        let (ranges, q, kv) = (cx.read(ranges)?, cx.read(q)?, [cx.read(k)?, cx.read(v)?]);
        let bias = bias.map(|bias| cx.read(bias)).transpose()?;
        let (y, scratch) = (cx.write(y)?, cx.scratch()?);
        cached_attention::<T>(cx.pool, &dims, cached, ranges, bias, q, kv, y, scratch);
    }
);

/// # Safety
/// As [`CpuLaunch::read`], for the operands of a context.
#[allow(unsafe_code, reason = "operands become slices after they are checked")]
unsafe fn slices<'a>(
    cx: &CpuLaunch<'a>,
    context: AttentionContext,
) -> Result<ContextSlices<'a>, DeviceError> {
    let AttentionContext { starts, kv_starts, bias, dropout } = context;
    // SAFETY: the caller's promise.
    unsafe {
        let dropout = match dropout {
            Some(dropout) => Some(WeightDropout {
                probability: dropout.probability,
                seed: dropout.seed,
                op: dropout.op,
                keys: cx.read(dropout.keys)?,
            }),
            None => None,
        };
        Ok(ContextSlices {
            starts: cx.starts(starts)?,
            kv_starts: kv_starts.map(|starts| cx.starts(starts)).transpose()?,
            bias: bias.map(|bias| cx.read(bias)).transpose()?,
            dropout,
        })
    }
}
