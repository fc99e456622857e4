//! Translates a config and a model into a request for the planner, which depends on neither.

use zeroth_config::resolve::{Origin, Resolved, Setting};
use zeroth_config::schema::{OffloadDevice, Values};
use zeroth_machine::Rates;
use zeroth_model::{Activation, Layer, Lora, LoraError, ModelConfig, ParameterTable, lora_table};
use zeroth_plan::{ActivationShape, Adapters, Block, FeedForward, Freedom, Offload, Placement, Shape, Stack};
use zeroth_program::Settings;

/// State offloaded to disk, which cannot be planned yet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{section}.device is \"nvme\": planning of NVMe offload is not yet built; use \"cpu\" or \"none\"")]
pub struct NvmeOffload {
    /// The config section.
    pub section: &'static str,
}

/// The placement of model states under a resolved config.
pub fn placement(
    name: &str,
    config: &Resolved,
    table: Option<&ParameterTable>,
) -> Result<Placement, NvmeOffload> {
    let Values { zero, offload_param, offload_optimizer, .. } = &config.values;
    let stage = zero.stage;
    let on_host = |section: &'static str, device: OffloadDevice, least: u8| -> Result<bool, NvmeOffload> {
        match device {
            // Below its stage nothing is partitioned, so nothing is offloaded; `config check` says so too.
            _ if stage < least => Ok(false),
            OffloadDevice::Nvme => Err(NvmeOffload { section }),
            device => Ok(device == OffloadDevice::Cpu),
        }
    };
    let optimizer = on_host("zero_optimization.offload_optimizer", offload_optimizer.device, 1)?;
    let parameters = on_host("zero_optimization.offload_param", offload_param.device, 3)?;
    let offload = match (optimizer, parameters) {
        (false, false) => Offload::None,
        (true, false) => Offload::Optimizer,
        (false, true) => Offload::Parameters,
        (true, true) => Offload::OptimizerAndParameters,
    };
    let threshold = zero.stage3_param_persistence_threshold;
    let persistent = table.map_or(0, |table| {
        let elements = table.iter().map(zeroth_model::Parameter::elements);
        elements.filter(|elements| *elements <= threshold).fold(0, |kept: u64, elements| {
            if kept + elements <= zero.stage3_model_persistence_threshold { kept + elements } else { kept }
        })
    });
    Ok(Placement {
        persistent,
        settings: Settings::from_config(config),
        // Rates are measured by runs: without them state stays where the stream has it.
        freedom: freedom(config, None),
        ..Placement::new(name, stage, offload)
    })
}

/// What the config leaves open, so that runs and plans choose it to fit. `update` are the measured rates of a rank's share
/// of the machine.
pub fn freedom(config: &Resolved, update: Option<Rates>) -> Freedom {
    let checkpoints = |setting: &Setting| {
        setting.key.path.starts_with("activation_checkpointing") && setting.origin != Origin::Default
    };
    Freedom {
        recompute: is_open(config, "zeroth.recompute") && !config.settings().iter().any(checkpoints),
        prefetch: is_open(config, "zero_optimization.stage3_prefetch_bucket_size"),
        micro_batch: is_open(config, "train_micro_batch_size_per_gpu")
            && is_open(config, "gradient_accumulation_steps"),
        frozen: is_open(config, "zeroth.frozen"),
        update,
    }
}

/// Whether a key was given neither in the file nor as a flag.
pub fn is_open(config: &Resolved, key: &str) -> bool {
    let origin = config.get(key).map(|setting| &setting.origin);
    !matches!(origin, Some(Origin::File(_) | Origin::Flag(_)))
}

/// The model's shape, as the planner needs it. `lengths` are the tokens of the longest sequence, and of the longest target
/// of an encoder-decoder.
pub fn shape(
    model: &ModelConfig,
    table: &ParameterTable,
    micro_batch: u64,
    [max_length, max_target_length]: [u64; 2],
    recompute: bool,
) -> Shape {
    Shape {
        largest_unit: table.largest_unit().map_or(0, zeroth_model::Unit::elements),
        activations: activations(model),
        micro_batch,
        max_length,
        max_target_length,
        recompute,
    }
}

/// The parameters that LoRA adds to this model.
pub fn adapters(table: &ParameterTable, lora: &Lora) -> Result<Adapters, LoraError> {
    let own = lora_table(table, lora)?;
    Ok(Adapters {
        params: own.total(),
        largest_unit: own.largest_unit().map_or(0, zeroth_model::Unit::elements),
    })
}

fn activations(model: &ModelConfig) -> ActivationShape {
    let feed_forward = |layer: &Layer| match (layer.experts(), layer.feed_forward()) {
        (Some(experts), _) => Some(FeedForward::Experts {
            width: experts.width,
            per_token: experts.per_token,
            experts: experts.count,
        }),
        (None, Some(dense)) => {
            let width = dense.up.out;
            Some(match (&dense.gate, dense.activation) {
                (Some(_), _) => FeedForward::Gated { width },
                (None, Activation::Relu) => FeedForward::Relu { width },
                (None, Activation::Silu | Activation::Gelu | Activation::GeluTanh) => {
                    FeedForward::Gelu { width }
                }
            })
        }
        (None, None) => None,
    };
    let mut stacks: Vec<Stack> = Vec::new();
    for layer in model.all_layers() {
        let (Some(attention), Some(feed_forward)) = (layer.attention(), feed_forward(layer)) else {
            continue;
        };
        let block = Block {
            heads: attention.heads,
            kv_heads: attention.kv_heads,
            head_dim: attention.head_dim,
            qk_norm: attention.head_norms.is_some(),
            cross_attention: layer.attentions().any(|attention| attention.reads_encoder),
            feed_forward,
        };
        match stacks.iter_mut().find(|stack| stack.block == block) {
            Some(stack) => stack.blocks += 1,
            None => stacks.push(Stack { blocks: 1, block }),
        }
    }
    ActivationShape { hidden: model.hidden, vocab: model.vocab, stacks }
}
