//! Which keys and values are implemented, and which ones `zeroth train` refuses or only notes.

use zeroth_base::{DType, Optimizer};
use zeroth_config::check::{KeyStatus, check};
use zeroth_config::explain;
use zeroth_config::preset::PRESETS;
use zeroth_config::read::{ConfigSource, Document, parse};
use zeroth_config::resolve::{Flags, ModelFacts, Origin, ResolveRequest, Resolved, resolve};
use zeroth_config::schema::SchedulerType;
use zeroth_config::unsupported::{UnsupportedKey, UnsupportedKeys, unsupported_keys};

fn read(text: &str) -> Document {
    parse(ConfigSource::from_text("ds.json", text)).unwrap_or_else(|error| panic!("{text}\n{error}"))
}

fn statuses(text: &str) -> Vec<(String, KeyStatus)> {
    let report = check(&read(text));
    report.of_keys().map(|verdict| (verdict.path.clone(), verdict.status)).collect()
}

/// The unsupported keys of a run with this file and these flags: 2 ranks, hidden size 64, 4 blocks, 100 steps.
fn unsupported(text: &str, flags: &Flags) -> UnsupportedKeys {
    unsupported_keys(&resolved(text, flags))
}

fn resolved(text: &str, flags: &Flags) -> Resolved {
    let file = check(&read(text)).values;
    let model = Some(ModelFacts { hidden_size: Some(64), blocks: Some(4) });
    let request = ResolveRequest { file: &file, flags, ranks: 2, model, steps: Some(100) };
    resolve(&request).unwrap_or_else(|error| panic!("{text}\n{error}"))
}

fn refused(text: &str) -> Vec<UnsupportedKey> {
    unsupported(text, &Flags::default()).refused
}

fn paths(lacks: &[UnsupportedKey]) -> Vec<&'static str> {
    lacks.iter().map(|lack| lack.path).collect()
}

/// Asserts that every key of a file has this status.
fn assert_all(status: KeyStatus, text: &str) {
    let others: Vec<_> = statuses(text).into_iter().filter(|(_, found)| *found != status).collect();
    assert!(others.is_empty(), "{others:?} in {text}");
}

#[test]
fn implemented_keys_are_honoured() {
    for text in [
        r#"{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}"#,
        r#"{"steps_per_print": 10, "gradient_clipping": 0.5, "bf16": {"enabled": true}}"#,
        r#"{"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "float32"}}"#,
        r#"{"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "bf16"}}"#,
        r#"{"communication_data_type": "BF16", "fp16": {"enabled": false}, "bf16": {"enabled": "auto"}}"#,
        r#"{"zero_optimization": {"stage": 0, "overlap_comm": true, "reduce_bucket_size": 5e8}}"#,
        r#"{"zero_optimization": {"stage": 1, "reduce_scatter": true, "reduce_bucket_size": "auto"}}"#,
        r#"{"zero_optimization": {"stage": 2, "overlap_comm": false}}"#,
        r#"{"zeroth": {"frozen": "auto"}}"#,
        r#"{"zero_optimization": {"stage": 2}, "zeroth": {"frozen": "sharded"}}"#,
        r#"{"zero_optimization": {"stage": 3}, "zeroth": {"frozen": "whole"}}"#,
        r#"{"communication_data_type": "fp16", "zero_optimization": {"stage": 0, "reduce_scatter": false,
            "sub_group_size": 1e7}}"#,
        r#"{"zero_optimization": {"stage": 1, "allgather_bucket_size": 2e8, "allgather_partitions": true}}"#,
        r#"{"zero_optimization": {"stage": 2, "allgather_partitions": false}}"#,
        r#"{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}, "zeroth": {"sum_group": 2}}"#,
        r#"{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1}, "zeroth": {"sum_group": "auto"}}"#,
        r#"{"zero_optimization": {"stage": 3, "allgather_bucket_size": 2e8, "memory_efficient_linear": false,
            "sub_group_size": 1e9}}"#,
        r#"{"fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500,
            "hysteresis": 1, "consecutive_hysteresis": true, "min_loss_scale": 2}}"#,
        r#"{"fp16": {"enabled": true, "loss_scale": 128}, "bf16": {"enabled": false}}"#,
        r#"{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.5, "buffer_count": 2}}}"#,
        r#"{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": false, "buffer_count": 5,
            "buffer_size": 1e8, "max_in_cpu": 1e9}}}"#,
        r#"{"activation_checkpointing": {"number_checkpoints": 2, "cpu_checkpointing": true}}"#,
        r#"{"zeroth": {"recompute": "norm_swiglu"}}"#,
        r#"{"zeroth": {"recompute": "attention", "moments": "bf16", "stochastic_rounding": false}}"#,
        r#"{"zeroth": {"recompute": "block"}, "activation_checkpointing": {"cpu_checkpointing": false}}"#,
        r#"{"zeroth": {"recompute": "block", "recompute_blocks": 3}}"#,
        r#"{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "zeroth": {"update": "host", "update_window": 1000000}}"#,
        r#"{"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 5e7, "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 1e5,
            "stage3_model_persistence_threshold": 1e6, "stage3_gather_16bit_weights_on_model_save": false}}"#,
        r#"{"zero_optimization": {"stage": 3, "offload_param": {"device": "none"},
            "offload_optimizer": {"device": "None"}}}"#,
        r#"{"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8,
            "weight_decay": 0.1, "bias_correction": false}}}"#,
        r#"{"optimizer": {"type": "adam", "params": {"lr": 1e-4, "adam_w_mode": true}}}"#,
        r#"{"optimizer": {"type": "Adam", "params": {"lr": 1e-4, "adam_w_mode": false, "amsgrad": false}}}"#,
        r#"{"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": true,
            "weight_decay": 0.1}}}"#,
        r#"{"optimizer": {"type": "Lion", "params": {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.1}}}"#,
        r#"{"optimizer": {"type": "Adagrad", "params": {"lr": 0.01, "lr_decay": 1e-3, "initial_accumulator_value": 0.1,
            "eps": 1e-10, "weight_decay": 0}}}"#,
        r#"{"optimizer": {"type": "AdEMAMix", "params": {"lr": 1e-3, "betas": [0.9, 0.999, 0.9999], "alpha": 8,
            "t_alpha": 1000, "t_beta3": 1000, "eps": 1e-8, "weight_decay": 0.1}}}"#,
        r#"{"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4,
            "warmup_num_steps": 10, "warmup_type": "linear", "last_batch_iteration": -1}}}"#,
        r#"{"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10}}}"#,
        r#"{"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_min_ratio": 0, "cos_min_ratio": 0.1}}}"#,
        r#"{"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-6,
            "lr_range_test_step_size": 20, "lr_range_test_step_rate": 1, "lr_range_test_staircase": true}}}"#,
        r#"{"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3,
            "decay_lr_rate": 0.1, "cycle_first_step_size": 10, "cycle_second_step_size": 10,
            "cycle_first_stair_count": 2, "cycle_second_stair_count": 2, "decay_step_size": 5,
            "cycle_momentum": false}}}"#,
        r#"{"wall_clock_breakdown": false, "tensorboard": {"enabled": false}, "csv_monitor": {"enabled": "False"}}"#,
        r#"{"wall_clock_breakdown": true, "tensorboard": {"enabled": true, "output_path": "runs", "job_name": "a"},
            "csv_monitor": {"enabled": true, "job_name": "a"}, "flops_profiler": {"enabled": true, "profile_step": 2,
            "module_depth": -1, "top_modules": 3, "detailed": false, "output_file": "profile.txt"}}"#,
        r#"{"zeroth": {"recompute": "none", "collectives": "exact", "moments": "fp32", "decay": "all",
            "lr_scheduler_type": "cosine_with_min_lr", "warmup_steps": 10, "lr_scheduler_kwargs": {"min_lr": 1e-6,
            "min_lr_rate": 0.1, "num_cycles": 0.5, "power": 1, "lr_end": 1e-7, "timescale": 9, "warmup_lr_rate": 0.1,
            "num_decay_steps": 5, "num_stable_steps": 5, "warmup_type": "linear", "decay_type": "1-sqrt",
            "min_lr_ratio": 0.1}}}"#,
    ] {
        assert_all(KeyStatus::Honoured, text);
        let run = format!("{:?}", unsupported(text, &Flags::default()));
        assert_eq!(run, "UnsupportedKeys { refused: [], noted: [] }", "{text}");
    }
}

#[test]
fn features_that_are_always_on_are_built_in() {
    assert_all(
        KeyStatus::BuiltIn,
        r#"{"zero_optimization": {"contiguous_gradients": false, "round_robin_gradients": true},
            "activation_checkpointing": {"contiguous_memory_optimization": true},
            "optimizer": {"params": {"adam_w_mode": true}}}"#,
    );
    let offloaded = r#"{"zero_optimization": {"stage": 2, "offload_optimizer":
        {"device": "cpu", "pin_memory": false, "fast_init": true}}}"#;
    let found: Vec<KeyStatus> = statuses(offloaded).into_iter().map(|(_, status)| status).collect();
    assert_eq!(found, [KeyStatus::Honoured, KeyStatus::Honoured, KeyStatus::BuiltIn, KeyStatus::BuiltIn]);
}

#[test]
fn keys_made_irrelevant_by_other_values_have_no_effect() {
    for (text, path) in [
        (
            r#"{"zero_optimization": {"stage": 2, "allgather_partitions": false, "allgather_bucket_size": 2e8}}"#,
            "zero_optimization.allgather_bucket_size",
        ),
        (
            r#"{"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "allgather_bucket_size": 2e8}}"#,
            "zero_optimization.allgather_bucket_size",
        ),
        (
            r#"{"zero_optimization": {"stage": 0, "allgather_partitions": false}}"#,
            "zero_optimization.allgather_partitions",
        ),
        (
            r#"{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "buffer_count": 5}}}"#,
            "zero_optimization.offload_param.buffer_count",
        ),
        (
            r#"{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none", "buffer_count": 5}}}"#,
            "zero_optimization.offload_optimizer.buffer_count",
        ),
        (
            r#"{"activation_checkpointing": {"number_checkpoints": 2}, "zeroth": {"recompute": "attention"}}"#,
            "activation_checkpointing.number_checkpoints",
        ),
        (r#"{"zeroth": {"stochastic_rounding": true}}"#, "zeroth.stochastic_rounding"),
        (r#"{"zeroth": {"recompute": "norm_swiglu", "recompute_blocks": 3}}"#, "zeroth.recompute_blocks"),
        (r#"{"bf16": {"enabled": true}, "zeroth": {"update": "host"}}"#, "zeroth.update"),
        (
            r#"{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": false},
                "fp16": {"enabled": false}, "zeroth": {"update": "host"}}"#,
            "zeroth.update",
        ),
    ] {
        assert!(statuses(text).contains(&(path.to_owned(), KeyStatus::NoEffect)), "{:?}", statuses(text));
    }
    // Updated parameters are copied if they and the optimizer state are on different devices, whichever is on the host.
    let apart = r#"{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "none", "buffer_count": 5}}}"#;
    assert_all(KeyStatus::Honoured, apart);
}

#[test]
fn optimizer_and_scheduler_types_ignore_case() {
    let text = r#"{"optimizer": {"type": "sgd", "params": {"momentum": 0.9}},
        "scheduler": {"type": "warmuplr", "params": {"warmup_num_steps": 9}}}"#;
    let config = resolved(text, &Flags::default());
    assert_eq!(
        (config.values.optimizer.name, config.values.scheduler.name),
        (Optimizer::Sgd, Some(SchedulerType::WarmupLr))
    );
}

#[test]
fn bf16_gradient_accumulation_has_an_effect_at_stages_2_and_3() {
    for (stage, expected) in [
        (0, KeyStatus::NoEffect),
        (1, KeyStatus::NoEffect),
        (2, KeyStatus::Honoured),
        (3, KeyStatus::Honoured),
    ] {
        let asked = |sums: &str| {
            let text = format!(
                r#"{{"zero_optimization": {{"stage": {stage}}}, "data_types": {{"grad_accum_dtype": "{sums}"}}}}"#
            );
            let found =
                check(&read(&text)).of_keys().find(|key| key.path.ends_with("dtype")).unwrap().clone();
            (found.status, found.message)
        };
        let (status, said) = asked("bf16");
        assert_eq!(status, expected, "stage {stage}");
        assert_eq!(said.contains("only stages 2 and 3 keep shards"), status == KeyStatus::NoEffect, "{said}");
        assert_eq!(asked("fp32").0, KeyStatus::Honoured, "sums are in fp32 at every stage");
    }
}

#[test]
fn groups_have_a_verdict_at_every_stage_and_one_kind() {
    let found = |text: &str, end: &str| {
        let verdicts = check(&read(text));
        let verdict = verdicts.of_keys().find(|verdict| verdict.path.ends_with(end)).unwrap().clone();
        (verdict.status, verdict.message)
    };
    let hpz = |more: &str| {
        let text = format!(r#"{{"zero_optimization": {{"zero_hpz_partition_size": {more}}}"#);
        found(&text, "zero_hpz_partition_size")
    };
    for stage in [1, 2] {
        let (status, said) = hpz(&format!(r#"2, "stage": {stage}}}"#));
        assert_eq!(status, KeyStatus::NoEffect);
        assert!(said.contains(&format!("at stage {stage}")) && said.contains("nothing to shard"), "{said}");
    }
    assert_eq!(hpz(r#"2, "stage": 3}"#).0, KeyStatus::Honoured);
    let (status, said) = hpz(r#"0, "stage": 3}"#);
    assert!(status == KeyStatus::Invalid && said.contains("at least 1"), "{said}");
    let (status, said) = hpz(r#"2, "stage": 3, "offload_param": {"device": "cpu"}}"#);
    assert!(status == KeyStatus::Invalid && said.contains("remove one of the two"), "{said}");
    let both =
        r#"{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}, "zeroth": {"sum_group": 4}}"#;
    let (status, said) = found(both, "sum_group");
    assert!(status == KeyStatus::Invalid && said.contains("leave zeroth.sum_group out"), "{said}");
}

#[test]
fn groups_that_ranks_cannot_form_are_refused_with_those_that_they_can() {
    let refused = |text: &str, ranks: u64| {
        let file = check(&read(text)).values;
        let flags = Flags::default();
        let request = ResolveRequest { file: &file, flags: &flags, ranks, model: None, steps: Some(100) };
        resolve(&request).map(|resolved| resolved.group()).map_err(|error| error.to_string())
    };
    let hpz =
        |size: u64| format!(r#"{{"zero_optimization": {{"stage": 3, "zero_hpz_partition_size": {size}}}}}"#);
    let sums = |group: &str| format!(r#"{{"zeroth": {{"sum_group": {group}}}}}"#);
    assert_eq!(refused(&hpz(4), 8), Ok(Some(4)));
    assert_eq!(refused(&hpz(1), 8), Ok(None));
    assert_eq!(refused(&sums("2"), 8), Ok(Some(2)));
    assert_eq!(refused(&sums("\"auto\""), 8), Ok(None));
    for (text, ranks, words) in [
        (
            hpz(3),
            8,
            "zero_hpz_partition_size is 3, and 8 ranks cannot be groups of 3: write a divisor of 8 (2, 4 or 8)",
        ),
        (hpz(16), 8, "8 ranks cannot be groups of 16"),
        (
            sums("3"),
            4,
            "zeroth.sum_group is 3, and 4 ranks cannot be groups of 3: write a divisor of 4 (1, 2 or 4)",
        ),
        (sums("2"), 1, "zeroth.sum_group is 2, and 1 rank cannot be groups of 2: write a divisor of 1 (1)"),
    ] {
        let said = refused(&text, ranks).unwrap_err();
        assert!(said.contains(words) && said.ends_with("or leave the key out"), "{said}");
    }
}

#[test]
fn unsupported_values_are_not_yet_and_are_refused() {
    for (text, path, value) in [
        (
            r#"{"fp16": {"enabled": true, "fp16_master_weights_and_grads": true}}"#,
            "fp16.fp16_master_weights_and_grads",
            "true",
        ),
        (
            r#"{"bf16": {"enabled": true, "bf16_optimizer_states": true}}"#,
            "bf16.bf16_optimizer_states",
            "true",
        ),
        (
            r#"{"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "fp16"}}"#,
            "data_types.grad_accum_dtype",
            "\"fp16\"",
        ),
        (
            r#"{"zero_optimization": {"stage": 3, "zero_quantized_weights": true}}"#,
            "zero_optimization.zero_quantized_weights",
            "true",
        ),
        (r#"{"optimizer": {"type": "Lamb"}}"#, "optimizer.type", "\"Lamb\""),
        (r#"{"optimizer": {"params": {"amsgrad": true}}}"#, "optimizer.params.amsgrad", "true"),
        (
            r#"{"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 5}}}"#,
            "scheduler.params.last_batch_iteration",
            "5",
        ),
        (r#"{"scheduler": {"type": "StepLR"}}"#, "scheduler.type", "\"StepLR\""),
        (r#"{"zeroth": {"collectives": "fast"}}"#, "zeroth.collectives", "\"fast\""),
    ] {
        assert!(statuses(text).contains(&(path.to_owned(), KeyStatus::Unsupported)), "{:?}", statuses(text));
        let refused = refused(text);
        assert_eq!(paths(&refused), [path], "{text}");
        assert_eq!(refused[0].value, value, "{text}");
        assert!(refused[0].location().is_some() && !refused[0].instead.is_empty(), "{text}");
    }
}

#[test]
fn parameters_have_the_status_of_their_optimizer_or_offload_device() {
    let text =
        r#"{"optimizer": {"type": "Lamb", "params": {"lr": 0.1, "max_coeff": 10, "weight_decay": 0}}}"#;
    assert_all(KeyStatus::Unsupported, text);
    assert_eq!(paths(&refused(text)), ["optimizer.type"], "the type says it for all");
    let disk = r#"{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/disk",
        "pin_memory": false, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/disk", "ratio": 1, "pin_memory": true}},
        "aio": {"block_size": 1048576}}"#;
    let built: Vec<_> =
        statuses(disk).into_iter().filter(|(_, status)| *status != KeyStatus::Unsupported).collect();
    assert_eq!(built, [("zero_optimization.stage".to_owned(), KeyStatus::Honoured)]);
    let refused = refused(disk);
    let devices = ["zero_optimization.offload_param.device", "zero_optimization.offload_optimizer.device"];
    assert_eq!(paths(&refused), devices, "the device says it for all");
    assert!(refused.iter().all(|lack| lack.instead.contains("write \"cpu\"")), "{refused:?}");
    let here = |path: &str| explain::here(explain::find(path).unwrap()[0]);
    assert_eq!(
        here(devices[0]),
        "honoured for \"none\", \"cpu\", not yet for \"nvme\", where the other values let it"
    );
    assert_eq!(here("optimizer.params.momentum"), "honoured");
}

#[test]
fn one_cycle_cycles_momentum_by_default() {
    let cycle = |more: &str| {
        format!(
            r#"{{"scheduler": {{"type": "OneCycle", "params": {{"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3,
                "cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": 0 {more}}}}}}}"#
        )
    };
    let momentum = |text: &str| {
        let all = statuses(text).into_iter().filter(|(path, _)| path.contains("_mom"));
        all.map(|(_, status)| status).collect::<Vec<_>>()
    };
    // DeepSpeed's default is true, so a file without the key enables it.
    let open = cycle("");
    assert_eq!(momentum(&open), [KeyStatus::Unsupported; 3]);
    let lack = &refused(&open)[0];
    assert_eq!((lack.path, lack.value.as_str()), ("scheduler.params.cycle_momentum", "true"));
    assert_eq!((&lack.origin, lack.location()), (&Origin::Default, None));
    assert!(lack.instead.contains("cycle_momentum: false"), "{lack}");
    let off = cycle(r#", "cycle_momentum": false"#);
    let [rest @ .., switch] = &momentum(&off)[..] else { panic!("{off}") };
    assert_eq!((rest, *switch), (&[KeyStatus::NoEffect; 3][..], KeyStatus::Honoured));
    assert!(refused(&off).is_empty());
}

#[test]
fn prefetch_has_no_effect_without_overlap_comm() {
    let text =
        r#"{"zero_optimization": {"stage": 3, "overlap_comm": false, "stage3_prefetch_bucket_size": 1e7}}"#;
    let prefetch = ("zero_optimization.stage3_prefetch_bucket_size".to_owned(), KeyStatus::NoEffect);
    assert!(statuses(text).contains(&prefetch), "{:?}", statuses(text));
}

#[test]
fn sections_have_the_status_of_their_switch() {
    let section = |text: &str, path: &str| {
        let report = check(&read(text));
        report.verdicts.iter().find(|verdict| verdict.path == path).unwrap().status
    };
    for (device, status) in
        [("none", KeyStatus::Honoured), ("cpu", KeyStatus::Honoured), ("nvme", KeyStatus::Unsupported)]
    {
        let text = format!(
            r#"{{"zero_optimization": {{"stage": 3, "offload_param": {{"device": "{device}", "nvme_path": "/disk"}}}}}}"#
        );
        assert_eq!(section(&text, "zero_optimization.offload_param"), status);
    }
    for enabled in [true, false] {
        let text = format!(r#"{{"csv_monitor": {{"enabled": {enabled}}}}}"#);
        assert_eq!(section(&text, "csv_monitor"), KeyStatus::Honoured);
    }
}

#[test]
fn every_preset_is_fully_implemented() {
    for preset in PRESETS {
        assert!(refused(preset.text).is_empty(), "{}: {:?}", preset.name, refused(preset.text));
    }
    assert_eq!(PRESETS.len(), 6);
}

#[test]
fn flags_decide_what_the_file_leaves_open() {
    let auto = r#"{"fp16": {"enabled": "auto", "fp16_master_weights_and_grads": true}, "bf16": {"enabled": "auto"}}"#;
    assert!(refused(auto).is_empty(), "the run is in bf16");
    let fp16 = unsupported(auto, &Flags { precision: Some(DType::F16), ..Flags::default() }).refused;
    assert_eq!(paths(&fp16), ["fp16.fp16_master_weights_and_grads"]);
    let flags = Flags { gradient_checkpointing: Some(true), ..Flags::default() };
    for (text, flags, recompute, origin) in [
        ("{}", flags, "block", Origin::Flag("--gradient-checkpointing")),
        ("{}", Flags::default(), "none", Origin::Default),
        (
            r#"{"activation_checkpointing": {}}"#,
            Flags::default(),
            "block",
            Origin::Auto("the file has the section activation_checkpointing".to_owned()),
        ),
    ] {
        let config = resolved(text, &flags);
        let setting = config.get("zeroth.recompute").unwrap();
        assert_eq!((setting.value.as_str(), &setting.origin), (Some(recompute), &origin), "{text}");
        assert!(unsupported_keys(&config).refused.is_empty());
    }
}

#[test]
fn unsupported_keys_that_do_not_change_training_are_noted() {
    let text = r#"{"memory_breakdown": true, "log_level": "debug",
        "checkpoint": {"use_node_local_storage": true}}"#;
    let found = unsupported(text, &Flags::default());
    assert!(found.refused.is_empty(), "{:?}", found.refused);
    let mut noted = paths(&found.noted);
    noted.sort_unstable();
    assert_eq!(noted, ["checkpoint.use_node_local_storage", "log_level", "memory_breakdown"]);
}
