//! Activation functions of feed-forward layers, defined in f64.

use std::f64::consts::{FRAC_1_SQRT_2, PI, TAU};

/// The function f of an activation, y = f(x), and of a gated one, y = f(gate) · up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ActivationFn {
    /// x · sigmoid(x): SwiGLU.
    Silu,
    /// x · Φ(x), Φ the normal distribution function (`gelu` in transformers): GeGLU.
    Gelu,
    /// GELU by its tanh approximation (`gelu_new`, `gelu_pytorch_tanh`).
    GeluTanh,
    /// max(x, 0).
    Relu,
}

impl ActivationFn {
    /// Every activation.
    pub const ALL: [Self; 4] = [Self::Silu, Self::Gelu, Self::GeluTanh, Self::Relu];

    /// The name of the op without a gate in messages, traces and plans.
    pub const fn plain_name(self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::Gelu => "gelu",
            Self::GeluTanh => "gelu_tanh",
            Self::Relu => "relu",
        }
    }

    /// The name of its gradient.
    pub const fn plain_backward_name(self) -> &'static str {
        match self {
            Self::Silu => "silu_backward",
            Self::Gelu => "gelu_backward",
            Self::GeluTanh => "gelu_tanh_backward",
            Self::Relu => "relu_backward",
        }
    }

    /// The gated op's name in messages, traces and plans.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Silu => "swiglu",
            Self::Gelu => "geglu",
            Self::GeluTanh => "geglu_tanh",
            Self::Relu => "reglu",
        }
    }

    /// The name of its gradient.
    pub const fn backward_name(self) -> &'static str {
        match self {
            Self::Silu => "swiglu_backward",
            Self::Gelu => "geglu_backward",
            Self::GeluTanh => "geglu_tanh_backward",
            Self::Relu => "reglu_backward",
        }
    }

    /// f(x). Kernels are compared with it.
    pub fn value(self, x: f64) -> f64 {
        match self {
            Self::Silu => x * sigmoid(x),
            Self::Gelu => x * normal_cdf(x),
            Self::GeluTanh => x * sigmoid(2.0 * tanh_argument(x)),
            // A NaN stays one.
            Self::Relu => {
                if x < 0.0 {
                    0.0
                } else {
                    x
                }
            }
        }
    }

    /// f'(x); that of `Relu` at 0 is 0, as PyTorch has it.
    pub fn slope(self, x: f64) -> f64 {
        match self {
            Self::Silu => sigmoid(x) * (1.0 + x * sigmoid(-x)),
            Self::Gelu => normal_cdf(x) + x * (-x * x / 2.0).exp() / TAU.sqrt(),
            Self::GeluTanh => {
                let u = 2.0 * tanh_argument(x);
                let du = 2.0 * (2.0 / PI).sqrt() * (1.0 + 3.0 * CUBIC * x * x);
                sigmoid(u) * (1.0 + x * sigmoid(-u) * du)
            }
            Self::Relu => f64::from(u8::from(x > 0.0)),
        }
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The coefficient of x³ in the tanh approximation of GELU.
const CUBIC: f64 = 0.044_715;

/// u of GELU ≈ x · (1 + tanh(u)) / 2 = x · sigmoid(2u).
fn tanh_argument(x: f64) -> f64 {
    (2.0 / PI).sqrt() * (x + CUBIC * x * x * x)
}

/// The normal distribution function. Its relative error is below 1e-13, in the lower tail too.
fn normal_cdf(x: f64) -> f64 {
    let z = x.abs() * FRAC_1_SQRT_2;
    let tail = if z < 2.0 {
        // erf(z) = 2/√π · e^(-z²) · Σ 2ⁿ z^(2n+1) / (2n+1)!!; every term is positive.
        let (mut term, mut sum) = (z, z);
        for n in 1..60 {
            term *= 2.0 * z * z / f64::from(2 * n + 1);
            sum += term;
        }
        0.5 - sum * (-z * z).exp() / PI.sqrt()
    } else {
        // erfc(z) = e^(-z²)/√π / (z + (1/2)/(z + (2/2)/(z + (3/2)/(z + …)))).
        let fraction = (1..150).rev().fold(z, |below, n| z + f64::from(n) / 2.0 / below);
        0.5 * (-z * z).exp() / PI.sqrt() / fraction
    };
    if x < 0.0 { tail } else { 1.0 - tail }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of mpmath's `ncdf`.
    #[test]
    fn the_normal_distribution_function_is_exact_in_both_tails() {
        let expected: [(f64, f64); 12] = [
            (-30.0, 4.906_713_927_148_187e-198),
            (-8.0, 6.220_960_574_271_784e-16),
            (-3.0, 0.001_349_898_031_630_094_6),
            (-2.9, 0.001_865_813_300_384_038_4),
            (-2.8, 0.002_555_130_330_427_934_2),
            (-1.0, 0.158_655_253_931_457_05),
            (-0.25, 0.401_293_674_317_076_3),
            (0.0, 0.5),
            (0.5, 0.691_462_461_274_013_1),
            (2.5, 0.993_790_334_674_223_8),
            (3.5, 0.999_767_370_920_964_5),
            (9.0, 1.0),
        ];
        for (x, cdf) in expected {
            let found = normal_cdf(x);
            assert!((found - cdf).abs() <= 1e-13 * cdf, "{x}: {found} is not {cdf}");
        }
        assert!(normal_cdf(f64::NAN).is_nan());
    }
}
