//! Bytes of one memory, by what they are for.

use serde::Serialize;

/// Bytes in one memory, by what they are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Bytes {
    /// Parameters, trained and frozen.
    pub parameters: u64,
    /// Gradients that are kept.
    pub gradients: u64,
    /// Optimizer state, master copy included.
    pub optimizer: u64,
    /// What forward keeps for backward.
    pub activations: u64,
    /// What is gathered, reduced or on its way.
    pub buffers: u64,
    /// The sum of the others.
    pub total: u64,
}

impl Bytes {
    /// Parameters, gradients and optimizer state only.
    #[must_use]
    pub fn of_states(parameters: u64, gradients: u64, optimizer: u64) -> Self {
        Self { parameters, gradients, optimizer, ..Self::default() }.summed()
    }

    /// The same with activations and buffers.
    #[must_use]
    pub fn with(self, activations: u64, buffers: u64) -> Self {
        Self { activations, buffers, ..self }.summed()
    }

    fn summed(self) -> Self {
        let parts = [self.parameters, self.gradients, self.optimizer, self.activations, self.buffers];
        Self { total: parts.into_iter().fold(0, u64::saturating_add), ..self }
    }
}
