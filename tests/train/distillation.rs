//! Knowledge distillation: golden runs of TRL, placements of the teacher, resuming, and refusals.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{golden, json, metrics, number, tensors, text, train_on};
use crate::common::{Ended, zeroth, zeroth_json};

pub(super) fn student() -> PathBuf {
    golden("kd/student")
}

pub(super) fn teacher() -> PathBuf {
    golden("kd/teacher")
}

pub(super) fn data() -> PathBuf {
    student().join("data.jsonl")
}

/// Trains the golden student on its own rows, in file order.
pub(super) fn distil(output: &Path, more: &[&str]) -> Ended {
    let flags = ["--fp32", "--max-length", "40", "--per-device-train-batch-size", "2"];
    train_on(&student(), &data(), output, &[&flags, more].concat())
}

/// What steps compute, without times and memory.
pub(super) fn computed(run: &Path) -> Vec<[Value; 6]> {
    let keys = ["step", "loss", "ce_loss", "kd_loss", "grad_norm", "lr"];
    metrics(run).iter().map(|line| keys.map(|key| line[key].clone())).collect()
}

/// A copy of a golden folder, to be changed.
pub(super) fn copied(from: &Path, to: &Path) -> PathBuf {
    fs::create_dir_all(to).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(from.join(name), to.join(name)).unwrap();
    }
    to.to_owned()
}

/// Changes a field of a model's config.json.
fn set(model: &Path, field: &str, value: impl Into<Value>) {
    let path = model.join("config.json");
    let mut config = json(&path);
    config[field] = value.into();
    fs::write(path, config.to_string()).unwrap();
}

/// A tokenizer with a token for each of the vocabulary's ids, one of which has another text.
fn tokenizer(model: &Path, odd: &str) {
    tokenizer_of(model, 52, odd);
}

/// A tokenizer with so many tokens, and one more.
fn tokenizer_of(model: &Path, tokens: u64, odd: &str) {
    let mut vocab: serde_json::Map<String, Value> =
        (0..tokens).map(|id| (format!("t{id}"), id.into())).collect();
    vocab.insert(odd.to_owned(), tokens.into());
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"},
    });
    fs::write(model.join("tokenizer.json"), tokenizer.to_string()).unwrap();
}

fn distils_like_trl(case: &str, preset: &str, [ranks, accumulation, micro_batch]: [u64; 3]) {
    let steps = json(&golden("kd").join(case).join("steps.json"));
    let (settings, run) = (&steps["distillation"], &steps["runs"][0]);
    assert_eq!(run["batch"], ranks * accumulation * micro_batch);
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    let numbers = [ranks, accumulation, micro_batch].map(|number| number.to_string());
    let settings = ["alpha", "temperature", "beta", "squared"].map(|key| settings[key].to_string());
    let teacher = teacher();
    let flags = [
        ["--teacher", text(&teacher)],
        ["--kd-alpha", &settings[0]],
        ["--kd-temperature", &settings[1]],
        ["--kd-beta", &settings[2]],
        ["--kd-squared", &settings[3]],
        ["--deepspeed", preset],
        ["--ranks", &numbers[0]],
        ["--gradient-accumulation-steps", &numbers[1]],
        ["--per-device-train-batch-size", &numbers[2]],
        ["--warmup-steps", "3"],
        ["--max-steps", "20"],
        ["--learning-rate", "1e-3"],
    ];
    distil(&output, &flags.concat()).assert_done();
    let lines = metrics(&output);
    assert_eq!(lines.len(), 20);
    for (line, at) in lines.iter().zip(0..) {
        let of = |key: &str| (number(&line[key]), number(&run[key][at]));
        for key in ["loss", "ce_loss", "kd_loss"] {
            let (found, expected) = of(key);
            assert!((found - expected).abs() < 1e-5, "{case}, step {at}: {key} {found} {expected}");
        }
        let (found, expected) = of("grad_norm");
        assert!((found - expected).abs() < 5e-4 * expected, "{case}, step {at}: norm {found} {expected}");
    }
}

#[test]
fn students_are_distilled_like_trl() {
    distils_like_trl("jsd-mixed", "zero3", [2, 1, 2]);
    distils_like_trl("forward-kl", "zero2", [1, 2, 2]);
    distils_like_trl("reverse-kl-mixed", "zero0", [1, 1, 4]);
}

#[test]
fn every_placement_of_the_teacher_gives_the_same_metrics() {
    let folder = tempfile::tempdir().unwrap();
    let (teacher, rows) = (teacher(), data());
    let run = |name: &str, more: &[&str]| {
        let output = folder.path().join(name);
        let flags = ["--deepspeed", "zero3", "--ranks", "2", "--max-steps", "3", "--teacher", text(&teacher)];
        let ended = distil(&output, &[&flags[..], more].concat());
        ended.assert_done();
        (computed(&output), json(&output.join("plan.json"))["teacher"].clone(), ended.stderr)
    };
    let evaluated = ["--eval-data", text(&rows), "--eval-steps", "3"];
    let (usual, sharded, said) = run("sharded", &[]);
    assert!(
        said.contains("distilled from") && said.contains(", sharded; loss 0.5 · KD · T² + 0.5 · CE"),
        "{said}"
    );
    assert!(said.contains(" (ce "), "progress lines have both parts: {said}");
    let (whole, on_all, _) = run("whole", &["--teacher-deepspeed", "zero0"]);
    let (offloaded, on_host, _) = run("offloaded", &["--teacher-deepspeed", "zero3_offload"]);
    let (with_eval, ..) = run("evaluated", &evaluated);
    assert_eq!(usual, whole);
    assert_eq!(usual, offloaded);
    // The last line is that of the evaluation, which knows no teacher.
    assert_eq!(usual[..], with_eval[..3]);
    assert_eq!(with_eval[3][3], Value::Null);
    let last = metrics(&folder.path().join("evaluated")).pop().unwrap();
    assert!(number(&last["eval_loss"]) > 0.0 && last.get("kd_loss").is_none(), "{last}");

    let bytes = |plan: &Value, tier: &str| plan[tier].as_u64().unwrap();
    assert!(bytes(&sharded, "device_bytes") < bytes(&on_all, "device_bytes"), "{sharded} {on_all}");
    assert!(bytes(&on_host, "device_bytes") < bytes(&sharded, "device_bytes"), "{on_host} {sharded}");
    assert!(bytes(&on_host, "host_bytes") > 0, "{on_host}");

    // 4-bit weights are another teacher, and the same wherever they are.
    let (nf4, in_4_bits, _) = run("nf4", &["--teacher-quantize", "nf4"]);
    let (nf4_on_host, ..) =
        run("nf4-offloaded", &["--teacher-quantize", "nf4", "--teacher-deepspeed", "zero3_offload"]);
    assert_eq!(nf4, nf4_on_host);
    assert_ne!(nf4[0][3], usual[0][3]);
    assert!(bytes(&in_4_bits, "device_bytes") < bytes(&sharded, "device_bytes"), "{in_4_bits} {sharded}");
}

#[test]
fn a_teacher_that_is_the_student_teaches_nothing_and_alpha_0_is_plain_training() {
    let folder = tempfile::tempdir().unwrap();
    let own = student();
    let run = |name: &str, more: &[&str]| {
        let output = folder.path().join(name);
        let ended = distil(&output, &[&["--max-steps", "2"], more].concat());
        ended.assert_done();
        (computed(&output), ended.stderr)
    };
    let (same, _) = run("same", &["--teacher", text(&own), "--kd-alpha", "1"]);
    assert!(number(&same[0][3]).abs() < 1e-6, "{same:?}");
    assert!(number(&same[0][4]) < 1e-4, "{same:?}");
    let (plain, _) = run("plain", &[]);
    // A teacher that is not there is not read.
    let (none, said) = run("none", &["--teacher", "/no/such/teacher", "--kd-alpha", "0"]);
    assert_eq!(plain, none);
    assert!(said.contains("--kd-alpha 0 is plain training: the teacher is not read"), "{said}");
    // Adapters are distilled, too.
    let (lora, _) = run("lora", &["--teacher", text(&teacher()), "--train-type", "lora", "--lora-rank", "2"]);
    assert!(number(&lora[1][3]) > 0.0 && lora[1][1] != lora[0][1], "{lora:?}");
}

#[test]
fn reports_have_both_parts_of_the_loss() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    let teacher = teacher();
    let flags = ["--teacher", text(&teacher), "--max-steps", "2", "--report-to", "csv,tensorboard"];
    distil(&output, &flags).assert_done();
    let table = fs::read_to_string(output.join("metrics.csv")).unwrap();
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines[0].ends_with(",eval_tokens,ce_loss,kd_loss"), "{table}");
    let line = metrics(&output).remove(0);
    let expected = format!(",{:?},{:?}", number(&line["ce_loss"]), number(&line["kd_loss"]));
    assert!(lines[1].ends_with(&expected), "{table}: {expected}");
    let events = fs::read_dir(output.join("tensorboard")).unwrap().next().unwrap().unwrap().path();
    let events = fs::read(events).unwrap();
    assert!(events.windows(13).any(|bytes| bytes == b"train/kd_loss"));
}

#[test]
fn a_resumed_run_has_the_bits_of_an_uninterrupted_one_and_no_teacher_is_saved() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, parts) = (folder.path().join("whole"), folder.path().join("parts"));
    let golden = teacher();
    let run = |output: &Path, more: &[&str]| {
        let flags = ["--max-steps", "6", "--save-steps", "3", "--lr-scheduler-type", "constant"];
        distil(output, &[&flags, more].concat())
    };
    let usual = ["--teacher", text(&golden)];
    run(&whole, &usual).assert_done();
    run(&parts, &[&usual[..], &["--max-steps", "3"]].concat()).assert_done();

    // Another teacher, or another loss: refused, and named.
    let other = copied(&golden, &folder.path().join("other"));
    let path = other.join("model.safetensors");
    let mut file = fs::read(&path).unwrap();
    let tensor = tensors(&file).into_iter().find(|tensor| tensor.shape.len() == 2).unwrap();
    file[tensor.bytes.end - 4] ^= 1;
    fs::write(&path, file).unwrap();
    let resume = ["--resume", "auto"];
    let refused: [(&[&str], &str); 6] = [
        (&["--teacher", text(&golden), "--kd-alpha", "0.3"], "--kd-alpha is 0.3, that of the checkpoint 0.5"),
        (
            &["--teacher", text(&golden), "--kd-temperature", "3"],
            "--kd-temperature is 3, that of the checkpoint 2",
        ),
        (&["--teacher", text(&golden), "--kd-beta", "1"], "--kd-beta is 1, that of the checkpoint 0"),
        (&["--teacher", text(&golden), "--teacher-quantize", "nf4"], "--teacher-quantize is nf4"),
        (&[], "this command has no distillation"),
        // The last element of a tensor: known once all of it is loaded.
        (&["--teacher", text(&other)], "has other weights"),
    ];
    for (flags, why) in refused {
        let ended = run(&parts, &[flags, &resume].concat());
        assert_eq!(ended.code, 2, "{flags:?}: {}", ended.stderr);
        assert!(ended.stderr.contains(why), "{flags:?}: {}", ended.stderr);
    }
    let plain = folder.path().join("plain");
    run(&plain, &["--max-steps", "3"]).assert_done();
    let ended = run(&plain, &[&usual[..], &resume].concat());
    assert!(
        ended.code == 2 && ended.stderr.contains("the checkpoint is of plain training"),
        "{}",
        ended.stderr
    );

    // Its placement may change.
    let placed = ["--teacher-deepspeed", r#"{"zero_optimization": {"stage": 3}, "gradient_clipping": 2.0}"#];
    let ended = run(&parts, &[&usual[..], &resume, &placed].concat());
    ended.assert_done();
    assert!(ended.stderr.contains("these have no effect: gradient_clipping"), "{}", ended.stderr);
    assert_eq!(computed(&whole), computed(&parts));
    let model = |run: &Path| fs::read(run.join("model/model.safetensors")).unwrap();
    assert_eq!(model(&whole), model(&parts));

    let step = parts.join("checkpoints/step-6");
    let names = |file: &Path| -> Vec<String> {
        tensors(&fs::read(file).unwrap()).into_iter().map(|tensor| tensor.name).collect()
    };
    let shard = names(&step.join("rank-00000-of-00001.safetensors"));
    assert!(!shard.is_empty() && shard.iter().all(|name| !name.contains("teacher")), "{shard:?}");
    let expected = names(&student().join("model.safetensors"));
    let mut exported = names(&parts.join("model/model.safetensors"));
    exported.sort();
    assert_eq!(exported, {
        let mut names = expected;
        names.sort();
        names
    });
    let entry = &json(&step.join("manifest.json"))["distillation"];
    assert_eq!((&entry["alpha"], &entry["squared"]), (&"0.5".into(), &true.into()));
    assert_eq!(entry["teacher"]["hash"].as_str().unwrap().len(), 16);
}

#[test]
fn unsuitable_teachers_and_settings_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let output = at("run");
    let golden = teacher();
    let refuse = |flags: &[&str], expected: &[&str]| {
        let ended = distil(&output, &[&["--max-steps", "1"], flags].concat());
        assert_eq!(ended.code, 2, "{flags:?}: {}", ended.stderr);
        for part in expected {
            assert!(ended.stderr.contains(part), "{flags:?}: {part}: {}", ended.stderr);
        }
        assert!(!output.exists());
    };
    let with = |more: &'static [&'static str]| [&["--teacher", text(&golden)], more].concat();
    for wrong in ["0", "-1", "nan", "inf"] {
        let flags = ["--teacher", text(&golden), "--kd-temperature", wrong];
        refuse(&flags, &["--kd-temperature", "above 0"]);
    }
    for (flag, wrong) in
        [("--kd-alpha", "1.1"), ("--kd-alpha", "-0.1"), ("--kd-alpha", "NaN"), ("--kd-beta", "2")]
    {
        refuse(&["--teacher", text(&golden), flag, wrong], &[flag, "from 0 to 1"]);
    }
    refuse(&with(&["--kd-hidden", "0.5"]), &["hidden states are not yet built"]);
    refuse(&with(&["--kd-attention", "0.5"]), &["attention maps are not yet built"]);
    refuse(
        &["--kd-alpha", "0.5", "--kd-squared", "--teacher-quantize", "nf4", "--kd-tail", "bucket"],
        &[
            "--kd-alpha, --kd-squared need --teacher DIR or --kd-cache DIR",
            "--teacher-quantize needs",
            "--kd-tail needs",
        ],
    );
    refuse(&with(&["--kd-tail", "bucket"]), &["--kd-tail needs --kd-cache DIR"]);
    refuse(&["--teacher", "/no/such/teacher"], &["--teacher", "/no/such/teacher"]);
    refuse(&with(&["--teacher-deepspeed", "zero9"]), &["--teacher-deepspeed", "zero9"]);
    let nvme =
        r#"{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}}"#;
    refuse(&["--teacher", text(&golden), "--teacher-deepspeed", nvme], &["not yet built"]);

    // No weights: refused, unless they may be drawn.
    let empty = at("empty");
    fs::create_dir_all(&empty).unwrap();
    fs::copy(golden.join("config.json"), empty.join("config.json")).unwrap();
    refuse(&["--teacher", text(&empty)], &["has no weights", "--random-weights"]);
    let drawn = ["--teacher", text(&empty), "--random-weights", "--max-steps", "1"];
    distil(&at("drawn"), &drawn).assert_done();

    // An encoder-decoder; too few positions; another vocabulary without tokenizers.
    let t5 = "crates/zeroth-model/tests/configs/t5-small";
    refuse(&["--teacher", t5], &["encoder-decoder", "decoder-only teacher"]);
    let short = copied(&golden, &at("short"));
    set(&short, "max_position_embeddings", 20);
    refuse(&["--teacher", text(&short)], &["20 positions", "--max-length 20"]);
    let longer = super::golden("kd/teacher-longer");
    refuse(&["--teacher", text(&longer)], &["vocabulary of 61 ids", "one of 53"]);

    // Other tokenizers, by content; padded vocabularies of one tokenizer are fine.
    let own = copied(&student(), &at("own"));
    tokenizer(&own, "t52");
    let other = copied(&golden, &at("other"));
    let refuse_own = |teacher: &Path, expected: &[&str]| {
        let flags = ["--teacher", text(teacher), "--fp32", "--max-length", "40", "--max-steps", "1"];
        let ended = train_on(&own, &data(), &output, &flags);
        assert_eq!(ended.code, 2, "{}", ended.stderr);
        assert!(expected.iter().all(|part| ended.stderr.contains(part)), "{expected:?}: {}", ended.stderr);
    };
    refuse_own(&other, &["has no tokenizer.json"]);
    tokenizer(&other, "odd");
    refuse_own(&other, &["another tokenizer", "\"t52\" is id 52 in one and no token in the other"]);
    // An embedding smaller than the tokenizer, and ready tokens beyond it.
    let small = copied(&super::golden("kd/teacher"), &at("small"));
    set(&small, "vocab_size", 50);
    tokenizer(&small, "t52");
    let words = ["an embedding of 50 ids", "fewer than the 53 of its tokenizer.json", text(&small)];
    refuse_own(&small, &words);
    set(&small, "vocab_size", 45);
    tokenizer_of(&own, 44, "t44");
    tokenizer_of(&small, 44, "t44");
    refuse_own(&small, &["of sample", "--teacher", text(&small), "an embedding of 45 ids"]);
    tokenizer(&own, "t52");
    let padded = copied(&longer, &at("padded"));
    tokenizer(&padded, "t52");
    let flags = ["--teacher", text(&padded), "--fp32", "--max-length", "40", "--max-steps", "1"];
    train_on(&own, &data(), &at("padded-run"), &flags).assert_done();
}

#[test]
fn a_teacher_in_the_output_folder_is_never_destroyed() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    distil(&run, &["--max-steps", "1"]).assert_done();
    // The model of an earlier run teaches the next one into the same folder.
    let model = run.join("model");
    let before = fs::read(model.join("model.safetensors")).unwrap();
    let flags = ["--teacher", text(&model), "--max-steps", "1", "--overwrite-output-dir"];
    let ended = distil(&run, &flags);
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    assert!(ended.stderr.contains("--teacher"), "{}", ended.stderr);
    assert_eq!(fs::read(model.join("model.safetensors")).unwrap(), before);
}

#[test]
fn plan_and_dry_run_know_the_teacher() {
    let (student, teacher) = (student(), teacher());
    let plan = |more: &[&str]| {
        let flags = [
            "plan",
            "--model",
            text(&student),
            "--ranks",
            "2",
            "--max-length",
            "40",
            "--fp32",
            "--device",
            "cpu",
            "--deepspeed",
            "zero3",
        ];
        let (code, plan) = zeroth_json(&[&flags[..], more].concat());
        assert_eq!(code, 0);
        plan["rows"][0]["device_bytes"]["parameters"].as_u64().unwrap()
    };
    let alone = plan(&[]);
    let sharded = plan(&["--teacher", text(&teacher)]);
    let whole = plan(&["--teacher", text(&teacher), "--teacher-deepspeed", "zero0"]);
    let nf4 = plan(&["--teacher", text(&teacher), "--teacher-quantize", "nf4"]);
    assert!(alone < nf4 && nf4 < sharded && sharded < whole, "{alone} {nf4} {sharded} {whole}");
    let flags = ["plan", "--params", "8B", "--teacher", text(&teacher)];
    assert_eq!(zeroth(&flags).code, 2);
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    let ended = distil(&output, &["--teacher", text(&teacher), "--max-steps", "1", "--dry-run"]);
    ended.assert_done();
    assert!(ended.stderr.contains("distilled from") && !output.exists(), "{}", ended.stderr);
}

/// The distillation guide's config as written: 2 ranks, 16 samples a step.
#[test]
fn the_guides_config_distils() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    let config = crate::common::root().join("crates/zeroth-config/tests/configs/guide-distillation.json");
    let teacher = teacher();
    let flags = [
        "--teacher",
        text(&teacher),
        "--deepspeed",
        text(&config),
        "--ranks",
        "2",
        "--max-steps",
        "2",
        "--max-length",
        "40",
    ];
    let ended = train_on(&student(), &data(), &output, &flags);
    ended.assert_done();
    assert!(ended.stderr.contains("sharded in host memory"), "{}", ended.stderr);
    assert_eq!(metrics(&output)[1]["samples_seen"], 32);
    let plan = json(&output.join("plan.json"));
    assert!(plan["teacher"]["host_bytes"].as_u64().unwrap() > 0, "{plan}");
}
