//! The config's reporting sections: files on disk, and figures derived from instruction times.

use std::fs;
use std::path::Path;
use std::time::Duration;

use zeroth_config::check::check;
use zeroth_config::read::{ConfigSource, parse};
use zeroth_config::resolve::{Flags, ModelFacts, ResolveRequest, Resolved, resolve};
use zeroth_cpu::CpuTarget;
use zeroth_engine::InstructionTime;
use zeroth_model::{BatchTokens, ModelConfig, ParameterTable, forward, table};
use zeroth_program::Compiled;
use zeroth_program::{Action, Settings};
use zeroth_train::report::ResumePosition;
use zeroth_train::report::breakdown::{Breakdown, StepPhase};
use zeroth_train::report::flops::ModelFlops;
use zeroth_train::report::timing::{StepProfile, StepTiming};
use zeroth_train::{EvalMetrics, ReportPlan, ReportTo, Reporters, StepMetrics};

fn resolved(text: &str) -> Resolved {
    let asked =
        check(&parse(ConfigSource::from_text("ds.json", text)).expect("what this test made itself is right"))
            .values;
    let model = Some(ModelFacts { hidden_size: Some(64), blocks: Some(2) });
    resolve(&ResolveRequest { file: &asked, flags: &Flags::default(), ranks: 1, model, steps: Some(10) })
        .expect("what this test made itself is right")
}

fn step(step: u64) -> StepMetrics {
    StepMetrics {
        step,
        loss: 3.0 - step as f64 / 4.0,
        loss_parts: [None; zeroth_kernel::LOSSES],
        router: None,
        grad_norm: 1.0,
        lr: 0.001,
        tokens: 100,
        step_ms: 50.0,
        loss_scale: 65536.0,
        skipped: false,
        device_bytes_peak: 1,
        host_bytes_peak: 2,
        samples_seen: 4 * step,
    }
}

fn evaluation(step: u64) -> EvalMetrics {
    EvalMetrics {
        step,
        eval_loss: 2.0,
        loss_parts: [None; zeroth_kernel::LOSSES],
        eval_perplexity: 2.0_f64.exp(),
        eval_tokens: 9,
        samples_seen: 4 * step,
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .expect("what this test made itself is right")
        .map(|entry| {
            entry
                .expect("what this test made itself is right")
                .file_name()
                .into_string()
                .expect("what this test made itself is right")
        })
        .collect();
    names.sort();
    names
}

fn holds(folder: &Path, tag: &str) -> usize {
    let files = names(folder).into_iter().filter(|name| name.starts_with("events.out.tfevents."));
    let bytes = files
        .flat_map(|name| fs::read(folder.join(name)).expect("what this test made itself is right"))
        .collect::<Vec<u8>>();
    bytes.windows(tag.len()).filter(|window| *window == tag.as_bytes()).count()
}

#[test]
fn only_metrics_jsonl_is_written_by_default() {
    let folder = tempfile::tempdir().expect("what this test made itself is right");
    let plan = ReportPlan::new(&resolved("{}"), &[ReportTo::Jsonl], folder.path());
    let mut reporters =
        Reporters::open(&plan, folder.path(), None).expect("what this test made itself is right");
    reporters.step(&step(1), None);
    reporters.sync();
    assert_eq!(names(folder.path()), ["metrics.jsonl"]);
    assert!(plan.paths().is_empty());
}

#[test]
fn flags_and_config_sections_write_separate_folders() {
    let folder = tempfile::tempdir().expect("what this test made itself is right");
    let elsewhere = folder.path().join("elsewhere");
    let text = format!(
        r#"{{"fp16": {{"enabled": true}}, "tensorboard": {{"enabled": true}},
            "csv_monitor": {{"enabled": true, "output_path": {elsewhere:?}, "job_name": "mine"}}}}"#
    );
    let run = folder.path().join("run");
    fs::create_dir(&run).expect("what this test made itself is right");
    let plan = ReportPlan::new(&resolved(&text), &[ReportTo::TensorBoard, ReportTo::Csv], &run);
    let mut reporters = Reporters::open(&plan, &run, None).expect("what this test made itself is right");
    reporters.step(&step(1), None);
    reporters.evaluation(&evaluation(1));
    assert_eq!(names(&run), ["DeepSpeedJobName", "metrics.csv", "metrics.jsonl", "tensorboard"]);
    for tag in [
        "train/loss_scale",
        "train/grad_norm",
        "train/learning_rate",
        "train/tokens_per_second",
        "eval/perplexity",
    ] {
        assert_eq!(holds(&run.join("tensorboard"), tag), 1, "{tag}");
    }
    for tag in ["Train/Samples/train_loss", "Train/Samples/lr", "Train/Samples/loss_scale"] {
        assert_eq!(holds(&run.join("DeepSpeedJobName"), tag), 1, "{tag}");
        assert_eq!(holds(&run.join("tensorboard"), tag), 0, "{tag}");
    }
    assert_eq!(
        names(&elsewhere.join("mine")),
        ["Train_Samples_loss_scale.csv", "Train_Samples_lr.csv", "Train_Samples_train_loss.csv"]
    );
    assert_eq!(plan.paths().len(), 4);
}

#[test]
fn resuming_writes_each_step_once() {
    let folder = tempfile::tempdir().expect("what this test made itself is right");
    let plan = ReportPlan::new(
        &resolved(r#"{"csv_monitor": {"enabled": true}}"#),
        &[ReportTo::TensorBoard, ReportTo::Csv],
        folder.path(),
    );
    let mut reporters =
        Reporters::open(&plan, folder.path(), None).expect("what this test made itself is right");
    for number in 1..=3 {
        reporters.step(&step(number), None);
    }
    drop(reporters);
    let mut reporters = Reporters::open(&plan, folder.path(), Some(ResumePosition { step: 2, samples: 8 }))
        .expect("what this test made itself is right");
    reporters.step(&step(3), None);
    for (file, rows) in
        [("metrics.jsonl", 3), ("metrics.csv", 4), ("DeepSpeedJobName/Train_Samples_lr.csv", 4)]
    {
        let text = fs::read_to_string(folder.path().join(file)).expect("what this test made itself is right");
        assert_eq!(text.lines().count(), rows, "{file}\n{text}");
    }
    // No loss scale without fp16, and TensorBoard has a second file.
    assert!(!folder.path().join("DeepSpeedJobName/Train_Samples_loss_scale.csv").exists());
    assert_eq!(names(&folder.path().join("tensorboard")).len(), 2);
}

fn tiny(config: &Resolved) -> (ModelConfig, ParameterTable, Compiled) {
    let json = r#"{"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 256, "rms_norm_eps": 1e-6,
        "rope_theta": 10000, "tie_word_embeddings": true, "hidden_act": "silu"}"#;
    let model = ModelConfig::from_json(json, "config.json").expect("what this test made itself is right");
    let table = table(&model);
    let graph =
        forward(&model, &table, BatchTokens::of_tokens(64)).expect("what this test made itself is right");
    let compiled =
        Compiled::new(graph, 1, &Settings::from_config(config), &CpuTarget { threads: 1 }, vec![64])
            .expect("what this test made itself is right");
    (model, table, compiled)
}

/// A step in which every instruction takes a millisecond.
fn times(compiled: &Compiled) -> Vec<InstructionTime> {
    let program = &compiled.program;
    let of = |section: usize| {
        let instructions = 0..program.sections[section].instructions.len();
        instructions.map(move |instruction| InstructionTime { section, instruction, seconds: 1e-3 })
    };
    program.in_order().flat_map(of).collect()
}

#[test]
fn a_breakdown_counts_every_instruction_once() {
    let (_, _, compiled) = tiny(&resolved("{}"));
    let times = times(&compiled);
    let mut breakdown = Breakdown::default();
    breakdown.add(&compiled.program, &times);
    breakdown.step(times.len() as f64);
    let ms = |part| breakdown.milliseconds(part).round() as usize;
    // All nodes except the head, whose loss comes with its gradient; and clearing the loss.
    assert_eq!(ms(StepPhase::Forward), compiled.graph.nodes.len());
    assert!(ms(StepPhase::Backward) >= compiled.backward.nodes.len() && ms(StepPhase::Update) > 0);
    assert_eq!(StepPhase::ALL.into_iter().map(ms).sum::<usize>(), times.len());
}

#[test]
fn profiled_flops_sum_to_the_model() {
    let config = resolved(
        r#"{"wall_clock_breakdown": true, "flops_profiler": {"enabled": true, "profile_step": 2, "top_modules": 2}}"#,
    );
    let (model, table, compiled) = tiny(&config);
    let lengths = [vec![30, 20], Vec::new()];
    let times = times(&compiled);
    let mut timing = StepTiming::from_config(&config);
    assert!(timing.is_enabled() && !StepTiming::from_config(&resolved("{}")).is_enabled());
    let mut take = |number| {
        let line = step(number);
        let data = Duration::from_millis(1);
        timing
            .step(&compiled, StepProfile { metrics: &line, data, lengths: &lengths, times: &times })
            .expect("what this test made itself is right")
    };
    assert_eq!(take(1), None, "step 2 was asked for");
    let text = take(2).expect("what this test made itself is right");
    // Counted from the parameter table, not from the graph: 6 · weights · tokens, and attention.
    let work = ModelFlops::of(&model, &table).expect("what this test made itself is right").step([30, 20]);
    assert_eq!(work, 6.0 * 77_824.0 * 50.0 + 12.0 * 2.0 * 64.0 * (900.0 + 400.0) / 2.0);
    assert!(
        text.starts_with(
            "flops profile of step 2 on one rank: 50 tokens, 24.3 MFLOP in 50.0 ms, 487 MFLOP/s\n"
        ),
        "{text}"
    );
    let row = |name: &str| {
        let line = text
            .lines()
            .find(|line| line.trim_start().starts_with(name))
            .unwrap_or_else(|| panic!("{name}\n{text}"));
        line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(row("model")[1..4], ["78,208", "24.3", "M"]);
    // 3 · 2 · 64 · 64 · 50: q has 4 heads of 16.
    assert_eq!(row("linear q_proj")[2..5], ["4,096", "1.23", "M"]);
    assert!(text.contains("top ops by operations: linear "), "{text}");
    let nodes = |kind: fn(&Action) -> bool| {
        let micro = compiled.program.micro_batches().flat_map(|section| &section.instructions);
        micro.filter(|instruction| kind(&instruction.action)).count()
    };
    assert_eq!(row("model")[4], format!("{}.000", nodes(|action| matches!(action, Action::Forward(_)))));
    let line = timing.line().expect("what this test made itself is right");
    assert!(line.starts_with("time of a step: 50.0 ms · data 1.0 · forward "), "{line}");
    assert_eq!(timing.line(), None, "a line begins anew");
}

#[test]
fn profiles_respect_depth_and_file() {
    let folder = tempfile::tempdir().expect("what this test made itself is right");
    let path = folder.path().join("profile.txt");
    let config = resolved(&format!(
        r#"{{"flops_profiler": {{"enabled": true, "module_depth": 1, "output_file": {path:?}}}}}"#
    ));
    let (_, _, compiled) = tiny(&config);
    let times = times(&compiled);
    let line = step(1);
    let taken =
        StepProfile { metrics: &line, data: Duration::ZERO, lengths: &[vec![10], Vec::new()], times: &times };
    let said = StepTiming::from_config(&config)
        .step(&compiled, taken)
        .expect("what this test made itself is right")
        .expect("what this test made itself is right");
    assert!(said.contains("profile.txt"), "{said}");
    let text = fs::read_to_string(path).expect("what this test made itself is right");
    assert!(
        !text.contains("q_proj") && !text.contains("top ops") && text.contains("top units by time"),
        "{text}"
    );
}

#[test]
fn reports_go_to_the_logging_folder_and_leave_it_as_it_was_before_the_first_step() {
    let folder = tempfile::tempdir().unwrap();
    let (run, logs) = (folder.path().join("run"), folder.path().join("a/logs"));
    fs::create_dir(&run).unwrap();
    let plan = ReportPlan::new(&resolved("{}"), &[ReportTo::TensorBoard, ReportTo::Csv], &run);
    assert_eq!(plan.clone().named("x").paths(), [run.join("tensorboard/x"), run.join("metrics.csv")]);
    let plan = plan.in_folder(&logs).named("x");
    assert_eq!(plan.paths(), [logs.join("x"), logs.join("metrics.csv")]);
    let unstarted = plan.unstarted();
    plan.check_table(false).unwrap();
    drop(Reporters::open(&plan, &run, None).unwrap());
    assert!(logs.join("metrics.csv").exists() && logs.join("x").exists());
    // A table without rows is nobody's.
    plan.check_table(false).unwrap();
    unstarted.remove();
    assert!(!folder.path().join("a").exists());
    // One with rows is, and neither removed nor replaced, unless the run continues it.
    drop(Reporters::open(&plan, &run, None).unwrap());
    let table = fs::read_to_string(logs.join("metrics.csv")).unwrap() + "1,2\n";
    fs::write(logs.join("metrics.csv"), &table).unwrap();
    let message = plan.check_table(false).unwrap_err().to_string();
    assert!(message.contains("is there already") && message.contains("--logging-dir"), "{message}");
    plan.check_table(true).unwrap();
    unstarted.remove();
    assert_eq!(fs::read_to_string(logs.join("metrics.csv")).unwrap(), table);
    fs::write(logs.join("metrics.csv"), "of someone else").unwrap();
    assert!(plan.check_table(true).is_err());
}

#[test]
fn monitors_of_a_run_without_a_step_leave_no_folders() {
    let folder = tempfile::tempdir().unwrap();
    let sections = r#"{"tensorboard": {"enabled": true, "job_name": "a"}, "csv_monitor": {"enabled": true, "job_name": "b"}}"#;
    let plan = ReportPlan::new(&resolved(sections), &[], folder.path());
    let unstarted = plan.unstarted();
    drop(Reporters::open(&plan, folder.path(), None).unwrap());
    assert!(folder.path().join("a").exists() && folder.path().join("b/Train_Samples_lr.csv").exists());
    unstarted.remove();
    assert!(!folder.path().join("a").exists() && !folder.path().join("b").exists());
    // What was there before stays.
    fs::create_dir(folder.path().join("b")).unwrap();
    fs::write(folder.path().join("b/mine.csv"), "mine").unwrap();
    let unstarted = plan.unstarted();
    drop(Reporters::open(&plan, folder.path(), None).unwrap());
    unstarted.remove();
    assert_eq!(fs::read_to_string(folder.path().join("b/mine.csv")).unwrap(), "mine");
}
