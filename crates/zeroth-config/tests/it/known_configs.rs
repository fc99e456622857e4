//! Published configs: from the five documents, the pages of DeepSpeed and Hugging Face, ms-swift (six) and axolotl.
//!
//! Every key of every file gets one verdict, and docs/verdicts.md counts them.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;
use zeroth_config::check::{CheckReport, KeyStatus, Severity, check};
use zeroth_config::docs::wrap;
use zeroth_config::read::{ConfigSource, parse};
use zeroth_config::schema::{self, Effect, ReadBy};

/// Keys of these files that are errors, with the reason.
const WRONG_ON_PURPOSE: [(&str, &str, KeyStatus, &str); 2] = [
    (
        "deepspeed-zero-page.json",
        "zero_optimization.grad_hooks",
        KeyStatus::Invalid,
        "DeepSpeed's page documents the key, and DeepSpeed refuses it",
    ),
    (
        "deepspeed-hf-nvme.json",
        "zero_optimization.aio",
        KeyStatus::Unknown,
        "Hugging Face's page has `aio` inside zero_optimization, where DeepSpeed refuses it; it belongs to the top level",
    ),
];

struct Known {
    name: String,
    text: String,
    report: CheckReport,
}

fn known_configs() -> Vec<Known> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs");
    let entries = fs::read_dir(folder).expect("the folder lies beside this file");
    let mut paths: Vec<PathBuf> =
        entries.map(|entry| entry.expect("a folder can be listed").path()).collect();
    paths.sort();
    let known = |path: PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).expect("their names are ASCII").to_owned();
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        let report = checked(&name, &text);
        Known { name, text, report }
    };
    paths.into_iter().map(known).collect()
}

fn checked(name: &str, text: &str) -> CheckReport {
    match parse(ConfigSource::from_text(name, text)) {
        Ok(document) => check(&document),
        Err(error) => panic!("{error}"),
    }
}

fn status(text: &str, path: &str) -> KeyStatus {
    let report = checked("ds.json", text);
    let mut found = report.verdicts.iter().filter(|verdict| verdict.path == path);
    let verdict = found.next().unwrap_or_else(|| panic!("{text} has no verdict on {path}"));
    verdict.status
}

/// Strips `//` comments, so that a plain JSON parser can list the keys.
fn without_comments(text: &str) -> String {
    let strip = |line: &str| {
        let mut quoted = false;
        let mut previous = ' ';
        for (at, character) in line.char_indices() {
            match character {
                '"' if previous != '\\' => quoted = !quoted,
                '/' if previous == '/' && !quoted => return line[..at - 1].to_owned(),
                _ => {}
            }
            previous = character;
        }
        line.to_owned()
    };
    text.lines().map(strip).collect::<Vec<_>>().join("\n")
}

/// Collects the paths of all keys in file order, except for comments (`_…`). A list is a value.
fn key_paths(value: &Json, section: &str, paths: &mut Vec<String>) {
    let Json::Object(members) = value else { return };
    for (key, value) in members.iter().filter(|(key, _)| !key.starts_with('_')) {
        let path = if section.is_empty() { key.clone() } else { format!("{section}.{key}") };
        paths.push(path.clone());
        key_paths(value, &path, paths);
    }
}

#[test]
fn every_key_has_exactly_one_verdict_in_file_order() {
    let mut left = Vec::new();
    for Known { name, text, report } in known_configs() {
        let json: Json = serde_json::from_str(&without_comments(&text)).unwrap();
        let mut paths = Vec::new();
        key_paths(&json, "", &mut paths);
        let judged: Vec<&String> = report.verdicts.iter().map(|verdict| &verdict.path).collect();
        if judged != paths.iter().collect::<Vec<_>>() {
            let missing: Vec<&String> = paths.iter().filter(|path| !judged.contains(path)).collect();
            left.push(format!(
                "{name}: {} keys, {} verdicts, none on {missing:?}",
                paths.len(),
                judged.len()
            ));
        }
    }
    assert!(left.is_empty(), "{}", left.join("\n"));
}

#[test]
fn only_the_listed_keys_are_errors() {
    let files = known_configs();
    for (file, path, expected, reason) in WRONG_ON_PURPOSE {
        let known = files.iter().find(|known| known.name == file).unwrap();
        let verdict = known.report.verdicts.iter().find(|verdict| verdict.path == path).unwrap();
        assert_eq!(
            (verdict.status, verdict.severity()),
            (expected, Severity::Error),
            "{file}, {path}: {reason}"
        );
    }
    for Known { name, report, .. } in files {
        for verdict in report.at_least(Severity::Error) {
            let listed =
                WRONG_ON_PURPOSE.iter().any(|(file, path, ..)| *file == name && *path == verdict.path);
            assert!(listed, "{name}: {} is {}: {}", verdict.path, verdict.status.title(), verdict.message);
        }
    }
}

#[test]
fn every_source_has_files() {
    let names: Vec<String> = known_configs().into_iter().map(|known| known.name).collect();
    let of = |source: &str| names.iter().filter(|name| name.starts_with(source)).count();
    assert_eq!((of("guide-") + of("primer-") + of("manual-"), of("swift-")), (5, 6));
    assert!(of("deepspeed-") >= 15 && of("axolotl-") >= 1, "{names:?}");
}

/// A key is honoured if it is read and its value supported, or if it turns off a feature that does not exist.
#[test]
fn honoured_keys_are_read_or_turn_a_feature_off() {
    for Known { name, report, .. } in known_configs() {
        for verdict in report.verdicts.iter().filter(|verdict| verdict.status == KeyStatus::Honoured) {
            let key = verdict.key.unwrap();
            let off = matches!(key.effect, Effect::Unsupported(_));
            let value = report.values.get(key.path).map_or(&Json::Null, |found| &found.value);
            let read = key.reader != ReadBy::Nobody && key.supports(value);
            assert!(off || read, "{name}: {}", verdict.path);
        }
    }
}

#[test]
fn every_verdict_except_honoured_has_a_message() {
    for Known { name, report, .. } in known_configs() {
        for verdict in report.verdicts.iter().filter(|verdict| verdict.status != KeyStatus::Honoured) {
            assert!(!verdict.message.is_empty(), "{name}: {} is {}", verdict.path, verdict.status.title());
        }
    }
}

/// The keys of each status, as pairs of a section and the names in it, separated by spaces.
type Expected<'a> = [(KeyStatus, &'a [(&'a str, &'a str)])];

fn assert_verdicts(file: &str, expected: &Expected<'_>) {
    let known = known_configs().into_iter().find(|known| known.name == file).expect("the file is there");
    let mut wanted: Vec<(String, KeyStatus)> = Vec::new();
    for (status, sections) in expected {
        for (section, names) in *sections {
            let path =
                |name: &str| if section.is_empty() { name.to_owned() } else { format!("{section}.{name}") };
            wanted.extend(names.split_whitespace().map(|name| (path(name), *status)));
        }
    }
    let mut found: Vec<(String, KeyStatus)> =
        known.report.verdicts.iter().map(|verdict| (verdict.path.clone(), verdict.status)).collect();
    wanted.sort();
    found.sort();
    let differ: Vec<_> = wanted.iter().filter(|pair| !found.contains(pair)).collect();
    let instead: Vec<_> = found.iter().filter(|pair| !wanted.contains(pair)).collect();
    assert_eq!(found, wanted, "{file}: expected {differ:?}, found {instead:?}");
}

/// Keys of `fp16` that have an effect while the command line may still turn it on.
const LOSS_SCALE: &str = "loss_scale loss_scale_window initial_scale_power hysteresis min_loss_scale";

#[test]
fn verdicts_on_the_zero3_guide() {
    let zero = "stage overlap_comm reduce_bucket_size stage3_prefetch_bucket_size \
                stage3_param_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance \
                stage3_gather_16bit_weights_on_model_save";
    assert_verdicts(
        "guide-zero3.json",
        &[
            (
                KeyStatus::Honoured,
                &[
                    ("", "fp16 zero_optimization"),
                    ("fp16", "enabled"),
                    ("fp16", LOSS_SCALE),
                    ("zero_optimization", zero),
                    ("zero_optimization", "offload_optimizer offload_param sub_group_size"),
                    ("zero_optimization.offload_optimizer", "device"),
                    ("zero_optimization.offload_param", "device pin_memory"),
                ],
            ),
            (
                KeyStatus::BuiltIn,
                &[
                    ("zero_optimization", "contiguous_gradients"),
                    ("zero_optimization.offload_optimizer", "pin_memory"),
                ],
            ),
        ],
    );
}

#[test]
fn verdicts_on_the_distillation_guide() {
    let zero = "stage stage3_prefetch_bucket_size stage3_param_persistence_threshold \
                stage3_max_live_parameters stage3_max_reuse_distance \
                stage3_gather_16bit_weights_on_model_save";
    assert_verdicts(
        "guide-distillation.json",
        &[
            (
                KeyStatus::Honoured,
                &[
                    ("", "train_batch_size gradient_accumulation_steps zero_optimization"),
                    ("zero_optimization", zero),
                    ("", "activation_checkpointing memory_efficient_linear"),
                    ("zero_optimization", "offload_optimizer offload_param"),
                    ("zero_optimization.offload_optimizer", "device"),
                    ("zero_optimization.offload_param", "device pin_memory buffer_size max_in_cpu"),
                    ("activation_checkpointing", "cpu_checkpointing number_checkpoints"),
                ],
            ),
            (
                KeyStatus::BuiltIn,
                &[
                    ("", "use_dynamic_tiling"),
                    ("zero_optimization", "round_robin_gradients"),
                    ("zero_optimization.offload_optimizer", "pin_memory fast_init"),
                    ("activation_checkpointing", "contiguous_memory_optimization"),
                ],
            ),
            // Data-parallel ranks have different activations, pinned memory needs no staging buffers, and this config
            // does not use a disk.
            (
                KeyStatus::NoEffect,
                &[
                    ("", "aio"),
                    ("zero_optimization.offload_param", "buffer_count"),
                    ("activation_checkpointing", "partition_activations"),
                    ("aio", "block_size queue_depth single_submit overlap_events"),
                ],
            ),
        ],
    );
}

#[test]
fn verdicts_on_the_zero2_guide() {
    assert_verdicts(
        "guide-zero2.json",
        &[
            (
                KeyStatus::Honoured,
                &[
                    ("", "gradient_accumulation_steps train_batch_size train_micro_batch_size_per_gpu"),
                    ("", "fp16 bf16 optimizer scheduler zero_optimization"),
                    ("", "gradient_clipping steps_per_print wall_clock_breakdown"),
                    ("fp16", "enabled"),
                    ("bf16", "enabled"),
                    ("optimizer", "type params"),
                    ("optimizer.params", "lr betas eps weight_decay"),
                    ("scheduler", "type params"),
                    ("scheduler.params", "warmup_min_lr warmup_max_lr warmup_num_steps"),
                    ("zero_optimization", "stage overlap_comm reduce_scatter reduce_bucket_size"),
                    ("zero_optimization", "offload_optimizer allgather_bucket_size allgather_partitions"),
                    ("zero_optimization.offload_optimizer", "device"),
                    ("fp16", LOSS_SCALE),
                ],
            ),
            (
                KeyStatus::BuiltIn,
                &[
                    ("zero_optimization", "contiguous_gradients"),
                    ("zero_optimization.offload_optimizer", "pin_memory"),
                ],
            ),
        ],
    );
}

#[test]
fn verdicts_on_the_custom_config_of_the_primer() {
    assert_verdicts(
        "primer-custom.json",
        &[
            (
                KeyStatus::Honoured,
                &[
                    ("", "train_batch_size train_micro_batch_size_per_gpu zero_optimization bf16"),
                    ("zero_optimization", "stage reduce_scatter reduce_bucket_size overlap_comm"),
                    ("zero_optimization", "offload_optimizer allgather_bucket_size allgather_partitions"),
                    ("zero_optimization.offload_optimizer", "device"),
                    ("bf16", "enabled"),
                ],
            ),
            (KeyStatus::BuiltIn, &[("zero_optimization.offload_optimizer", "pin_memory")]),
        ],
    );
}

#[test]
fn verdicts_on_the_generated_config_of_the_manual() {
    assert_verdicts(
        "manual-generated.json",
        &[
            (
                KeyStatus::Honoured,
                &[
                    ("", "train_batch_size gradient_accumulation_steps zero_optimization bf16"),
                    ("", "steps_per_print gradient_clipping"),
                    ("zero_optimization", "stage overlap_comm offload_param"),
                    ("zero_optimization.offload_param", "device pin_memory"),
                    ("bf16", "enabled"),
                ],
            ),
            (KeyStatus::BuiltIn, &[("zero_optimization", "contiguous_gradients")]),
        ],
    );
}

#[test]
fn stage_3_keys_have_no_effect_below_stage_3() {
    let names = schema::names_in("zero_optimization").filter(|name| name.starts_with("stage3_"));
    for name in names.filter(|name| *name != "stage3_gather_fp16_weights_on_model_save") {
        for stage in 0..3 {
            let text = format!(r#"{{"zero_optimization": {{"stage": {stage}, "{name}": 1}}}}"#);
            assert_eq!(status(&text, &format!("zero_optimization.{name}")), KeyStatus::NoEffect, "{text}");
        }
    }
    let text = r#"{"zero_optimization": {"stage": 2}, "memory_efficient_linear": false}"#;
    assert_eq!(status(text, "memory_efficient_linear"), KeyStatus::NoEffect);
}

#[test]
fn offload_param_has_no_effect_below_stage_3() {
    for stage in 0..=3 {
        let text = format!(
            r#"{{"zero_optimization": {{"stage": {stage}, "offload_param":
                {{"device": "cpu", "pin_memory": false, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9}}}}}}"#
        );
        let expected = if stage == 3 { KeyStatus::Honoured } else { KeyStatus::NoEffect };
        for key in ["", ".device", ".pin_memory", ".buffer_count", ".buffer_size", ".max_in_cpu"] {
            let path = format!("zero_optimization.offload_param{key}");
            assert_eq!(status(&text, &path), expected, "stage {stage}, {path}");
        }
    }
}

#[test]
fn allgather_bucket_size_has_an_effect_where_state_is_sharded() {
    for (stage, expected) in [
        (0, KeyStatus::NoEffect),
        (1, KeyStatus::Honoured),
        (2, KeyStatus::Honoured),
        (3, KeyStatus::Honoured),
    ] {
        let text = format!(r#"{{"zero_optimization": {{"stage": {stage}, "allgather_bucket_size": 2e8}}}}"#);
        assert_eq!(status(&text, "zero_optimization.allgather_bucket_size"), expected, "stage {stage}");
    }
}

#[test]
fn aio_has_no_effect_without_nvme_offload() {
    let keys = schema::keys().filter(|key| key.parent() == "aio");
    for key in keys.filter(|key| !matches!(key.effect, Effect::Deprecated(_))) {
        let value = key.default.to_json().unwrap();
        let on = |device: &str| {
            format!(
                r#"{{"zero_optimization": {{"stage": 3, "offload_param": {{"device": "{device}", "nvme_path": "/disk"}}}},
                    "aio": {{"{}": {value}}}}}"#,
                key.name()
            )
        };
        assert_eq!(status(&on("cpu"), key.path), KeyStatus::NoEffect, "{}", key.path);
        assert_ne!(status(&on("nvme"), key.path), KeyStatus::NoEffect, "{}", key.path);
    }
    assert_eq!(status(r#"{"aio": {"thread_count": 1}}"#, "aio.thread_count"), KeyStatus::Deprecated);
}

#[test]
fn fp16_keys_have_no_effect_while_fp16_is_off() {
    let keys = schema::keys().filter(|key| key.parent() == "fp16" && key.name() != "enabled");
    for key in keys {
        let value = key.default.to_json().unwrap();
        let text = format!(r#"{{"fp16": {{"enabled": false, "{}": {value}}}}}"#, key.name());
        assert_eq!(status(&text, key.path), KeyStatus::NoEffect, "{text}");
    }
}

#[test]
fn dynamic_loss_scale_keys_have_no_effect_with_a_fixed_scale() {
    for name in ["loss_scale_window", "initial_scale_power", "hysteresis", "min_loss_scale"] {
        let text = format!(r#"{{"fp16": {{"enabled": true, "loss_scale": 128, "{name}": 1}}}}"#);
        assert_eq!(status(&text, &format!("fp16.{name}")), KeyStatus::NoEffect, "{text}");
    }
    // DeepSpeed requires a window and a minimum above 0 only for a dynamic loss scale.
    for name in ["loss_scale_window", "min_loss_scale"] {
        let text = format!(r#"{{"fp16": {{"enabled": true, "loss_scale": 128, "{name}": 0}}}}"#);
        assert_eq!(status(&text, &format!("fp16.{name}")), KeyStatus::NoEffect, "{text}");
    }
}

#[test]
fn zeroth_schedule_keys_have_no_effect_beside_a_scheduler_section() {
    let text = r#"{"scheduler": {"type": "WarmupLR"}, "zeroth": {"lr_scheduler_type": "cosine", "warmup_steps": 9}}"#;
    assert_eq!(status(text, "zeroth.lr_scheduler_type"), KeyStatus::NoEffect);
    assert_eq!(status(text, "zeroth.warmup_steps"), KeyStatus::NoEffect);
}

/// Renders docs/verdicts.md.
fn verdicts_page() -> String {
    let mut page = String::from(
        "# Verdicts on known configs\n\n\
         How many keys of each file under `crates/zeroth-config/tests/configs` get which verdict from `zeroth config \
         check`.\nWritten by a test, which fails when the page is stale; to write it anew:\n\n    \
         ZEROTH_BLESS=1 cargo test -p zeroth-config --test it known_configs::\n\n\
         | file | honoured | built in | not yet | no effect | deprecated | unknown | invalid |\n\
         |---|--:|--:|--:|--:|--:|--:|--:|\n",
    );
    let row = |name: &str, counts: [usize; KeyStatus::ALL.len()]| {
        format!("| {name} | {} |\n", counts.map(|count| count.to_string()).join(" | "))
    };
    let mut sums = [0; KeyStatus::ALL.len()];
    for Known { name, report, .. } in known_configs() {
        let counts = KeyStatus::ALL.map(|status| report.count(status));
        for (sum, count) in sums.iter_mut().zip(counts) {
            *sum += count;
        }
        page += &row(&name, counts);
    }
    page += &row("**all**", sums);
    page += "\nErrors in these files, and why they stay in:\n\n";
    let listed = |(file, path, status, reason): (&str, &str, KeyStatus, &str)| {
        let line = format!("- {file}, `{path}` ({}): {reason}.", status.title());
        wrap(&line, "  ") + "\n"
    };
    page + &WRONG_ON_PURPOSE.map(listed).concat()
}

#[test]
fn docs_verdicts_md_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/verdicts.md");
    let page = verdicts_page();
    if std::env::var_os("ZEROTH_BLESS").is_some() {
        fs::write(&path, &page).unwrap();
    }
    let written = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == page,
        "docs/verdicts.md is stale: ZEROTH_BLESS=1 cargo test -p zeroth-config --test it known_configs:: writes it anew"
    );
}
