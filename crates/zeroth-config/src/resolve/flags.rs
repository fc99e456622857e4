//! The flags of a training command that correspond to keys of the file, and their defaults.

use serde_json::{Map, Value};
use zeroth_base::{DType, Optimizer};

use crate::schema::AutoRule;

/// The given flags; `None` where one was not given.
#[derive(Debug, Clone, Default, PartialEq)]
#[allow(missing_docs, reason = "a field is the flag of its name")]
pub struct Flags {
    pub per_device_train_batch_size: Option<u64>,
    pub gradient_accumulation_steps: Option<u64>,
    pub learning_rate: Option<f64>,
    pub weight_decay: Option<f64>,
    pub adam_beta1: Option<f64>,
    pub adam_beta2: Option<f64>,
    pub adam_epsilon: Option<f64>,
    pub max_grad_norm: Option<f64>,
    /// --warmup-steps: steps from 1 on, below that a share of all.
    pub warmup_steps: Option<f64>,
    /// --warmup-ratio: a share of all steps, where --warmup-steps is absent or 0.
    pub warmup_ratio: Option<f64>,
    pub lr_scheduler_type: Option<String>,
    /// --lr-scheduler-kwargs, checked against the keys of `zeroth.lr_scheduler_kwargs`.
    pub lr_scheduler_kwargs: Map<String, Value>,
    /// --optim.
    pub optimizer: Option<Optimizer>,
    pub max_steps: Option<u64>,
    /// --bf16, --fp16, --fp32 or --torch-dtype.
    pub precision: Option<DType>,
    /// Whether --torch-dtype alone says the precision.
    pub precision_by_dtype: bool,
    pub gradient_checkpointing: Option<bool>,
    pub save_on_each_node: Option<bool>,
    /// --train-type lora: its learning rate is another by default.
    pub lora: bool,
}

/// The values of flags that were not given. ms-swift's, as its users rely on them.
impl Flags {
    pub(super) fn micro_batch(&self) -> u64 {
        self.per_device_train_batch_size.unwrap_or(1)
    }

    pub(super) fn accumulation(&self) -> u64 {
        self.gradient_accumulation_steps.unwrap_or(1)
    }

    pub(super) fn learning_rate(&self) -> f64 {
        self.learning_rate.unwrap_or(if self.lora { 1e-4 } else { 1e-5 })
    }

    pub(super) fn betas(&self) -> [f64; 2] {
        [self.adam_beta1.unwrap_or(0.9), self.adam_beta2.unwrap_or(0.95)]
    }

    pub(super) fn epsilon(&self) -> f64 {
        self.adam_epsilon.unwrap_or(1e-8)
    }

    pub(super) fn weight_decay(&self) -> f64 {
        self.weight_decay.unwrap_or(0.1)
    }

    pub(super) fn max_grad_norm(&self) -> f64 {
        self.max_grad_norm.unwrap_or(1.0)
    }

    /// The warm-up. As in Hugging Face, --warmup-steps wins over --warmup-ratio unless it is 0.
    pub(super) fn warmup(&self) -> WarmupLength {
        match (self.warmup_steps.unwrap_or(0.0), self.warmup_ratio) {
            (0.0, Some(ratio)) => WarmupLength::Ratio(ratio),
            (steps, _) => WarmupLength::Steps(steps),
        }
    }

    /// The value that a flag gives a key without a rule, with the flag and Hugging Face's name for it.
    pub(super) fn direct(&self, path: &str) -> Option<(Value, &'static str, &'static str)> {
        if path == "optimizer.type" {
            return Some((self.optimizer?.name().into(), "--optim", "optim"));
        }
        let parameter = path.strip_prefix("zeroth.lr_scheduler_kwargs.")?;
        let value = self.lr_scheduler_kwargs.get(parameter)?;
        Some((value.clone(), "--lr-scheduler-kwargs", "lr_scheduler_kwargs"))
    }
}

/// The warm-up that the flags ask for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum WarmupLength {
    /// Steps from 1 on, below that a share of all steps.
    Steps(f64),
    /// A share of all steps.
    Ratio(f64),
}

impl WarmupLength {
    /// Its number of steps in a run of `total`; a share is rounded up.
    pub(super) fn steps(self, total: Option<u64>) -> Option<u64> {
        match self {
            Self::Steps(steps) if steps == 0.0 || steps >= 1.0 => Some(steps as u64),
            Self::Ratio(0.0) => Some(0),
            Self::Steps(share) | Self::Ratio(share) => {
                total.map(|total| (total as f64 * share).ceil() as u64)
            }
        }
    }

    /// The flag that says so.
    pub(super) const fn flag(self) -> &'static str {
        match self {
            Self::Steps(_) => "--warmup-steps",
            Self::Ratio(_) => "--warmup-ratio",
        }
    }
}

/// The flag of an `"auto"` rule, whether it was given, and Hugging Face's name for it in mismatches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct RuleFlag {
    pub(super) flag: &'static str,
    pub(super) is_given: bool,
    /// Hugging Face's name in a mismatch; `None` where the file's value is taken without comparing.
    pub(super) hf: Option<&'static str>,
}

/// The flag that a rule reads. Rules that read none of the flags give `None`.
pub(super) fn rule_flag(rule: AutoRule, flags: &Flags) -> Option<RuleFlag> {
    let of = |flag, is_given, hf| Some(RuleFlag { flag, is_given, hf: Some(hf) });
    match rule {
        AutoRule::MicroBatch => of(
            "--per-device-train-batch-size",
            flags.per_device_train_batch_size.is_some(),
            "per_device_train_batch_size",
        ),
        AutoRule::Accumulation => of(
            "--gradient-accumulation-steps",
            flags.gradient_accumulation_steps.is_some(),
            "gradient_accumulation_steps",
        ),
        AutoRule::Clipping => of("--max-grad-norm", flags.max_grad_norm.is_some(), "max_grad_norm"),
        AutoRule::LearningRate | AutoRule::WarmupMaxLr => {
            of("--learning-rate", flags.learning_rate.is_some(), "learning_rate")
        }
        AutoRule::Betas => of(
            "--adam-beta1, --adam-beta2",
            flags.adam_beta1.is_some() || flags.adam_beta2.is_some(),
            "adam_beta1+adam_beta2",
        ),
        AutoRule::Epsilon => of("--adam-epsilon", flags.adam_epsilon.is_some(), "adam_epsilon"),
        AutoRule::WeightDecay => of("--weight-decay", flags.weight_decay.is_some(), "weight_decay"),
        AutoRule::Fp16 => of(precision_flag(flags), flags.precision.is_some(), "fp16|fp16_full_eval"),
        AutoRule::Bf16 => of(precision_flag(flags), flags.precision.is_some(), "bf16|bf16_full_eval"),
        AutoRule::TotalSteps => {
            of("--max-steps", flags.max_steps.is_some(), "num_training_steps (calculated)")
        }
        AutoRule::WarmupSteps => {
            let is_given = flags.warmup_steps.is_some() || flags.warmup_ratio.is_some();
            of(flags.warmup().flag(), is_given, "warmup_steps")
        }
        AutoRule::NodeLocal => Some(RuleFlag {
            flag: "--save-on-each-node",
            is_given: flags.save_on_each_node == Some(true),
            hf: None,
        }),
        AutoRule::TrainBatch
        | AutoRule::WarmupMinLr
        | AutoRule::HiddenSquared
        | AutoRule::NineTenthsHiddenSquared
        | AutoRule::TenHidden
        | AutoRule::Blocks
        | AutoRule::Group
        | AutoRule::UntestedOptimizer => None,
    }
}

fn precision_flag(flags: &Flags) -> &'static str {
    match flags.precision {
        Some(_) if flags.precision_by_dtype => "--torch-dtype",
        Some(DType::F16) => "--fp16",
        Some(DType::F32) => "--fp32",
        Some(DType::Bf16) | None => "--bf16",
    }
}
