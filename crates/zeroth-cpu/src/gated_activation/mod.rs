//! Gated activations, y = f(gate) · up, and their gradients, computed in f32 and rounded once. All operands have the same row
//! stride, so that they are treated as flat arrays, row padding included.

#![allow(unsafe_code, reason = "vector kernels run where their instructions were detected")]

#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
mod gelu;

#[cfg(target_arch = "x86_64")]
use bytemuck::{cast_slice, cast_slice_mut};

pub(super) use self::gelu::{Gelu, GeluTanh};
use super::isa::each_isa;
use super::launch::cpu_kernel;
use super::pool::Pool;
use super::work_partition::Chunks;
use super::{check_len, math};
use zeroth_base::ActivationFn;
use zeroth_kernel::Element;

/// Elements per task.
const PIECE: usize = 8192;

/// y = f(gate) · up, f the activation.
pub fn gated_activation<T: Element>(
    pool: &Pool,
    activation: ActivationFn,
    gate: &[T],
    up: &[T],
    y: &mut [T],
) {
    check_len("gate", gate.len(), y.len());
    check_len("up", up.len(), y.len());
    let fused = math::has_fma(pool.isa());
    pool.each(Chunks::new(y, PIECE), |task, y| {
        let range = task * PIECE..task * PIECE + y.len();
        #[cfg(target_arch = "x86_64")]
        if avx512_bf16::fits::<T>(pool.isa(), activation) {
            let [gate, up] = [gate, up].map(|from| cast_slice(&from[range.clone()]));
            // SAFETY: `fits` has found the instructions.
            unsafe { avx512_bf16::forward(gate, up, cast_slice_mut(y)) };
            return;
        }
        forward(pool.isa(), activation, fused, &gate[range.clone()], &up[range], y);
    });
}

/// Writes the gradients of gate and up.
pub fn gated_activation_backward<T: Element>(
    pool: &Pool,
    activation: ActivationFn,
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
        if avx512_bf16::fits::<T>(pool.isa(), activation) {
            let [dy, gate, up] = [dy, gate, up].map(|from| cast_slice(&from[range.clone()]));
            // SAFETY: as above.
            unsafe { avx512_bf16::backward(dy, gate, up, cast_slice_mut(dgate), cast_slice_mut(dup)) };
            return;
        }
        backward(
            pool.isa(),
            activation,
            fused,
            &dy[range.clone()],
            &gate[range.clone()],
            &up[range],
            dgate,
            dup,
        );
    });
}

/// An activation f in f32. `FUSED`: multiply-add is one instruction.
pub(super) trait Activation {
    /// f(x).
    fn value<const FUSED: bool>(x: f32) -> f32;

    /// f(x) and f'(x).
    fn value_and_slope<const FUSED: bool>(x: f32) -> (f32, f32);
}

/// x · sigmoid(x).
pub(super) struct Silu;

impl Activation for Silu {
    #[inline(always)]
    fn value<const FUSED: bool>(x: f32) -> f32 {
        x * math::sigmoid::<FUSED>(x)
    }

    #[inline(always)]
    fn value_and_slope<const FUSED: bool>(x: f32) -> (f32, f32) {
        let sigmoid = math::sigmoid::<FUSED>(x);
        let silu = x * sigmoid;
        (silu, sigmoid + silu * (1.0 - sigmoid))
    }
}

/// max(x, 0).
pub(super) struct Relu;

impl Activation for Relu {
    #[inline(always)]
    fn value<const FUSED: bool>(x: f32) -> f32 {
        // f32::max would lose a NaN.
        if x < 0.0 { 0.0 } else { x }
    }

    #[inline(always)]
    fn value_and_slope<const FUSED: bool>(x: f32) -> (f32, f32) {
        (Self::value::<FUSED>(x), if x > 0.0 { 1.0 } else { 0.0 })
    }
}

/// Calls a function that is generic over the activation, the element `T` of its caller, and whether multiply-add is one
/// instruction.
macro_rules! with_activation {
    ($activation:expr, $fused:expr, $function:ident($($argument:expr),*)) => {
        match ($activation, $fused) {
            (ActivationFn::Silu, true) => $function::<Silu, T, true>($($argument),*),
            (ActivationFn::Silu, false) => $function::<Silu, T, false>($($argument),*),
            (ActivationFn::Gelu, true) => $function::<Gelu, T, true>($($argument),*),
            (ActivationFn::Gelu, false) => $function::<Gelu, T, false>($($argument),*),
            (ActivationFn::GeluTanh, true) => $function::<GeluTanh, T, true>($($argument),*),
            (ActivationFn::GeluTanh, false) => $function::<GeluTanh, T, false>($($argument),*),
            (ActivationFn::Relu, true) => $function::<Relu, T, true>($($argument),*),
            (ActivationFn::Relu, false) => $function::<Relu, T, false>($($argument),*),
        }
    };
}

pub(super) use with_activation;

each_isa! {
    fn forward<T>(activation: ActivationFn, fused: bool, gate: &[T], up: &[T], y: &mut [T]) {
        with_activation!(activation, fused, forward_with(gate, up, y));
    }
}

#[inline(always)]
fn forward_with<F: Activation, T: Element, const FUSED: bool>(gate: &[T], up: &[T], y: &mut [T]) {
    for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
        *y = T::from_f32(F::value::<FUSED>(gate.to_f32()) * up.to_f32());
    }
}

each_isa! {
    fn backward<T>(activation: ActivationFn, fused: bool, dy: &[T], gate: &[T], up: &[T], dgate: &mut [T], dup: &mut [T]) {
        with_activation!(activation, fused, backward_with(dy, gate, up, dgate, dup));
    }
}

#[inline(always)]
fn backward_with<F: Activation, T: Element, const FUSED: bool>(
    dy: &[T],
    gate: &[T],
    up: &[T],
    dgate: &mut [T],
    dup: &mut [T],
) {
    let inputs = dy.iter().zip(gate).zip(up);
    for ((dgate, dup), ((dy, gate), up)) in dgate.iter_mut().zip(dup).zip(inputs) {
        let dy = dy.to_f32();
        let (value, slope) = F::value_and_slope::<FUSED>(gate.to_f32());
        *dgate = T::from_f32(dy * up.to_f32() * slope);
        *dup = T::from_f32(dy * value);
    }
}

cpu_kernel!(GatedActivation { activation, gate, up, y }, |_| 0, |cx| {
    gated_activation::<T>(cx.pool, activation, cx.read(gate)?, cx.read(up)?, cx.write(y)?);
});

cpu_kernel!(GatedActivationBackward { activation, dy, gate, up, dgate, dup }, |_| 0, |cx| {
    let (dy, gate, up) = (cx.read(dy)?, cx.read(gate)?, cx.read(up)?);
    let (dgate, dup) = (cx.write(dgate)?, cx.write(dup)?);
    gated_activation_backward::<T>(cx.pool, activation, dy, gate, up, dgate, dup);
});
