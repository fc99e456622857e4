//! The blocks of a decoder-only model, from what its config says of all of them.

use zeroth_base::ActivationFn;
use zeroth_graph::NormOptions;

use crate::architecture::Mixture;
use crate::layer::{
    AttentionModule, Branch, ExpertsModule, FeedForwardModule, Layer, LinearModule, NormModule, Positions,
    Sublayer,
};
use crate::rope::Rope;
use crate::table::ParameterRole;

/// What a config says of its blocks.
pub(super) struct BlockOfConfig {
    pub(super) hidden: u64,
    pub(super) heads: u64,
    pub(super) kv_heads: u64,
    pub(super) head_dim: u64,
    pub(super) score_width: u64,
    pub(super) qkv_bias: bool,
    pub(super) output_bias: bool,
    pub(super) qk_norm: bool,
    pub(super) rope: Rope,
    pub(super) ffn: u64,
    pub(super) mlp_bias: bool,
    pub(super) activation: ActivationFn,
    pub(super) norm: NormOptions,
    pub(super) mixture: Option<(Mixture, ExpertsOfConfig)>,
}

/// What a config says of its experts.
pub(super) struct ExpertsOfConfig {
    pub(super) count: u64,
    pub(super) per_token: u64,
    pub(super) width: u64,
    pub(super) normalized: bool,
    pub(super) aux_loss: Option<f64>,
    /// For each block, whether it has experts; a block without them has the dense feed-forward part.
    pub(super) in_block: Vec<bool>,
}

impl BlockOfConfig {
    pub(super) fn layer(&self, index: usize, window: Option<u64>) -> Layer {
        let at = format!("model.layers.{index}");
        let part =
            |norm: &str, branch| Sublayer { norm: self.norm(format!("{at}.{norm}"), self.hidden), branch };
        let second = match &self.mixture {
            Some((mixture, experts)) if experts.in_block[index] => self.experts(&at, mixture, experts),
            _ => self.feed_forward(&at),
        };
        Layer {
            parts: vec![
                part("input_layernorm", self.attention(&at, window)),
                part("post_attention_layernorm", second),
            ],
        }
    }

    const fn norm(&self, name: String, width: u64) -> NormModule {
        NormModule { name, width, options: self.norm }
    }

    fn attention(&self, at: &str, window: Option<u64>) -> Branch {
        let Self { hidden, heads, kv_heads, head_dim, qkv_bias, output_bias, .. } = *self;
        let linear = |part: &str, role, shape, bias| {
            LinearModule::new(format!("{at}.self_attn.{part}"), role, shape, bias)
        };
        let head_norm = |part: &str| self.norm(format!("{at}.self_attn.{part}"), head_dim);
        let [q, kv] = [heads, kv_heads].map(|heads| heads * head_dim);
        Branch::Attention(Box::new(AttentionModule {
            q: linear("q_proj", ParameterRole::Query, [q, hidden], qkv_bias),
            k: linear("k_proj", ParameterRole::Key, [kv, hidden], qkv_bias),
            v: linear("v_proj", ParameterRole::Value, [kv, hidden], qkv_bias),
            o: linear("o_proj", ParameterRole::AttentionOutput, [hidden, q], output_bias),
            head_norms: self.qk_norm.then(|| ["q_norm", "k_norm"].map(head_norm)),
            heads,
            kv_heads,
            head_dim,
            score_width: self.score_width,
            window,
            causal: true,
            reads_encoder: false,
            positions: Some(Positions::Rope(self.rope.clone())),
        }))
    }

    fn feed_forward(&self, at: &str) -> Branch {
        let Self { hidden, ffn, mlp_bias: bias, activation, .. } = *self;
        let linear =
            |part: &str, role, shape| LinearModule::new(format!("{at}.mlp.{part}"), role, shape, bias);
        Branch::FeedForward(FeedForwardModule {
            gate: Some(linear("gate_proj", ParameterRole::FeedForwardInput, [ffn, hidden])),
            up: linear("up_proj", ParameterRole::FeedForwardInput, [ffn, hidden]),
            down: linear("down_proj", ParameterRole::FeedForwardOutput, [hidden, ffn]),
            activation,
        })
    }

    fn experts(&self, at: &str, mixture: &Mixture, experts: &ExpertsOfConfig) -> Branch {
        let (name, shape) = (format!("{at}.mlp.gate"), [experts.count, self.hidden]);
        Branch::Experts(ExpertsModule {
            router: LinearModule::new(name, ParameterRole::Router, shape, false),
            stored_router: format!("{at}.{}.gate", mixture.module),
            name: format!("{at}.mlp.experts"),
            stored_name: format!("{at}.{}.experts", mixture.module),
            projections: mixture.projections,
            count: experts.count,
            per_token: experts.per_token,
            width: experts.width,
            normalized: experts.normalized,
            activation: self.activation,
        })
    }
}
