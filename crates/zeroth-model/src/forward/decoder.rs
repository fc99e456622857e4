//! Decoder-only families: embedding, blocks, head. A block with experts ends with its route, and the unit of its experts goes on
//! from there.

use zeroth_graph::{BalanceSums, Builder, GraphError, ParamId, Role, Routing, Value};

use super::blocks::{BlockInputs, BlockOutput, Blocks, Residual};
use super::error::{ForwardError, UNIT_ORDER, not_fitting};
use super::params::param_specs;
use crate::distill::TEACHER_PREFIX;
use crate::{Layer, ModelConfig, Parameter, ParameterKind, ParameterTable, ParameterUnit, UnitName};

/// A decoder-only model, to be added to a graph.
pub(crate) struct DecoderForward<'a> {
    table: &'a ParameterTable,
    blocks: Blocks<'a>,
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
    /// Adds the loss that balances the experts, where the config asks for it: transformers computes it over the blocks with
    /// experts together.
    pub(crate) fn aux_loss(&self, b: &mut Builder, config: &ModelConfig) -> Result<(), GraphError> {
        if let (Some(coefficient), BalanceSums::After(sums)) = (config.aux_loss, self.balance) {
            b.set_loss_part("aux_loss", coefficient);
            b.balance_loss(sums, config.layers.iter().filter_map(Layer::experts).count() as u64)?;
        }
        Ok(())
    }
}

impl<'a> DecoderForward<'a> {
    pub(crate) fn new(config: &'a ModelConfig, table: &'a ParameterTable) -> Self {
        Self { table, blocks: Blocks::new(config, table, ""), is_teacher: false }
    }

    /// The same as the teacher of a distillation.
    pub(crate) fn teacher(config: &'a ModelConfig, table: &'a ParameterTable) -> Self {
        Self { table, blocks: Blocks::new(config, table, TEACHER_PREFIX), is_teacher: true }
    }

    /// Adds all units but the loss.
    pub(crate) fn add(
        &self,
        b: &mut Builder,
        is_trained: &dyn Fn(&Parameter) -> bool,
    ) -> Result<DecoderOutput, ForwardError> {
        let Self { table, blocks: Blocks { config, params }, .. } = self;
        let aux = config.aux_loss.filter(|_| !self.is_teacher);
        if let Some(coefficient) = aux
            && !table.iter().any(|p| p.adapted_kind() == ParameterKind::Router && is_trained(p))
        {
            return Err(ForwardError::FrozenRouters { coefficient });
        }
        let mut balance = if aux.is_some() { BalanceSums::First } else { BalanceSums::None };
        let (mut stream, mut embedding) = (None, None);
        let unit_order = || not_fitting(config, UNIT_ORDER);
        for unit in &table.units {
            self.add_unit(b, unit, is_trained)?;
            stream = match (unit.name, stream) {
                (UnitName::Embedding | UnitName::Tied, _) => {
                    let weight = params.of_kind(b, unit, ParameterKind::Embedding)?.ok_or_else(unit_order)?;
                    embedding = Some(weight);
                    let ids = b.ids();
                    let branch = b.embedding(ids, weight)?;
                    Some(BlockOutput::Residual(Residual { sum: None, branch }))
                }
                (UnitName::Block(index), Some(BlockOutput::Residual(residual))) => {
                    let inputs = BlockInputs { bias: None, memory: None, balance };
                    let next = self.blocks.add(b, self.layer(index)?, residual, inputs)?;
                    if let BlockOutput::Routed { routing: Routing { balance: Some(sums), .. }, .. } = next {
                        balance = BalanceSums::After(sums);
                    }
                    Some(next)
                }
                (UnitName::Experts(index), Some(BlockOutput::Routed { sum, normed, routing })) => {
                    let experts = self.layer(index)?.experts().ok_or_else(unit_order)?;
                    let branch = self.blocks.experts(b, experts, normed, &routing)?;
                    Some(BlockOutput::Residual(Residual { sum: Some(sum), branch }))
                }
                (UnitName::Head, Some(BlockOutput::Residual(residual))) => {
                    let norm = params.of_kind(b, unit, ParameterKind::Norm)?.ok_or_else(unit_order)?;
                    let (_, normed) = residual.norm(b, norm, config.norm)?;
                    let head = params.of_kind(b, unit, ParameterKind::Head)?;
                    let head = head.or(embedding).ok_or_else(unit_order)?;
                    return Ok(DecoderOutput { normed, head, balance });
                }
                _ => break,
            };
        }
        Err(unit_order())
    }

    fn layer(&self, index: u64) -> Result<&Layer, ForwardError> {
        let config = self.blocks.config;
        config.layers.get(index as usize).ok_or_else(|| not_fitting(config, UNIT_ORDER))
    }

    /// Begins a unit.
    fn add_unit(
        &self,
        b: &mut Builder,
        unit: &ParameterUnit,
        is_trained: &dyn Fn(&Parameter) -> bool,
    ) -> Result<(), GraphError> {
        let name = |name: &str| self.blocks.params.name(name);
        let params = param_specs(unit, is_trained, name);
        if self.is_teacher {
            b.teacher_unit(name(&unit.name.to_string()), params)?;
            return Ok(());
        }
        let role = match unit.name {
            UnitName::Embedding | UnitName::Tied => Role::Embedding,
            UnitName::Block(index) | UnitName::Experts(index) => Role::Block(index),
            UnitName::Head => Role::Head,
            UnitName::EncoderPositions
            | UnitName::EncoderBlock(_)
            | UnitName::EncoderNorm
            | UnitName::DecoderPositions => Role::Other,
        };
        b.unit(unit.name.to_string(), role, params)?;
        Ok(())
    }
}
