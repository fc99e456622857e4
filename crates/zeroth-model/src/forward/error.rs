//! Why a forward cannot be built.

use zeroth_graph::GraphError;

use crate::{Family, ModelConfig};

/// A model whose forward cannot be built.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ForwardError {
    #[error(
        "the parameter table does not fit the config, which is of the family {family}: {expected} expected"
    )]
    NotFitting { family: Family, expected: &'static str },
    #[error(
        "knowledge distillation is for decoder-only models, and {who} is of the family {family}: train it without a \
         teacher, or give decoder-only models"
    )]
    DistilledEncoder { who: &'static str, family: Family },
    #[error(
        "config.json asks for the auxiliary loss of routers (`output_router_logits`, `router_aux_loss_coef` {coefficient}), and \
         the routers are frozen: add `gate` to the target modules, or set `output_router_logits` to false"
    )]
    FrozenRouters { coefficient: f64 },
    #[error("the parameter table has {name}, and not the other matrix of its adapter")]
    LoneMatrix { name: String },
    #[error("the parameter table does not fit the model: {0}")]
    Graph(#[from] GraphError),
}

pub(super) const UNIT_ORDER: &str = "units in the order of execution";

pub(super) fn not_fitting(config: &ModelConfig, expected: &'static str) -> ForwardError {
    ForwardError::NotFitting { family: config.family, expected }
}
