//! `config new`: generates a ZeRO config from a micro-batch and an accumulation, with safe defaults for the rest.
//!
//! Also a library function:
//!
//! ```
//! use zeroth_config::generate::{ZeroConfig, build_config};
//! let config = build_config(&ZeroConfig { offload: true, ..ZeroConfig::new(2, 32) });
//! assert_eq!(config["train_batch_size"], 64);
//! assert_eq!(config["zero_optimization"]["offload_param"]["device"], "cpu");
//! ```

use std::path::Path;

use serde_json::{Map, Value, json};
use zeroth_base::{DType, PublishError, counted, format_bytes, publish};

/// The inputs of a generated config.
#[derive(Debug, Clone, PartialEq)]
pub struct ZeroConfig {
    /// Samples one rank computes at a time.
    pub micro_batch_size: u64,
    /// Micro-batches before the optimizer steps.
    pub gradient_accumulation: u64,
    /// The ZeRO stage, 0 to 3.
    pub stage: u8,
    /// Whether parameters live in host memory.
    pub offload: bool,
    /// bf16; or fp16, whose loss scale begins at 2^12; or fp32, which turns bf16 off.
    pub precision: DType,
    /// Ranks; they multiply `train_batch_size`.
    pub world_size: u64,
    /// Whether backward recomputes blocks.
    pub checkpointing: bool,
    /// Fine-grained keys of `zero_optimization`, each as it is to be written.
    pub fine_grained: Vec<(&'static str, Value)>,
}

/// The keys of `zero_optimization` that `config new` can set one by one.
pub const FINE_GRAINED: [&str; 7] = [
    "sub_group_size",
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_gather_16bit_weights_on_model_save",
];

impl ZeroConfig {
    /// Stage 3 in bf16 without offload, for one rank.
    pub fn new(micro_batch_size: u64, gradient_accumulation: u64) -> Self {
        Self {
            micro_batch_size,
            gradient_accumulation,
            stage: 3,
            offload: false,
            precision: DType::Bf16,
            world_size: 1,
            checkpointing: false,
            fine_grained: Vec::new(),
        }
    }

    /// The global batch: micro-batch × accumulation × ranks.
    pub fn train_batch_size(&self) -> u64 {
        self.micro_batch_size.saturating_mul(self.gradient_accumulation).saturating_mul(self.world_size)
    }
}

/// The config, its fields in the order in which people read them.
pub fn build_config(config: &ZeroConfig) -> Value {
    let device = if config.offload { "cpu" } else { "none" };
    let mut zero = Map::new();
    zero.insert("stage".to_owned(), config.stage.into());
    zero.insert("offload_param".to_owned(), json!({"device": device, "pin_memory": config.offload}));
    zero.insert("overlap_comm".to_owned(), true.into());
    zero.insert("contiguous_gradients".to_owned(), true.into());
    for (key, value) in &config.fine_grained {
        zero.insert((*key).to_owned(), value.clone());
    }
    let mut root = Map::new();
    root.insert("train_batch_size".to_owned(), config.train_batch_size().into());
    root.insert("zero_optimization".to_owned(), Value::Object(zero));
    root.insert("bf16".to_owned(), json!({"enabled": config.precision == DType::Bf16}));
    if config.precision == DType::F16 {
        root.insert("fp16".to_owned(), json!({"enabled": true, "loss_scale": 0, "initial_scale_power": 12}));
    }
    root.insert("gradient_accumulation_steps".to_owned(), config.gradient_accumulation.into());
    root.insert("steps_per_print".to_owned(), 50.into());
    root.insert("gradient_clipping".to_owned(), 1.0.into());
    if config.checkpointing {
        root.insert("activation_checkpointing".to_owned(), json!({"cpu_checkpointing": false}));
    }
    Value::Object(root)
}

/// The text of a config file: JSON with an indent of 2 and a line end.
pub fn to_text(config: &Value) -> String {
    format!("{config:#}\n")
}

/// Writes a config so that it appears whole or not at all.
pub fn save_config(config: &Value, path: &Path) -> Result<(), PublishError> {
    publish(path, to_text(config).as_bytes())
}

/// The memory a config is chosen for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryFound {
    /// Free bytes of one device, or of the host where there is no GPU.
    pub device: u64,
    /// Whether the device is a GPU, so that host memory is somewhere else.
    pub is_gpu: bool,
}

/// Batch sizes and offload that fit the memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbedBatch {
    /// Samples one rank computes at a time.
    pub micro_batch_size: u64,
    /// Micro-batches before the optimizer steps.
    pub gradient_accumulation: u64,
    /// Whether parameters go to host memory.
    pub offload: bool,
    /// One sentence with the numbers.
    pub reason: String,
}

/// Below this much free device memory a config is for a small GPU: those of 24 GB report up to 25.8e9 bytes.
const SMALL_DEVICE: u64 = 32_000_000_000;
/// What activations of one sample of a usual length may take at the least.
const SAMPLE: u64 = 8_000_000_000;

/// Chooses micro-batch, accumulation and offload for the memory found. With a parameter count by the 16 bytes a
/// parameter that stage 3 shards across ranks; without, by the size of the device alone.
pub fn choose(memory: MemoryFound, params: Option<u64>, world_size: u64) -> ProbedBatch {
    let free = memory.device;
    let found = format_bytes(free);
    let Some(params) = params else {
        let small = free < SMALL_DEVICE;
        let offload = small && memory.is_gpu;
        let (micro_batch_size, gradient_accumulation) = if small { (1, 32) } else { (2, 8) };
        let reason = if small && !memory.is_gpu {
            format!("{found} of host memory is the device here: one sample at a time; nothing to offload to")
        } else if small {
            format!("{found} free on the device is little: one sample at a time, parameters in host memory")
        } else {
            format!("{found} free on the device: two samples at a time, everything on the device")
        };
        return ProbedBatch { micro_batch_size, gradient_accumulation, offload, reason };
    };
    let states = params.saturating_mul(16).div_ceil(world_size.max(1));
    // A fifth is left to gathered parameters, activations and the driver.
    let fits = states <= free / 5 * 4;
    let ranks = counted(world_size, "rank");
    let shown = format!("16 bytes a parameter on {ranks} are {}", format_bytes(states));
    if !fits {
        // Without parameters 14 of the 16 bytes stay on the device.
        let rest = params.saturating_mul(14).div_ceil(world_size.max(1));
        let so = if !memory.is_gpu {
            "more ranks or memory are needed".to_owned()
        } else if rest <= free / 5 * 4 {
            format!("parameters go to host memory, which leaves {}", format_bytes(rest))
        } else {
            format!(
                "parameters go to host memory, and the {} left are still too much: use more ranks, or the preset \
                 zero3_offload, which moves the optimizer too",
                format_bytes(rest)
            )
        };
        let reason = format!("{shown}, more than four fifths of the {found} free: {so}");
        return ProbedBatch {
            micro_batch_size: 1,
            gradient_accumulation: 32,
            offload: memory.is_gpu,
            reason,
        };
    }
    let micro_batch_size = match (free - states) / SAMPLE {
        0 | 1 => 1,
        2..=5 => 2,
        _ => 4,
    };
    let reason =
        format!("{shown} of the {found} free; the rest has room for a micro-batch of {micro_batch_size}");
    ProbedBatch { micro_batch_size, gradient_accumulation: 16 / micro_batch_size, offload: false, reason }
}

/// One of the three configs that `config tiers` writes.
#[derive(Debug, Clone, PartialEq)]
pub struct TierConfig {
    /// `small`, `medium` or `large`.
    pub name: &'static str,
    /// Whom it is for.
    pub about: &'static str,
    /// The config.
    pub config: ZeroConfig,
}

/// The three tiers: a small GPU, several large ones, and long rows on these.
pub fn tiers(precision: DType, world_size: u64) -> [TierConfig; 3] {
    let of =
        |micro, accumulation| ZeroConfig { precision, world_size, ..ZeroConfig::new(micro, accumulation) };
    [
        TierConfig {
            name: "small",
            about: "one small GPU: one sample at a time, parameters in host memory",
            config: ZeroConfig { offload: true, ..of(1, 32) },
        },
        TierConfig {
            name: "medium",
            about: "several large GPUs: everything on the device",
            config: of(2, 8),
        },
        TierConfig {
            name: "large",
            about: "long rows on large GPUs: more accumulation, blocks recomputed in backward",
            config: ZeroConfig { checkpointing: true, ..of(2, 16) },
        },
    ]
}

/// The tier that suits this much free device memory.
pub fn tier_for(device_memory: u64) -> &'static str {
    if device_memory < SMALL_DEVICE { "small" } else { "medium" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check;
    use crate::read::{ConfigSource, parse};

    #[test]
    fn the_defaults_give_the_manuals_fields_in_their_order() {
        let expected = r#"{
  "train_batch_size": 16,
  "zero_optimization": {
    "stage": 3,
    "offload_param": {
      "device": "none",
      "pin_memory": false
    },
    "overlap_comm": true,
    "contiguous_gradients": true
  },
  "bf16": {
    "enabled": true
  },
  "gradient_accumulation_steps": 8,
  "steps_per_print": 50,
  "gradient_clipping": 1.0
}
"#;
        assert_eq!(to_text(&build_config(&ZeroConfig::new(2, 8))), expected);
    }

    #[test]
    fn fp16_has_its_block_and_turns_bf16_off() {
        let config = build_config(&ZeroConfig { precision: DType::F16, ..ZeroConfig::new(1, 4) });
        assert_eq!(config["fp16"], json!({"enabled": true, "loss_scale": 0, "initial_scale_power": 12}));
        assert_eq!(config["bf16"], json!({"enabled": false}));
    }

    #[test]
    fn ranks_multiply_the_batch() {
        let config = build_config(&ZeroConfig { world_size: 8, ..ZeroConfig::new(2, 8) });
        assert_eq!(config["train_batch_size"], 128);
    }

    #[test]
    fn whatever_is_generated_passes_the_check() {
        let generated = tiers(DType::F16, 4)
            .into_iter()
            .chain(tiers(DType::Bf16, 1))
            .map(|tier| to_text(&build_config(&tier.config)));
        for text in generated {
            let document = parse(ConfigSource::from_text("generated", text)).unwrap();
            let report = check::check(&document);
            assert!(
                report.is_ok(false),
                "{:#?}",
                report.at_least(check::Severity::Error).collect::<Vec<_>>()
            );
        }
    }

    #[test]
    fn memory_decides_what_is_not_typed() {
        let gpu = |device| MemoryFound { device, is_gpu: true };
        let small = choose(gpu(24_000_000_000), None, 1);
        assert_eq!((small.micro_batch_size, small.gradient_accumulation, small.offload), (1, 32, true));
        let large = choose(gpu(80_000_000_000), None, 1);
        assert_eq!((large.micro_batch_size, large.gradient_accumulation, large.offload), (2, 8, false));
        // 8B parameters: 16 · 8e9 / 8 = 16 GB a rank, and 64 GB are left of 80.
        let fits = choose(gpu(80_000_000_000), Some(8_000_000_000), 8);
        assert_eq!((fits.micro_batch_size, fits.offload), (4, false));
        let tight = choose(gpu(80_000_000_000), Some(8_000_000_000), 1);
        assert!(tight.offload && tight.reason.contains("128 GB"), "{}", tight.reason);
        let host = choose(MemoryFound { device: 16_000_000_000, is_gpu: false }, None, 1);
        assert!(!host.offload, "without a GPU there is nowhere to offload to");
    }
}
