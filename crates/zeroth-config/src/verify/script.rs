//! Reads the flags of a training script, and identifies its trainer.

use zeroth_base::DType;

use super::words::Arguments;
use crate::resolve::Flags;
use crate::trainer_defaults::{ForeignTrainer, number, swift_accumulation};

/// The trainer that reads the script's flags and fills `"auto"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trainer {
    /// Hugging Face's Trainer, recognised by its flags.
    HuggingFace,
    /// ms-swift.
    Swift,
    Zeroth,
    /// A custom script, which passes the file to DeepSpeed unchanged.
    Own,
}

impl Trainer {
    /// Whether the trainer compares flags with the file and stops at a mismatch.
    pub(super) fn compares(self) -> bool {
        self != Self::Own
    }

    /// The trainer's name in messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::HuggingFace => "Hugging Face's Trainer",
            Self::Swift => "ms-swift",
            Self::Zeroth => "zeroth",
            Self::Own => "the script",
        }
    }

    /// Adds the defaults of flags that are not given, if the trainer compares them with the file.
    ///
    /// zeroth does not: the file overrides flags that are not given.
    pub(super) fn with_defaults(self, given: &Flags, ranks: u64) -> Option<Flags> {
        let mut flags = given.clone();
        let trainer = match self {
            Self::HuggingFace => ForeignTrainer::HuggingFace,
            Self::Swift => ForeignTrainer::Swift,
            Self::Zeroth | Self::Own => return None,
        };
        let of = |flag: &str| number(trainer, flag, given.lora);
        let micro = of("per-device-train-batch-size").map_or(1, |micro| micro as u64);
        let micro = *flags.per_device_train_batch_size.get_or_insert(micro);
        flags.gradient_accumulation_steps.get_or_insert(match self {
            Self::Swift => swift_accumulation(micro, ranks),
            _ => 1,
        });
        flags.learning_rate = flags.learning_rate.or(of("learning-rate"));
        flags.weight_decay = flags.weight_decay.or(of("weight-decay"));
        flags.adam_beta1.get_or_insert(0.9);
        flags.adam_beta2 = flags.adam_beta2.or(of("adam-beta2"));
        flags.adam_epsilon.get_or_insert(1e-8);
        flags.max_grad_norm.get_or_insert(1.0);
        flags.warmup_steps.get_or_insert(0.0);
        if self == Self::HuggingFace {
            flags.precision.get_or_insert(DType::F32);
        }
        Some(flags)
    }
}

/// The parsed flags of a script.
#[derive(Debug, Clone, Default)]
pub(super) struct ScriptFlags {
    /// Flags that correspond to keys of the file. The precision follows later, from the next four fields and the file.
    pub(super) flags: Flags,
    pub(super) bf16: Option<bool>,
    pub(super) fp16: Option<bool>,
    pub(super) fp32: Option<bool>,
    /// `--torch_dtype`, the dtype in which weights are loaded.
    pub(super) dtype: Option<DType>,
    /// `--batch_size` or `--train_batch_size`, whose meaning depends on the script: flag, value.
    pub(super) own_batch: Option<(String, u64)>,
    /// Configs that the command names: flag, value.
    pub(super) configs: Vec<(String, String)>,
    /// A settings file that the script reads.
    pub(super) settings_file: Option<String>,
    /// Flags whose value cannot be parsed: flag, value, what was expected.
    pub(super) unreadable: Vec<(String, String, &'static str)>,
}

/// Flags of Hugging Face's `TrainingArguments` that hardly any other script has.
const HUGGING_FACE: &[&str] = &[
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "num_train_epochs",
    "overwrite_output_dir",
    "lr_scheduler_type",
    "warmup_ratio",
    "max_grad_norm",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "evaluation_strategy",
    "eval_strategy",
    "save_strategy",
    "save_total_limit",
    "logging_strategy",
    "report_to",
    "do_train",
];

/// Guesses the trainer from the flags, for programs that do not reveal it.
pub(super) fn trainer_by_flags(arguments: &Arguments) -> Trainer {
    if arguments.has(HUGGING_FACE) { Trainer::HuggingFace } else { Trainer::Own }
}

impl ScriptFlags {
    pub(super) fn read(arguments: &mut Arguments, trainer: Trainer) -> Self {
        let flags = Flags {
            per_device_train_batch_size: arguments.whole(&[
                "per_device_train_batch_size",
                "train_micro_batch_size_per_gpu",
                "micro_batch_size",
                "per_gpu_train_batch_size",
            ]),
            gradient_accumulation_steps: arguments
                .whole(&["gradient_accumulation_steps", "gradient_accumulation"]),
            learning_rate: arguments.number(&["learning_rate", "lr"]),
            weight_decay: arguments.number(&["weight_decay"]),
            adam_beta1: arguments.number(&["adam_beta1"]),
            adam_beta2: arguments.number(&["adam_beta2"]),
            adam_epsilon: arguments.number(&["adam_epsilon"]),
            max_grad_norm: arguments.number(&["max_grad_norm", "gradient_clipping"]),
            warmup_steps: warmup(arguments),
            warmup_ratio: None,
            lr_scheduler_type: arguments.text(&["lr_scheduler_type"]).map(|(_, name)| name),
            lr_scheduler_kwargs: serde_json::Map::new(),
            optimizer: None,
            max_steps: max_steps(arguments),
            precision: None,
            precision_by_dtype: false,
            gradient_checkpointing: arguments.switch(&["gradient_checkpointing"]),
            save_on_each_node: arguments.switch(&["save_on_each_node"]),
            lora: is_lora(arguments, trainer),
        };
        let own = ["batch_size", "train_batch_size"];
        Self {
            flags,
            bf16: arguments.switch(&["bf16"]),
            fp16: arguments.switch(&["fp16"]),
            fp32: arguments.switch(&["fp32"]),
            dtype: arguments.text(&["torch_dtype", "dtype"]).and_then(|(_, name)| precision(&name)),
            own_batch: arguments.whole(&own).and_then(|size| Some((arguments.text(&own)?.0, size))),
            configs: ["deepspeed", "deepspeed_config", "ds_config"]
                .iter()
                // `--deepspeed` without a value, or with `true`, is DeepSpeed's own switch.
                .filter_map(|name| arguments.text(&[name]))
                .filter(|(_, value)| !matches!(value.to_ascii_lowercase().as_str(), "true" | "false"))
                .collect(),
            settings_file: arguments.leading.iter().find(|word| is_settings(word)).cloned(),
            unreadable: std::mem::take(&mut arguments.unreadable),
        }
    }
}

/// `--max_steps`, unless it is negative: Hugging Face's Trainer then counts epochs.
fn max_steps(arguments: &mut Arguments) -> Option<u64> {
    let by_epochs = arguments.text(&["max_steps"]).is_some_and(|(_, steps)| steps.starts_with('-'));
    if by_epochs { None } else { arguments.whole(&["max_steps"]) }
}

/// Warmup steps, or below 1 the fraction of steps. `--warmup_steps` overrides `--warmup_ratio` unless it is 0.
fn warmup(arguments: &mut Arguments) -> Option<f64> {
    let steps = arguments.number(&["warmup_steps", "num_warmup_steps"]);
    let ratio = arguments.number(&["warmup_ratio"]).filter(|ratio| (0.0..1.0).contains(ratio));
    steps.filter(|steps| *steps > 0.0).or(ratio).or(steps)
}

/// Whether the script trains LoRA, which is the default of ms-swift.
fn is_lora(arguments: &Arguments, trainer: Trainer) -> bool {
    match arguments.text(&["train_type", "tuner_type", "sft_type", "finetuning_type"]) {
        Some((_, name)) => name == "lora",
        None => trainer == Trainer::Swift,
    }
}

fn is_settings(word: &str) -> bool {
    [".yaml", ".yml", ".json"].iter().any(|ending| word.ends_with(ending))
}

/// Parses a dtype by its name in PyTorch, Hugging Face or accelerate.
pub(super) fn precision(name: &str) -> Option<DType> {
    match name.trim_start_matches("torch.") {
        "bf16" | "bfloat16" => Some(DType::Bf16),
        "fp16" | "float16" | "half" => Some(DType::F16),
        "fp32" | "float32" | "float" | "no" => Some(DType::F32),
        _ => None,
    }
}
