//! Encoder-decoder families, in the manner of T5.
//!
//! Stream 0 holds the sources and stream 1 the targets: decoder inputs with their labels. Sequence i of the targets attends to
//! sequence i of the sources. An encoder block is self-attention and feed-forward, a decoder block has attention to the encoder's
//! result between them; each part begins with a norm. All blocks of a stack add the same biases by distance to their scores.

use std::slice;

use zeroth_base::PositionBuckets;
use zeroth_graph::{BalanceSums, Builder, Role, Value};

use super::blocks::{BlockInputs, BlockOutput, Blocks, Residual};
use super::error::{ForwardError, UNIT_ORDER, not_fitting};
use super::params::param_specs;
use crate::{
    Layer, ModelConfig, Parameter, ParameterKind, ParameterTable, ParameterUnit, Positions, UnitName,
};

/// The streams of an encoder-decoder.
const SOURCE: usize = 0;
const TARGET: usize = 1;

/// An encoder-decoder model, to be added to a graph.
pub(super) struct EncoderDecoderForward<'a> {
    table: &'a ParameterTable,
    blocks: Blocks<'a>,
}

/// The units that are not begun yet.
struct Units<'a> {
    config: &'a ModelConfig,
    left: slice::Iter<'a, ParameterUnit>,
    is_trained: &'a dyn Fn(&Parameter) -> bool,
}

impl<'a> Units<'a> {
    /// Begins the next unit, which must be this one.
    fn begin(&mut self, b: &mut Builder, name: UnitName) -> Result<&'a ParameterUnit, ForwardError> {
        let next = self.left.next().filter(|unit| unit.name == name);
        let unit = next.ok_or_else(|| not_fitting(self.config, UNIT_ORDER))?;
        let role = match name {
            UnitName::Tied => Role::Embedding,
            UnitName::EncoderBlock(index) => Role::Block(index),
            UnitName::Block(index) => Role::Block(self.config.encoder_layers.len() as u64 + index),
            UnitName::Head => Role::Head,
            UnitName::Embedding
            | UnitName::EncoderPositions
            | UnitName::EncoderNorm
            | UnitName::DecoderPositions
            | UnitName::Experts(_) => Role::Other,
        };
        let specs = param_specs(unit, self.is_trained, str::to_owned);
        b.unit(name.to_string(), role, specs)?;
        Ok(unit)
    }
}

impl<'a> EncoderDecoderForward<'a> {
    pub(super) fn new(config: &'a ModelConfig, table: &'a ParameterTable) -> Self {
        Self { table, blocks: Blocks::new(config, table, "") }
    }

    /// Adds all units.
    pub(super) fn add(
        &self,
        b: &mut Builder,
        is_trained: &dyn Fn(&Parameter) -> bool,
    ) -> Result<(), ForwardError> {
        let Self { table, blocks: Blocks { config, params } } = self;
        let mut units = Units { config, left: table.units.iter(), is_trained };
        let missing = || not_fitting(config, UNIT_ORDER);
        let unit = units.begin(b, UnitName::Tied)?;
        let shared = params.of_kind(b, unit, ParameterKind::Embedding)?.ok_or_else(missing)?;
        // Both streams here: the embedding is gathered once for them.
        let [source, target] = [SOURCE, TARGET].map(|stream| b.stream(stream));
        let mut embed = |ids: Value| {
            let x = b.embedding(ids, shared)?;
            b.dropout(x, config.dropout_rate)
        };
        let (source, target_embedded) = (embed(source.ids)?, embed(target.ids)?); // [Ts, H], [Tt, H]

        let unit = units.begin(b, UnitName::EncoderPositions)?;
        let bias = Some(self.bias(b, unit, &config.encoder_layers)?);
        let inputs = BlockInputs { bias, memory: None, balance: BalanceSums::None };
        let mut residual = Residual { sum: None, branch: source };
        for (index, layer) in (0..).zip(&config.encoder_layers) {
            units.begin(b, UnitName::EncoderBlock(index))?;
            residual = self.block(b, layer, residual, inputs)?;
        }
        let unit = units.begin(b, UnitName::EncoderNorm)?;
        let memory = Some(self.final_norm(b, unit, residual)?); // [Ts, H]

        let unit = units.begin(b, UnitName::DecoderPositions)?;
        let bias = Some(self.bias(b, unit, &config.layers)?);
        let inputs = BlockInputs { bias, memory, balance: BalanceSums::None };
        let mut residual = Residual { sum: None, branch: target_embedded };
        for (index, layer) in (0..).zip(&config.layers) {
            units.begin(b, UnitName::Block(index))?;
            residual = self.block(b, layer, residual, inputs)?;
        }
        let unit = units.begin(b, UnitName::Head)?;
        let mut x = self.final_norm(b, unit, residual)?; // [Tt, H]
        if config.scaled_head {
            x = b.scale(x, (config.hidden as f64).powf(-0.5))?;
        }
        let head = params.of_kind(b, unit, ParameterKind::Head)?.unwrap_or(shared);
        b.head_loss_of(x, target.labels, head)?;
        Ok(())
    }

    /// The biases that all blocks of a stack add to the scores of their own tokens, in the unit of its positions.
    fn bias(&self, b: &mut Builder, unit: &ParameterUnit, layers: &[Layer]) -> Result<Value, ForwardError> {
        let config = self.blocks.config;
        let weight = self.blocks.params.of_kind(b, unit, ParameterKind::PositionBias)?;
        let attention = layers.first().and_then(Layer::attention);
        match (weight, attention.map(|attention| (&attention.positions, attention.causal))) {
            (Some(weight), Some((Some(Positions::Relative { buckets, max_distance }), causal))) => {
                let (buckets, max_distance) = (*buckets, *max_distance);
                let buckets = PositionBuckets { buckets, max_distance, bidirectional: !causal };
                Ok(b.position_bias(weight, buckets)?)
            }
            _ => Err(not_fitting(config, "relative positions")),
        }
    }

    fn block(
        &self,
        b: &mut Builder,
        layer: &Layer,
        residual: Residual,
        inputs: BlockInputs,
    ) -> Result<Residual, ForwardError> {
        match self.blocks.add(b, layer, residual, inputs)? {
            BlockOutput::Residual(residual) => Ok(residual),
            BlockOutput::Routed { .. } => Err(not_fitting(self.blocks.config, UNIT_ORDER)),
        }
    }

    /// The result of a stack; the norm is in this unit.
    fn final_norm(
        &self,
        b: &mut Builder,
        unit: &ParameterUnit,
        residual: Residual,
    ) -> Result<Value, ForwardError> {
        let Blocks { config, params } = &self.blocks;
        let weight = params.of_kind(b, unit, ParameterKind::Norm)?;
        let weight = weight.ok_or_else(|| not_fitting(config, UNIT_ORDER))?;
        let (_, normed) = residual.norm(b, weight, config.norm)?;
        Ok(b.dropout(normed, config.dropout_rate)?)
    }
}
