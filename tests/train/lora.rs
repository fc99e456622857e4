//! LoRA: golden runs of PEFT, checkpoints without the base, resuming, kills, adapter folders, and refusals.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::running::Running;
use super::{golden, is_full, json, metrics, new_data, new_model, number, tensors, text, train, train_on};
use crate::common::{Ended, zeroth};

const BASE: &str = "qwen3-tied";
const LORA: [&str; 2] = ["--train-type", "lora"];

/// Trains adapters over the golden model.
fn lora(output: &Path, more: &[&str]) -> Ended {
    train(BASE, output, &[&LORA[..], more].concat())
}

fn losses(run: &Path) -> Vec<f64> {
    metrics(run).iter().map(|line| number(&line["loss"])).collect()
}

fn adapter(run: &Path) -> Vec<u8> {
    fs::read(run.join("model/adapter_model.safetensors")).unwrap()
}

/// A copy of the golden model, to be changed.
fn copied(folder: &Path, name: &str) -> PathBuf {
    let copy = folder.join(name);
    fs::create_dir_all(&copy).unwrap();
    for file in ["config.json", "model.safetensors", "data.jsonl"] {
        fs::copy(golden(BASE).join(file), copy.join(file)).unwrap();
    }
    copy
}

/// Changes one element of a tensor of a model's only file.
fn change(model: &Path, tensor: &str, element: usize) {
    let path = model.join("model.safetensors");
    let mut file = fs::read(&path).unwrap();
    let found = tensors(&file).into_iter().find(|found| found.name == tensor).unwrap();
    file[found.bytes.start + 4 * element] ^= 1;
    fs::write(&path, file).unwrap();
}

/// Continues PEFT's own adapter for its 20 steps, and compares losses, norms and final matrices with PEFT's.
fn trains_like_peft(case: &str, preset: &str, [ranks, accumulation, micro_batch]: [u64; 3]) {
    let start = golden("lora").join(case);
    let steps = json(&start.join("steps.json"));
    let batch = ranks * accumulation * micro_batch;
    let run = steps["runs"].as_array().unwrap().iter().find(|run| run["batch"] == batch).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    let [ranks, accumulation, micro_batch] = [ranks, accumulation, micro_batch].map(|n| n.to_string());
    let flags = [
        ["--train-type", "lora"],
        ["--adapter", text(&start)],
        ["--deepspeed", preset],
        ["--ranks", &ranks],
        ["--gradient-accumulation-steps", &accumulation],
        ["--per-device-train-batch-size", &micro_batch],
        ["--warmup-steps", "3"],
        ["--max-steps", "20"],
        ["--learning-rate", "1e-3"],
        ["--max-length", "40"],
        ["--fp32", "true"],
    ];
    let base = steps["base"].as_str().unwrap();
    train(base, &output, &flags.concat()).assert_done();
    for (line, at) in metrics(&output).iter().zip(0..) {
        let of = |key: &str| (number(&line[key]), number(&run[key][at]));
        let (loss, norm, rate) = (of("loss"), of("grad_norm"), of("lr"));
        assert!((loss.0 - loss.1).abs() < 1e-5, "{case}, {preset}, step {at}: loss {loss:?}");
        assert!((norm.0 - norm.1).abs() < 5e-4 * norm.1, "{case}, {preset}, step {at}: norm {norm:?}");
        assert!((rate.0 - rate.1).abs() < 1e-12, "{case}, {preset}, step {at}: rate {rate:?}");
    }
    let file = adapter(&output);
    let (found, expected) = (tensors(&file), run["final"].as_object().unwrap());
    assert_eq!(found.len(), expected.len());
    for tensor in found {
        let data = file[tensor.bytes].as_chunks::<4>().0;
        let norm = data.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes)).powi(2)).sum::<f64>().sqrt();
        let name = tensor.name.strip_prefix("base_model.model.").unwrap();
        let wanted = number(&expected[name]["norm"]);
        assert!((norm - wanted).abs() < 1e-5 * wanted, "{case}, {name}: {norm} {wanted}");
        assert_eq!(tensor.dtype, "F32");
    }
}

#[test]
fn adapters_train_like_peft() {
    trains_like_peft("qwen3-tied-all", "zero2", [1, 1, 4]);
    trains_like_peft("qwen2-yarn-tied-qv-rslora", "zero3", [2, 1, 2]);
    trains_like_peft("llama-biases-tied-all-rslora", "zero3_offload", [3, 2, 2]);
}

#[test]
fn checkpoints_and_the_model_hold_adapters_only() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let flags =
        ["--max-steps", "4", "--save-steps", "2", "--lora-rank", "2", "--target-modules", "q_proj,v_proj"];
    let ended = lora(&run, &flags);
    ended.assert_done();
    // Rank 2 on q_proj (24 → 40) and v_proj (24 → 20) of two blocks, over 13,172 frozen parameters.
    let trained = 2 * 2 * ((24 + 40) + (24 + 20));
    let words = format!("LoRA r 2 on q_proj, v_proj: {trained} of ");
    assert!(ended.stderr.contains(&words), "{words}: {}", ended.stderr);
    let plan = json(&run.join("plan.json"));
    assert_eq!(plan["trained_parameters"], trained);

    let step = run.join("checkpoints/step-4");
    let manifest = json(&step.join("manifest.json"));
    assert_eq!(manifest["model"]["total"], trained);
    let entry = &manifest["lora"];
    assert_eq!((&entry["rank"], &entry["alpha"]), (&2.into(), &"32".into()));
    assert_eq!(entry["target_modules"], serde_json::json!(["q_proj", "v_proj"]));
    assert_eq!(entry["base"]["hash"].as_str().unwrap().len(), 16);
    let file = fs::read(step.join("rank-00000-of-00001.safetensors")).unwrap();
    let stored = tensors(&file);
    assert!(stored.iter().all(|tensor| tensor.name.contains(".lora_")), "adapters only");
    // Weights and two moments, in f32, and the header.
    let data: usize = stored.iter().map(|tensor| tensor.bytes.len()).sum();
    assert_eq!(data, 3 * 4 * trained);
    let base = fs::read(golden(BASE).join("model.safetensors")).unwrap();
    let of_base = tensors(&base).into_iter().find(|t| t.name.contains("q_proj")).unwrap();
    let row = &base[of_base.bytes.start..of_base.bytes.start + 64];
    assert!(!file.windows(row.len()).any(|window| window == row), "no bytes of the base");

    let model = run.join("model");
    let mut names: Vec<String> = fs::read_dir(&model)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["adapter_config.json", "adapter_model.safetensors", "export.json"]);
    let config = json(&model.join("adapter_config.json"));
    assert_eq!(
        (&config["peft_type"], &config["r"], &config["lora_alpha"]),
        (&"LORA".into(), &2.into(), &32.into())
    );
    assert_eq!(config["base_model_name_or_path"], text(&golden(BASE).canonicalize().unwrap()));
    // B has left zero, and A has moved.
    let file = adapter(&run);
    for tensor in tensors(&file) {
        assert!(file[tensor.bytes.clone()].iter().any(|byte| *byte != 0), "{}", tensor.name);
    }
    let inspected = zeroth(&["checkpoint", "inspect", text(&step)]);
    assert!(inspected.stdout.contains("LoRA r 2, alpha 32"), "{}", inspected.stdout);
    // An export of the last checkpoint is the same adapter, byte for byte.
    let exported = folder.path().join("exported");
    let ended = zeroth(&["checkpoint", "export", text(&step), "--output", text(&exported)]);
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    for name in ["adapter_model.safetensors", "adapter_config.json"] {
        assert_eq!(fs::read(exported.join(name)).unwrap(), fs::read(model.join(name)).unwrap(), "{name}");
    }
    // A finished run is recognised as such.
    let again = lora(&run, &[&flags[..], &["--resume", "auto"]].concat());
    again.assert_done();
    assert!(again.stderr.contains("already complete"), "{}", again.stderr);
    // The adapter goes on in another run, and its rank and targets need not be typed.
    let more = folder.path().join("more");
    let ended = lora(&more, &["--adapter", text(&model), "--max-steps", "2", "--lora-dropout", "0"]);
    ended.assert_done();
    assert!(ended.stderr.contains("LoRA r 2 on q_proj, v_proj"), "{}", ended.stderr);
}

#[test]
fn the_best_adapter_is_exported() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let rows = golden(BASE).join("data.jsonl");
    let flags = [
        ["--max-steps", "4"],
        ["--save-steps", "1"],
        ["--eval-steps", "1"],
        ["--eval-data", text(&rows)],
        ["--load-best-model-at-end", "true"],
        // The loss falls, so the largest is the first.
        ["--greater-is-better", "true"],
        ["--learning-rate", "1e-2"],
    ];
    let ended = lora(&run, &flags.concat());
    ended.assert_done();
    let step = json(&run.join("model/export.json"))["step"].as_u64().unwrap();
    assert!(step < 4, "the best is not the last: {step}");
    let exported = folder.path().join("exported");
    let checkpoint = run.join(format!("checkpoints/step-{step}"));
    let ended = zeroth(&["checkpoint", "export", text(&checkpoint), "--output", text(&exported)]);
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert_eq!(fs::read(exported.join("adapter_model.safetensors")).unwrap(), adapter(&run));
}

#[test]
fn resuming_gives_the_same_bits_and_works_on_other_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let flags = |ranks: &'static str, preset: &'static str| {
        [
            "--ranks",
            ranks,
            "--deepspeed",
            preset,
            "--max-steps",
            "8",
            "--save-steps",
            "4",
            "--learning-rate",
            "3e-3",
        ]
    };
    let batch = ["--per-device-train-batch-size", "3"];
    let whole = |name: &str, precision: &str| {
        lora(&at(name), &[&flags("2", "zero3")[..], &batch, &[precision]].concat()).assert_done();
        at(name).join("checkpoints/step-4")
    };
    let from = whole("bf16", "--bf16");
    lora(&at("rest"), &[&flags("2", "zero3")[..], &["--bf16", "--resume", text(&from)]].concat())
        .assert_done();
    assert_eq!(losses(&at("bf16"))[4..], losses(&at("rest"))[..]);
    assert_eq!(adapter(&at("bf16")), adapter(&at("rest")));
    for rank in 0..2 {
        let part = format!("checkpoints/step-8/rank-0000{rank}-of-00002.safetensors");
        assert_eq!(
            fs::read(at("bf16").join(&part)).unwrap(),
            fs::read(at("rest").join(&part)).unwrap(),
            "{part}"
        );
    }
    let from = whole("fp32", "--fp32");
    let identity = |run: &Path| json(&run.join("checkpoints/step-8/manifest.json"))["lora"]["base"].clone();
    for (ranks, preset) in [("1", "zero0"), ("3", "zero2")] {
        let run = at(&format!("{ranks}-{preset}"));
        lora(&run, &[&flags(ranks, preset)[..], &["--fp32", "--resume", text(&from)]].concat()).assert_done();
        for (found, expected) in losses(&run).iter().zip(&losses(&at("fp32"))[4..]) {
            assert!((found - expected).abs() < 1e-3, "{ranks} of {preset}: {found} {expected}");
        }
        // The base's hash depends neither on ranks nor on the stage.
        assert_eq!(identity(&run), identity(&at("fp32")), "{ranks} of {preset}");
    }
}

#[test]
fn resuming_over_another_base_or_with_other_adapters_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let base = copied(folder.path(), "base");
    let data = golden(BASE).join("data.jsonl");
    let run = folder.path().join("run");
    let go = |more: &[&str]| {
        let flags = ["--train-type", "lora", "--max-steps", "4", "--save-steps", "2", "--lora-rank", "4"];
        train_on(&base, &data, &run, &[&flags[..], more].concat())
    };
    go(&[]).assert_done();
    fs::remove_dir_all(run.join("checkpoints/step-4")).unwrap();
    let kept = fs::read(run.join("metrics.jsonl")).unwrap();
    let refused = |more: &[&str], words: &[&str]| {
        let ended = go(&[&["--resume", "auto"], more].concat());
        assert_eq!(ended.code, 2, "{more:?}: {}", ended.stderr);
        for word in words {
            assert!(ended.stderr.contains(word), "{word}: {}", ended.stderr);
        }
    };
    refused(&["--lora-alpha", "16"], &["--lora-alpha is 16, that of the checkpoint 32", "--adapter"]);
    refused(&["--lora-rank", "2"], &["--lora-rank is 2, that of the checkpoint 4"]);
    refused(&["--use-rslora"], &["--use-rslora is true, that of the checkpoint false"]);
    refused(
        &["--target-modules", "q_proj"],
        &["--target-modules leaves out model.layers.0.", "has an adapter"],
    );
    refused(&["--train-type", "full", "--lora-rank", "4"], &["a checkpoint of LoRA", "--train-type lora"]);
    // Another base of the same name: seen before anything is loaded, or while it is.
    let weights = base.join("model.safetensors");
    let original = fs::read(&weights).unwrap();
    change(&base, "model.layers.1.mlp.up_proj.weight", 3);
    refused(&[], &["adapters of another base", "--model", text(&base)]);
    assert_eq!(fs::read(run.join("metrics.jsonl")).unwrap(), kept, "nothing was touched");
    fs::write(&weights, &original).unwrap();
    change(&base, "model.layers.1.mlp.up_proj.weight", 700);
    refused(&[], &["adapters of another base"]);
    refused(
        &["--ranks", "2", "--per-device-train-batch-size", "1", "--deepspeed", "zero3"],
        &["cannot share"],
    );
    fs::write(&weights, &original).unwrap();
    // Dropout may change, and so may everything that resuming changes elsewhere.
    go(&["--resume", "auto", "--lora-dropout", "0.1"]).assert_done();
    assert_eq!(metrics(&run).len(), 4);
    // A checkpoint of full training has no adapters.
    let full = folder.path().join("full");
    train_on(&base, &data, &full, &["--max-steps", "2"]).assert_done();
    let ended =
        train_on(&base, &data, &full, &[&LORA[..], &["--max-steps", "4", "--resume", "auto"]].concat());
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    assert!(ended.stderr.contains("a checkpoint of full training"), "{}", ended.stderr);
}

#[test]
fn the_base_is_quantised_and_keeps_its_identity() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, more: &[&str]| {
        let output = folder.path().join(name);
        let ended =
            lora(&output, &[&["--max-steps", "3", "--save-steps", "2", "--lora-rank", "4"], more].concat());
        ended.assert_done();
        (
            json(&output.join("checkpoints/step-3/manifest.json"))["lora"].clone(),
            losses(&output),
            ended.stderr,
        )
    };
    let (plain, plain_losses, _) = run("plain", &[]);
    let (packed, packed_losses, said) = run("nf4", &["--quantize", "nf4"]);
    assert!(said.contains("linear layers are kept in nf4"), "{said}");
    assert_eq!(packed["quantized"], true);
    assert_eq!(packed["base"], plain["base"], "the hash is of the weights as they are stored");
    assert_ne!(packed_losses, plain_losses, "4 bits are fewer than 16");
    for (one, other) in packed_losses.iter().zip(&plain_losses) {
        assert!((one - other).abs() < 0.1 * other, "{packed_losses:?} {plain_losses:?}");
    }
    // By the names of ms-swift and TRL, sharded over two ranks and resumed: the same base.
    let from = folder.path().join("nf4/checkpoints/step-2");
    let (again, _, said) =
        run("swift", &["--quant_method", "bnb", "--quant_bits", "4", "--resume", text(&from)]);
    assert!(!said.contains("changed since the checkpoint: --quantize"), "{said}");
    assert_eq!(again["base"], plain["base"]);
    let two = ["--load_in_4bit", "--ranks", "2", "--deepspeed", "zero3", "--bnb_4bit_quant_type", "nf4"];
    assert_eq!(run("trl", &two).0["base"], plain["base"]);
    let (_, _, said) = run("unpacked", &["--resume", text(&from)]);
    assert!(said.contains("changed since the checkpoint: --quantize: nf4 → none"), "{said}");
}

#[test]
fn killed_runs_resume_to_the_same_bits() {
    let is_full = is_full();
    let (kills, steps) = if is_full { (20, 400) } else { (2, 60) };
    let folder = tempfile::tempdir().unwrap();
    let model = new_model(folder.path(), 64, 2, 128, 128);
    let data = new_data(folder.path(), 40, 24, 128);
    let total = steps.to_string();
    let words = |output: &Path| -> Vec<String> {
        let flags = [
            ["--device", "cpu"],
            ["--model", text(&model)],
            ["--data", text(&data)],
            ["--output", text(output)],
            ["--train-type", "lora"],
            ["--random-weights", "true"],
            ["--ranks", "2"],
            ["--threads-per-rank", "1"],
            ["--deepspeed", "zero3"],
            ["--per-device-train-batch-size", "4"],
            ["--max-steps", &total],
            ["--save-steps", "3"],
            ["--save-total-limit", "2"],
            ["--resume", "auto"],
        ];
        std::iter::once("train").chain(flags.concat()).map(str::to_owned).collect()
    };
    let whole = folder.path().join("whole");
    let all = words(&whole);
    let ended = zeroth(&all.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let killed = folder.path().join("killed");
    let all = words(&killed);
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    for kill in 1..=kills {
        let mut running = Running::start(folder.path(), &all);
        running.wait_for_steps(&killed, kill * steps / (kills + 2));
        running.launcher.kill().unwrap();
        running.launcher.wait().unwrap();
    }
    let mut running = Running::start(folder.path(), &all);
    let (status, _) = running.end(Duration::from_mins(2));
    assert_eq!(status.and_then(|status| status.code()), Some(0), "{}", running.said());
    assert_eq!(losses(&killed), losses(&whole));
    assert_eq!(adapter(&killed), adapter(&whole));
    for rank in 0..2 {
        let part = format!("checkpoints/step-{steps}/rank-0000{rank}-of-00002.safetensors");
        assert_eq!(fs::read(killed.join(&part)).unwrap(), fs::read(whole.join(&part)).unwrap(), "{part}");
    }
}

#[test]
fn bad_input_is_refused_with_what_was_found() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    let case = |name: &str| golden("lora").join(name);
    let (all, other) = (case("qwen3-tied-all"), case("llama-biases-tied-all"));
    let named_for_gpt2 = "c_attn";
    for (flags, words) in [
        (&["--lora-rank", "0"][..], &["LoRA rank of 0", "8 is usual"][..]),
        (&["--lora-rank", "4096"], &["LoRA rank of 4096 is larger than model.layers.0.", "give at most"]),
        (&["--target-modules", "q_prj"], &["`q_prj` matches no module", "did you mean `q_proj`"]),
        (
            &["--target-modules", named_for_gpt2],
            &["`c_attn` matches no module", "q_proj, k_proj, v_proj, o_proj"],
        ),
        (&["--target-modules", ".*c_attn"], &["`.*c_attn` matches no module", "q_proj, k_proj"]),
        (
            &["--target-modules", "q_prj", "v_proj", "c_attn", "norm"],
            &[
                "`q_prj` matches no module",
                "did you mean `q_proj`",
                "`c_attn` matches",
                "`norm` is not a linear map",
            ],
        ),
        (&["--target-modules", "(q_proj"], &["`(q_proj` is no regular expression"]),
        (&["--target-modules", r"(?=.*_proj)(?!.*_proj).*"], &["matches no module"]),
        (&["--target-modules", "lm_head"], &["`lm_head` is tied to model.embed_tokens.weight"]),
        (&["--target-modules", "norm"], &["`norm` is not a linear map"]),
        (&["--lora-alpha", "0"], &["--lora-alpha", "above 0"]),
        (&["--lora-dropout", "1"], &["--lora-dropout", "below 1"]),
        (&["--init-lora-weights", "pissa"], &["--init-lora-weights", "pissa", "not yet built", "gaussian"]),
        (&["--adapter", text(&other)], &["--adapter", "does not fit the base model"]),
        (
            &["--adapter", text(&all), "--lora-rank", "8", "--lora-alpha", "6"],
            &["--lora-rank is 8, that of the adapter 4"],
        ),
        (&["--adapter", text(&all), "--lora-alpha", "7"], &["--lora-alpha is 7, that of the adapter 6"]),
        (
            &["--adapter", text(&all), "--target-modules", "q_proj"],
            &["28 matrices", "--target-modules asks for 4"],
        ),
        (&["--adapter", "no/such/folder"], &["--adapter", "no/such/folder"]),
        (&["--use-dora"], &["--use-dora", "DoRA", "not yet built"]),
        (&["--modules-to-save", "embed_tokens"], &["modules_to_save", "not yet built"]),
        (&["--lora-bias", "all"], &["lora_bias", "not yet built"]),
        (&["--lorap-lr-ratio", "16"], &["LoRA+", "not yet built"]),
        (&["--loraplus-lr-ratio", "16"], &["LoRA+", "not yet built"]),
        (&["--load-in-8bit"], &["8-bit", "not yet built"]),
        (&["--quant-bits", "8"], &["--quant-bits", "not yet built"]),
        (&["--quant-method", "bnb"], &["--quant-bits 4"]),
        (&["--train-type", "full", "--use-peft"], &["contradict"]),
        (
            &["--train-type", "full", "--quantize", "nf4"],
            &["--quantize nf4 needs --train-type lora", "small updates"],
        ),
        (&["--train-type", "full", "--adapter", text(&all)], &["needs --train-type lora"]),
    ] {
        let ended = lora(&output, flags);
        assert_eq!(ended.code, 2, "{flags:?}: {}", ended.stderr);
        for word in words {
            assert!(ended.stderr.contains(word), "{flags:?}, {word}: {}", ended.stderr);
        }
        assert!(!output.exists(), "{flags:?}");
    }
    // A base without weights, which only measuring wants.
    let model = new_model(folder.path(), 16, 1, 16, 32);
    let data = new_data(folder.path(), 4, 6, 32);
    let steps = ["--train-type", "lora", "--max-steps", "1", "--lora-rank", "2"];
    let ended = train_on(&model, &data, &output, &steps);
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    assert!(
        ended.stderr.contains("has no weights") && ended.stderr.contains("--random-weights"),
        "{}",
        ended.stderr
    );
    let ended = train_on(&model, &data, &output, &[&steps[..], &["--random-weights"]].concat());
    ended.assert_done();
    assert!(ended.stderr.contains("initialised randomly with seed 42"), "{}", ended.stderr);
    // An adapter inside the output is an input, and stays.
    let own = output.join("model");
    let again =
        [&steps[..], &["--random-weights", "--adapter", text(&own), "--overwrite-output-dir"]].concat();
    let ended = train_on(&model, &data, &output, &again);
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    assert!(own.join("adapter_model.safetensors").exists(), "{}", ended.stderr);
}

#[test]
fn flags_of_other_trainers_are_understood() {
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, more: &[&str]| -> (Ended, Value) {
        let output = folder.path().join(name);
        let ended = train(BASE, &output, &[&["--max-steps", "1"], more].concat());
        ended.assert_done();
        let manifest = json(&output.join("checkpoints/step-1/manifest.json"));
        (ended, manifest)
    };
    // TRL.
    let trl =
        ["--use_peft", "--lora_r", "4", "--lora_alpha", "8", "--lora_target_modules", "q_proj", "v_proj"];
    let (ended, trl) = run("trl", &[&trl[..], &["--lora_task_type", "CAUSAL_LM"]].concat());
    assert_eq!((&trl["lora"]["rank"], &trl["lora"]["alpha"]), (&4.into(), &"8".into()));
    assert_eq!(trl["config"]["optimizer"]["params"]["lr"], 1e-4, "the default of LoRA");
    assert!(ended.stderr.contains("note: --lora-task-type has no effect"), "{}", ended.stderr);
    // ms-swift.
    let swift = [
        "--tuner_type",
        "lora",
        "--lora_rank",
        "4",
        "--target_modules",
        "all-linear",
        "--use_rslora",
        "true",
    ];
    let (_, swift) =
        run("swift", &[&swift[..], &["--lora_dropout", "0.1", "--init_weights", "gaussian"]].concat());
    assert_eq!((&swift["lora"]["rslora"], &swift["lora"]["dropout"]), (&true.into(), &"0.1".into()));
    assert_eq!(swift["lora"]["target_modules"], "all-linear");
    // A regular expression, as PEFT takes one.
    let pattern = r"model\.layers\.1\.self_attn\.(q|v)_proj";
    let (_, one) = run("pattern", &["--train_type", "lora", "--target_modules", pattern, "--lora_rank", "4"]);
    assert_eq!(one["model"]["parameters"].as_array().unwrap().len(), 4);
    // With look-around, and as a list of Python's.
    for (name, targets, matrices) in [
        ("ahead", r"model\.layers\.(?!0\.)\d+\.self_attn\.(q|v)_proj", 4),
        ("behind", r".*(?<!up)(?<!gate)(?<!down)_proj", 16),
        ("list", "['q_proj','v_proj']", 8),
    ] {
        let (_, manifest) =
            run(name, &["--train_type", "lora", "--target_modules", targets, "--lora_rank", "4"]);
        assert_eq!(manifest["model"]["parameters"].as_array().unwrap().len(), matrices, "{name}");
    }
    // LLaMA-Factory and axolotl, in run files.
    for (name, lines) in [
        ("factory", "finetuning_type: lora\nlora_rank: 4\nlora_target: all\nlora_alpha: 16\n"),
        (
            "axolotl",
            "adapter: lora\nlora_r: 4\nlora_alpha: 16\nlora_target_linear: true\nlora_fan_in_fan_out: false\n",
        ),
    ] {
        let file = folder.path().join(format!("{name}.yaml"));
        fs::write(&file, lines).unwrap();
        let (_, manifest) = run(name, &["--config", text(&file)]);
        let entry = &manifest["lora"];
        assert_eq!((&entry["rank"], &entry["alpha"]), (&4.into(), &"16".into()), "{name}");
        assert_eq!(entry["target_modules"], "all-linear", "{name}");
    }
    // Flags of LoRA beside full training: noted where that was said, refused where it was not.
    let (ended, full) = run("full", &["--train-type", "full", "--lora-rank", "4"]);
    assert!(ended.stderr.contains("--lora-rank has no effect with --train-type full"), "{}", ended.stderr);
    assert_eq!(full["lora"], Value::Null);
    let ended = train(BASE, &folder.path().join("unsaid"), &["--lora-rank", "4"]);
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    assert!(ended.stderr.contains("--lora-rank asks for LoRA"), "{}", ended.stderr);
}
