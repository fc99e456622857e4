//! Names that other trainers have for what is called otherwise here: commands, flags, keys of their files, and values.
//! They are refused with the name to write instead.

/// Commands of other programs, and what to write instead of them.
const COMMANDS: &[(&[&str], &str)] = &[
    (
        &["swift", "sft", "pt", "finetune", "fine-tune", "llamafactory-cli", "axolotl", "trl"],
        "`zeroth train` trains, with the flags of ms-swift, LLaMA-Factory, TRL and Hugging Face's Trainer",
    ),
    (
        &["deepspeed", "ds", "torchrun", "accelerate", "mpirun", "srun"],
        "`zeroth train --ranks N` starts its ranks itself, without a launcher and without a script: --deepspeed FILE and the \
         script's flags stay as they are",
    ),
    (
        &["infer", "inference", "chat", "deploy", "serve", "app"],
        "`zeroth generate` answers a prompt, the rows of a file, or a chat",
    ),
    (
        &["export", "merge", "merge-lora", "merge_lora"],
        "`zeroth checkpoint export` exports a run; --merge merges adapters",
    ),
    (&["estimate", "estimate-memory", "memory"], "`zeroth plan` says what a job needs and which presets fit"),
    (
        &["env", "check", "info"],
        "`zeroth doctor` shows this machine, `zeroth config check` checks a DeepSpeed file",
    ),
];

/// Flags of other trainers, and keys of their files, without dashes.
const FLAGS: &[(&[&str], Instead)] = &[
    // axolotl.
    (&["base-model"], Instead::Flag("model")),
    (&["datasets"], Instead::Flag("data")),
    (&["test-datasets"], Instead::Flag("eval-data")),
    (&["sequence-len"], Instead::Flag("max-length")),
    (&["sample-packing"], Instead::Flag("packing")),
    (&["micro-batch-size"], Instead::Flag("per-device-train-batch-size")),
    (&["eval-batch-size"], Instead::Flag("per-device-eval-batch-size")),
    (&["num-epochs"], Instead::Flag("num-train-epochs")),
    (&["lr-scheduler"], Instead::Flag("lr-scheduler-type")),
    (&["optimizer"], Instead::Flag("optim")),
    (&["val-set-size", "val-size"], Instead::Flag("split-dataset-ratio")),
    (&["evals-per-epoch"], Instead::Flag("eval-steps")),
    (&["saves-per-epoch"], Instead::Flag("save-steps")),
    (&["peft-init-lora-weights"], Instead::Flag("init-lora-weights")),
    (&["peft-use-dora"], Instead::Flag("use-dora")),
    (
        &["dataset-prepared-path"],
        Instead::Words("leave it out: rows are tokenised once, into the token cache (ZEROTH_CACHE)"),
    ),
    (
        &["eval-sample-packing", "pad-to-sequence-len"],
        Instead::Words("leave it out: rows are not padded, and --packing packs those of training"),
    ),
    (
        &["flash-attention", "xformers-attention", "sdp-attention", "s2-attention"],
        Instead::Words("leave it out: attention is one fused kernel"),
    ),
    (&["special-tokens", "tokens"], Instead::Words("leave it out: the tokenizer's own files name them")),
    (
        &["tokenizer-type", "tokenizer-config"],
        Instead::Words("leave it out: the folder of --model has the tokenizer"),
    ),
    (
        &["chat-template"],
        Instead::Words("put it into the folder of --model as chat_template.jinja, which is what is read"),
    ),
    (&["strict"], Instead::Words("leave it out: nothing is ignored silently")),
    (&["debug"], Instead::Words("leave it out; --dry-run shows the first batch")),
    (
        &["train-on-inputs", "train-on-prompt"],
        Instead::Words("leave it out: prompts are not trained, and rows of `text` are trained whole"),
    ),
    (
        &["wandb-project", "wandb-entity", "wandb-watch", "wandb-name", "wandb-log-model", "wandb-run-id"],
        Instead::Words(
            "leave it out: a run connects to no service, and --report-to tensorboard or csv writes files",
        ),
    ),
    // LLaMA-Factory.
    (&["neat-packing"], Instead::Flag("packing")),
    // DeepSpeed's launcher and its file.
    (&["deepspeed-config", "ds-config"], Instead::Flag("deepspeed")),
    (&["gradient-clipping"], Instead::Flag("max-grad-norm")),
    (&["train-micro-batch-size-per-gpu"], Instead::Flag("per-device-train-batch-size")),
    (&["zero-stage"], Instead::Words("write --deepspeed zero0, zero1, zero2 or zero3")),
];

/// Values that stand for several flags, or for none: flag, value, and what to write.
const VALUES: &[(&str, &str, &str)] = &[
    ("train-type", "qlora", "--train-type lora --quantize nf4 is QLoRA"),
    ("bf16", "auto", "leave it out: runs are in bf16 unless another precision is asked for"),
    ("fp16", "auto", "leave it out: runs are in bf16 unless another precision is asked for"),
];

/// What to write instead of a flag.
#[derive(Debug, Clone, Copy)]
enum Instead {
    /// A flag of `train`, and of other commands that have it.
    Flag(&'static str),
    /// Something else.
    Words(&'static str),
}

/// What to write instead of a command that other programs have.
pub(crate) fn command(word: &str) -> Option<&'static str> {
    COMMANDS.iter().find(|(names, _)| names.contains(&word)).map(|(_, instead)| *instead)
}

/// What to write instead of a flag, without dashes, for a command whose flags `has` knows; `written` writes a flag down.
pub(crate) fn flag(
    name: &str,
    has: impl Fn(&str) -> bool,
    written: impl Fn(&str) -> String,
) -> Option<String> {
    let (_, instead) = FLAGS.iter().find(|(names, _)| names.contains(&name))?;
    match instead {
        Instead::Flag(flag) => has(flag).then(|| format!("write {}", written(flag))),
        // These are about training.
        Instead::Words(words) => has("num-train-epochs").then(|| (*words).to_owned()),
    }
}

/// What to write instead of a value.
pub(crate) fn value(flags: &[String], value: &str) -> Option<&'static str> {
    let is_meant =
        |(flag, other, _): &&(&str, &str, &str)| *other == value && flags.iter().any(|name| name == flag);
    VALUES.iter().find(is_meant).map(|(.., instead)| *instead)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flag_names::spellings;

    #[test]
    fn names_are_foreign_and_what_is_written_instead_exists() {
        let root = crate::flag_rules::command();
        for (names, _) in COMMANDS {
            assert!(names.iter().all(|name| root.find_subcommand(name).is_none()), "{names:?}");
        }
        let train = root.find_subcommand("train").unwrap();
        let known: Vec<String> = train.get_arguments().flat_map(spellings).collect();
        for (names, instead) in FLAGS {
            assert!(names.iter().all(|name| !known.iter().any(|known| known == name)), "{names:?} are flags");
            if let Instead::Flag(flag) = instead {
                assert!(known.iter().any(|known| known == flag), "{flag} is no flag");
            }
        }
        assert!(VALUES.iter().all(|(flag, ..)| known.iter().any(|known| known == flag)));
    }

    #[test]
    fn every_key_of_the_page_of_trainers_is_known() {
        let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/coming-from.md");
        let page = std::fs::read_to_string(page).unwrap();
        let (_, table) = page.split_once("| axolotl | here |").unwrap();
        let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
        let root = crate::flag_rules::command();
        let train = root.find_subcommand("train").unwrap();
        let has = |flag: &str| train.get_arguments().flat_map(spellings).any(|known| known == flag);
        let mut keys = 0;
        for row in rows {
            let cell = row.trim_matches('|').split('|').next().unwrap();
            for span in cell.split('`').skip(1).step_by(2) {
                let name = span.split(':').next().unwrap().replace('_', "-");
                // The second value of `adapter`.
                let is_value = span == "qlora";
                let is_known = has(&name) || flag(&name, has, str::to_owned).is_some();
                assert!(is_known || is_value, "`{span}` of axolotl gets no answer");
                keys += 1;
            }
        }
        assert!(keys > 12, "{keys}");
    }
}
