//! The rules by which values are resolved, one by one, and the defaults of flags that are not given.

use serde_json::{Value as Json, json};
use zeroth_base::Optimizer;
use zeroth_config::resolve::Flags;

use super::Run;

const STAGE_3: &str = r#"{"zero_optimization": {"stage": 3}}"#;

/// A key absent from the file counts as `"auto"`: the flag if it is given, else the file, else the default.
#[test]
fn values_come_from_the_flag_else_the_file_else_the_default() {
    let typed = Run::typed(Flags { max_grad_norm: Some(0.5), learning_rate: Some(3e-4), ..Flags::default() });
    assert_eq!(typed.value("{}", "gradient_clipping"), (json!(0.5), "command line"));
    assert_eq!(typed.value("{}", "optimizer.params.lr"), (json!(3e-4), "command line"));
    let plain = Run::plain();
    assert_eq!(plain.value(r#"{"gradient_clipping": 0.25}"#, "gradient_clipping"), (json!(0.25), "file"));
    assert_eq!(plain.value("{}", "gradient_clipping").0, json!(1.0));
    assert_eq!(plain.value("{}", "zero_optimization.reduce_bucket_size"), (json!(500_000_000), "default"));
    assert_eq!(plain.value("{}", "zero_optimization.sub_group_size"), (json!(1_000_000_000), "default"));
}

#[test]
fn flags_that_are_not_given_have_their_documented_defaults() {
    let resolved = Run::plain().resolved("{}");
    let value = |path: &str| resolved.get(path).map(|setting| setting.value.clone());
    for (path, expected) in [
        ("train_micro_batch_size_per_gpu", json!(1)),
        ("gradient_accumulation_steps", json!(1)),
        ("optimizer.type", json!("AdamW")),
        ("optimizer.params.lr", json!(1e-5)),
        ("optimizer.params.betas", json!([0.9, 0.95])),
        ("optimizer.params.eps", json!(1e-8)),
        ("optimizer.params.weight_decay", json!(0.1)),
        ("gradient_clipping", json!(1.0)),
        ("zeroth.lr_scheduler_type", json!("cosine")),
        ("zeroth.warmup_steps", json!(0.0)),
        ("bf16.enabled", json!(true)),
    ] {
        assert_eq!(value(path), Some(expected), "{path}");
    }
    let lora = Run::typed(Flags { lora: true, ..Flags::default() });
    assert_eq!(lora.value("{}", "optimizer.params.lr").0, json!(1e-4));
}

/// `{"zero_optimization": {"stage": 3}}` plus flags is a full config.
#[test]
fn a_stage_plus_flags_is_a_full_config() {
    let flags = Flags {
        per_device_train_batch_size: Some(2),
        gradient_accumulation_steps: Some(8),
        learning_rate: Some(2e-5),
        max_steps: Some(100),
        warmup_steps: Some(0.1),
        lr_scheduler_type: Some("linear".to_owned()),
        ..Flags::default()
    };
    let resolved = Run::typed(flags).on(5).resolved(STAGE_3);
    for (path, value, origin) in [
        ("zero_optimization.stage", json!(3), "file"),
        ("train_batch_size", json!(80), "auto"),
        ("train_micro_batch_size_per_gpu", json!(2), "command line"),
        ("gradient_accumulation_steps", json!(8), "command line"),
        ("optimizer.params.lr", json!(2e-5), "command line"),
        ("zeroth.lr_scheduler_type", json!("linear"), "command line"),
        ("zeroth.warmup_steps", json!(0.1), "command line"),
        ("zero_optimization.overlap_comm", json!(true), "default"),
    ] {
        let setting = resolved.get(path).unwrap_or_else(|| panic!("no {path}"));
        assert_eq!((&setting.value, setting.origin.word()), (&value, origin), "{path}");
    }
}

/// Only a flag that is given can contradict the file (exit 2, all contradictions at once); the file overrides others.
#[test]
fn only_explicit_flags_contradict_the_file_and_all_are_reported() {
    let text = r#"{"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.3, "fp16": {"enabled": true},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.8, 0.9], "eps": 1e-7, "weight_decay": 0}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "total_num_steps": 50}}}"#;
    let resolved = Run { steps: Some(77), ..Run::plain() }.resolved(text);
    for (path, value) in [
        ("train_micro_batch_size_per_gpu", json!(4)),
        ("gradient_clipping", json!(0.3)),
        ("fp16.enabled", json!(true)),
        ("optimizer.params.lr", json!(3e-4)),
        ("optimizer.params.betas", json!([0.8, 0.9])),
        ("optimizer.params.eps", json!(1e-7)),
        ("optimizer.params.weight_decay", json!(0.0)),
        ("scheduler.params.warmup_num_steps", json!(5)),
        // The data gives 77 steps; only an explicit --max-steps would contradict the file.
        ("scheduler.params.total_num_steps", json!(50)),
    ] {
        let setting = resolved.get(path).unwrap();
        assert_eq!((&setting.value, setting.origin.word()), (&value, "file"), "{path}");
    }
    let typed = Flags {
        per_device_train_batch_size: Some(1),
        max_grad_norm: Some(1.0),
        learning_rate: Some(1e-5),
        adam_beta2: Some(0.95),
        adam_epsilon: Some(1e-8),
        weight_decay: Some(0.1),
        warmup_steps: Some(3.0),
        max_steps: Some(10),
        lr_scheduler_type: Some("cosine".to_owned()),
        ..Flags::default()
    };
    let lines = Run::typed(typed).mismatches(text);
    assert_eq!(lines.len(), 9, "{lines:#?}");
    for name in [
        "per_device_train_batch_size=1 ",
        "max_grad_norm=1.0 ",
        "learning_rate=1e-05 ",
        "adam_beta1+adam_beta2=[0.9, 0.95] ",
        "adam_epsilon=1e-08 ",
        "weight_decay=0.1 ",
        "warmup_steps=3 ",
        "num_training_steps (calculated)=10 ",
        "lr_scheduler_type=cosine ",
    ] {
        assert!(lines.iter().any(|line| line.contains(&format!("vs hf {name}"))), "{name}: {lines:#?}");
    }
}

/// An optimizer or scheduler section in the file overrides flags that are not given.
#[test]
fn sections_of_the_file_override_flags_that_are_not_given() {
    let text =
        r#"{"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "scheduler": {"type": "WarmupLR"}}"#;
    let plain = Run::plain();
    // The defaults of PyTorch and DeepSpeed, not ours.
    assert_eq!(plain.value(text, "optimizer.params.betas"), (json!([0.9, 0.999]), "default"));
    assert_eq!(plain.value(text, "optimizer.params.weight_decay"), (json!(0.0), "default"));
    assert_eq!(plain.value(text, "scheduler.params.warmup_num_steps"), (json!(1000), "default"));
    assert_eq!(plain.value(text, "scheduler.params.warmup_type"), (json!("log"), "default"));
    assert_eq!(
        plain.value(text, "scheduler.params.warmup_max_lr").0,
        json!(1e-3),
        "the optimizer's learning rate"
    );
    assert!(plain.resolved(text).get("zeroth.lr_scheduler_type").is_none(), "the file has a schedule");
    // In DeepSpeed, WarmupDecayLR's maximum does not follow the optimizer.
    let decay = r#"{"optimizer": {"params": {"lr": 1e-4}}, "scheduler": {"type": "WarmupDecayLR"}}"#;
    assert_eq!(plain.value(decay, "scheduler.params.warmup_max_lr"), (json!(1e-3), "default"));
    let typed = Run::typed(Flags { adam_beta2: Some(0.95), warmup_steps: Some(20.0), ..Flags::default() });
    assert_eq!(typed.value(text, "optimizer.params.betas"), (json!([0.9, 0.95]), "command line"));
    assert_eq!(typed.value(text, "scheduler.params.warmup_num_steps"), (json!(20), "command line"));
}

/// `"auto"` on a key without a rule is the key's default, with a note.
#[test]
fn auto_without_a_rule_is_the_default_with_a_note() {
    for (name, default) in [
        ("stage3_max_live_parameters", json!(1_000_000_000)),
        ("stage3_max_reuse_distance", json!(1_000_000_000)),
        ("sub_group_size", json!(1_000_000_000)),
        ("overlap_comm", json!(true)),
    ] {
        let path = format!("zero_optimization.{name}");
        let text = format!(r#"{{"zero_optimization": {{"stage": 3, "{name}": "auto"}}}}"#);
        let resolved = Run::plain().resolved(&text);
        let setting = resolved.get(&path).unwrap();
        assert_eq!((&setting.value, setting.origin.word()), (&default, "default"), "{path}");
        assert!(
            resolved.notes.iter().any(|note| note.starts_with(&path) && note.contains("default")),
            "{path}"
        );
    }
}

/// `warmup_num_steps` 0 from `"auto"` means no warmup.
#[test]
fn warmup_is_a_number_of_steps_or_a_fraction_of_them_rounded_up() {
    let text = r#"{"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}"#;
    for (typed, steps, expected) in [
        (None, Some(1000), json!(0)),
        (None, None, json!(0)),
        (Some(0.0), Some(1000), json!(0)),
        (Some(1.0), Some(1000), json!(1)),
        (Some(100.0), None, json!(100)),
        (Some(0.03), Some(1000), json!(30)),
        (Some(0.0301), Some(1000), json!(31)),
        (Some(0.5), Some(3), json!(2)),
        (Some(0.03), None, json!("auto")),
    ] {
        let run = Run { steps, ..Run::typed(Flags { warmup_steps: typed, ..Flags::default() }) };
        let (value, _) = run.value(text, "scheduler.params.warmup_num_steps");
        assert_eq!(value, expected, "{typed:?} of {steps:?}");
    }
    // A share contradicts the file's number once the steps are known.
    let number = r#"{"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}"#;
    let share = Run::typed(Flags { warmup_steps: Some(0.03), ..Flags::default() });
    assert_eq!(share.mismatches(number), [""; 0]);
    assert!(Run { steps: Some(1000), ..share }.mismatches(number)[0].contains("warmup_steps=30"));
}

#[test]
fn total_num_steps_stays_auto_until_the_data_or_a_flag_gives_it() {
    const PATH: &str = "scheduler.params.total_num_steps";
    for text in [
        r#"{"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}}}"#,
        r#"{"scheduler": {"type": "WarmupCosineLR"}}"#,
    ] {
        let open = Run::plain().resolved(text);
        assert_eq!(open.get(PATH).unwrap().value, json!("auto"));
        assert!(
            open.notes.iter().any(|note| note.contains(PATH) && note.contains("--max-steps")),
            "{:?}",
            open.notes
        );
        let known = Run { steps: Some(750), ..Run::plain() };
        assert_eq!(known.value(text, PATH), (json!(750), "auto"));
        let typed = Run { steps: Some(750), ..Run::typed(Flags { max_steps: Some(9), ..Flags::default() }) };
        assert_eq!(typed.value(text, PATH), (json!(9), "command line"));
    }
}

#[test]
fn dependent_defaults_follow_other_values() {
    let plain = Run::plain();
    for stage in 0..=3 {
        let text = format!(r#"{{"zero_optimization": {{"stage": {stage}}}}}"#);
        assert_eq!(
            plain.value(&text, "zero_optimization.overlap_comm").0,
            json!(stage == 3),
            "stage {stage}"
        );
    }
    // DeepSpeed 0.19.3 changed the default from 0.0 to 1.0; an explicit 0 still turns clipping off.
    assert_eq!(plain.value(r#"{"gradient_clipping": 0}"#, "gradient_clipping"), (json!(0.0), "file"));
    let cycle = r#"{"scheduler": {"type": "OneCycle", "params":
        {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_first_step_size": 300}}}"#;
    assert_eq!(plain.value(cycle, "scheduler.params.cycle_second_step_size").0, json!(300));
    let kept =
        plain.value(r#"{"activation_checkpointing": {}}"#, "activation_checkpointing.number_checkpoints");
    assert_eq!(kept, (json!(32), "auto"), "the blocks of the model");
    let checkpointing = Run::typed(Flags { gradient_checkpointing: Some(true), ..Flags::default() });
    assert_eq!(checkpointing.value("{}", "zeroth.recompute").0, json!("block"));
    assert_eq!(plain.value("{}", "zeroth.recompute").0, json!("none"));
}

/// Whether a key in the value contains a dot.
fn dotted(value: &Json) -> bool {
    value
        .as_object()
        .is_some_and(|object| object.iter().any(|(key, value)| key.contains('.') || dotted(value)))
}

#[test]
fn resolved_config_is_nested_like_deepspeeds_with_canonical_names() {
    let text = r#"{"bfloat16": {"enabled": true}, "memory_efficient_linear": false,
        "zero_optimization": {"stage": 3, "prefetch_bucket_size": 7, "cpu_offload": true},
        "optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}"#;
    let json = Run::plain().on(2).resolved(text).to_json();
    for (pointer, value) in [
        ("/train_batch_size", json!(2)),
        ("/bf16/enabled", json!(true)),
        ("/zero_optimization/stage", json!(3)),
        ("/zero_optimization/stage3_prefetch_bucket_size", json!(7)),
        ("/zero_optimization/memory_efficient_linear", json!(false)),
        ("/zero_optimization/offload_optimizer/device", json!("cpu")),
        ("/zero_optimization/offload_param/device", json!("none")),
        ("/optimizer/type", json!("SGD")),
        ("/optimizer/params/momentum", json!(0.9)),
    ] {
        assert_eq!(json.pointer(pointer), Some(&value), "{pointer}");
    }
    for absent in
        ["/bfloat16", "/memory_efficient_linear", "/zero_optimization/cpu_offload", "/optimizer/params/betas"]
    {
        assert_eq!(json.pointer(absent), None, "{absent}");
    }
    assert!(!dotted(&json), "{json}");
}

/// The run folder keeps the resolved config, which must resolve to the same values.
#[test]
fn a_resolved_config_resolves_to_itself() {
    for text in [
        "{}",
        STAGE_3,
        r#"{"activation_checkpointing": {}}"#,
        r#"{"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}}}"#,
    ] {
        let run = Run::plain().on(3);
        let once = run.resolved(text).to_json();
        assert_eq!(run.resolved(&once.to_string()).to_json(), once, "{text}");
    }
}

/// DeepSpeed refuses unknown keys in `zero_optimization` and in the parameters of optimizers.
#[test]
fn a_resolved_config_adds_no_key_that_deepspeed_refuses() {
    let json = Run::plain().resolved("{}").to_json();
    for pointer in
        ["/zero_optimization/use_dynamic_tiling", "/optimizer/params/fused", "/optimizer/params/foreach"]
    {
        assert_eq!(json.pointer(pointer), None, "{pointer}");
    }
}

#[test]
fn the_warmup_ratio_is_a_share_of_all_steps_unless_warmup_steps_says_more() {
    let text = r#"{"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}"#;
    for (ratio, typed, steps, expected) in [
        (0.03, None, Some(1000), json!(30)),
        (0.0301, None, Some(1000), json!(31)),
        (0.03, Some(0.0), Some(1000), json!(30)),
        (0.03, Some(7.0), Some(1000), json!(7)),
        (1.0, None, Some(1000), json!(1000)),
        (0.0, None, None, json!(0)),
        (0.03, None, None, json!("auto")),
    ] {
        let flags = Flags { warmup_ratio: Some(ratio), warmup_steps: typed, ..Flags::default() };
        let run = Run { steps, ..Run::typed(flags) };
        let (value, _) = run.value(text, "scheduler.params.warmup_num_steps");
        assert_eq!(value, expected, "{ratio} and {typed:?} of {steps:?}");
    }
    // Without a scheduler section the schedule is Hugging Face's; from 1 on its key counts steps.
    let own = |ratio| Run {
        steps: Some(40),
        ..Run::typed(Flags { warmup_ratio: Some(ratio), ..Flags::default() })
    };
    assert_eq!(own(0.1).value("{}", "zeroth.warmup_steps"), (json!(0.1), "command line"));
    assert_eq!(own(1.0).value("{}", "zeroth.warmup_steps"), (json!(40.0), "command line"));
    let fixed = r#"{"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}}"#;
    let error = own(0.1).resolve(fixed).unwrap_err().to_string();
    assert!(
        error.contains("warmup_num_steps=7 vs hf warmup_steps=4") && error.contains("--warmup-ratio"),
        "{error}"
    );
}

#[test]
fn optim_chooses_the_optimizer_where_the_file_does_not() {
    let lion =
        Run::typed(Flags { optimizer: Some(Optimizer::Lion), learning_rate: Some(1e-4), ..Flags::default() });
    assert_eq!(lion.value("{}", "optimizer.type"), (json!("Lion"), "command line"));
    assert_eq!(lion.value("{}", "optimizer.params.lr"), (json!(1e-4), "command line"));
    let mixed = Run::typed(Flags { optimizer: Some(Optimizer::AdEmaMix), ..Flags::default() });
    assert_eq!(mixed.resolved("{}").values.optimizer.betas_of_three, [0.9, 0.999, 0.9999]);
    let error = lion.resolve(r#"{"optimizer": {"type": "AdamW"}}"#).unwrap_err().to_string();
    assert!(error.contains("ds optimizer.type=AdamW vs hf optim=Lion"), "{error}");
    // DeepSpeed's Adam is AdamW unless adam_w_mode is false.
    let adamw = Run::typed(Flags { optimizer: Some(Optimizer::AdamW), ..Flags::default() });
    assert_eq!(adamw.value(r#"{"optimizer": {"type": "Adam"}}"#, "optimizer.type").1, "file");
    assert!(adamw.resolve(r#"{"optimizer": {"type": "Adam", "params": {"adam_w_mode": false}}}"#).is_err());
}

#[test]
fn parameters_of_the_schedule_are_keys() {
    const PATH: &str = "zeroth.lr_scheduler_kwargs.min_lr";
    let kwargs = |value: f64| json!({ "min_lr": value }).as_object().cloned().unwrap();
    let typed = Run::typed(Flags { lr_scheduler_kwargs: kwargs(1e-6), ..Flags::default() });
    assert_eq!(typed.value("{}", PATH), (json!(1e-6), "command line"));
    let text = r#"{"zeroth": {"lr_scheduler_kwargs": {"min_lr": 1e-5}}}"#;
    assert_eq!(Run::plain().value(text, PATH), (json!(1e-5), "file"));
    assert!(Run::plain().resolved("{}").get(PATH).is_none());
    let error = typed.resolve(text).unwrap_err().to_string();
    assert!(error.contains("lr_scheduler_kwargs=1e-06"), "{error}");
    let resolved = typed.resolved(r#"{"scheduler": {"type": "WarmupLR"}}"#);
    assert!(resolved.get(PATH).is_none(), "the file has a schedule");
    assert!(
        resolved.notes.iter().any(|note| note.starts_with("--lr-scheduler-kwargs")),
        "{:?}",
        resolved.notes
    );
}
