//! GELU in f32, exact and by its tanh approximation.

use std::f32::consts::FRAC_2_SQRT_PI;

use super::Activation;
use crate::math;

/// x · Φ(x), Φ the normal distribution function.
pub(crate) struct Gelu;

impl Activation for Gelu {
    #[inline(always)]
    fn value<const FUSED: bool>(x: f32) -> f32 {
        x * math::normal_cdf::<FUSED>(x).0
    }

    #[inline(always)]
    fn value_and_slope<const FUSED: bool>(x: f32) -> (f32, f32) {
        /// 1 / √(2π).
        const PEAK: f32 = 0.398_942_3;
        let (cdf, bell) = math::normal_cdf::<FUSED>(x);
        // x · e^(-x²/2) is 0 long before 20; x itself may be infinite.
        (x * cdf, cdf + x.clamp(-20.0, 20.0) * (bell * PEAK))
    }
}

/// x · (1 + tanh(√(2/π) · (x + 0.044715 x³))) / 2. (1 + tanh(u)) / 2 is sigmoid(2u).
pub(crate) struct GeluTanh;

/// √(8/π) and its product with 0.044715: 2u is `LINEAR` · x + `CUBIC` · x³.
const LINEAR: f32 = FRAC_2_SQRT_PI * std::f32::consts::SQRT_2;
const CUBIC: f32 = 0.044_715 * LINEAR;

/// The sigmoid is 0 or 1 beyond ±`FAR`; x³ could overflow.
const FAR: f32 = 20.0;

/// sigmoid(2u), and sigmoid(-|2u|), from which the slope is computed without cancellation.
#[inline(always)]
fn sigmoid_and_tail<const FUSED: bool>(near: f32) -> (f32, f32) {
    let tail = math::sigmoid::<FUSED>(-near.abs() * (LINEAR + CUBIC * (near * near)));
    (if near < 0.0 { tail } else { 1.0 - tail }, tail)
}

impl Activation for GeluTanh {
    #[inline(always)]
    fn value<const FUSED: bool>(x: f32) -> f32 {
        x * sigmoid_and_tail::<FUSED>(x.clamp(-FAR, FAR)).0
    }

    #[inline(always)]
    fn value_and_slope<const FUSED: bool>(x: f32) -> (f32, f32) {
        let near = x.clamp(-FAR, FAR);
        let (sigmoid, tail) = sigmoid_and_tail::<FUSED>(near);
        let steepness = near * (LINEAR + 3.0 * CUBIC * (near * near));
        (x * sigmoid, sigmoid + tail * (1.0 - tail) * steepness)
    }
}

#[cfg(test)]
mod tests {
    use zeroth_base::ActivationFn;

    use super::*;

    fn check<F: Activation, const FUSED: bool>(exact: ActivationFn, ulps: f64) {
        for step in -120_000..=120_000 {
            let x = step as f32 * 1e-4;
            let (value, slope) = F::value_and_slope::<FUSED>(x);
            assert_eq!(F::value::<FUSED>(x).to_bits(), value.to_bits(), "{x}");
            let (expected, x) = (exact.value(f64::from(x)), f64::from(x));
            let error = (f64::from(value) - expected).abs();
            // 1e-36: the sigmoid is 0 below e^-87.
            assert!(
                error <= ulps * f64::from(f32::EPSILON) * expected.abs() + 1e-36,
                "{x}: {value} {expected}"
            );
            let expected = exact.slope(x);
            let error = (f64::from(slope) - expected).abs() / f64::from(f32::EPSILON);
            assert!(error <= 4.0, "{x}: slope {slope} {expected}");
        }
        for (x, expected) in
            [(0.0, (0.0, 0.5)), (50.0, (50.0, 1.0)), (-50.0, (0.0, 0.0)), (3e38, (3e38, 1.0))]
        {
            assert_eq!(F::value_and_slope::<FUSED>(x), expected, "{x}");
        }
        assert_eq!(F::value_and_slope::<FUSED>(f32::INFINITY), (f32::INFINITY, 1.0));
        let (value, slope) = F::value_and_slope::<FUSED>(f32::NAN);
        assert!(value.is_nan() && slope.is_nan());
    }

    #[test]
    fn gelu_is_within_4_ulp_and_saturates() {
        check::<Gelu, true>(ActivationFn::Gelu, 4.0);
        check::<Gelu, false>(ActivationFn::Gelu, 4.0);
    }

    /// The absolute error of 2u, which reaches 87, is the relative error of the result.
    #[test]
    fn gelu_tanh_is_near_and_saturates() {
        check::<GeluTanh, true>(ActivationFn::GeluTanh, 100.0);
        check::<GeluTanh, false>(ActivationFn::GeluTanh, 100.0);
    }
}
