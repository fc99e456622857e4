//! Values that are invalid by themselves: of another type, fractional, or out of bounds.

use zeroth_config::check::KeyStatus::Invalid;

use super::assert_rows;

#[test]
fn values_of_another_type_are_reported_with_the_expected_type() {
    assert_rows(
        Invalid,
        &[
            (r#"{▸"wall_clock_breakdown": "maybe"}"#, "wall_clock_breakdown", "must be true or false"),
            (r#"{▸"dump_state": 2}"#, "dump_state", "it holds the number 2, and must be true or false"),
            (
                r#"{"zero_optimization": {▸"overlap_comm": []}}"#,
                "zero_optimization.overlap_comm",
                "true or false",
            ),
            (
                r#"{"zero_optimization": {▸"stage": "three"}}"#,
                "zero_optimization.stage",
                "the text \"three\"",
            ),
            (
                r#"{▸"train_batch_size": true}"#,
                "train_batch_size",
                "it holds true, and must be a whole number",
            ),
            (
                r#"{▸"steps_per_print": [10]}"#,
                "steps_per_print",
                "it holds a list, and must be a whole number",
            ),
            (r#"{▸"gradient_clipping": "high"}"#, "gradient_clipping", "must be a number"),
            (r#"{"fp16": {▸"loss_scale": true}}"#, "fp16.loss_scale", "it holds true, and must be a number"),
            (
                r#"{"fp16": {▸"loss_scale": {}}}"#,
                "fp16.loss_scale",
                "it holds an object, and must be a number",
            ),
            (r#"{"fp16": {▸"loss_scale": "inf"}}"#, "fp16.loss_scale", "the text \"inf\""),
            (
                r#"{"zero_optimization": {"offload_param": {▸"nvme_path": 7}}}"#,
                "zero_optimization.offload_param.nvme_path",
                "must hold text",
            ),
            (r#"{"tensorboard": {▸"job_name": true}}"#, "tensorboard.job_name", "must hold text"),
            (
                r#"{"zero_optimization": {"offload_optimizer": {▸"device": "cpus"}}}"#,
                "zero_optimization.offload_optimizer.device",
                "\"cpus\" is not one of \"none\", \"cpu\" or \"nvme\"; did you mean \"cpu\"?",
            ),
            (r#"{▸"communication_data_type": "int8"}"#, "communication_data_type", "is not one of \"fp16\""),
            (r#"{▸"gradient_allreduce_op": "max"}"#, "gradient_allreduce_op", "\"mean\" or \"sum\""),
            (r#"{"zeroth": {▸"recompute": true}}"#, "zeroth.recompute", "must be \"none\", \"norm_swiglu\""),
            (
                r#"{"scheduler": {"type": "WarmupLR", "params": {▸"warmup_type": "linaer"}}}"#,
                "scheduler.params.warmup_type",
                "did you mean \"linear\"?",
            ),
            (r#"{"optimizer": {"params": {▸"betas": [0.9]}}}"#, "optimizer.params.betas", "must hold 2"),
            (
                r#"{"optimizer": {"params": {▸"betas": [0.9, 0.9, 0.9]}}}"#,
                "optimizer.params.betas",
                "must hold 2",
            ),
            (r#"{"optimizer": {"params": {▸"betas": "0.9"}}}"#, "optimizer.params.betas", "must hold a list"),
            (
                r#"{"optimizer": {"params": {▸"betas": [0.9, "x"]}}}"#,
                "optimizer.params.betas",
                "the text \"x\"",
            ),
            (
                r#"{"elasticity": {▸"micro_batch_sizes": [2, 4.5]}}"#,
                "elasticity.micro_batch_sizes",
                "4.5 is not",
            ),
            (
                r#"{"elasticity": {▸"micro_batch_sizes": 4}}"#,
                "elasticity.micro_batch_sizes",
                "must hold a list",
            ),
            (r#"{"comms_logger": {▸"prof_ops": "all_reduce"}}"#, "comms_logger.prof_ops", "must hold a list"),
            (r#"{"comms_logger": {▸"prof_ops": [1]}}"#, "comms_logger.prof_ops", "must hold texts"),
            (r#"{▸"fp16": true}"#, "fp16", "it holds a boolean, and must hold an object {…}"),
            (r#"{▸"bf16": "auto"}"#, "bf16", "it holds text, and must hold an object {…}"),
            (
                r#"{▸"zero_optimization": 3}"#,
                "zero_optimization",
                "it holds a number, and must hold an object",
            ),
            (r#"{▸"optimizer": []}"#, "optimizer", "it holds a list, and must hold an object {…}"),
            (r#"{▸"scheduler": 5}"#, "scheduler", "it holds a number, and must hold an object {…}"),
            (r#"{"scheduler": {▸"type": 5}}"#, "scheduler.type", "it holds a number, and must hold text"),
            (r#"{▸"activation_checkpointing": 1}"#, "activation_checkpointing", "must hold an object {…}"),
            (r#"{"checkpoint": {▸"writer": "fast"}}"#, "checkpoint.writer", "must hold an object {…}"),
        ],
    );
}

#[test]
fn fractions_are_refused_for_whole_numbers() {
    const PREFETCH: &str = "zero_optimization.stage3_prefetch_bucket_size";
    assert_rows(
        Invalid,
        &[
            // 0.9 · 4096², a value that has broken many configs.
            (
                r#"{"zero_optimization": {▸"stage3_prefetch_bucket_size": 15099494.4}}"#,
                PREFETCH,
                "15099494.4 is not a whole number; write 15099494",
            ),
            (
                r#"{"zero_optimization": {▸"stage3_prefetch_bucket_size": "15099494.4"}}"#,
                PREFETCH,
                "15099494.4 is not a whole number; write 15099494",
            ),
            (
                r#"{"zero_optimization": {▸"stage3_prefetch_bucket_size": 1e30}}"#,
                PREFETCH,
                "1e30 is beyond 2^63",
            ),
            (r#"{▸"train_batch_size": 0.5}"#, "train_batch_size", "0.5 is not a whole number"),
            (r#"{"fp16": {▸"hysteresis": 1.5}}"#, "fp16.hysteresis", "1.5 is not a whole number"),
        ],
    );
}

#[test]
fn numbers_out_of_bounds_are_reported_with_the_bounds() {
    assert_rows(
        Invalid,
        &[
            (
                r#"{"zero_optimization": {▸"stage": 4}}"#,
                "zero_optimization.stage",
                "at least 0 and at most 3",
            ),
            (r#"{"zero_optimization": {▸"stage": -1}}"#, "zero_optimization.stage", "-1 is out of bounds"),
            (r#"{"fp16": {▸"hysteresis": 0}}"#, "fp16.hysteresis", "it must be at least 1"),
            (r#"{"fp16": {▸"loss_scale": -1}}"#, "fp16.loss_scale", "it must be at least 0"),
            (r#"{"fp16": {▸"min_loss_scale": 0}}"#, "fp16.min_loss_scale", "it must be above 0"),
            (r#"{"fp16": {▸"loss_scale_window": 0}}"#, "fp16.loss_scale_window", "it must be at least 1"),
            (r#"{"fp16": {▸"initial_scale_power": 200}}"#, "fp16.initial_scale_power", "at most 126"),
            (r#"{"aio": {▸"queue_depth": 0}}"#, "aio.queue_depth", "it must be at least 1"),
            (r#"{"aio": {▸"block_size": 100}}"#, "aio.block_size", "it must be at least 512"),
            (
                r#"{"zero_optimization": {"offload_param": {▸"buffer_count": 0}}}"#,
                "zero_optimization.offload_param.buffer_count",
                "it must be at least 1",
            ),
            (
                r#"{"zero_optimization": {"offload_optimizer": {▸"buffer_count": 0}}}"#,
                "zero_optimization.offload_optimizer.buffer_count",
                "it must be at least 1",
            ),
            (
                r#"{"zero_optimization": {"offload_optimizer": {▸"ratio": 1.5}}}"#,
                "zero_optimization.offload_optimizer.ratio",
                "1.5 is out of bounds: it must be at least 0 and at most 1",
            ),
            (
                r#"{"activation_checkpointing": {▸"number_checkpoints": 0}}"#,
                "activation_checkpointing.number_checkpoints",
                "it must be at least 1",
            ),
            (
                r#"{"zero_optimization": {▸"reduce_bucket_size": -1}}"#,
                "zero_optimization.reduce_bucket_size",
                "least 0",
            ),
            (
                r#"{"zero_optimization": {▸"sub_group_size": -5e8}}"#,
                "zero_optimization.sub_group_size",
                "least 0",
            ),
            (
                r#"{"zero_optimization": true, ▸"allgather_size": -5}"#,
                "allgather_size",
                "it must be at least 0",
            ),
            (r#"{▸"train_batch_size": 0}"#, "train_batch_size", "it must be at least 1"),
            (r#"{▸"train_micro_batch_size_per_gpu": -1}"#, "train_micro_batch_size_per_gpu", "at least 1"),
            (r#"{▸"gradient_accumulation_steps": 0}"#, "gradient_accumulation_steps", "at least 1"),
            (r#"{▸"gradient_clipping": -1.0}"#, "gradient_clipping", "it must be at least 0"),
            (r#"{"optimizer": {"params": {▸"lr": -1e-3}}}"#, "optimizer.params.lr", "it must be at least 0"),
            (
                r#"{"optimizer": {"params": {▸"betas": [0.9, 1.0]}}}"#,
                "optimizer.params.betas",
                "1.0 is out of bounds",
            ),
            (
                r#"{"optimizer": {"params": {▸"betas": [-0.1, 0.9]}}}"#,
                "optimizer.params.betas",
                "-0.1 is out of",
            ),
        ],
    );
}
