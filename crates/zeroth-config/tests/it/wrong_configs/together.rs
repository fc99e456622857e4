//! Values that are invalid together: contradictions, duplicate keys, parameters of another optimizer or scheduler.

use zeroth_config::check::KeyStatus::Invalid;
use zeroth_config::check::Severity;

use super::{assert_rows, checked};

#[test]
fn contradictory_values_are_reported() {
    assert_rows(
        Invalid,
        &[
            (
                r#"{"zero_optimization": {"stage": 3, "offload_param": {▸"device": "nvme"}}}"#,
                "zero_optimization.offload_param.device",
                "zero_optimization.offload_param.nvme_path does not say where",
            ),
            (
                r#"{"zero_optimization": {"stage": 3, "offload_optimizer": {▸"device": "nvme", "nvme_path": " "}}}"#,
                "zero_optimization.offload_optimizer.device",
                "zero_optimization.offload_optimizer.nvme_path does not say where",
            ),
            (
                r#"{▸"train_batch_size": 16, "train_micro_batch_size_per_gpu": 3}"#,
                "train_batch_size",
                "16 is no multiple of train_micro_batch_size_per_gpu 3, so no number of ranks fits; write 15 or 18",
            ),
            (
                r#"{▸"train_batch_size": 1, "gradient_accumulation_steps": 2}"#,
                "train_batch_size",
                "1 is no multiple of gradient_accumulation_steps 2, so no number of ranks fits; write 2,",
            ),
            (
                r#"{"gradient_accumulation_steps": 5, "train_micro_batch_size_per_gpu": 4, ▸"train_batch_size": 64}"#,
                "train_batch_size",
                "train_micro_batch_size_per_gpu 4 × gradient_accumulation_steps 5 = 20",
            ),
            (
                r#"{▸"train_batch_size": 9223372036854775807, "train_micro_batch_size_per_gpu": 2}"#,
                "train_batch_size",
                "no number of ranks fits",
            ),
            (r#"{"fp16": {▸"enabled": true}, "bf16": {"enabled": true}}"#, "fp16.enabled", "both true"),
            (r#"{"bfloat16": {"enabled": true}, "fp16": {▸"enabled": "true"}}"#, "fp16.enabled", "both true"),
        ],
    );
}

#[test]
fn duplicate_keys_are_reported_with_the_other_location() {
    const GATHER: &str = "zero_optimization.stage3_gather_fp16_weights_on_model_save";
    assert_rows(
        Invalid,
        &[
            (
                "{\"train_batch_size\": 8,\n ▸\"train_batch_size\": 16}",
                "train_batch_size",
                "first at line 1, column 2",
            ),
            (
                "{\"zero_optimization\": {\n  \"stage\": 2,\n  ▸\"stage\": 3}}",
                "zero_optimization.stage",
                "the key is given twice, first at line 2, column 3",
            ),
            (r#"{"fp16": {"enabled": true}, ▸"fp16": {}}"#, "fp16", "first at line 1, column 2"),
            (
                r#"{"optimizer": {"type": "Adam", ▸"type": "Adam"}}"#,
                "optimizer.type",
                "first at line 1, column 16",
            ),
            // DeepSpeed refuses duplicate keys everywhere, including sections that have no counterpart here.
            (
                r#"{"autotuning": {"fast": true, ▸"fast": false}}"#,
                "autotuning.fast",
                "given twice, first at line 1",
            ),
            (r#"{"my_notes": {"a": 1, ▸"a": 2}}"#, "my_notes.a", "the key is given twice, first at line 1"),
            (
                r#"{"zero_optimization": {"stage3_prefetch_bucket_size": 1, ▸"prefetch_bucket_size": 2}}"#,
                "zero_optimization.prefetch_bucket_size",
                "the same key as `zero_optimization.stage3_prefetch_bucket_size` at line 1, column 24",
            ),
            (
                r#"{"zero_optimization": {"memory_efficient_linear": true}, ▸"memory_efficient_linear": true}"#,
                "memory_efficient_linear",
                "the same key as `zero_optimization.memory_efficient_linear` at line 1",
            ),
            (
                r#"{"bf16": {"enabled": true}, ▸"bfloat16": {"check_grad_overflow": false}}"#,
                "bfloat16",
                "the same section as `bf16`",
            ),
            (
                r#"{"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": true,
                ▸"stage3_gather_fp16_weights_on_model_save": true}}"#,
                GATHER,
                "the old name of `zero_optimization.stage3_gather_16bit_weights_on_model_save`",
            ),
            (
                r#"{"zero_optimization": {▸"cpu_offload": true, "offload_optimizer": {"device": "cpu"}}}"#,
                "zero_optimization.cpu_offload",
                "`zero_optimization.offload_optimizer.device`, which is given too (line 1, column 67)",
            ),
            (
                r#"{"aio": {▸"thread_count": 1, "intra_op_parallelism": 1}}"#,
                "aio.thread_count",
                "the old name of `aio.intra_op_parallelism`, which is given too",
            ),
        ],
    );
}

#[test]
fn invalid_optimizers_and_schedulers_are_reported_with_a_fix() {
    assert_rows(
        Invalid,
        &[
            (r#"{"optimizer": {▸"type": "Adamm"}}"#, "optimizer.type", "did you mean \"Adam\"?"),
            (r#"{"optimizer": {▸"type": "OneBitAdm"}}"#, "optimizer.type", "did you mean \"OneBitAdam\"?"),
            (r#"{"optimizer": {▸"type": "Sophia"}}"#, "optimizer.type", "use one of Adam, AdamW, SGD, Lion"),
            (r#"{"scheduler": {▸"type": "WarmupLRR"}}"#, "scheduler.type", "did you mean \"WarmupLR\"?"),
            (r#"{"scheduler": {▸"type": "Trapezoid"}}"#, "scheduler.type", "use one of WarmupLR"),
            (r#"{"scheduler": {▸"type": "cosine"}}"#, "scheduler.type", "--lr-scheduler-type cosine"),
            (
                r#"{"optimizer": {"type": "SGD", "params": {▸"betas": [0.9, 0.99]}}}"#,
                "optimizer.params.betas",
                "a parameter of Adam, AdamW, Lion, AdEMAMix; SGD has none of that name",
            ),
            (
                r#"{"optimizer": {"params": {▸"momentum": 0.9}, "type": "AdamW"}}"#,
                "optimizer.params.momentum",
                "a parameter of SGD; AdamW has none of that name",
            ),
            (
                r#"{"optimizer": {"type": "AdamW", "params": {▸"max_grad_norm": 1.0}}}"#,
                "optimizer.params.max_grad_norm",
                "write gradient_clipping at the top level",
            ),
            (
                r#"{"scheduler": {"type": "WarmupCosineLR", "params": {▸"warmup_max_lr": 1e-3}}}"#,
                "scheduler.params.warmup_max_lr",
                "a parameter of WarmupLR, WarmupDecayLR",
            ),
            (
                r#"{"scheduler": {▸"params": {}}}"#,
                "scheduler.params",
                "scheduler has no `type`; write one of",
            ),
            (
                r#"{"scheduler": {"params": {▸"warmup_min_lr": 0}}}"#,
                "scheduler.params.warmup_min_lr",
                "depends on scheduler.type, which is missing",
            ),
            (
                r#"{"scheduler": {▸"type": "OneCycle", "params": {"cycle_min_lr": 1e-4}}}"#,
                "scheduler.type",
                "OneCycle needs scheduler.params.cycle_max_lr",
            ),
            (
                r#"{"scheduler": {▸"type": "OneCycle"}}"#,
                "scheduler.type",
                "OneCycle needs scheduler.params.cycle_min_lr and scheduler.params.cycle_max_lr",
            ),
            (
                r#"{"zero_optimization": {▸"grad_hooks": true}}"#,
                "zero_optimization.grad_hooks",
                "leave it out",
            ),
            (
                r#"{"zero_optimization": {"offload_optimizer": {▸"buffer_size": 1e8}}}"#,
                "zero_optimization.offload_optimizer.buffer_size",
                "did you mean offload_param.buffer_size?",
            ),
            (
                r#"{"zero_optimization": {"offload_param": {▸"ratio": 0.3}}}"#,
                "zero_optimization.offload_param.ratio",
                "did you mean offload_optimizer.ratio?",
            ),
        ],
    );
}

#[test]
fn one_fault_is_reported_once() {
    for text in [
        r#"{"scheduler": {"type": 5}}"#,
        r#"{"scheduler": {"type": "cosine", "params": {}}}"#,
        r#"{"zero_optimization": {"stage": 4}}"#,
        r#"{"zero_optimisation": {"stage": 3, "offload_param": {"device": "cpu"}}}"#,
    ] {
        let report = checked(text);
        let errors: Vec<String> = report
            .at_least(Severity::Error)
            .map(|verdict| format!("{}: {}", verdict.path, verdict.message))
            .collect();
        assert_eq!(errors.len(), 1, "{text}: {errors:#?}");
    }
}
