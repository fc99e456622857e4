//! Flags for knowledge distillation: those of `train`, and the arguments of `distill`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use crate::lora_args::QuantizeArg;
use crate::train_args::ReadingArgs;
use crate::value_args::{DeviceArg, whole};

#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Knowledge distillation")]
pub(crate) struct KdArgs {
    /// Distil from this model: a Hugging Face folder with weights and the same tokenizer, or a name in the local Hugging Face
    /// cache
    #[arg(long, aliases = ["teacher-model", "teacher-model-name-or-path"], value_name = "DIR")]
    pub(crate) teacher: Option<String>,
    /// Where the teacher's weights are: a preset or DeepSpeed JSON file of which stage and offload_param count [default: as
    /// --deepspeed]
    #[arg(long, alias = "teacher-deepspeed-config", value_name = "NAME|FILE")]
    pub(crate) teacher_deepspeed: Option<String>,
    /// Keep the teacher's linear layers in 4 bits
    #[arg(long, value_enum, value_name = "TYPE")]
    pub(crate) teacher_quantize: Option<QuantizeArg>,
    /// Share of the distillation in the loss, alpha · KD + (1 − alpha) · CE [default: 0.5]
    #[arg(long, value_name = "X", allow_hyphen_values = true, value_parser = share)]
    pub(crate) kd_alpha: Option<f64>,
    /// Temperature of both distributions [default: 2, or that of --kd-cache]
    #[arg(long, value_name = "X", allow_hyphen_values = true, value_parser = temperature)]
    pub(crate) kd_temperature: Option<f64>,
    /// Divergence, as TRL's GKD counts: 0 is KL(teacher‖student), 1 is KL(student‖teacher), between is the generalised JSD
    /// [default: 0]
    #[arg(long, value_name = "X", allow_hyphen_values = true, value_parser = share)]
    pub(crate) kd_beta: Option<f64>,
    /// Multiply the divergence by the squared temperature [default: true]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) kd_squared: Option<bool>,
    /// Distil from a cache that `zeroth distill cache` made, without the teacher
    #[arg(long, value_name = "DIR")]
    pub(crate) kd_cache: Option<PathBuf>,
    /// What a cache lacks of a distribution: one more bucket, or left out of both [default: bucket]
    #[arg(long, value_enum, value_name = "HOW")]
    pub(crate) kd_tail: Option<TailArg>,
}

/// The teacher of a planned run.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct PlanTeacherArgs {
    /// Distil from this model, whose weights are beside those of --model
    #[arg(long, value_name = "DIR", conflicts_with = "params")]
    pub(crate) teacher: Option<String>,
    /// Where the teacher's weights are, as of `train`
    #[arg(long, value_name = "NAME|FILE", requires = "teacher")]
    pub(crate) teacher_deepspeed: Option<String>,
    /// Keep the teacher's linear layers in 4 bits
    #[arg(long, value_enum, value_name = "TYPE", requires = "teacher")]
    pub(crate) teacher_quantize: Option<QuantizeArg>,
    /// Distil from this cache, without the teacher
    #[arg(long, value_name = "DIR", conflicts_with_all = ["params", "teacher"])]
    pub(crate) kd_cache: Option<PathBuf>,
}

/// What becomes of the mass that a cache lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TailArg {
    /// One more bucket, with its exact mass
    Bucket,
    /// Both distributions are renormalised over the cached ids
    Renormalize,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DistillCommand {
    /// Write a teacher's most probable tokens for all tokens of a dataset, to train with `train --kd-cache`
    Cache(Box<DistillCacheArgs>),
}

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Example: zeroth distill cache --teacher my-teacher --data rows.jsonl --top-k 20 --kd-temperature 2 --output cache\n\n\
                  A record has 8 bytes per id: 160 bytes per token at k = 20. An interrupted command continues where it stopped. \
                  `zeroth train --kd-cache cache` needs the same --data, --max-length, --truncation-strategy, --columns, \
                  --system and --max-train-samples; packing, shuffling, epochs and held-out rows may differ."
)]
pub(crate) struct DistillCacheArgs {
    /// Teacher: a Hugging Face folder with weights, or a name in the local Hugging Face cache
    #[arg(long, aliases = ["teacher-model", "teacher-model-name-or-path"], value_name = "DIR")]
    pub(crate) teacher: String,
    /// Student, whose chat template and maximum length hold for the rows [default: the teacher's]
    #[arg(long, alias = "model-name-or-path", value_name = "DIR")]
    pub(crate) model: Option<String>,
    /// Files, folders or quoted patterns, as --data of `train`
    #[arg(long, aliases = ["dataset", "train-file", "data-path"], value_name = "FILE", num_args = 1.., required = true)]
    pub(crate) data: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) reading: ReadingArgs,
    /// Use only the first N rows
    #[arg(long, alias = "max-samples", value_name = "N", value_parser = whole(1..))]
    pub(crate) max_train_samples: Option<u64>,
    /// Ids per token, the most probable ones
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = whole(1..))]
    pub(crate) top_k: u64,
    /// Temperature of the distributions, that of the training
    #[arg(long, value_name = "X", default_value_t = 2.0, allow_hyphen_values = true, value_parser = temperature)]
    pub(crate) kd_temperature: f64,
    /// Folder of the cache
    #[arg(short, long, alias = "output-dir", value_name = "DIR")]
    pub(crate) output: PathBuf,
    /// Device [default: cuda if a GPU is found]
    #[arg(long, value_enum, value_name = "DEVICE")]
    pub(crate) device: Option<DeviceArg>,
    /// CPU threads [default: all]
    #[arg(long, value_name = "N", value_parser = whole(1..=1024))]
    pub(crate) threads: Option<u64>,
    /// Where the teacher's weights are: a preset or DeepSpeed JSON file of which offload_param counts
    #[arg(long, alias = "teacher-deepspeed-config", value_name = "NAME|FILE")]
    pub(crate) teacher_deepspeed: Option<String>,
    /// Keep the teacher's linear layers in 4 bits
    #[arg(long, value_enum, value_name = "TYPE")]
    pub(crate) teacher_quantize: Option<QuantizeArg>,
    /// Rows per micro-batch
    #[arg(long, alias = "batch-size", value_name = "N", default_value_t = 1, value_parser = whole(1..))]
    pub(crate) per_device_train_batch_size: u64,
    /// Compute in bf16 (the default)
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) bf16: Option<bool>,
    /// Compute in fp16
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) fp16: Option<bool>,
    /// Compute in fp32
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) fp32: Option<bool>,
    /// Draw the teacher's weights from --seed where the folder has none, for measuring
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) random_weights: bool,
    /// Random seed of --random-weights
    #[arg(long, value_name = "N", value_parser = whole(0..), default_value_t = 42)]
    pub(crate) seed: u64,
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if (0.0..=1.0).contains(&number) => Ok(number),
        Ok(_) => Err("must be from 0 to 1".to_owned()),
        Err(_) => Err("is not a number".to_owned()),
    }
}

fn temperature(text: &str) -> Result<f64, String> {
    // Logits are divided by it in f32.
    const RANGE: std::ops::RangeInclusive<f64> = 1e-3..=1e3;
    match text.parse::<f64>() {
        Ok(number) if RANGE.contains(&number) => Ok(number),
        Ok(number) if number.is_finite() && number > 0.0 => {
            Err(format!("must be from {} to {}", RANGE.start(), RANGE.end()))
        }
        Ok(_) => Err("must be above 0: logits are divided by it".to_owned()),
        Err(_) => Err("is not a number".to_owned()),
    }
}

impl KdArgs {
    /// Whether the run distils: it has a teacher or a cache, and their share is not 0.
    pub(crate) fn distils(&self) -> bool {
        (self.teacher.is_some() || self.kd_cache.is_some()) && self.alpha() > 0.0
    }

    /// The share of the distillation.
    pub(crate) fn alpha(&self) -> f64 {
        self.kd_alpha.unwrap_or(0.5)
    }

    /// Refuses flags that lack what they are about, all at once; notes those that have no effect.
    pub(crate) fn check(&self) -> anyhow::Result<Vec<String>> {
        let of_any = [
            ("--kd-alpha", self.kd_alpha.is_some()),
            ("--kd-temperature", self.kd_temperature.is_some()),
            ("--kd-beta", self.kd_beta.is_some()),
            ("--kd-squared", self.kd_squared.is_some()),
        ];
        let of_teacher = [
            ("--teacher-deepspeed", self.teacher_deepspeed.is_some()),
            ("--teacher-quantize", self.teacher_quantize.is_some()),
        ];
        let of_cache = [("--kd-tail", self.kd_tail.is_some())];
        let (has_teacher, has_cache) = (self.teacher.is_some(), self.kd_cache.is_some());
        let typed = |flags: &[(&'static str, bool)]| -> Vec<&'static str> {
            flags.iter().filter(|(_, is_typed)| *is_typed).map(|(flag, _)| *flag).collect()
        };
        let mut refused = Vec::new();
        let mut needs = |flags: Vec<&str>, what: &str, has: bool| {
            if !has && !flags.is_empty() {
                let verb = if flags.len() == 1 { "needs" } else { "need" };
                refused.push(format!("{} {verb} {what}", flags.join(", ")));
            }
        };
        needs(typed(&of_any), "--teacher DIR or --kd-cache DIR", has_teacher || has_cache);
        needs(typed(&of_teacher), "--teacher DIR", has_teacher);
        needs(typed(&of_cache), "--kd-cache DIR", has_cache);
        anyhow::ensure!(
            refused.is_empty(),
            "{}: without them the model is trained on its data alone; add what is missing, or leave the flags out",
            refused.join("; ")
        );
        if (has_teacher || has_cache) && self.alpha() == 0.0 {
            return Ok(vec![format!(
                "--kd-alpha 0 is plain training: {} not read",
                if has_teacher { "the teacher is" } else { "the cache is" }
            )]);
        }
        let mut notes = Vec::new();
        if has_cache && has_teacher {
            notes.push("the teacher is compared with that of --kd-cache, and not loaded".to_owned());
            if self.teacher_deepspeed.is_some() {
                notes.push("--teacher-deepspeed has no effect with --kd-cache".to_owned());
            }
        }
        Ok(notes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_out_of_range_are_refused() {
        assert_eq!((share("0"), share("1")), (Ok(0.0), Ok(1.0)));
        for wrong in ["-0.1", "1.01", "nan", "inf", "x", ""] {
            assert!(share(wrong).is_err(), "{wrong}");
        }
        assert_eq!((temperature("0.5"), temperature("1e3")), (Ok(0.5), Ok(1e3)));
        for wrong in ["0", "-1", "nan", "inf", "1e-9", "1e9", "two"] {
            assert!(temperature(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn flags_that_lack_their_teacher_are_all_named() {
        let lost = KdArgs {
            kd_alpha: Some(0.5),
            kd_beta: Some(0.1),
            kd_tail: Some(TailArg::Bucket),
            teacher_quantize: Some(QuantizeArg::Nf4),
            ..KdArgs::default()
        };
        let words = lost.check().unwrap_err().to_string();
        assert!(words.contains("--kd-alpha, --kd-beta need --teacher DIR or --kd-cache DIR"), "{words}");
        assert!(words.contains("--teacher-quantize needs --teacher DIR"), "{words}");
        assert!(words.contains("--kd-tail needs --kd-cache DIR"), "{words}");
        let plain = KdArgs { teacher: Some("t".to_owned()), kd_alpha: Some(0.0), ..KdArgs::default() };
        assert_eq!(plain.check().unwrap(), ["--kd-alpha 0 is plain training: the teacher is not read"]);
        assert!(!plain.distils());
    }
}
