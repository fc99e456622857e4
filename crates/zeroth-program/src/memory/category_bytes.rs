//! Bytes of one memory tier by category.

use serde::Serialize;

/// Bytes of one memory tier by category.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Bytes {
    /// Parameters, trained and frozen.
    pub parameters: u64,
    /// Gradients that are kept for the update.
    pub gradients: u64,
    /// Optimizer states, master weights included.
    pub optimizer: u64,
    /// Activations kept from forward to backward.
    pub activations: u64,
    /// Communication and staging buffers, and scratch.
    pub buffers: u64,
    /// The sum of the other fields.
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
