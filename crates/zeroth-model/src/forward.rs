//! Builds the forward graph of decoder-only families.
//!
//! Block: norm, attention, residual add and norm, feed-forward. The residual add of one part and the norm of the next
//! are one op, so a block ends with its branch and the sum so far, and the next begins with both. A block with experts ends
//! with its route, and the unit of its experts goes on from there.

use zeroth_graph::{
    BalanceSums, Builder, GatedActivation, Graph, GraphError, ParamId, ParamSpec, Role, Routing, Value,
};

use crate::distill::TEACHER_PREFIX;
use crate::lora::adapter_name;
use crate::rotary::rotary;
use crate::table::Adapters;
use crate::{
    Activation, Experts, Family, ModelConfig, Parameter, ParameterKind, ParameterTable, Positions, Unit,
    UnitName,
};

/// The micro-batches a forward is written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// Tokens (rows) of a micro-batch.
    pub tokens: u64,
}

/// A model whose forward cannot be built.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ForwardError {
    /// A family, or a feature of one, that is not implemented.
    #[error("{} models with {what} cannot be trained yet: {} can", family.model_type(), Family::trainable())]
    NotYet {
        /// The family.
        family: Family,
        /// The feature that is missing.
        what: &'static str,
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
    let mut b = Builder::new(&[batch.tokens]);
    let output = Decoder::new(config, table)?.add(&mut b, &is_trained)?;
    b.head_loss(output.normed, output.head)?;
    output.aux_loss(&mut b, config)?;
    Ok(b.finish()?)
}

/// A decoder-only model, to be added to a graph.
pub(crate) struct Decoder<'a> {
    config: &'a ModelConfig,
    table: &'a ParameterTable,
    activation: GatedActivation,
    /// Whether it is the teacher of a distillation: its units are a group of their own, and the names of its parameters have
    /// [`TEACHER_PREFIX`].
    is_teacher: bool,
}

/// The end of a decoder, before its loss.
pub(crate) struct DecoderOutput {
    /// The normed hidden state [T, H].
    pub(crate) normed: Value,
    /// The output projection [V, H].
    pub(crate) head: ParamId,
    balance: BalanceSums,
}

impl DecoderOutput {
    /// Adds the loss that balances the experts, where the config asks for it.
    pub(crate) fn aux_loss(&self, b: &mut Builder, config: &ModelConfig) -> Result<(), GraphError> {
        match (&config.experts, self.balance) {
            (Some(experts), BalanceSums::After(sums)) => aux_loss(b, experts, sums),
            _ => Ok(()),
        }
    }
}

impl<'a> Decoder<'a> {
    /// Refuses what has no forward.
    pub(crate) fn new(config: &'a ModelConfig, table: &'a ParameterTable) -> Result<Self, ForwardError> {
        let activation = match config.activation {
            Activation::Silu => GatedActivation::Silu,
            Activation::Gelu => GatedActivation::Gelu,
            Activation::GeluTanh => GatedActivation::GeluTanh,
            Activation::Relu => {
                let what = "another activation than silu, gelu, gelu_new or gelu_pytorch_tanh";
                return Err(not_yet(config, if config.family.is_encoder_decoder() { ENCODER } else { what }));
            }
        };
        Ok(Self { config, table, activation, is_teacher: false })
    }

    /// The same as the teacher of a distillation.
    pub(crate) fn teacher(config: &'a ModelConfig, table: &'a ParameterTable) -> Result<Self, ForwardError> {
        Ok(Self { is_teacher: true, ..Self::new(config, table)? })
    }

    /// Adds all units but the loss.
    pub(crate) fn add(
        &self,
        b: &mut Builder,
        is_trained: &dyn Fn(&Parameter) -> bool,
    ) -> Result<DecoderOutput, ForwardError> {
        let Self { config, table, .. } = *self;
        let Positions::Rope(rope) = &config.positions else { return Err(not_yet(config, ENCODER)) };
        let aux = config.experts.as_ref().and_then(|experts| experts.aux_loss).filter(|_| !self.is_teacher);
        if let Some(coefficient) = aux
            && !table.iter().any(|parameter| is_of_router(parameter) && is_trained(parameter))
        {
            return Err(ForwardError::FrozenRouters { coefficient });
        }
        b.rotary(rotary(rope, config.head_dim, config.max_positions));
        let (mut stream, mut balance) = (None, BalanceSums::None);
        if aux.is_some() {
            balance = BalanceSums::First;
        }
        for unit in &table.units {
            self.add_unit(b, unit, is_trained)?;
            stream = match (unit.name, stream) {
                (UnitName::Embedding | UnitName::Tied, _) => {
                    let embed = self.param(b, "model.embed_tokens.weight")?;
                    let ids = b.ids();
                    Some(Stream::Block(Residual { sum: None, branch: b.embedding(ids, embed)? }))
                }
                (UnitName::Block(index), Some(Stream::Block(residual))) => {
                    let next = self.block(b, index, residual, balance)?;
                    if let Stream::Routed { routing: Routing { balance: Some(sums), .. }, .. } = next {
                        balance = BalanceSums::After(sums);
                    }
                    Some(next)
                }
                (UnitName::Experts(index), Some(Stream::Routed { sum, normed, routing })) => {
                    let branch = self.experts(b, index, normed, &routing)?;
                    Some(Stream::Block(Residual { sum: Some(sum), branch }))
                }
                (UnitName::Head, Some(Stream::Block(residual))) => {
                    let norm = self.param(b, "model.norm.weight")?;
                    let (_, normed) = residual.norm(b, norm, config.norm_eps)?;
                    let head = if config.tied_head { "model.embed_tokens.weight" } else { "lm_head.weight" };
                    return Ok(DecoderOutput { normed, head: self.param(b, head)?, balance });
                }
                _ => break,
            };
        }
        Err(not_yet(config, "units in another order"))
    }

    /// Begins a unit.
    fn add_unit(
        &self,
        b: &mut Builder,
        unit: &Unit,
        is_trained: &dyn Fn(&Parameter) -> bool,
    ) -> Result<(), GraphError> {
        let params = unit.parameters.iter().map(|parameter| {
            let trainable = is_trained(parameter);
            let (name, shape) = (self.name(&parameter.name), parameter.shape.clone());
            ParamSpec { name, shape, trainable, quantized: parameter.quantized && !trainable }
        });
        if self.is_teacher {
            b.teacher_unit(self.name(&unit.name.to_string()), params.collect())?;
            return Ok(());
        }
        let role = match unit.name {
            UnitName::Embedding | UnitName::Tied => Role::Embedding,
            UnitName::Block(index) | UnitName::Experts(index) => Role::Block(index),
            UnitName::Head => Role::Head,
            _ => Role::Other,
        };
        b.unit(unit.name.to_string(), role, params.collect())?;
        Ok(())
    }

    fn name(&self, name: &str) -> String {
        if self.is_teacher { format!("{TEACHER_PREFIX}{name}") } else { name.to_owned() }
    }

    fn param(&self, b: &Builder, name: &str) -> Result<ParamId, GraphError> {
        b.param(&self.name(name))
    }
}

const ENCODER: &str = "an encoder";

fn not_yet(config: &ModelConfig, what: &'static str) -> ForwardError {
    ForwardError::NotYet { family: config.family, what }
}

/// Whether it is a router, or the adapter of one.
fn is_of_router(parameter: &Parameter) -> bool {
    let is_adapter = matches!(parameter.kind, ParameterKind::LoraA | ParameterKind::LoraB);
    parameter.kind == ParameterKind::Router || (is_adapter && parameter.name.contains(".mlp.gate.lora_"))
}

/// The loss that balances the experts: transformers computes it over the blocks with experts together.
fn aux_loss(b: &mut Builder, experts: &Experts, sums: Value) -> Result<(), GraphError> {
    if let Some(coefficient) = experts.aux_loss {
        b.set_loss_part("aux_loss", coefficient);
        b.balance_loss(sums, experts.in_block.iter().filter(|has_experts| **has_experts).count() as u64)?;
    }
    Ok(())
}

/// What goes from one unit to the next.
#[derive(Clone, Copy)]
enum Stream {
    Block(Residual),
    /// Inside of a block with experts.
    Routed {
        /// The residual sum.
        sum: Value,
        /// What the experts read [T, H].
        normed: Value,
        routing: Routing,
    },
}

/// The residual stream: the sum of all branches so far, and the newest branch, which is not added yet.
#[derive(Clone, Copy)]
struct Residual {
    sum: Option<Value>,
    branch: Value,
}

impl Residual {
    /// Adds the newest branch and normalizes the sum; returns both.
    fn norm(&self, b: &mut Builder, weight: ParamId, eps: f64) -> Result<(Value, Value), GraphError> {
        match self.sum {
            None => Ok((self.branch, b.rms_norm(self.branch, weight, eps)?)),
            Some(sum) => b.add_rms_norm(sum, self.branch, weight, eps),
        }
    }
}

impl Decoder<'_> {
    fn block(
        &self,
        b: &mut Builder,
        index: u64,
        residual: Residual,
        balance: BalanceSums,
    ) -> Result<Stream, GraphError> {
        let Self { config, activation, .. } = *self;
        let adapters = self.table.adapters;
        let ModelConfig { heads, kv_heads, head_dim, norm_eps, .. } = *config;
        let at = |part: &str| self.name(&format!("model.layers.{index}.{part}"));
        let linear = |b: &mut Builder, x: Value, part: &str, has_bias: bool| {
            let weight = b.param(&at(&format!("{part}.weight")))?;
            let bias = if has_bias { Some(b.param(&at(&format!("{part}.bias")))?) } else { None };
            let y = b.linear(x, weight, bias)?;
            match adapters {
                Some(adapters) => adapted(b, &at(part), adapters, x, y),
                None => Ok(y),
            }
        };
        let rotated = |b: &mut Builder, x: Value, norm: &str, heads: u64| {
            if !config.qk_norm {
                return b.rope(x, heads);
            }
            let weight = b.param(&at(&format!("self_attn.{norm}.weight")))?;
            b.head_norm_rope(x, weight, heads, norm_eps)
        };

        let norm = b.param(&at("input_layernorm.weight"))?;
        let (sum, normed) = residual.norm(b, norm, norm_eps)?;
        let q = linear(b, normed, "self_attn.q_proj", config.qkv_bias)?; // [T, heads · D]
        let k = linear(b, normed, "self_attn.k_proj", config.qkv_bias)?; // [T, kv_heads · D]
        let v = linear(b, normed, "self_attn.v_proj", config.qkv_bias)?; // [T, kv_heads · D]
        let q = rotated(b, q, "q_norm", heads)?;
        let k = rotated(b, k, "k_norm", kv_heads)?;
        let window = config.windows.get(index as usize).copied().flatten();
        let attended = b.attention([q, k, v], heads, kv_heads, window, (head_dim as f64).powf(-0.5))?;
        let branch = linear(b, attended, "self_attn.o_proj", config.output_bias)?; // [T, H]

        let norm = b.param(&at("post_attention_layernorm.weight"))?;
        let (sum, normed) = b.add_rms_norm(sum, branch, norm, norm_eps)?;
        if let Some(experts) = config.experts.as_ref().filter(|_| config.has_experts(index)) {
            let logits = linear(b, normed, "mlp.gate", false)?; // [T, experts]
            let routing = b.route(logits, experts.per_token, experts.normalized, balance)?;
            return Ok(Stream::Routed { sum, normed, routing });
        }
        let gate = linear(b, normed, "mlp.gate_proj", config.mlp_bias)?; // [T, F]
        let up = linear(b, normed, "mlp.up_proj", config.mlp_bias)?; // [T, F]
        let activated = b.gated_activation(activation, gate, up)?;
        let branch = linear(b, activated, "mlp.down_proj", config.mlp_bias)?; // [T, H]
        Ok(Stream::Block(Residual { sum: Some(sum), branch }))
    }

    /// What the experts make of their tokens, summed by token [T, H].
    fn experts(
        &self,
        b: &mut Builder,
        index: u64,
        normed: Value,
        routing: &Routing,
    ) -> Result<Value, GraphError> {
        let (activation, adapters) = (self.activation, self.table.adapters);
        let linear = |b: &mut Builder, x: Value, part: &str, scale: fn(Adapters) -> f64| {
            let name = self.name(&format!("model.layers.{index}.mlp.experts.{part}"));
            let weight = b.param(&name)?;
            let y = b.grouped_linear(x, weight, routing)?;
            let inner = b.param(&adapter_name(&name, "lora_A"));
            let (Some(adapters), Ok(inner)) = (adapters, inner) else { return Ok(y) };
            let outer = b.param(&adapter_name(&name, "lora_B"))?;
            let u = b.grouped_linear(x, inner, routing)?; // [T · k, rank]
            b.grouped_linear_add(y, u, outer, scale(adapters), routing)
        };
        let x = b.gather_rows(normed, routing)?; // [T · k, H]
        let gate_up = linear(b, x, "gate_up_proj", |adapters| adapters.fused_scale)?; // [T · k, 2F]
        let gated = b.gated_rows(activation, gate_up, routing)?; // [T · k, F]
        let y = linear(b, gated, "down_proj", |adapters| adapters.scale)?; // [T · k, H]
        b.combine_rows(y, routing)
    }
}

/// Adds what the adapter of a module makes of the module's input `x` to its output `y`, where it has one.
fn adapted(
    b: &mut Builder,
    module: &str,
    adapters: Adapters,
    x: Value,
    y: Value,
) -> Result<Value, GraphError> {
    let Ok(inner) = b.param(&adapter_name(module, "lora_A")) else { return Ok(y) };
    let outer = b.param(&adapter_name(module, "lora_B"))?;
    let dropped = b.dropout(x, adapters.dropout)?;
    let u = b.linear(dropped, inner, None)?; // [T, rank]
    b.linear_add(y, u, outer, adapters.scale)
}
