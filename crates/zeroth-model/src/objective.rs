//! What a model is trained for.

use zeroth_graph::Graph;

use crate::distill::forward_distilled;
use crate::{BatchTokens, Distilled, ForwardError, ModelConfig, ParameterTable, forward};

/// What a model is trained for: its loss, and what that is computed from besides the model.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Objective<'a> {
    /// The labels: cross-entropy.
    #[default]
    CrossEntropy,
    /// The labels, and the distributions of a teacher.
    Distillation(Distilled<'a>),
}

impl Objective<'_> {
    /// The forward of a model with its loss.
    pub fn forward(
        self,
        config: &ModelConfig,
        table: &ParameterTable,
        batch: BatchTokens,
    ) -> Result<Graph, ForwardError> {
        match self {
            Self::CrossEntropy => forward(config, table, batch),
            Self::Distillation(distilled) => forward_distilled(config, table, distilled, batch),
        }
    }
}
