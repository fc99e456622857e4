//! Encoder-decoder families, in the manner of T5.
//!
//! Stream 0 holds the sources and stream 1 the targets: decoder inputs with their labels. Sequence i of the targets attends to
//! sequence i of the sources. An encoder block is self-attention and feed-forward, a decoder block has attention to the encoder's
//! result between them; each part begins with a norm. All blocks of a stack add the same biases by distance to their scores.

use std::slice;

use zeroth_base::PositionBuckets;
use zeroth_graph::{AttentionOptions, Builder, GraphError, Role, Value};

use super::{ForwardError, NamedParams, Residual, UNIT_ORDER, activation_fn, not_fitting, param_specs};
use crate::{ModelConfig, Parameter, ParameterTable, Positions, Unit, UnitName};

/// The streams of an encoder-decoder.
const SOURCE: usize = 0;
const TARGET: usize = 1;

/// An encoder-decoder model, to be added to a graph.
pub(super) struct EncoderDecoder<'a> {
    config: &'a ModelConfig,
    table: &'a ParameterTable,
    params: NamedParams<'a>,
}

/// The units that are not begun yet.
struct Units<'a> {
    config: &'a ModelConfig,
    left: slice::Iter<'a, Unit>,
    is_trained: &'a dyn Fn(&Parameter) -> bool,
}

impl Units<'_> {
    /// Begins the next unit, which must be this one.
    fn begin(&mut self, b: &mut Builder, name: UnitName) -> Result<(), ForwardError> {
        let next = self.left.next().filter(|unit| unit.name == name);
        let unit = next.ok_or_else(|| not_fitting(self.config, UNIT_ORDER))?;
        let role = match name {
            UnitName::Tied => Role::Embedding,
            UnitName::EncoderBlock(index) => Role::Block(index),
            UnitName::Block(index) => Role::Block(self.config.encoder_blocks + index),
            UnitName::Head => Role::Head,
            _ => Role::Other,
        };
        let specs = param_specs(unit, self.is_trained, str::to_owned);
        b.unit(name.to_string(), role, specs)?;
        Ok(())
    }
}

/// What a stack computes with: its names begin with `name`.
#[derive(Clone, Copy)]
struct Stack {
    name: &'static str,
    /// Whether tokens attend to earlier ones only.
    causal: bool,
    /// The biases of self-attention [heads, distances].
    bias: Value,
}

impl<'a> EncoderDecoder<'a> {
    pub(super) fn new(config: &'a ModelConfig, table: &'a ParameterTable) -> Self {
        Self { config, table, params: NamedParams::new(table, "") }
    }

    /// Adds all units.
    pub(super) fn add(
        &self,
        b: &mut Builder,
        is_trained: &dyn Fn(&Parameter) -> bool,
    ) -> Result<(), ForwardError> {
        let (config, table) = (self.config, self.table);
        let mut units = Units { config, left: table.units.iter(), is_trained };
        units.begin(b, UnitName::Tied)?;
        let shared = b.param("shared.weight")?;
        // Both streams here: the embedding is gathered once for them.
        let [source, target] = [SOURCE, TARGET].map(|stream| b.stream(stream));
        let mut embed = |ids: Value| {
            let x = b.embedding(ids, shared)?;
            b.dropout(x, config.dropout_rate)
        };
        let (source, target_embedded) = (embed(source.ids)?, embed(target.ids)?); // [Ts, H], [Tt, H]

        units.begin(b, UnitName::EncoderPositions)?;
        let encoder = self.stack(b, "encoder", false)?;
        let mut residual = Residual { sum: None, branch: source };
        for index in 0..config.encoder_blocks {
            units.begin(b, UnitName::EncoderBlock(index))?;
            residual = self.self_attention(b, encoder, index, residual)?;
            residual = self.feed_forward(b, &format!("encoder.block.{index}.layer.1"), residual)?;
        }
        units.begin(b, UnitName::EncoderNorm)?;
        let memory = self.final_norm(b, encoder, residual)?; // [Ts, H]

        units.begin(b, UnitName::DecoderPositions)?;
        let decoder = self.stack(b, "decoder", true)?;
        let mut residual = Residual { sum: None, branch: target_embedded };
        for index in 0..config.blocks {
            units.begin(b, UnitName::Block(index))?;
            residual = self.self_attention(b, decoder, index, residual)?;
            let at = format!("decoder.block.{index}.layer.1");
            residual = self.attention(b, &at, "EncDecAttention", residual, Keys::Of(memory))?;
            residual = self.feed_forward(b, &format!("decoder.block.{index}.layer.2"), residual)?;
        }
        units.begin(b, UnitName::Head)?;
        let mut x = self.final_norm(b, decoder, residual)?; // [Tt, H]
        if config.scaled_head {
            x = b.scale(x, (config.hidden as f64).powf(-0.5))?;
        }
        let head = if config.tied_head { shared } else { b.param("lm_head.weight")? };
        b.head_loss_of(x, target.labels, head)?;
        Ok(())
    }

    /// The biases of a stack, in its unit of positions.
    fn stack(&self, b: &mut Builder, name: &'static str, causal: bool) -> Result<Stack, ForwardError> {
        let Positions::Relative { buckets, max_distance } = self.config.positions else {
            return Err(not_fitting(self.config, "relative positions"));
        };
        let weight =
            b.param(&format!("{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"))?;
        let buckets = PositionBuckets { buckets, max_distance, bidirectional: !causal };
        Ok(Stack { name, causal, bias: b.position_bias(weight, buckets)? })
    }

    fn self_attention(
        &self,
        b: &mut Builder,
        stack: Stack,
        index: u64,
        residual: Residual,
    ) -> Result<Residual, GraphError> {
        let at = format!("{}.block.{index}.layer.0", stack.name);
        self.attention(b, &at, "SelfAttention", residual, Keys::Own(stack))
    }

    /// The attention of the layer at `at`.
    fn attention(
        &self,
        b: &mut Builder,
        at: &str,
        name: &str,
        residual: Residual,
        keys: Keys,
    ) -> Result<Residual, GraphError> {
        let ModelConfig { heads, kv_heads, dropout_rate: dropout, .. } = *self.config;
        let project = |b: &mut Builder, x: Value, part: &str| {
            self.params.linear(b, &format!("{at}.{name}.{part}"), x, false)
        };
        let (sum, normed) = self.norm(b, at, residual)?;
        let (read, causal, bias) = match keys {
            Keys::Own(stack) => (normed, stack.causal, Some(stack.bias)),
            Keys::Of(memory) => (memory, false, None),
        };
        let q = project(b, normed, "q")?; // [T, heads · D]
        let k = project(b, read, "k")?; // [Tk, heads · D]
        let v = project(b, read, "v")?; // [Tk, heads · D]
        // The scale is part of the weights of q.
        let options = AttentionOptions { heads, kv_heads, window: None, scale: 1.0, causal, dropout };
        let attended = b.attention_with([q, k, v], bias, options)?;
        let branch = project(b, attended, "o")?; // [T, H]
        Ok(Residual { sum: Some(sum), branch: b.dropout(branch, dropout)? })
    }

    /// The feed-forward part of the layer at `at`.
    fn feed_forward(&self, b: &mut Builder, at: &str, residual: Residual) -> Result<Residual, GraphError> {
        let (config, activation) = (self.config, activation_fn(self.config.activation));
        let project = |b: &mut Builder, x: Value, part: &str| {
            self.params.linear(b, &format!("{at}.DenseReluDense.{part}"), x, false)
        };
        let (sum, normed) = self.norm(b, at, residual)?;
        let activated = if config.gated {
            let gate = project(b, normed, "wi_0")?; // [T, F]
            let up = project(b, normed, "wi_1")?; // [T, F]
            b.gated_activation(activation, gate, up)?
        } else {
            let inner = project(b, normed, "wi")?; // [T, F]
            b.activation(activation, inner)?
        };
        let dropped = b.dropout(activated, config.dropout_rate)?;
        let branch = project(b, dropped, "wo")?; // [T, H]
        Ok(Residual { sum: Some(sum), branch: b.dropout(branch, config.dropout_rate)? })
    }

    /// The result of a stack.
    fn final_norm(&self, b: &mut Builder, stack: Stack, residual: Residual) -> Result<Value, GraphError> {
        let weight = b.param(&format!("{}.final_layer_norm.weight", stack.name))?;
        let (_, normed) = residual.norm(b, weight, self.config.norm_eps, true)?;
        b.dropout(normed, self.config.dropout_rate)
    }

    /// The sum, and the norm of the layer at `at`.
    fn norm(&self, b: &mut Builder, at: &str, residual: Residual) -> Result<(Value, Value), GraphError> {
        let weight = b.param(&format!("{at}.layer_norm.weight"))?;
        residual.norm(b, weight, self.config.norm_eps, true)
    }
}

/// What an attention reads its keys and values from.
#[derive(Clone, Copy)]
enum Keys {
    /// Its own tokens.
    Own(Stack),
    /// The encoder's result.
    Of(Value),
}
