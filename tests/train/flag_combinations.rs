//! Random combinations of flags of `train`: each runs two steps, or is refused with a reason. None panics.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::{is_full, new_data, new_model, text, written};
use crate::common::{Ended, zeroth};

/// Flags and the values that they are tried with, the bounds among them. Words are separated by spaces; `@` is the folder
/// of the run's files, `EVAL` a file of rows.
const FLAGS: &[(&str, &[&str])] = &[
    ("--deepspeed", &["zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"]),
    ("--ranks", &["1", "2"]),
    ("--threads_per_rank", &["1", "2"]),
    ("--per_device_train_batch_size", &["1", "3"]),
    ("--gradient_accumulation_steps", &["1", "2"]),
    ("--learning_rate", &["0", "1e-30", "1e-3", "1"]),
    ("--weight_decay", &["0", "0.1", "1"]),
    ("--adam_beta1", &["0", "0.9", "0.999999"]),
    ("--adam_beta2", &["0", "0.95", "0.999999"]),
    ("--adam_epsilon", &["1e-37", "1e-8", "1"]),
    ("--max_grad_norm", &["0", "1e-6", "1"]),
    ("--warmup_steps", &["0", "0.5", "1", "1000000"]),
    ("--warmup_ratio", &["0", "0.5", "1"]),
    (
        "--lr_scheduler_type",
        &[
            "constant",
            "constant_with_warmup",
            "linear",
            "cosine",
            "cosine_with_restarts",
            "cosine_with_min_lr",
            "cosine_warmup_with_min_lr",
            "polynomial",
            "inverse_sqrt",
            "warmup_stable_decay",
        ],
    ),
    (
        "--lr_scheduler_kwargs",
        &[
            "{}",
            r#"{"min_lr":1e-6}"#,
            r#"{"min_lr_rate":1}"#,
            r#"{"num_cycles":0}"#,
            r#"{"num_decay_steps":0}"#,
            r#"{"power":0,"lr_end":0}"#,
            r#"{"timescale":1}"#,
        ],
    ),
    ("--optim", &["adamw_torch", "lion_32bit", "ademamix", "sgd", "adagrad"]),
    ("--bf16", &["", "true", "false"]),
    ("--fp16", &["", "true", "false"]),
    ("--fp32", &["", "true", "false"]),
    ("--torch_dtype", &["auto", "bfloat16", "float16", "float32"]),
    ("--gradient_checkpointing", &["", "false"]),
    ("--max_length", &["1", "2", "5", "6", "4096"]),
    ("--truncation_strategy", &["delete", "left", "right"]),
    ("--packing", &["", "false"]),
    ("--shuffle", &["true", "false"]),
    ("--seed", &["0", "18446744073709551615"]),
    ("--data_seed", &["0", "18446744073709551615"]),
    ("--max_train_samples", &["1", "3", "1000"]),
    ("--num_train_epochs", &["0.001", "1", "1e9"]),
    ("--eval_data", &["EVAL", "EVAL EVAL"]),
    ("--eval_steps", &["1", "0.5", "1000000"]),
    ("--eval_strategy", &["no", "steps", "epoch"]),
    ("--per_device_eval_batch_size", &["1", "7"]),
    ("--split_dataset_ratio", &["0", "0.001", "0.5", "0.999"]),
    ("--load_best_model_at_end", &["", "false"]),
    ("--metric_for_best_model", &["loss", "perplexity"]),
    ("--greater_is_better", &["", "false"]),
    (
        "--early_stopping_patience",
        &["1", "1000000 --early_stopping_threshold 0", "1 --early_stopping_threshold 1e30"],
    ),
    ("--logging_steps", &["1", "0.5", "1000000"]),
    ("--logging_strategy", &["no", "steps", "epoch"]),
    ("--save_steps", &["0", "0.5", "1", "1000000"]),
    ("--save_strategy", &["no", "steps", "epoch", "best"]),
    ("--save_only_model", &["", "false"]),
    ("--system", &["Brief.", "-"]),
    ("--save_total_limit", &["1", "1000000"]),
    ("--report_to", &["none", "csv", "tensorboard csv", "jsonl"]),
    ("--run_name", &["a", "ä-ö.1"]),
    ("--save_dtype", &["fp32", "bf16", "fp16 --train_type lora --random_weights"]),
    ("--logging_dir", &["@/logs"]),
    ("--config", &["CONFIG"]),
    ("--resume", &["", "auto"]),
    ("--overwrite_output_dir", &["", "false"]),
    ("--max_restarts", &["0", "1"]),
    ("--max_skipped_steps", &["0", "5"]),
    ("--trace", &["@/trace.json"]),
    ("--dry_run", &["", "false"]),
    ("--device_memory", &["1GB"]),
    ("--host_memory", &["4GB"]),
    ("--disk_space", &["1GB"]),
    ("--train_type", &["full", "lora --random_weights", "lora --random_weights --lora_rank 2"]),
    ("--use_peft", &["false", "true --random_weights"]),
    ("--lora_alpha", &["16 --train_type lora --random_weights --use_rslora", "1e-3"]),
    ("--lora_dropout", &["0 --train_type lora --random_weights", "0.5 --train_type lora --random_weights"]),
    (
        "--target_modules",
        &["q_proj v_proj --train_type lora --random_weights", ".*mlp.* --use_peft --random_weights"],
    ),
    ("--allow_other_base", &["true", "false --train_type lora --random_weights"]),
    ("--init_lora_weights", &["gaussian --train_type lora --random_weights"]),
    ("--teacher", &["MODEL --random_weights", "MODEL --random_weights --kd_alpha 0", "missing --kd_alpha 0"]),
    ("--kd_alpha", &["0 --teacher MODEL", "1 --teacher MODEL --random_weights"]),
    (
        "--kd_temperature",
        &["0.001 --teacher MODEL --random_weights", "1000 --teacher MODEL --random_weights"],
    ),
    ("--kd_beta", &["0.5 --teacher MODEL --random_weights", "1"]),
    ("--kd_squared", &["false --teacher MODEL --random_weights"]),
    ("--teacher_deepspeed", &["zero3_offload --teacher MODEL --random_weights"]),
    ("--teacher_quantize", &["nf4 --teacher MODEL --random_weights"]),
    ("--use_dora", &["false"]),
    ("--do_train", &["", "true"]),
    ("--monitor", &["", "false"]),
    ("--dataloader_num_workers", &["0", "64"]),
    ("--group_by_length", &["", "true"]),
    ("--push_to_hub", &["false"]),
    ("--local_rank", &["-1", "0"]),
    ("--fsdp", &["full_shard auto_wrap"]),
];

/// Flags that need evaluations, which most combinations would not have.
const EVALUATE: [&str; 6] = [
    "--eval_strategy",
    "--load_best_model_at_end",
    "--metric_for_best_model",
    "--greater_is_better",
    "--early_stopping_patience",
    "--save_strategy",
];

/// Combinations that are tried, of which CI runs a quarter.
const COMBINATIONS: usize = 100;

/// xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        ((u128::from(self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)) * bound as u128) >> 64) as usize
    }
}

/// The flags of a combination: three to ten, each once.
fn combination(number: usize) -> Vec<(&'static str, &'static str)> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ (number as u64 + 1).wrapping_mul(0xd134_2543_de82_ef95));
    let mut left: Vec<_> = FLAGS.iter().collect();
    let mut flags: Vec<_> = (0..3 + random.below(8))
        .map(|_| {
            let (flag, values) = left.swap_remove(random.below(left.len()));
            (*flag, values[random.below(values.len())])
        })
        .collect();
    let has = |names: &[&str]| flags.iter().any(|(flag, _)| names.contains(flag));
    if has(&EVALUATE) && !has(&["--eval_data", "--split_dataset_ratio"]) {
        flags.push(("--eval_data", "EVAL"));
    }
    flags
}

#[test]
fn any_combination_of_flags_runs_or_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let model = new_model(folder.path(), 16, 1, 16, 32);
    let data = new_data(folder.path(), 4, 6, 32);
    let eval = written(folder.path(), "eval.jsonl", &[r#"{"input_ids": [1, 2, 3]}"#]);
    let config =
        written(folder.path(), "run.yaml", &["learning_rate: 1e-4", "bf16: true", "logging_steps: 2"]);
    let count = if is_full() { COMBINATIONS } else { COMBINATIONS / 4 };
    let tried = |number: usize| -> (Vec<String>, Ended) {
        let own = folder.path().join(number.to_string());
        std::fs::create_dir(&own).unwrap();
        let output = own.join("run");
        let base = [
            "train",
            "--device",
            "cpu",
            "--model",
            text(&model),
            "--data",
            text(&data),
            "--output",
            text(&output),
            "--max-steps",
            "2",
        ];
        let mut arguments = base.map(str::to_owned).to_vec();
        for (flag, value) in combination(number) {
            arguments.push(flag.to_owned());
            let words = value.split(' ').filter(|word| !word.is_empty());
            arguments.extend(words.map(|word| {
                let word = word.replace("EVAL", text(&eval)).replace("CONFIG", text(&config));
                let word = word.replace("MODEL", text(&model));
                word.replace('@', text(&own))
            }));
        }
        let ended = zeroth(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        (arguments, ended)
    };
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        break;
                    }
                    let (arguments, ended) = tried(number);
                    let shown = format!("{number}: zeroth {}\n{}", arguments.join(" "), ended.stderr);
                    assert!(ended.is_orderly(), "{shown}");
                    assert!(matches!(ended.code, 0 | 2), "exit {} of {shown}", ended.code);
                    assert!(ended.code == 0 || ended.stderr.contains("error: "), "{shown}");
                    done.fetch_add(usize::from(ended.code == 0), Ordering::Relaxed);
                }
            });
        }
    });
    let done = done.into_inner();
    assert!(done * 2 > count, "only {done} of {count} combinations ran");
}
