//! Activations of gated feed-forward layers, defined in f64.

/// The function f of a gated activation, y = f(gate) · up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GatedActivation {
    /// x · sigmoid(x): SwiGLU.
    Silu,
}

impl GatedActivation {
    /// Every activation.
    pub const ALL: [Self; 1] = [Self::Silu];

    /// The gated op's name in messages, traces and plans.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Silu => "swiglu",
        }
    }

    /// The name of its gradient.
    pub const fn backward_name(self) -> &'static str {
        match self {
            Self::Silu => "swiglu_backward",
        }
    }

    /// f(x). Kernels are compared with it.
    pub fn value(self, x: f64) -> f64 {
        match self {
            Self::Silu => x * sigmoid(x),
        }
    }

    /// f'(x).
    pub fn slope(self, x: f64) -> f64 {
        match self {
            Self::Silu => sigmoid(x) * (1.0 + x * sigmoid(-x)),
        }
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
