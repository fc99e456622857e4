//! The blocks of a model, added to a graph part by part.

use zeroth_graph::{
    AttentionOptions, BalanceSums, Builder, GraphError, NormOptions, ParamId, Routing, Value,
};

use super::error::{ForwardError, not_fitting};
use super::params::NamedParams;
use crate::rotary::rotary;
use crate::table::AdapterScales;
use crate::{
    AttentionModule, Branch, ExpertsModule, FeedForwardModule, Layer, ModelConfig, NormModule,
    ParameterTable, Positions,
};

/// The residual stream: the sum of all branches so far, and the newest branch, which is not added yet.
#[derive(Clone, Copy)]
pub(super) struct Residual {
    pub(super) sum: Option<Value>,
    pub(super) branch: Value,
}

impl Residual {
    /// Adds the newest branch and normalizes the sum; returns both.
    pub(super) fn norm(
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

/// What adds the blocks of a model.
pub(super) struct Blocks<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) params: NamedParams<'a>,
}

/// What a block reads besides the residual stream.
#[derive(Clone, Copy)]
pub(super) struct BlockInputs {
    /// The biases of attention to a block's own tokens, by distance [heads, distances].
    pub(super) bias: Option<Value>,
    /// The encoder's output.
    pub(super) memory: Option<Value>,
    pub(super) balance: BalanceSums,
}

/// What goes from one unit to the next.
#[derive(Clone, Copy)]
pub(super) enum BlockOutput {
    Residual(Residual),
    /// Inside of a block with experts, whose unit goes on from there.
    Routed {
        /// The residual sum.
        sum: Value,
        /// What the experts read [T, H].
        normed: Value,
        routing: Routing,
    },
}

impl<'a> Blocks<'a> {
    pub(super) fn new(config: &'a ModelConfig, table: &'a ParameterTable, prefix: &'static str) -> Self {
        Self { config, params: NamedParams::new(table, prefix) }
    }

    /// A block up to its experts, if it has some.
    pub(super) fn add(
        &self,
        b: &mut Builder,
        layer: &Layer,
        mut residual: Residual,
        inputs: BlockInputs,
    ) -> Result<BlockOutput, ForwardError> {
        for part in &layer.parts {
            let (sum, normed) = residual.norm(b, self.norm(b, &part.norm)?, part.norm.options)?;
            let branch = match &part.branch {
                Branch::Attention(attention) => self.attention(b, attention, normed, inputs)?,
                Branch::FeedForward(feed_forward) => self.feed_forward(b, feed_forward, normed)?,
                Branch::Experts(experts) => {
                    let logits = self.params.linear(b, &experts.router, normed)?; // [T, experts]
                    let routing = b.route(logits, experts.per_token, experts.normalized, inputs.balance)?;
                    return Ok(BlockOutput::Routed { sum, normed, routing });
                }
            };
            residual = Residual { sum: Some(sum), branch: b.dropout(branch, self.config.dropout_rate)? };
        }
        Ok(BlockOutput::Residual(residual))
    }

    fn norm(&self, b: &Builder, norm: &NormModule) -> Result<ParamId, GraphError> {
        self.params.get(b, &format!("{}.weight", norm.name))
    }

    fn attention(
        &self,
        b: &mut Builder,
        attention: &AttentionModule,
        normed: Value,
        inputs: BlockInputs,
    ) -> Result<Value, ForwardError> {
        let expected = |what| not_fitting(self.config, what);
        let AttentionModule { heads, kv_heads, head_dim, window, causal, .. } = *attention;
        let read = if attention.reads_encoder {
            inputs.memory.ok_or_else(|| expected("an encoder's output"))?
        } else {
            normed
        };
        let mut q = self.params.linear(b, &attention.q, normed)?; // [T, heads · D]
        let mut k = self.params.linear(b, &attention.k, read)?; // [Tk, kv_heads · D]
        let v = self.params.linear(b, &attention.v, read)?; // [Tk, kv_heads · D]
        let bias = match &attention.positions {
            Some(Positions::Rope(rope)) => {
                b.rotary(rotary(rope, head_dim, self.config.max_positions));
                let [q_norm, k_norm] = match &attention.head_norms {
                    Some(norms) => norms.each_ref().map(Some),
                    None => [None, None],
                };
                q = self.rotated(b, q, heads, q_norm)?;
                k = self.rotated(b, k, kv_heads, k_norm)?;
                None
            }
            Some(Positions::Relative { .. }) => Some(inputs.bias.ok_or_else(|| expected("position biases"))?),
            None => None,
        };
        let options = AttentionOptions {
            heads,
            kv_heads,
            window,
            scale: attention.scale(),
            causal,
            dropout: self.config.dropout_rate,
        };
        let attended = b.attention_with([q, k, v], bias, options)?;
        self.params.linear(b, &attention.o, attended) // [T, H]
    }

    /// The heads of q or k, rotated; normed before where there is a norm.
    fn rotated(
        &self,
        b: &mut Builder,
        x: Value,
        heads: u64,
        norm: Option<&NormModule>,
    ) -> Result<Value, GraphError> {
        match norm {
            Some(norm) => b.head_norm_rope(x, self.norm(b, norm)?, heads, norm.options),
            None => b.rope(x, heads),
        }
    }

    fn feed_forward(
        &self,
        b: &mut Builder,
        feed_forward: &FeedForwardModule,
        normed: Value,
    ) -> Result<Value, ForwardError> {
        let FeedForwardModule { gate, up, down, activation } = feed_forward;
        let activated = if let Some(gate) = gate {
            let gate = self.params.linear(b, gate, normed)?; // [T, F]
            let up = self.params.linear(b, up, normed)?; // [T, F]
            b.gated_activation(*activation, gate, up)?
        } else {
            let up = self.params.linear(b, up, normed)?; // [T, F]
            b.activation(*activation, up)?
        };
        let dropped = b.dropout(activated, self.config.dropout_rate)?;
        self.params.linear(b, down, dropped) // [T, H]
    }

    /// What the experts make of their tokens, summed by token [T, H].
    pub(super) fn experts(
        &self,
        b: &mut Builder,
        experts: &ExpertsModule,
        normed: Value,
        routing: &Routing,
    ) -> Result<Value, ForwardError> {
        let x = b.gather_rows(normed, routing)?; // [T · k, H]
        let gate_up = |adapters: AdapterScales| adapters.fused_scale;
        let gate_up = self.params.grouped_linear(b, &experts.gate_up(), x, routing, gate_up)?; // [T · k, 2F]
        let gated = b.gated_rows(experts.activation, gate_up, routing)?; // [T · k, F]
        let down = |adapters: AdapterScales| adapters.scale;
        let y = self.params.grouped_linear(b, &experts.down(), gated, routing, down)?; // [T · k, H]
        Ok(b.combine_rows(y, routing)?)
    }
}
