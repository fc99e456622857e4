//! SwiGLU, y = silu(gate) · up, and its gradient, computed in f32 and rounded once. All operands have the same row stride, so
//! that they are treated as flat arrays, row padding included.

#![allow(unsafe_code, reason = "vector kernels run where their instructions were detected")]

#[cfg(target_arch = "x86_64")]
mod avx512_bf16;

#[cfg(target_arch = "x86_64")]
use bytemuck::{cast_slice, cast_slice_mut};

use super::isa::each_isa;
use super::pool::Pool;
use super::work_partition::Chunks;
use super::{check_len, math};
use zeroth_kernel::Element;

/// Elements per task.
const PIECE: usize = 8192;

/// y = silu(gate) · up.
pub fn swiglu<T: Element>(pool: &Pool, gate: &[T], up: &[T], y: &mut [T]) {
    check_len("gate", gate.len(), y.len());
    check_len("up", up.len(), y.len());
    let fused = math::has_fma(pool.isa());
    pool.each(Chunks::new(y, PIECE), |task, y| {
        let range = task * PIECE..task * PIECE + y.len();
        #[cfg(target_arch = "x86_64")]
        if avx512_bf16::fits::<T>(pool.isa()) {
            let [gate, up] = [gate, up].map(|from| cast_slice(&from[range.clone()]));
            // SAFETY: `fits` has found the instructions.
            unsafe { avx512_bf16::forward(gate, up, cast_slice_mut(y)) };
            return;
        }
        forward(pool.isa(), fused, &gate[range.clone()], &up[range], y);
    });
}

/// Writes the gradients of gate and up.
pub fn swiglu_backward<T: Element>(
    pool: &Pool,
    dy: &[T],
    gate: &[T],
    up: &[T],
    dgate: &mut [T],
    dup: &mut [T],
) {
    check_len("gate", gate.len(), dy.len());
    check_len("up", up.len(), dy.len());
    check_len("dgate", dgate.len(), dy.len());
    check_len("dup", dup.len(), dy.len());
    let fused = math::has_fma(pool.isa());
    pool.each((Chunks::new(dgate, PIECE), Chunks::new(dup, PIECE)), |task, (dgate, dup)| {
        let range = task * PIECE..task * PIECE + dgate.len();
        #[cfg(target_arch = "x86_64")]
        if avx512_bf16::fits::<T>(pool.isa()) {
            let [dy, gate, up] = [dy, gate, up].map(|from| cast_slice(&from[range.clone()]));
            // SAFETY: as above.
            unsafe { avx512_bf16::backward(dy, gate, up, cast_slice_mut(dgate), cast_slice_mut(dup)) };
            return;
        }
        backward(pool.isa(), fused, &dy[range.clone()], &gate[range.clone()], &up[range], dgate, dup);
    });
}

each_isa! {
    fn forward<T>(fused: bool, gate: &[T], up: &[T], y: &mut [T]) {
        if fused {
            forward_with::<T, true>(gate, up, y);
        } else {
            forward_with::<T, false>(gate, up, y);
        }
    }
}

#[inline(always)]
fn forward_with<T: Element, const FUSED: bool>(gate: &[T], up: &[T], y: &mut [T]) {
    for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
        let gate = gate.to_f32();
        *y = T::from_f32(gate * math::sigmoid::<FUSED>(gate) * up.to_f32());
    }
}

each_isa! {
    fn backward<T>(fused: bool, dy: &[T], gate: &[T], up: &[T], dgate: &mut [T], dup: &mut [T]) {
        if fused {
            backward_with::<T, true>(dy, gate, up, dgate, dup);
        } else {
            backward_with::<T, false>(dy, gate, up, dgate, dup);
        }
    }
}

#[inline(always)]
fn backward_with<T: Element, const FUSED: bool>(
    dy: &[T],
    gate: &[T],
    up: &[T],
    dgate: &mut [T],
    dup: &mut [T],
) {
    let inputs = dy.iter().zip(gate).zip(up);
    for ((dgate, dup), ((dy, gate), up)) in dgate.iter_mut().zip(dup).zip(inputs) {
        let (dy, gate, up) = (dy.to_f32(), gate.to_f32(), up.to_f32());
        let sigmoid = math::sigmoid::<FUSED>(gate);
        let silu = gate * sigmoid;
        *dgate = T::from_f32(dy * up * (sigmoid + silu * (1.0 - sigmoid)));
        *dup = T::from_f32(dy * silu);
    }
}
