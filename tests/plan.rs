//! `zeroth plan`, end to end: published figures, what fits, and suggested changes.

use crate::common::{model, zeroth, zeroth_json};
use serde_json::{Value, json};

fn totals(plan: &Value) -> Vec<(String, u64)> {
    let rows = plan["rows"].as_array().unwrap();
    rows.iter()
        .map(|row| {
            (row["preset"].as_str().unwrap().to_owned(), row["device_bytes"]["total"].as_u64().unwrap())
        })
        .collect()
}

fn total(plan: &Value, preset: &str) -> u64 {
    totals(plan).into_iter().find(|(name, _)| name == preset).unwrap().1
}

#[test]
fn plan_8b_on_5_ranks_without_master_weights() {
    let (code, plan) = zeroth_json(&["plan", "--params", "8B", "--ranks", "5", "--states", "plain"]);
    assert_eq!(code, 0);
    let bytes = ["zero0", "zero1", "zero2", "zero3"].map(|preset| total(&plan, preset));
    assert_eq!(bytes, [96_000_000_000, 44_800_000_000, 32_000_000_000, 19_200_000_000]);
}

#[test]
fn plan_matches_the_zero_paper_on_64_ranks() {
    let (_, plan) = zeroth_json(&["plan", "--params", "7.5B", "--ranks", "64"]);
    let bytes = ["zero0", "zero1", "zero2", "zero3"].map(|preset| total(&plan, preset));
    assert_eq!(bytes, [120_000_000_000, 31_406_250_000, 16_640_625_000, 1_875_000_000]);
}

#[test]
fn plan_matches_deepspeeds_table_for_t5_3b() {
    let ended = zeroth(&["plan", "--model", &model("t5-3b"), "--ranks", "8"]);
    for line in [
        "71.71GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1",
        "63.74GB |   0.79GB | offload_param=none, offload_optimizer=cpu , zero_init=1",
        "1.47GB |   6.10GB | offload_param=none, offload_optimizer=none, zero_init=1",
        "127.48GB |   6.10GB | offload_param=none, offload_optimizer=none, zero_init=0",
    ] {
        assert!(ended.stdout.contains(line), "{line}\n{}", ended.stdout);
    }
    assert!(ended.stdout.contains("2,851,598,336 parameters"), "{}", ended.stdout);
}

#[test]
fn plan_json_has_all_documented_keys() {
    let (_, plan) = zeroth_json(&["plan", "--params", "8B", "--ranks", "5", "--device-memory", "44GB"]);
    for key in ["params", "ranks", "rows", "recommended", "reason"] {
        assert!(plan.get(key).is_some(), "{key}");
    }
    let presets: Vec<String> = totals(&plan).into_iter().map(|(name, _)| name).collect();
    assert_eq!(presets, ["zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"]);
    for row in plan["rows"].as_array().unwrap() {
        for key in ["preset", "stage", "offload", "train_type", "comm_bytes_per_step", "saving", "fits"] {
            assert!(row.get(key).is_some(), "{key}");
        }
        for side in ["device_bytes", "host_bytes"] {
            let parts = ["parameters", "gradients", "optimizer", "activations", "buffers"];
            let sum: u64 = parts.iter().map(|part| row[side][part].as_u64().unwrap()).sum();
            assert_eq!(row[side]["total"].as_u64(), Some(sum), "{row}");
        }
    }
    assert_eq!(plan["rows"][5]["offload"], "optimizer+parameters");
    assert_eq!(plan["rows"][3]["offload"], "optimizer");
    assert_eq!(plan["rows"][0]["train_type"], "full");
}

#[test]
fn qwen3_8b_on_five_44_gb_gpus_takes_stage_2_with_recomputation() {
    let (code, plan) = zeroth_json(&[
        "plan",
        "--model",
        &model("Qwen3-8B"),
        "--ranks",
        "5",
        "--device-memory",
        "44GB",
        "--per-device-train-batch-size",
        "1",
        "--device",
        "cuda",
    ]);
    assert_eq!(code, 0);
    assert_eq!(plan["params"], 8_190_735_360_u64);
    assert_eq!(plan["recommended"], "zero2", "{}", plan["reason"]);
    let zero2 = &plan["rows"][2];
    assert!(total(&plan, "zero2") < 44_000_000_000);
    assert_eq!(zero2["chosen"], json!([{"key": "zeroth.recompute", "value": "norm_swiglu"}]));
    // Without recomputation, as the primer says, it needs stage 3.
    let (_, fixed) = zeroth_json(&[
        "plan",
        "--model",
        &model("Qwen3-8B"),
        "--ranks",
        "5",
        "--device-memory",
        "44GB",
        "--device",
        "cuda",
        "--deepspeed",
        r#"{"zero_optimization": {"stage": 2}, "zeroth": {"recompute": "none"}}"#,
    ]);
    assert_eq!(fixed["rows"][0]["fits"], false);
    assert!(plan["rows"][0]["device_bytes"]["activations"].as_u64().unwrap() > 0);
    assert!(plan["rows"][4]["device_bytes"]["buffers"].as_u64().unwrap() > 0);
}

#[test]
fn folder_and_config_json_give_the_same_plan() {
    let (_, four) = zeroth_json(&["plan", "--model", &model("Qwen3-30B-A3B"), "--ranks", "8"]);
    let (_, five) = zeroth_json(&["plan", "--model", &model("Qwen3-30B-A3B.transformers-5"), "--ranks", "8"]);
    assert_eq!(four["params"], 30_532_122_624_u64);
    assert_eq!(four["rows"], five["rows"]);
}

#[test]
fn misfits_exit_with_3_and_suggested_changes_fit() {
    let budgets = ["--device-memory", "24GB", "--host-memory", "64GB", "--device", "cuda"];
    let model = model("Qwen3-8B");
    let base = [&["plan", "--model", &model][..], &budgets].concat();
    let (code, plan) = zeroth_json(&[&base[..], &["--ranks", "1"]].concat());
    assert_eq!(code, 3);
    assert_eq!(plan["recommended"], Value::Null);
    let changes = plan["changes"].as_array().unwrap();
    assert!(!changes.is_empty());
    for change in changes {
        let to = change["to"].to_string();
        let host = change["preset"].as_str().unwrap();
        let again: Vec<&str> = match change["change"].as_str().unwrap() {
            "lora" => [&base[..], &["--ranks", "1", "--train-type", "lora"]].concat(),
            "recompute" => [&base[..], &["--ranks", "1", "--gradient-checkpointing"]].concat(),
            "ranks" => [&base[..], &["--ranks", &to]].concat(),
            "hosts" => [&base[..], &["--ranks", &to, "--ranks-per-host", "1"]].concat(),
            // The last of repeated flags wins.
            "device_memory" => [&base[..], &["--ranks", "1", "--device-memory", &to]].concat(),
            "host_memory" => [&base[..], &["--ranks", "1", "--host-memory", &to]].concat(),
            other => panic!("a change this test does not know: {other} for {host}"),
        };
        let (code, plan) = zeroth_json(&again);
        assert_eq!(code, 0, "{change} still does not fit: {}", plan["reason"]);
    }
}

#[test]
fn a_single_preset_decides_the_exit_code() {
    let plan = |preset| {
        zeroth_json(&[
            "plan",
            "--params",
            "8B",
            "--ranks",
            "5",
            "--device-memory",
            "20GB",
            "--deepspeed",
            preset,
        ])
    };
    assert_eq!(plan("zero2").0, 3);
    let (code, offloaded) = plan("zero2_offload");
    assert_eq!((code, offloaded["rows"].as_array().unwrap().len()), (0, 1));
}

#[test]
fn a_config_file_is_planned_by_its_stage_and_devices() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds.json");
    std::fs::write(
        &path,
        "zero_optimization: {\n  stage: 3\n  offload_optimizer: {\n    device: cpu\n  }\n}",
    )
    .unwrap();
    let file = path.to_str().unwrap();
    let (code, plan) = zeroth_json(&["plan", "--params", "8B", "--ranks", "4", "--deepspeed", file]);
    assert_eq!(code, 0);
    let row = &plan["rows"][0];
    assert_eq!((row["stage"].as_u64(), row["offload"].as_str()), (Some(3), Some("optimizer")));
    // 2 bytes per parameter over 4 ranks on each device; gradients and optimizer on the host.
    assert_eq!(row["device_bytes"]["total"], 4_000_000_000_u64);
    assert_eq!(row["host_bytes"]["total"], 112_000_000_000_u64);
}

#[test]
fn bf16_accumulation_halves_gradients() {
    let planned = |config: &str, flag: &str| {
        let model = model("Qwen3-8B");
        let (_, plan) =
            zeroth_json(&["plan", "--ranks", "2", "--model", &model, "--deepspeed", config, flag]);
        ["gradients", "optimizer"].map(|name| plan["rows"][0]["device_bytes"][name].as_u64().unwrap())
    };
    let stage = |rest: &str| format!(r#"{{"zero_optimization": {{"stage": 3}}{rest}}}"#);
    let [gradients, optimizer] = planned(&stage(""), "--bf16");
    let narrow = planned(&stage(r#", "data_types": {"grad_accum_dtype": "bf16"}"#), "--bf16");
    assert_eq!(narrow, [gradients / 2, optimizer]);
    assert_eq!(planned(&stage(""), "--fp16"), [gradients, optimizer / 10 * 12]);
}

#[test]
fn accumulation_costs_stages_2_and_3_communication() {
    let sent = |accumulation: &str, row: usize| {
        let (_, plan) = zeroth_json(&[
            "plan",
            "--params",
            "8B",
            "--ranks",
            "4",
            "--gradient-accumulation-steps",
            accumulation,
        ]);
        plan["rows"][row]["comm_bytes_per_step"].as_u64().unwrap()
    };
    // (N-1)/N of 2 bytes for each of Ψ: 12 GB here. Stage 1: 2Ψ; stage 2: kΨ + Ψ; stage 3: 3kΨ.
    assert_eq!([1, 2, 4].map(|row| sent("1", row)), [24_000_000_000, 24_000_000_000, 36_000_000_000]);
    assert_eq!([1, 2, 4].map(|row| sent("4", row)), [24_000_000_000, 60_000_000_000, 144_000_000_000]);
}

#[test]
fn gpus_without_bf16_are_refused_with_a_hint() {
    let ended = zeroth(&["plan", "--params", "1B", "--card", "V100"]);
    assert_eq!(ended.code, 2);
    assert!(
        ended.stderr.contains("does not support bf16") && ended.stderr.contains("--fp16"),
        "{}",
        ended.stderr
    );
    assert_eq!(zeroth(&["plan", "--params", "1B", "--ranks", "4", "--card", "V100", "--fp16"]).code, 0);
}

#[test]
fn lora_is_planned_from_the_models_linear_layers() {
    let (_, plan) =
        zeroth_json(&["plan", "--model", &model("Qwen2.5-7B"), "--ranks", "2", "--train-type", "lora"]);
    // PEFT's count for rank 8 on all linear layers of Qwen2.5-7B: 20,185,088.
    assert_eq!(plan["rows"][2]["train_type"], "lora");
    let gradients = plan["rows"][1]["device_bytes"]["gradients"].as_u64().unwrap();
    assert_eq!(gradients, 4 * 20_185_088);
}

#[test]
fn flags_without_effect_are_noted() {
    let notes = |arguments: &[&str]| zeroth_json(arguments).1["notes"].to_string();
    let typed = ["plan", "--params", "8B", "--max-length", "512", "--lora-rank", "4"];
    assert!(
        notes(&typed).contains("--max-length, --lora-rank have no effect without --model"),
        "{}",
        notes(&typed)
    );
    assert!(!notes(&["plan", "--params", "8B"]).contains("have no effect"));
    let with_model = ["plan", "--model", &model("Qwen3-0.6B"), "--max-length", "512"];
    assert!(!notes(&with_model).contains("have no effect"));
}

/// `train` writes the memory it allocates to plan.json; rows of the data are as long as the plan's.
#[test]
fn plan_equals_what_train_allocates() {
    let folder = tempfile::tempdir().unwrap();
    let (data, run) = (folder.path().join("rows.jsonl"), folder.path().join("run"));
    let ids: Vec<u32> = (1..=48).collect();
    let row = format!("{}\n", serde_json::json!({ "input_ids": ids, "labels": ids }));
    std::fs::write(&data, row.repeat(8)).unwrap();
    for preset in ["zero1", "zero3", "zero3_offload"] {
        let job =
            ["--model", "tests/golden/qwen3-tied", "--ranks", "2", "--device", "cpu", "--deepspeed", preset];
        let job = [&job[..], &["--max-length", "48", "--per-device-train-batch-size", "2"]].concat();
        let (data, run) = (data.to_str().unwrap(), run.to_str().unwrap());
        let run_of = ["--data", data, "--output", run, "--max-steps", "1", "--overwrite-output-dir"];
        let ended = zeroth(&[&["train"], &job[..], &run_of].concat());
        assert_eq!(ended.code, 0, "{}", ended.stderr);
        let allocated = std::fs::read_to_string(std::path::Path::new(run).join("plan.json")).unwrap();
        let allocated: Value = serde_json::from_str(&allocated).unwrap();
        let (_, plan) = zeroth_json(&[&["plan"], &job[..]].concat());
        let row = &plan["rows"][0];
        assert_eq!((&row["basis"], &plan["estimate"]), (&"program".into(), &false.into()));
        assert_eq!(row["device_bytes"], allocated["device_bytes"], "{preset}");
        let host = |value: &Value| value["host_bytes"]["total"].as_u64().unwrap();
        assert_eq!(host(row), 2 * host(&allocated), "{preset}");
    }
}

#[test]
fn what_cannot_be_compiled_is_marked_as_an_estimate() {
    for arguments in [
        &["plan", "--model", &model("Qwen3-30B-A3B"), "--states", "run"][..],
        &["plan", "--model", &model("Qwen3-0.6B"), "--states", "master"],
        &["plan", "--params", "8B"],
    ] {
        let (_, plan) = zeroth_json(arguments);
        assert!(
            plan["rows"].as_array().unwrap().iter().all(|row| row["basis"] == "estimate"),
            "{arguments:?}"
        );
        let text = zeroth(arguments).stdout;
        assert!(text.contains("zero2 (estimate)"), "{text}");
    }
}

#[test]
fn mixtures_of_experts_are_planned_by_the_program() {
    for more in
        [&["--ranks", "8"][..], &["--train-type", "lora"], &["--train-type", "lora", "--quantize", "nf4"]]
    {
        let arguments =
            [&["plan", "--model", "mistralai/Mixtral-8x7B-v0.1", "--deepspeed", "zero3"], more].concat();
        let (_, plan) = zeroth_json(&arguments);
        assert_eq!(
            (&plan["estimate"], &plan["params"]),
            (&false.into(), &46_702_792_704_u64.into()),
            "{more:?}"
        );
    }
    let dropout = ["--train-type", "lora", "--lora-dropout", "0.1"];
    let ended = zeroth(&[&["plan", "--model", &model("tiny-mixtral")], &dropout[..]].concat());
    assert!(ended.code == 2 && ended.stderr.contains("is not possible on experts"), "{}", ended.stderr);
}

#[test]
fn lora_and_nf4_are_planned_by_the_program() {
    let base = model("Qwen3-0.6B");
    let arguments = ["plan", "--model", &base, "--train-type", "lora", "--ranks", "4", "--device", "cuda"];
    let rows = |more: &[&str]| {
        let (_, plan) = zeroth_json(&[&arguments[..], more].concat());
        let rows = plan["rows"].as_array().unwrap().clone();
        assert!(rows.iter().all(|row| row["basis"] == "program"), "{rows:?}");
        rows
    };
    let row = |rows: &[Value], preset: &str| rows.iter().find(|row| row["preset"] == preset).unwrap().clone();
    let bytes = |row: &Value| row["device_bytes"]["parameters"].as_u64().unwrap();
    let open = rows(&[]);
    assert_eq!(row(&open, "zero2")["frozen"], "whole");
    assert_eq!(row(&open, "zero3")["frozen"], "sharded");
    // Whole where the budget has room for it, at any stage; else sharded.
    let (roomy, tight) = (rows(&["--device-memory", "80GB"]), rows(&["--device-memory", "4200MB"]));
    let [roomy, tight] = [&roomy, &tight].map(|rows| row(rows, "zero3"));
    assert_eq!((&roomy["frozen"], &roomy["fits"]), (&json!("whole"), &json!(true)));
    assert_eq!((&tight["frozen"], &tight["fits"]), (&json!("sharded"), &json!(true)));
    assert!(3 * bytes(&tight) < bytes(&roomy));
    // 440 million of 596 million parameters in 4.5 instead of 16 bits.
    let packed = bytes(&row(&rows(&["--quantize", "nf4"]), "zero2"));
    let saved = bytes(&row(&open, "zero2")) - packed;
    assert!((632_000_000..634_000_000).contains(&saved), "{saved}");
    let refused = zeroth(&["plan", "--model", &base, "--quantize", "nf4"]);
    assert!(refused.stderr.contains("--quantize nf4 needs --train-type lora"), "{}", refused.stderr);
}

#[test]
fn fp32_runs_are_planned() {
    let plan = |flag| {
        let model = model("Qwen3-0.6B");
        let (code, plan) =
            zeroth_json(&["plan", "--model", &model, "--ranks", "2", "--device", "cuda", flag]);
        assert_eq!(code, 0);
        ["parameters", "gradients", "optimizer"]
            .map(|part| plan["rows"][2]["device_bytes"][part].as_u64().unwrap())
    };
    // bf16: 2 whole, 4 and 2 + 8 sharded; fp32: 4 whole, 4 and 8 sharded.
    let ([p16, g16, o16], [p32, g32, o32]) = (plan("--bf16"), plan("--fp32"));
    assert_eq!((p32, g32, 10 * o32), (2 * p16, g16, 8 * o16));
}

#[test]
fn rows_say_what_budgets_leave_and_how_far_micro_batches_can_grow() {
    let base =
        ["plan", "--model", &model("Qwen3-0.6B"), "--ranks", "2", "--device", "cuda", "--deepspeed", "zero2"];
    let with = |more: &[&str]| {
        let (code, plan) = zeroth_json(&[&base[..], &["--device-memory", "24GB"], more].concat());
        (code, plan["rows"][0].clone())
    };
    let (code, row) = with(&["--max-length", "1024"]);
    assert_eq!(code, 0);
    let total = row["device_bytes"]["total"].as_u64().unwrap();
    assert_eq!(row["device_bytes_free"], 24_000_000_000 - total);
    assert_eq!(row["host_bytes_free"], Value::Null);
    let (batch, longest) =
        (row["largest_micro_batch"].as_u64().unwrap(), row["longest_row"].as_u64().unwrap());
    let fits = |batch: u64, length: u64| {
        let [batch, length] = [batch, length].map(|count| count.to_string());
        with(&["--per-device-train-batch-size", &batch, "--max-length", &length]).0 == 0
    };
    assert!(fits(batch, 1024) && !fits(batch + 1, 1024), "{batch}");
    assert!(fits(1, longest) && !fits(1, longest + longest / 50 + 32), "{longest}");
    // Without a budget there is no limit to report.
    let (_, plan) = zeroth_json(&base);
    for key in ["device_bytes_free", "host_bytes_free", "largest_micro_batch", "longest_row"] {
        assert_eq!(plan["rows"][0][key], Value::Null, "{key}");
    }
    let text = zeroth(&[&base[..], &["--device-memory", "24GB", "--max-length", "1024"]].concat()).stdout;
    assert!(text.contains("largest micro-batch of 1,024 tokens") && text.contains("device free"), "{text}");
}

#[test]
fn well_known_models_need_no_files() {
    let (code, plan) = zeroth_json(&["plan", "--model", "Qwen/Qwen3-8B", "--ranks", "5", "--device", "cuda"]);
    assert_eq!((code, &plan["params"]), (0, &8_190_735_360_u64.into()));
    assert!(plan["notes"].to_string().contains("the built-in config is used"), "{}", plan["notes"]);
    let (_, folder) =
        zeroth_json(&["plan", "--model", &model("Qwen3-8B"), "--ranks", "5", "--device", "cuda"]);
    assert_eq!(plan["rows"], folder["rows"]);
    let (code, resolved) =
        zeroth_json(&["config", "resolve", "zero3", "--model", "Qwen/Qwen3-8B", "--ranks", "8"]);
    assert_eq!(code, 0);
    assert!(resolved["notes"].to_string().contains("built-in config"), "{}", resolved["notes"]);
    assert_eq!(resolved["config"]["zero_optimization"]["reduce_bucket_size"], 4096 * 4096);
    // Nothing is trained from a name alone.
    let ended = zeroth(&["train", "--model", "Qwen/Qwen3-8B", "--data", "none.jsonl", "--output", "none"]);
    assert_eq!(ended.code, 2);
    assert!(ended.stderr.contains("Hugging Face cache"), "{}", ended.stderr);
}

#[test]
fn a_gpu_with_two_sizes_says_which_is_assumed() {
    let note = |card: &str| {
        let (code, plan) = zeroth_json(&["plan", "--params", "1B", "--card", card]);
        assert_eq!(code, 0, "{card}");
        plan["notes"].to_string()
    };
    let silent = note("A100");
    for words in ["--card A100 has 40 GB or 80 GB", "40 GB is assumed", "A100 80GB"] {
        assert!(silent.contains(words), "{words}: {silent}");
    }
    for clear in ["A100 40GB", "a100-80gb", "H100", "RTX 4090"] {
        assert!(!note(clear).contains("is assumed"), "{clear}: {}", note(clear));
    }
}

#[test]
fn names_near_a_built_in_model_suggest_it() {
    for (name, meant) in [
        ("Qwen3-8B", "did you mean `Qwen/Qwen3-8B`"),
        ("meta-llama/Meta-Llama-3-8B", "did you mean `meta-llama/Llama-3.1-8B`"),
    ] {
        let refused = zeroth(&["plan", "--model", name]);
        assert_eq!(refused.code, 2, "{name}: {}", refused.stdout);
        assert!(refused.stderr.contains(meant), "{name}: {}", refused.stderr);
    }
}

#[test]
fn plan_on_hosts_says_what_crosses_between_them_and_which_groups_to_write() {
    let flags = ["--hosts", "2", "--ranks-per-host", "8", "--device", "cuda", "--device-memory", "80GB"];
    let job = ["plan", "--model", "Qwen/Qwen3-8B", "--deepspeed", "zero3"];
    let (code, plan) = zeroth_json(&[&job[..], &flags].concat());
    assert_eq!((code, &plan["ranks"]), (0, &json!(16)));
    let between = &plan["rows"][0]["between_hosts"];
    let figures =
        ["hosts", "ranks_per_host", "group", "hpz", "recommended_hpz"].map(|key| between[key].clone());
    assert_eq!(figures, [json!(2), json!(8), json!(8), json!(false), json!(8)]);
    // In units of 2 bytes a parameter.
    let psi = 2.0 * plan["params"].as_f64().unwrap();
    let with = &between["with_hpz"];
    let expected = [
        (&between["bytes_into_host"], 2.0),
        (&between["nccl_rings"], 2.8125),
        (&with["bytes_into_host"], 1.5),
    ];
    for (bytes, expected) in expected {
        // The embedding and the head are gathered once.
        assert!((bytes.as_f64().unwrap() / psi - expected).abs() < 0.1, "{between}");
    }
    let weights =
        with["device_bytes"].as_f64().unwrap() - plan["rows"][0]["device_bytes"]["total"].as_f64().unwrap();
    assert!(weights > 0.9 * psi / 16.0, "{weights}");
    let text = zeroth(&[&job[..], &flags].concat()).stdout;
    assert!(text.contains("2 hosts × 8 ranks"), "{text}");
    assert!(text.contains("zero_hpz_partition_size 8 brings"), "{text}");
    let refused = zeroth(&[&job[..], &["--hosts", "3", "--ranks", "16"]].concat());
    assert_eq!(refused.code, 2);
    assert!(refused.stderr.contains("16 ranks cannot be divided by it"), "{}", refused.stderr);
}
