//! Operands of the distillation loss.

use super::Span;

/// The divergence of a student s from its teacher t over the first ids that both vocabularies have, at a temperature: KL(t‖s) where
/// `beta` is 0, KL(s‖t) where it is 1, and between beta · KL(t‖m) + (1 - beta) · KL(s‖m), m = beta · t + (1 - beta) · s.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DivergenceSpec {
    /// From 0 to 1.
    pub beta: f32,
    /// Divisor of the logits.
    pub temperature: f32,
    /// Whether the divergence is multiplied by the square of the temperature.
    pub squared: bool,
}

impl DivergenceSpec {
    /// The factor of the divergence.
    pub fn factor(self) -> f32 {
        if self.squared { self.temperature * self.temperature } else { 1.0 }
    }

    /// The least probability of a tail: what the listed probabilities leave of 1 in f32 is not known better.
    pub const LEAST_TAIL: f32 = 1.0 / (1 << 24) as f32;
}

/// The teacher of [`Kernel::DistillLossBackward`](super::Kernel::DistillLossBackward).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TeacherSpans {
    /// Its last hidden state x `[rows, hidden]` and its head w `[vocab, hidden]`, in the launch's dtype.
    Hidden {
        /// Its hidden size.
        hidden: usize,
        /// Its vocabulary.
        vocab: usize,
        /// Row stride of x.
        row_stride: usize,
        /// The hidden state.
        x: Span,
        /// The head.
        w: Span,
    },
    /// Log-probabilities of some tokens at the loss's temperature, over its whole vocabulary.
    TopK {
        /// Tokens of a row, each once.
        k: usize,
        /// Its vocabulary. An id that is not in both vocabularies belongs to the tail.
        vocab: usize,
        /// Whether the probability of all other tokens, at least [`DivergenceSpec::LEAST_TAIL`], is one more outcome. Else, and where the
        /// student has no other tokens, both distributions are renormalised over those listed.
        tail: bool,
        /// i32 `[rows, k]`.
        ids: Span,
        /// f32 `[rows, k]`.
        log_probs: Span,
    },
}

impl TeacherSpans {
    /// Its vocabulary.
    pub const fn vocab(&self) -> usize {
        match self {
            Self::Hidden { vocab, .. } | Self::TopK { vocab, .. } => *vocab,
        }
    }

    /// Columns of the logits that a slice holds of it.
    pub const fn logits(&self) -> usize {
        match self {
            Self::Hidden { vocab, .. } => *vocab,
            Self::TopK { .. } => 0,
        }
    }

    /// Whether rows of its hidden state have padding.
    pub(super) const fn has_padded_rows(&self) -> bool {
        match self {
            Self::Hidden { hidden, row_stride, .. } => *row_stride != *hidden,
            Self::TopK { .. } => false,
        }
    }

    pub(super) const fn spans(&self) -> [Span; 2] {
        match self {
            Self::Hidden { x, w, .. } => [*x, *w],
            Self::TopK { ids, log_probs, .. } => [*ids, *log_probs],
        }
    }
}
