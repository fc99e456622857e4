//! Builds the forward graph of a model.
//!
//! The residual add of one part and the norm of the next are one op, so a part ends with its branch and the sum so far, and the
//! next begins with both.

mod blocks;
mod decoder;
mod encoder_decoder;

use std::collections::HashMap;

use zeroth_graph::{
    ActivationFn, Builder, Graph, GraphError, NormOptions, ParamId, ParamSpec, Routing, Value,
};

use crate::table::Adapters;
use crate::{Activation, Family, LinearModule, ModelConfig, Parameter, ParameterKind, ParameterTable, Unit};

pub(crate) use decoder::Decoder;
use encoder_decoder::EncoderDecoder;

/// The micro-batches a forward is written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// Tokens (rows) of a micro-batch; those of the sources, of an encoder-decoder.
    pub tokens: u64,
    /// Tokens of the targets, of an encoder-decoder. Others have none.
    pub target_tokens: u64,
}

impl Batch {
    /// So many tokens; an encoder-decoder has as many of sources and of targets.
    pub const fn of_tokens(tokens: u64) -> Self {
        Self { tokens, target_tokens: tokens }
    }

    /// Pairs for an encoder-decoder: so many tokens of sources, and so many of targets.
    pub const fn of_pairs(source_tokens: u64, target_tokens: u64) -> Self {
        Self { tokens: source_tokens, target_tokens }
    }
}

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

/// The forward of a model; `table` is the model's own and says which parameters are trained.
pub fn forward(config: &ModelConfig, table: &ParameterTable, batch: Batch) -> Result<Graph, ForwardError> {
    forward_training(config, table, batch, |parameter| parameter.trained)
}

/// [`forward`] of a model of which only the parameters that `is_trained` names are trained; the others are frozen.
pub fn forward_training(
    config: &ModelConfig,
    table: &ParameterTable,
    batch: Batch,
    is_trained: impl Fn(&Parameter) -> bool,
) -> Result<Graph, ForwardError> {
    if config.family.is_encoder_decoder() {
        let mut b = Builder::new(&[batch.tokens, batch.target_tokens]);
        EncoderDecoder::new(config, table).add(&mut b, &is_trained)?;
        return Ok(b.finish()?);
    }
    let mut b = Builder::new(&[batch.tokens]);
    let output = Decoder::new(config, table).add(&mut b, &is_trained)?;
    b.head_loss(output.normed, output.head)?;
    output.aux_loss(&mut b, config)?;
    Ok(b.finish()?)
}

const UNIT_ORDER: &str = "units in the order of execution";

fn not_fitting(config: &ModelConfig, expected: &'static str) -> ForwardError {
    ForwardError::NotFitting { family: config.family, expected }
}

const fn activation_fn(activation: Activation) -> ActivationFn {
    match activation {
        Activation::Silu => ActivationFn::Silu,
        Activation::Gelu => ActivationFn::Gelu,
        Activation::GeluTanh => ActivationFn::GeluTanh,
        Activation::Relu => ActivationFn::Relu,
    }
}

/// A unit's parameters as the graph declares them, under the names that `rename` gives them.
fn param_specs(
    unit: &Unit,
    is_trained: &dyn Fn(&Parameter) -> bool,
    rename: impl Fn(&str) -> String,
) -> Vec<ParamSpec> {
    let spec = |parameter: &Parameter| {
        let trainable = is_trained(parameter);
        let (name, shape) = (rename(&parameter.name), parameter.shape.clone());
        ParamSpec { name, shape, trainable, quantized: parameter.quantized && !trainable }
    };
    unit.parameters.iter().map(spec).collect()
}

/// The residual stream: the sum of all branches so far, and the newest branch, which is not added yet.
#[derive(Clone, Copy)]
struct Residual {
    sum: Option<Value>,
    branch: Value,
}

impl Residual {
    /// Adds the newest branch and normalizes the sum; returns both.
    fn norm(
        &self,
        b: &mut Builder,
        weight: ParamId,
        options: NormOptions,
    ) -> Result<(Value, Value), GraphError> {
        match self.sum {
            None => Ok((self.branch, b.rms_norm(self.branch, weight, options)?)),
            Some(sum) => b.add_rms_norm(sum, self.branch, weight, options),
        }
    }
}

/// The parameters of a model by their names in its table, and the adapters of its linear maps.
struct NamedParams<'a> {
    /// What the graph's names have before those of the table.
    prefix: &'static str,
    adapters: Option<Adapters>,
    matrices: HashMap<&'a str, [Option<&'a Parameter>; 2]>,
}

impl<'a> NamedParams<'a> {
    fn new(table: &'a ParameterTable, prefix: &'static str) -> Self {
        Self { prefix, adapters: table.adapters, matrices: table.adapter_matrices() }
    }

    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn get(&self, b: &Builder, name: &str) -> Result<ParamId, GraphError> {
        b.param(&self.name(name))
    }

    /// How the adapter of a matrix acts, with its inner and outer matrix; `None` where it has no adapter.
    fn adapter(&self, b: &Builder, weight: &str) -> Result<Option<(Adapters, [ParamId; 2])>, ForwardError> {
        let (Some(adapters), Some(matrices)) = (self.adapters, self.matrices.get(weight)) else {
            return Ok(None);
        };
        match matrices {
            [Some(inner), Some(outer)] => {
                Ok(Some((adapters, [self.get(b, &inner.name)?, self.get(b, &outer.name)?])))
            }
            [Some(lone), None] | [None, Some(lone)] => {
                Err(ForwardError::LoneMatrix { name: lone.name.clone() })
            }
            [None, None] => Ok(None),
        }
    }

    /// A unit's first parameter of a kind.
    fn of_kind(&self, b: &Builder, unit: &Unit, kind: ParameterKind) -> Result<Option<ParamId>, GraphError> {
        let found = unit.parameters.iter().find(|parameter| parameter.kind == kind);
        found.map(|parameter| self.get(b, &parameter.name)).transpose()
    }

    /// A linear map, with its bias and adapter where it has them.
    fn linear(&self, b: &mut Builder, linear: &LinearModule, x: Value) -> Result<Value, ForwardError> {
        let LinearModule { name: module, bias, .. } = linear;
        let name = format!("{module}.weight");
        let weight = self.get(b, &name)?;
        let bias = if *bias { Some(self.get(b, &format!("{module}.bias"))?) } else { None };
        let y = b.linear(x, weight, bias)?;
        let Some((adapters, [inner, outer])) = self.adapter(b, &name)? else { return Ok(y) };
        let dropped = b.dropout(x, adapters.dropout)?;
        let u = b.linear(dropped, inner, None)?; // [T, rank]
        Ok(b.linear_add(y, u, outer, adapters.scale)?)
    }

    /// The linear maps of all experts, with their adapters where they have them; `scale` is that of the adapters.
    fn grouped_linear(
        &self,
        b: &mut Builder,
        name: &str,
        x: Value,
        routing: &Routing,
        scale: fn(Adapters) -> f64,
    ) -> Result<Value, ForwardError> {
        let weight = self.get(b, name)?;
        let y = b.grouped_linear(x, weight, routing)?;
        let Some((adapters, [inner, outer])) = self.adapter(b, name)? else { return Ok(y) };
        let u = b.grouped_linear(x, inner, routing)?; // [T · k, rank]
        Ok(b.grouped_linear_add(y, u, outer, scale(adapters), routing)?)
    }
}
