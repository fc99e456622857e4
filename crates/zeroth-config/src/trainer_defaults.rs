//! The defaults of other trainers, where they differ from those of `zeroth train`, and the flags that only one of them has.
//!
//! Theirs are from the sources of transformers 5, TRL 1, ms-swift 4, LLaMA-Factory and axolotl, as of 2026.

use crate::file_values::FileValues;

/// A trainer whose flags `zeroth train` reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum ForeignTrainer {
    /// transformers' Trainer.
    HuggingFace,
    /// TRL's SFTTrainer.
    Trl,
    /// ms-swift.
    Swift,
    LlamaFactory,
    Axolotl,
}

impl ForeignTrainer {
    /// All of them, in the order of [`FlagDefault::theirs`].
    pub const ALL: [Self; 5] = [Self::HuggingFace, Self::Trl, Self::Swift, Self::LlamaFactory, Self::Axolotl];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::HuggingFace => "Trainer",
            Self::Trl => "TRL",
            Self::Swift => "ms-swift",
            Self::LlamaFactory => "LLaMA-Factory",
            Self::Axolotl => "axolotl",
        }
    }

    /// Flags that no other trainer has, without dashes; of some, only a value or several together. Trainer's own are those of
    /// `zeroth train`.
    pub const fn signs(self) -> &'static [&'static [&'static str]] {
        match self {
            Self::HuggingFace => &[],
            Self::Trl => &[
                &["use-peft"],
                &["lora-task-type"],
                &["use-bnb-nested-quant"],
                &["bnb-4bit-quant-storage"],
                &["lmbda"],
                &["seq-kd"],
            ],
            Self::Swift => &[
                &["tuner-type"],
                &["sft-type"],
                &["dataset", "train-type"],
                &["dataset", "torch-dtype"],
                &["val-dataset"],
                &["attn-impl"],
                &["use-hf"],
                &["lazy-tokenize"],
                &["model-author"],
                &["train-dataloader-shuffle"],
                &["dataset-shuffle"],
                &["adapters"],
                &["init-weights"],
                &["quant-method"],
                &["quant-bits"],
                &["lora-dtype"],
                &["add-version"],
            ],
            Self::LlamaFactory => &[
                &["finetuning-type"],
                &["stage"],
                &["cutoff-len"],
                &["max-samples"],
                &["lora-target"],
                &["adapter-name-or-path"],
                &["quantization-bit"],
                &["quantization-method"],
                &["flash-attn"],
                &["plot-loss"],
            ],
            Self::Axolotl => &[
                &["adapter=lora"],
                &["adapter=qlora"],
                &["lora-model-dir"],
                &["lora-target-linear"],
                &["peft-use-rslora"],
                &["lora-fan-in-fan-out"],
            ],
        }
    }

    const fn column(self) -> usize {
        self as usize
    }
}

/// The default of a flag here, and elsewhere.
#[derive(Debug, Clone, Copy)]
pub struct FlagDefault {
    /// The flag, without dashes.
    pub flag: &'static str,
    /// Whether the row is about LoRA runs, or about others. `None`: about all.
    pub lora: Option<bool>,
    /// The default here.
    pub here: &'static str,
    /// Those of [`ForeignTrainer::ALL`]; `None` where it is the same, or where the trainer has nothing like it.
    pub theirs: [Option<&'static str>; 5],
    /// Keys of a DeepSpeed file that say the same.
    pub keys: &'static [&'static str],
    /// Other flags that say the same.
    pub also: &'static [&'static str],
    /// Flags without one of which nothing depends on the row.
    pub only_with: &'static [&'static str],
}

const fn row(flag: &'static str, here: &'static str, theirs: [Option<&'static str>; 5]) -> FlagDefault {
    FlagDefault { flag, lora: None, here, theirs, keys: &[], also: &[], only_with: &[] }
}

impl FlagDefault {
    const fn of_lora(mut self, lora: bool) -> Self {
        self.lora = Some(lora);
        self
    }

    const fn keys(mut self, keys: &'static [&'static str]) -> Self {
        self.keys = keys;
        self
    }

    const fn also(mut self, flags: &'static [&'static str]) -> Self {
        self.also = flags;
        self
    }

    const fn only_with(mut self, flags: &'static [&'static str]) -> Self {
        self.only_with = flags;
        self
    }

    /// The trainer's default, where it differs.
    pub fn of(&self, trainer: ForeignTrainer) -> Option<&'static str> {
        self.theirs[trainer.column()]
    }

    /// Whether a DeepSpeed file says the value. One with an optimizer or a schedule says all of it, but for what is "auto".
    pub fn is_in(&self, file: &FileValues) -> bool {
        let is_said = |key: &&str| match file.get(key) {
            Some(given) => given.value != "auto",
            None => ["optimizer", "scheduler"]
                .iter()
                .any(|section| key.starts_with(section) && file.has_section(section)),
        };
        self.keys.iter().any(is_said)
    }
}

const REQUIRED: Option<&str> = Some("must be given");
/// ms-swift accumulates up to this many samples in a step.
const SWIFT_BATCH: u64 = 16;

const EVALUATION: &[&str] = &["eval-data", "split-dataset-ratio"];
const DISTILLATION: &[&str] = &["teacher", "kd-cache"];

/// Every default that differs.
#[rustfmt::skip]
pub const FLAG_DEFAULTS: &[FlagDefault] = &[
    row("train-type", "full", [None, None, Some("lora"), Some("lora"), None]).also(&["use-peft", "adapter"]),
    row("per-device-train-batch-size", "1", [Some("8"), Some("8"), None, Some("8"), None])
        .keys(&["train_micro_batch_size_per_gpu", "train_batch_size"]),
    row("gradient-accumulation-steps", "1", [None, None, Some("16 / (batch size · ranks), rounded up"), None, None])
        .keys(&["gradient_accumulation_steps", "train_batch_size"]),
    row("learning-rate", "1e-5", [Some("5e-5"), Some("2e-5"), None, Some("5e-5"), REQUIRED])
        .of_lora(false).keys(&["optimizer.params.lr"]),
    row("learning-rate", "1e-4", [Some("5e-5"), Some("2e-5"), None, Some("5e-5"), REQUIRED])
        .of_lora(true).keys(&["optimizer.params.lr"]),
    row("weight-decay", "0.1", [Some("0"), Some("0"), None, Some("0"), Some("0")])
        .keys(&["optimizer.params.weight_decay"]),
    row("adam-beta2", "0.95", [Some("0.999"), Some("0.999"), None, Some("0.999"), Some("0.999")])
        .keys(&["optimizer.params.betas"]),
    row("lr-scheduler-type", "cosine", [Some("linear"), Some("linear"), None, Some("linear"), None])
        .keys(&["scheduler.type"]),
    row("warmup-steps", "0", [None, None, None, None, Some("3 % of all steps, at most 100")])
        .keys(&["scheduler.params.warmup_num_steps"]).also(&["warmup-ratio"]),
    row("num-train-epochs", "3", [None, None, None, None, Some("1")]).also(&["max-steps"]),
    row("bf16", "true", [Some("false: fp32"), None, Some("the dtype of the model's config.json"), Some("false: fp32"), None])
        .keys(&["bf16.enabled", "fp16.enabled"]).also(&["fp16", "fp32", "torch-dtype"]),
    row("gradient-checkpointing", "false", [None, Some("true"), Some("true"), Some("true"), None]),
    row("max-length", "the model's, at most 2048", [None, Some("1024"), Some("the model's"), None, Some("512")]),
    row("truncation-strategy", "delete", [None, Some("right"), None, Some("right"), None]),
    row("lora-rank", "8", [None, Some("16"), None, None, REQUIRED]).of_lora(true),
    row("lora-alpha", "32", [None, None, None, Some("2 · rank"), REQUIRED]).of_lora(true),
    row("lora-dropout", "0.05", [None, None, None, Some("0"), Some("0")]).of_lora(true),
    row("target-modules", "all-linear", [None, Some("PEFT's for the architecture, mostly q_proj and v_proj"), None, None, REQUIRED])
        .of_lora(true).also(&["lora-target-linear"]),
    row("logging-steps", "5", [Some("500"), Some("10"), None, Some("500"), Some("0.5 % of all steps, 1 to 10")]),
    row("report-to", "none", [None, None, Some("tensorboard"), None, None]),
    row("save-strategy", "steps", [None, None, None, None, Some("epoch")]).also(&["save-steps"]),
    row("save-total-limit", "all", [None, None, None, None, Some("4")]),
    row("eval-strategy", "steps if there is evaluation data", [Some("no"), Some("no"), None, Some("no"), Some("epoch")])
        .also(&["eval-steps"]).only_with(EVALUATION),
    row("eval-steps", "500", [Some("that of --logging-steps"), Some("that of --logging-steps"), None, Some("that of --logging-steps"), None])
        .only_with(EVALUATION),
    row("per-device-eval-batch-size", "that of training", [Some("8"), Some("8"), Some("1"), Some("8"), None])
        .only_with(EVALUATION),
    row("kd-temperature", "2", [None, Some("0.9"), Some("0.9"), None, None]).only_with(DISTILLATION),
    row("kd-beta", "0", [None, Some("0.5"), Some("0.5"), None, None]).only_with(DISTILLATION),
];

/// The default of a flag that is a number, of a trainer or, where that is the same, here.
pub(crate) fn number(trainer: ForeignTrainer, flag: &str, lora: bool) -> Option<f64> {
    let row = FLAG_DEFAULTS.iter().find(|row| row.flag == flag && row.lora.is_none_or(|of| of == lora))?;
    row.of(trainer).unwrap_or(row.here).parse().ok()
}

/// The accumulation of ms-swift where none is given.
pub fn swift_accumulation(micro_batch: u64, ranks: u64) -> u64 {
    SWIFT_BATCH.div_ceil(micro_batch.saturating_mul(ranks).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema;

    #[test]
    fn rows_differ_somewhere_and_name_keys() {
        for (column, trainer) in ForeignTrainer::ALL.into_iter().enumerate() {
            assert_eq!(trainer.column(), column);
            assert!(FLAG_DEFAULTS.iter().any(|row| row.of(trainer).is_some()), "{}", trainer.name());
        }
        for row in FLAG_DEFAULTS {
            assert!(row.theirs.iter().any(Option::is_some), "{}", row.flag);
            assert!(row.theirs.iter().flatten().all(|theirs| *theirs != row.here), "{}", row.flag);
            assert!(row.keys.iter().all(|key| schema::find(key).next().is_some()), "{}", row.flag);
        }
    }

    #[test]
    fn numbers_are_those_of_the_trainer_or_ours() {
        assert_eq!(number(ForeignTrainer::HuggingFace, "learning-rate", false), Some(5e-5));
        assert_eq!(number(ForeignTrainer::Swift, "learning-rate", true), Some(1e-4));
        assert_eq!(number(ForeignTrainer::Swift, "per-device-train-batch-size", false), Some(1.0));
        assert_eq!([swift_accumulation(1, 8), swift_accumulation(3, 4), swift_accumulation(8, 8)], [2, 2, 1]);
    }
}
