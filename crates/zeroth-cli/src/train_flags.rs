//! Training flags that correspond to config keys, with Hugging Face's names.

use clap::Args;
use serde_json::{Map, Value};
use zeroth::base::{DType, Optimizer};
use zeroth::config::resolve::Flags;
use zeroth::config::schema::{self, HF_SCHEDULES};

use crate::optimizer_names::optimizer;
use crate::precision_flags::{PrecisionFlags, TorchDtype, torch_dtype};
use crate::schedule_kwargs::schedule_kwargs;
use crate::value_args::whole;

/// The flags as given.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Training flags, with Hugging Face's names")]
pub(crate) struct TrainFlags {
    /// Micro-batch size per rank [default: 1]
    #[arg(long, value_name = "N", value_parser = whole(1..))]
    pub(crate) per_device_train_batch_size: Option<u64>,
    /// Micro-batches per optimizer step [default: 1]
    #[arg(long, value_name = "N", value_parser = whole(1..))]
    pub(crate) gradient_accumulation_steps: Option<u64>,
    /// Learning rate [default: 1e-5, LoRA 1e-4]
    #[arg(long, alias = "lr", value_name = "X", allow_hyphen_values = true, value_parser = learning_rate)]
    pub(crate) learning_rate: Option<f64>,
    /// Weight decay, not on biases and norms [default: 0.1]
    #[arg(long, value_name = "X", allow_hyphen_values = true, value_parser = weight_decay)]
    pub(crate) weight_decay: Option<f64>,
    /// Adam's first beta [default: 0.9]
    #[arg(long, value_name = "X", allow_hyphen_values = true, value_parser = beta)]
    pub(crate) adam_beta1: Option<f64>,
    /// Adam's second beta [default: 0.95]
    #[arg(long, value_name = "X", allow_hyphen_values = true, value_parser = beta)]
    pub(crate) adam_beta2: Option<f64>,
    /// Adam's epsilon [default: 1e-8]
    #[arg(long, value_name = "X", allow_hyphen_values = true, value_parser = epsilon)]
    pub(crate) adam_epsilon: Option<f64>,
    /// Maximum gradient norm for clipping; 0 disables it [default: 1.0]
    #[arg(long, value_name = "X", allow_hyphen_values = true, value_parser = not_negative)]
    pub(crate) max_grad_norm: Option<f64>,
    /// Warm-up steps; below 1, a fraction of all steps [default: 0]
    #[arg(long, alias = "num-warmup-steps", value_name = "N", allow_hyphen_values = true, value_parser = not_negative)]
    pub(crate) warmup_steps: Option<f64>,
    /// Warm-up as a share of all steps, rounded up; --warmup-steps above 0 takes precedence
    #[arg(long, value_name = "X", allow_hyphen_values = true, value_parser = share)]
    pub(crate) warmup_ratio: Option<f64>,
    /// Learning-rate schedule [default: cosine]
    #[arg(long, value_name = "NAME", value_parser = HF_SCHEDULES.to_vec())]
    pub(crate) lr_scheduler_type: Option<String>,
    /// Parameters of the schedule, as in '{"min_lr": 1e-6}' for cosine_with_min_lr
    #[arg(long, value_name = "JSON", value_parser = schedule_kwargs)]
    pub(crate) lr_scheduler_kwargs: Option<Map<String, Value>>,
    /// Optimizer: adamw_torch, lion_32bit, ademamix, sgd or adagrad [default: adamw_torch]
    #[arg(long, value_name = "NAME", value_parser = optimizer)]
    pub(crate) optim: Option<Optimizer>,
    /// Total optimizer steps
    #[arg(long, value_name = "N", value_parser = whole(1..))]
    pub(crate) max_steps: Option<u64>,
    /// Train in bf16 [default: true, unless the file or another flag sets a precision]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) bf16: Option<bool>,
    /// Train in fp16 with loss scaling
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) fp16: Option<bool>,
    /// Train in fp32
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) fp32: Option<bool>,
    /// The same by PyTorch's name: bfloat16, float16, float32, or auto for that of the model's config.json
    #[arg(long, alias = "dtype", value_name = "NAME", value_parser = torch_dtype)]
    pub(crate) torch_dtype: Option<TorchDtype>,
    /// Recompute blocks in backward instead of keeping their activations [default: false; under a budget, what does not fit]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) gradient_checkpointing: Option<bool>,
    /// Hugging Face's flag for checkpoints on each node's own disk
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) save_on_each_node: Option<bool>,
}

/// Parses a number within the bounds of the flag's config key.
fn bounded(path: &str, text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().map_err(|_| "is not a number".to_owned())?;
    let key = schema::find(path).find(|key| key.is_of(Some("AdamW")));
    match key.filter(|key| !key.bounds.allow(number)) {
        Some(key) => Err(format!("must be {}", key.bounds.in_words().unwrap_or_default())),
        None => Ok(number),
    }
}

fn learning_rate(text: &str) -> Result<f64, String> {
    bounded("optimizer.params.lr", text)
}

fn weight_decay(text: &str) -> Result<f64, String> {
    bounded("optimizer.params.weight_decay", text)
}

fn beta(text: &str) -> Result<f64, String> {
    bounded("optimizer.params.betas", text)
}

fn epsilon(text: &str) -> Result<f64, String> {
    bounded("optimizer.params.eps", text)
}

fn not_negative(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        Ok(_) => Err("must be a finite number of at least 0".to_owned()),
        Err(_) => Err("is not a number".to_owned()),
    }
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if (0.0..=1.0).contains(&number) => Ok(number),
        Ok(_) => Err("must be from 0 to 1; --warmup-steps counts steps".to_owned()),
        Err(_) => Err("is not a number".to_owned()),
    }
}

impl TrainFlags {
    fn precision_flags(&self) -> PrecisionFlags {
        let Self { bf16, fp16, fp32, torch_dtype, .. } = *self;
        PrecisionFlags { bf16, fp16, fp32, torch_dtype }
    }

    /// Whether --torch-dtype auto decides, so that the precision is that of the model's config.json.
    pub(crate) fn is_precision_of_model(&self) -> bool {
        self.precision_flags().is_of_model()
    }

    /// Converts the flags for the resolver; `model` is the dtype of the model's config.json.
    pub(crate) fn to_flags(&self, lora: bool, model: Option<DType>) -> anyhow::Result<Flags> {
        let (precision, precision_by_dtype) = self.precision_flags().precision(model)?;
        Ok(Flags {
            per_device_train_batch_size: self.per_device_train_batch_size,
            gradient_accumulation_steps: self.gradient_accumulation_steps,
            learning_rate: self.learning_rate,
            weight_decay: self.weight_decay,
            adam_beta1: self.adam_beta1,
            adam_beta2: self.adam_beta2,
            adam_epsilon: self.adam_epsilon,
            max_grad_norm: self.max_grad_norm,
            warmup_steps: self.warmup_steps,
            warmup_ratio: self.warmup_ratio,
            lr_scheduler_type: self.lr_scheduler_type.clone(),
            lr_scheduler_kwargs: self.lr_scheduler_kwargs.clone().unwrap_or_default(),
            optimizer: self.optim,
            max_steps: self.max_steps,
            precision,
            precision_by_dtype,
            gradient_checkpointing: self.gradient_checkpointing,
            save_on_each_node: self.save_on_each_node,
            lora,
        })
    }
}

/// The precision given; `--bf16 False` alone selects fp32.
pub(crate) fn precision(
    bf16: Option<bool>,
    fp16: Option<bool>,
    fp32: Option<bool>,
) -> anyhow::Result<Option<DType>> {
    Ok(PrecisionFlags { bf16, fp16, fp32, torch_dtype: None }.precision(None)?.0)
}
