//! Activations without a gate, y = f(x), their gradients, and multiplication by a factor, computed in f32 and rounded once. All
//! operands have the same row stride, so that they are treated as flat arrays, row padding included.

use super::gated_activation::{Activation, Gelu, GeluTanh, Relu, Silu, with_activation};
use super::isa::each_isa;
use super::launch::cpu_kernel;
use super::pool::Pool;
use super::work_partition::Chunks;
use super::{check_len, math};
use zeroth_base::ActivationFn;
use zeroth_kernel::Element;

/// Elements per task.
const PIECE: usize = 8192;

/// y = f(x).
pub fn activation<T: Element>(pool: &Pool, activation: ActivationFn, x: &[T], y: &mut [T]) {
    check_len("x", x.len(), y.len());
    let fused = math::has_fma(pool.isa());
    pool.each(Chunks::new(y, PIECE), |task, y| {
        forward(pool.isa(), activation, fused, &x[task * PIECE..][..y.len()], y);
    });
}

/// dx = dy · f'(x).
pub fn activation_backward<T: Element>(
    pool: &Pool,
    activation: ActivationFn,
    dy: &[T],
    x: &[T],
    dx: &mut [T],
) {
    check_len("dy", dy.len(), dx.len());
    check_len("x", x.len(), dx.len());
    let fused = math::has_fma(pool.isa());
    pool.each(Chunks::new(dx, PIECE), |task, dx| {
        let [dy, x] = [dy, x].map(|from| &from[task * PIECE..][..dx.len()]);
        backward(pool.isa(), activation, fused, dy, x, dx);
    });
}

/// y = factor · x.
pub fn scale<T: Element>(pool: &Pool, factor: f32, x: &[T], y: &mut [T]) {
    check_len("x", x.len(), y.len());
    pool.each(Chunks::new(y, PIECE), |task, y| {
        scale_piece(pool.isa(), factor, &x[task * PIECE..][..y.len()], y);
    });
}

each_isa! {
    fn forward<T>(activation: ActivationFn, fused: bool, x: &[T], y: &mut [T]) {
        with_activation!(activation, fused, forward_with(x, y));
    }
}

#[inline(always)]
fn forward_with<F: Activation, T: Element, const FUSED: bool>(x: &[T], y: &mut [T]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = T::from_f32(F::value::<FUSED>(x.to_f32()));
    }
}

each_isa! {
    fn backward<T>(activation: ActivationFn, fused: bool, dy: &[T], x: &[T], dx: &mut [T]) {
        with_activation!(activation, fused, backward_with(dy, x, dx));
    }
}

#[inline(always)]
fn backward_with<F: Activation, T: Element, const FUSED: bool>(dy: &[T], x: &[T], dx: &mut [T]) {
    for ((dx, dy), x) in dx.iter_mut().zip(dy).zip(x) {
        *dx = T::from_f32(dy.to_f32() * F::value_and_slope::<FUSED>(x.to_f32()).1);
    }
}

each_isa! {
    fn scale_piece<T>(factor: f32, x: &[T], y: &mut [T]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = T::from_f32(factor * x.to_f32());
        }
    }
}

cpu_kernel!(Activation { activation, x, y }, |_| 0, |cx| {
    self::activation::<T>(cx.pool, activation, cx.read(x)?, cx.write(y)?);
});

cpu_kernel!(ActivationBackward { activation, dy, x, dx }, |_| 0, |cx| {
    activation_backward::<T>(cx.pool, activation, cx.read(dy)?, cx.read(x)?, cx.write(dx)?);
});

cpu_kernel!(Scale { factor, x, y }, |_| 0, |cx| {
    scale::<T>(cx.pool, factor, cx.read(x)?, cx.write(y)?);
});
