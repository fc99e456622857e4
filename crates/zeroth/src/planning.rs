//! From a config and a model to a question for the planner: the config knows where state lives, the model knows its
//! shapes, the planner knows neither.

use zeroth_config::resolve::Resolved;
use zeroth_model::{Activation, Lora, LoraError, ModelConfig, ParameterTable, lora_table};
use zeroth_plan::{ActivationShape, Adapters, Block, FeedForward, Offload, Placement, Shape, Stack};

/// State on disk is not planned yet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{section}.device is \"nvme\": planning of state on disk is not yet built; use \"cpu\" or \"none\"")]
pub struct OnDisk {
    /// The section that says so.
    pub section: &'static str,
}

/// Where a resolved config puts the states of a model with this table.
pub fn placement(name: &str, config: &Resolved, table: Option<&ParameterTable>) -> Result<Placement, OnDisk> {
    let stage = config.whole("zero_optimization.stage").unwrap_or(0) as u8;
    let on_host = |section: &'static str, least: u8| -> Result<bool, OnDisk> {
        match config.text(&format!("{section}.device")) {
            // Below its stage nothing is cut, so nothing is moved: `config check` says so too.
            _ if stage < least => Ok(false),
            Some("nvme") => Err(OnDisk { section }),
            device => Ok(device == Some("cpu")),
        }
    };
    let optimizer = on_host("zero_optimization.offload_optimizer", 1)?;
    let parameters = on_host("zero_optimization.offload_param", 3)?;
    let offload = match (optimizer, parameters) {
        (false, false) => Offload::None,
        (true, false) => Offload::Optimizer,
        (false, true) => Offload::Parameters,
        (true, true) => Offload::OptimizerAndParameters,
    };
    let size = |key: &str| config.whole(&format!("zero_optimization.{key}")).unwrap_or(0);
    let threshold = size("stage3_param_persistence_threshold");
    let persistent = table.map_or(0, |table| {
        let elements = table.iter().map(zeroth_model::Parameter::elements);
        elements.filter(|elements| *elements <= threshold).sum()
    });
    Ok(Placement {
        reduce_bucket: size("reduce_bucket_size"),
        prefetch: size("stage3_prefetch_bucket_size"),
        max_live: size("stage3_max_live_parameters"),
        max_in_cpu: config.whole("zero_optimization.offload_param.max_in_cpu"),
        persistent,
        overlap: config.is_on("zero_optimization.overlap_comm"),
        ..Placement::new(name, stage, offload)
    })
}

/// What the planner asks of a model's shape.
pub fn shape(
    model: &ModelConfig,
    table: &ParameterTable,
    micro_batch: u64,
    max_length: u64,
    recompute: bool,
) -> Shape {
    Shape {
        largest_unit: table.largest_unit().map_or(0, zeroth_model::Unit::elements),
        activations: activations(model),
        micro_batch,
        max_length,
        recompute,
    }
}

/// LoRA's own parameters on this model.
pub fn adapters(table: &ParameterTable, lora: &Lora) -> Result<Adapters, LoraError> {
    let own = lora_table(table, lora)?;
    Ok(Adapters {
        params: own.total(),
        largest_unit: own.largest_unit().map_or(0, zeroth_model::Unit::elements),
    })
}

fn activations(model: &ModelConfig) -> ActivationShape {
    let dense = match (model.gated, model.activation) {
        (true, _) => FeedForward::Gated { width: model.ffn },
        (false, Activation::Relu) => FeedForward::Relu { width: model.ffn },
        (false, _) => FeedForward::Gelu { width: model.ffn },
    };
    let block = |feed_forward, cross_attention| Block {
        heads: model.heads,
        kv_heads: model.kv_heads,
        head_dim: model.head_dim,
        qk_norm: model.qk_norm,
        cross_attention,
        feed_forward,
    };
    let mut stacks = Vec::new();
    if model.encoder_blocks > 0 {
        stacks.push(Stack { blocks: model.encoder_blocks, block: block(dense, false) });
    }
    let cross_attention = model.encoder_blocks > 0;
    let with_experts = (0..model.blocks).filter(|index| model.has_experts(*index)).count() as u64;
    if let Some(experts) = model.experts.as_ref().filter(|_| with_experts > 0) {
        let feed_forward = FeedForward::Experts {
            width: experts.width,
            per_token: experts.per_token,
            experts: experts.count,
        };
        stacks.push(Stack { blocks: with_experts, block: block(feed_forward, cross_attention) });
    }
    if model.blocks > with_experts {
        stacks.push(Stack { blocks: model.blocks - with_experts, block: block(dense, cross_attention) });
    }
    ActivationShape { hidden: model.hidden, vocab: model.vocab, stacks }
}
