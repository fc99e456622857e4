//! Invalid configs are reported with the problem, the location and a fix; merely unusual ones pass.
//!
//! In the tables, `▸` marks the key at fault; it is not part of the text.

use zeroth_config::check::{CheckReport, KeyStatus, Severity, Verdict, check};
use zeroth_config::read::{ConfigSource, Document, Location, parse};
use zeroth_config::schema::{self, Effect};
use zeroth_config::snippet;

use KeyStatus::Unknown;

mod lenient;
mod properties;
mod together;
mod values;

/// A config with a mark at the fault, the path of the key as written, and a part of the message.
type Row = (&'static str, &'static str, &'static str);

fn read(text: &str) -> Document {
    parse(ConfigSource::from_text("ds.json", text)).unwrap_or_else(|error| panic!("{text}\n{error}"))
}

fn checked(text: &str) -> CheckReport {
    check(&read(text))
}

fn verdict<'a>(report: &'a CheckReport, path: &str) -> &'a Verdict {
    let found: Vec<&Verdict> = report.verdicts.iter().filter(|verdict| verdict.path == path).collect();
    assert_eq!(found.len(), 1, "verdicts on {path}: {found:?}");
    found[0]
}

/// Checks one row, and returns what is wrong with the verdict, if anything.
fn fault(status: KeyStatus, (marked, path, phrase): &Row) -> Option<String> {
    let (before, after) = marked.split_once('▸').expect("a row has a mark");
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
    let text = format!("{before}{after}");
    let document = read(&text);
    let Ok(report) = std::panic::catch_unwind(|| check(&document)) else {
        return Some(format!("{text}\n  the check panics"));
    };
    let at = |verdict: &&Verdict| verdict.path == *path && verdict.location == (Location { line, column });
    let Some(verdict) = report.verdicts.iter().find(at) else {
        return Some(format!("{text}\n  no verdict on {path} at line {line}, column {column}"));
    };
    let said = format!("{} ({:?}): {}", verdict.status.word(), verdict.severity(), verdict.message);
    let shown = snippet::of_verdict("error", &document.source, verdict);
    let right = verdict.status == status
        && verdict.severity() == Severity::Error
        && verdict.message.contains(phrase)
        && !report.is_ok(false)
        && shown.contains(&format!("ds.json: line {line}"));
    (!right).then(|| format!("{text}\n  expected {} (Error): …{phrase}…\n  found    {said}", status.word()))
}

fn assert_rows(status: KeyStatus, rows: &[Row]) {
    let faults: Vec<String> = rows.iter().filter_map(|row| fault(status, row)).collect();
    assert!(faults.is_empty(), "{} of {} rows:\n{}", faults.len(), rows.len(), faults.join("\n"));
}

#[test]
fn misspelled_keys_get_a_suggestion_at_every_level() {
    assert_rows(
        Unknown,
        &[
            (r#"{▸"gradient_cliping": 1.0}"#, "gradient_cliping", "did you mean `gradient_clipping`?"),
            (r#"{▸"train_batchsize": 8}"#, "train_batchsize", "did you mean `train_batch_size`?"),
            (r#"{▸"zero_optimisation": {"stage": 3}}"#, "zero_optimisation", "`zero_optimization`?"),
            (r#"{▸"FP16": {"enabled": true}}"#, "FP16", "did you mean `fp16`?"),
            (r#"{▸"zerotth": {}}"#, "zerotth", "did you mean `zeroth`?"),
            (r#"{"zero_optimization": {▸"stge": 3}}"#, "zero_optimization.stge", "`stage`?"),
            (
                r#"{"zero_optimization": {"stage": 3, ▸"stage3_prefetch_bucketsize": 1}}"#,
                "zero_optimization.stage3_prefetch_bucketsize",
                "`zero_optimization` has no key `stage3_prefetch_bucketsize`; did you mean `stage3_prefetch_bucket_size`?",
            ),
            (
                r#"{"zero_optimization": {"offload_param": {▸"pin_memmory": true}}}"#,
                "zero_optimization.offload_param.pin_memmory",
                "did you mean `pin_memory`?",
            ),
            (
                r#"{"zero_optimization": {"offload_optimizer": {▸"devise": "cpu"}}}"#,
                "zero_optimization.offload_optimizer.devise",
                "did you mean `device`?",
            ),
            (
                r#"{"zero_optimization": {"zenflow": {▸"top_k_ratio": 0.1}}}"#,
                "zero_optimization.zenflow.top_k_ratio",
                "did you mean `topk_ratio`?",
            ),
            (r#"{"fp16": {▸"loss_scale_windw": 9}}"#, "fp16.loss_scale_windw", "`loss_scale_window`?"),
            (r#"{"bf16": {▸"enable": true}}"#, "bf16.enable", "did you mean `enabled`?"),
            (r#"{"bfloat16": {▸"enable": true}}"#, "bfloat16.enable", "did you mean `enabled`?"),
            (r#"{"data_types": {▸"grad_accum_type": "fp32"}}"#, "data_types.grad_accum_type", "_dtype`?"),
            (r#"{"optimizer": {▸"tpye": "Adam"}}"#, "optimizer.tpye", "did you mean `type`?"),
            (r#"{"optimizer": {▸"parms": {}}}"#, "optimizer.parms", "did you mean `params`?"),
            (
                r#"{"optimizer": {"type": "AdamW", "params": {▸"weigth_decay": 0.1}}}"#,
                "optimizer.params.weigth_decay",
                "did you mean `weight_decay`?",
            ),
            (r#"{"scheduler": {▸"typ": "WarmupLR", "params": {}}}"#, "scheduler.typ", "did you mean `type`?"),
            (
                r#"{"scheduler": {"type": "WarmupLR", "params": {▸"warmup_num_step": 10}}}"#,
                "scheduler.params.warmup_num_step",
                "did you mean `warmup_num_steps`?",
            ),
            (
                r#"{"activation_checkpointing": {▸"partition_activation": true}}"#,
                "activation_checkpointing.partition_activation",
                "did you mean `partition_activations`?",
            ),
            (r#"{"aio": {▸"que_depth": 8}}"#, "aio.que_depth", "did you mean `queue_depth`?"),
            (r#"{"tensorboard": {▸"output_pth": "x"}}"#, "tensorboard.output_pth", "`output_path`?"),
            (r#"{"csv_monitor": {▸"jobname": "x"}}"#, "csv_monitor.jobname", "did you mean `job_name`?"),
            (r#"{"wandb": {▸"projet": "x"}}"#, "wandb.projet", "did you mean `project`?"),
            (r#"{"flops_profiler": {▸"profile_steps": 1}}"#, "flops_profiler.profile_steps", "_step`?"),
            (r#"{"checkpoint": {▸"tag_validate": "warn"}}"#, "checkpoint.tag_validate", "`tag_validation`?"),
            (
                r#"{"checkpoint": {"writer": {▸"io_bufer_size": 1}}}"#,
                "checkpoint.writer.io_bufer_size",
                "did you mean `io_buffer_size`?",
            ),
            (
                r#"{"timers": {"throughput": {▸"enable": true}}}"#,
                "timers.throughput.enable",
                "did you mean `enabled`?",
            ),
            (r#"{"elasticity": {▸"min_gpu": 1}}"#, "elasticity.min_gpu", "did you mean `min_gpus`?"),
            (r#"{"zeroth": {▸"recompte": "block"}}"#, "zeroth.recompte", "did you mean `recompute`?"),
            (r#"{"zeroth": {▸"collective": "fast"}}"#, "zeroth.collective", "did you mean `collectives`?"),
        ],
    );
}

/// A missing word is more than a few letters, but as common a mistake.
#[test]
fn keys_with_a_missing_word_get_a_suggestion() {
    assert_rows(
        Unknown,
        &[
            (
                r#"{▸"train_micro_batch_size": 1}"#,
                "train_micro_batch_size",
                "`train_micro_batch_size_per_gpu`",
            ),
            (r#"{▸"train_micro_batch_per_gpu": 1}"#, "train_micro_batch_per_gpu", "_size_per_gpu`"),
            (r#"{▸"accumulation_steps": 1}"#, "accumulation_steps", "`gradient_accumulation_steps`"),
            (
                r#"{"scheduler": {"type": "WarmupDecayLR", "params": {▸"total_steps": 9}}}"#,
                "scheduler.params.total_steps",
                "did you mean `total_num_steps`?",
            ),
        ],
    );
}

#[test]
fn keys_in_the_wrong_section_get_the_right_path_suggested() {
    let zero = |name| format!("`zero_optimization.{name}`");
    for key in schema::keys().filter(|key| key.parent() == "zero_optimization" && key.other_paths.is_empty())
    {
        if matches!(key.effect, Effect::Refused(_) | Effect::Deprecated(_)) {
            continue;
        }
        let report = checked(&format!(r#"{{"{}": 1}}"#, key.name()));
        let verdict = verdict(&report, key.name());
        let told = verdict.message.contains(&zero(key.name()));
        assert!(told && verdict.severity() == Severity::Error, "{}: {}", key.name(), verdict.message);
    }
    assert_rows(
        Unknown,
        &[
            (
                r#"{"zero_optimization": {▸"gradient_clipping": 1}}"#,
                "zero_optimization.gradient_clipping",
                "top level",
            ),
            (r#"{"zero_optimization": {▸"aio": {}}}"#, "zero_optimization.aio", "at the top level"),
            (r#"{"optimizer": {▸"lr": 0.1}}"#, "optimizer.lr", "did you mean `optimizer.params.lr`?"),
            (r#"{"bf16": {▸"loss_scale": 0}}"#, "bf16.loss_scale", "did you mean `fp16.loss_scale`?"),
            // Two sections have the key, and both are suggested.
            (
                r#"{"zero_optimization": {▸"pin_memory": true}}"#,
                "zero_optimization.pin_memory",
                "offload_param.pin_memory`",
            ),
            (
                r#"{"zero_optimization": {▸"pin_memory": true}}"#,
                "zero_optimization.pin_memory",
                "offload_optimizer.pin_memory`",
            ),
            // A dotted path is not a key: DeepSpeed would not read it.
            (
                r#"{▸"zero_optimization.stage": 3}"#,
                "zero_optimization.stage",
                "{\"zero_optimization\": {\"stage\": …}}",
            ),
            (r#"{▸"fp16.enabled": true}"#, "fp16.enabled", "{\"fp16\": {\"enabled\": …}}"),
        ],
    );
    let enabled = checked(r#"{"zero_optimization": {"enabled": true}}"#);
    let message = &verdict(&enabled, "zero_optimization.enabled").message;
    assert!(!message.contains("timers"), "a dozen sections have `enabled`, and none is likelier: {message}");
}

#[test]
fn suggestions_are_never_refused_themselves() {
    let report = checked(r#"{"zero_optimization": {"offload_optimizer": {"buffer_sizes": 1}}}"#);
    let message = &verdict(&report, "zero_optimization.offload_optimizer.buffer_sizes").message;
    assert!(!message.contains("mean `buffer_size`"), "offload_optimizer refuses it: {message}");
    // A similar parameter of another type is suggested with the type.
    for (text, path, owner) in [
        (
            r#"{"optimizer": {"type": "AdamW", "params": {"momentun": 0.9}}}"#,
            "optimizer.params.momentun",
            "SGD",
        ),
        (
            r#"{"scheduler": {"type": "WarmupLR", "params": {"total_num_step": 9}}}"#,
            "scheduler.params.total_num_step",
            "WarmupDecayLR",
        ),
    ] {
        let report = checked(text);
        assert!(verdict(&report, path).message.contains(owner), "{}", verdict(&report, path).message);
    }
    let report = checked(r#"{"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}}"#);
    let message = &verdict(&report, "zero_optimization.offload_param.device").message;
    assert!(!message.contains("mean \"cpu\""), "who writes gpu wants them to stay there: {message}");
}

#[test]
fn locations_count_lines_and_characters_of_the_original_file() {
    let text = "{\n  // 学习率\n\t\"zero_optimization\": {\"stage\": 2, /* 第二 */ \"stge\": 3},\n  # é\n  optimzer: {}\n}\n";
    let report = checked(text);
    assert_eq!(verdict(&report, "zero_optimization.stge").location, Location { line: 3, column: 45 });
    assert_eq!(verdict(&report, "optimzer").location, Location { line: 5, column: 3 });
}
