//! Decoder-only families.
//!
//! Block: norm, attention, residual add and norm, feed-forward. A block with experts ends with its route, and the unit of its
//! experts goes on from there.

use zeroth_graph::{BalanceSums, Builder, GraphError, ParamId, Role, Routing, Value};

use super::{ForwardError, NamedParams, Residual, UNIT_ORDER, activation_fn, not_fitting, param_specs};
use crate::distill::TEACHER_PREFIX;
use crate::rotary::rotary;
use crate::table::Adapters;
use crate::{Experts, ModelConfig, Parameter, ParameterKind, ParameterTable, Positions, Unit, UnitName};

/// A decoder-only model, to be added to a graph.
pub(crate) struct Decoder<'a> {
    config: &'a ModelConfig,
    table: &'a ParameterTable,
    params: NamedParams<'a>,
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
    pub(crate) fn new(config: &'a ModelConfig, table: &'a ParameterTable) -> Self {
        Self { config, table, params: NamedParams::new(table, ""), is_teacher: false }
    }

    /// The same as the teacher of a distillation.
    pub(crate) fn teacher(config: &'a ModelConfig, table: &'a ParameterTable) -> Self {
        Self { config, table, params: NamedParams::new(table, TEACHER_PREFIX), is_teacher: true }
    }

    /// Adds all units but the loss.
    pub(crate) fn add(
        &self,
        b: &mut Builder,
        is_trained: &dyn Fn(&Parameter) -> bool,
    ) -> Result<DecoderOutput, ForwardError> {
        let (config, table) = (self.config, self.table);
        let Positions::Rope(rope) = &config.positions else {
            return Err(not_fitting(config, "positions that are rotated"));
        };
        let aux = config.experts.as_ref().and_then(|experts| experts.aux_loss).filter(|_| !self.is_teacher);
        if let Some(coefficient) = aux
            && !table.iter().any(|p| p.adapted_kind() == ParameterKind::Router && is_trained(p))
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
                    let embed = self.params.get(b, "model.embed_tokens.weight")?;
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
                    let norm = self.params.get(b, "model.norm.weight")?;
                    let (_, normed) = residual.norm(b, norm, config.norm_eps, false)?;
                    let head = if config.tied_head { "model.embed_tokens.weight" } else { "lm_head.weight" };
                    return Ok(DecoderOutput { normed, head: self.params.get(b, head)?, balance });
                }
                _ => break,
            };
        }
        Err(not_fitting(config, UNIT_ORDER))
    }

    /// Begins a unit.
    fn add_unit(
        &self,
        b: &mut Builder,
        unit: &Unit,
        is_trained: &dyn Fn(&Parameter) -> bool,
    ) -> Result<(), GraphError> {
        let params = param_specs(unit, is_trained, |name| self.params.name(name));
        if self.is_teacher {
            b.teacher_unit(self.params.name(&unit.name.to_string()), params)?;
            return Ok(());
        }
        let role = match unit.name {
            UnitName::Embedding | UnitName::Tied => Role::Embedding,
            UnitName::Block(index) | UnitName::Experts(index) => Role::Block(index),
            UnitName::Head => Role::Head,
            _ => Role::Other,
        };
        b.unit(unit.name.to_string(), role, params)?;
        Ok(())
    }
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

impl Decoder<'_> {
    fn block(
        &self,
        b: &mut Builder,
        index: u64,
        residual: Residual,
        balance: BalanceSums,
    ) -> Result<Stream, GraphError> {
        let (config, params) = (self.config, &self.params);
        let ModelConfig { heads, kv_heads, head_dim, norm_eps, .. } = *config;
        let at = |part: &str| format!("model.layers.{index}.{part}");
        let projection =
            |b: &mut Builder, x: Value, part: &str, has_bias: bool| params.linear(b, &at(part), x, has_bias);
        let rotated = |b: &mut Builder, x: Value, norm: &str, heads: u64| {
            if !config.qk_norm {
                return b.rope(x, heads);
            }
            let weight = params.get(b, &at(&format!("self_attn.{norm}.weight")))?;
            b.head_norm_rope(x, weight, heads, norm_eps)
        };

        let norm = params.get(b, &at("input_layernorm.weight"))?;
        let (sum, normed) = residual.norm(b, norm, norm_eps, false)?;
        let q = projection(b, normed, "self_attn.q_proj", config.qkv_bias)?; // [T, heads · D]
        let k = projection(b, normed, "self_attn.k_proj", config.qkv_bias)?; // [T, kv_heads · D]
        let v = projection(b, normed, "self_attn.v_proj", config.qkv_bias)?; // [T, kv_heads · D]
        let q = rotated(b, q, "q_norm", heads)?;
        let k = rotated(b, k, "k_norm", kv_heads)?;
        let window = config.windows.get(index as usize).copied().flatten();
        let attended = b.attention([q, k, v], heads, kv_heads, window, (head_dim as f64).powf(-0.5))?;
        let branch = projection(b, attended, "self_attn.o_proj", config.output_bias)?; // [T, H]

        let norm = params.get(b, &at("post_attention_layernorm.weight"))?;
        let (sum, normed) = b.add_rms_norm(sum, branch, norm, norm_eps)?;
        if let Some(experts) = config.experts.as_ref().filter(|_| config.has_experts(index)) {
            let logits = projection(b, normed, "mlp.gate", false)?; // [T, experts]
            let routing = b.route(logits, experts.per_token, experts.normalized, balance)?;
            return Ok(Stream::Routed { sum, normed, routing });
        }
        let gate = projection(b, normed, "mlp.gate_proj", config.mlp_bias)?; // [T, F]
        let up = projection(b, normed, "mlp.up_proj", config.mlp_bias)?; // [T, F]
        let activated = b.gated_activation(activation_fn(config.activation), gate, up)?;
        let branch = projection(b, activated, "mlp.down_proj", config.mlp_bias)?; // [T, H]
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
        let activation = activation_fn(self.config.activation);
        let linear = |b: &mut Builder, x: Value, part: &str, scale: fn(Adapters) -> f64| {
            self.params.grouped_linear(
                b,
                &format!("model.layers.{index}.mlp.experts.{part}"),
                x,
                routing,
                scale,
            )
        };
        let x = b.gather_rows(normed, routing)?; // [T · k, H]
        let gate_up = linear(b, x, "gate_up_proj", |adapters| adapters.fused_scale)?; // [T · k, 2F]
        let gated = b.gated_rows(activation, gate_up, routing)?; // [T · k, F]
        let y = linear(b, gated, "down_proj", |adapters| adapters.scale)?; // [T · k, H]
        b.combine_rows(y, routing)
    }
}
