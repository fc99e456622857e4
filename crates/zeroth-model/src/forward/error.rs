//! Why a forward cannot be built.

use zeroth_graph::GraphError;

use crate::{Family, ModelConfig};

/// A model whose forward cannot be built.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ForwardError {
    /// A config and a table that are not of one model.
    #[error(
        "the parameter table does not fit the config, which is of the family {family}: {expected} expected"
    )]
    NotFitting {
        /// The family of the config.
        family: Family,
        /// What the config needs.
        expected: &'static str,
    },
    /// A distillation of, or by, an encoder-decoder.
    #[error(
        "knowledge distillation is for decoder-only models, and {who} is of the family {family}: train it without a \
         teacher, or give decoder-only models"
    )]
    DistilledEncoder {
        /// The student or the teacher.
        who: &'static str,
        /// Its family.
        family: Family,
    },
    /// An auxiliary loss that trains no router.
    #[error(
        "config.json asks for the auxiliary loss of routers (`output_router_logits`, `router_aux_loss_coef` {coefficient}), and \
         the routers are frozen: add `gate` to the target modules, or set `output_router_logits` to false"
    )]
    FrozenRouters {
        /// `router_aux_loss_coef`.
        coefficient: f64,
    },
    /// Half an adapter.
    #[error("the parameter table has {name}, and not the other matrix of its adapter")]
    LoneMatrix {
        /// The matrix that is there.
        name: String,
    },
    /// The table does not fit the config.
    #[error("the parameter table does not fit the model: {0}")]
    Graph(#[from] GraphError),
}

pub(super) const UNIT_ORDER: &str = "units in the order of execution";

pub(super) fn not_fitting(config: &ModelConfig, expected: &'static str) -> ForwardError {
    ForwardError::NotFitting { family: config.family, expected }
}
