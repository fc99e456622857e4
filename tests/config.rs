//! `zeroth config`, end to end: check, resolve, new, tiers, presets, verify.

use crate::common::{model, root, zeroth, zeroth_in, zeroth_json};
use serde_json::{Value, json};

fn temporary(text: &[u8]) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds.json");
    std::fs::write(&path, text).unwrap();
    let name = path.to_str().unwrap().to_owned();
    (folder, name)
}

#[test]
fn check_reports_every_key() {
    let (_folder, file) = temporary(
        b"{\n  \"train_batch_size\": 16,\n  \"zero_optimization\": {\"stage\": 2, \"stage3_max_live_parameters\": 1e9,\n    \"contiguous_gradients\": true},\n  \"gradient_cliping\": 1.0\n}",
    );
    let (code, report) = zeroth_json(&["config", "check", &file]);
    assert_eq!(code, 4);
    assert_eq!(report["ok"], false);
    assert_eq!(report["file"], file);
    let of = |path: &str| {
        let keys = report["keys"].as_array().unwrap();
        keys.iter().find(|key| key["path"] == path).unwrap_or_else(|| panic!("{path} has no verdict")).clone()
    };
    assert_eq!(of("train_batch_size")["status"], "honoured");
    assert_eq!(of("zero_optimization.stage")["status"], "honoured");
    assert_eq!(of("zero_optimization.stage3_max_live_parameters")["status"], "no_effect");
    assert_eq!(of("zero_optimization.contiguous_gradients")["status"], "built_in");
    let typo = of("gradient_cliping");
    assert_eq!(
        (typo["status"].as_str(), typo["line"].as_u64(), typo["column"].as_u64()),
        (Some("unknown"), Some(5), Some(3))
    );
    assert!(typo["message"].as_str().unwrap().contains("gradient_clipping"), "{typo}");
    let text = zeroth(&["config", "check", &file]);
    assert!(text.stdout.contains(&format!("{file}: line 5, column 3")), "{}", text.stdout);
    assert!(text.stdout.contains("^^^^^^^^^^^^^^^^^^"), "{}", text.stdout);
}

#[test]
fn strict_makes_warnings_errors() {
    let (_folder, file) = temporary(b"{\"something_of_mine\": 1}");
    assert_eq!(zeroth(&["config", "check", &file]).code, 0);
    let strict = zeroth(&["config", "check", "--strict", &file]);
    assert_eq!(strict.code, 4);
    assert!(strict.stdout.contains("with --strict"), "{}", strict.stdout);
    assert_eq!(zeroth(&["config", "check", &file, "--strict", "False"]).code, 0);
}

#[test]
fn unparsable_configs_exit_with_4_and_a_position() {
    for (bytes, phrase) in [
        (&b"{\"a\": [1, 2"[..], "line 1, column 7"),
        (b"\xff\xfe", "UTF"),
        (b"{\"train_batch_size\": NaN}", "NaN"),
        (b"{\"train_batch_size\": 1e999}", "1e999"),
        (b"", "nothing in this config"),
        (b"[1]", "object"),
    ] {
        let (_folder, file) = temporary(bytes);
        let ended = zeroth(&["config", "check", &file]);
        assert_eq!(ended.code, 4, "{bytes:?}\n{}", ended.stderr);
        assert!(ended.stderr.contains(phrase), "{bytes:?} should say `{phrase}`:\n{}", ended.stderr);
        let (code, report) = zeroth_json(&["config", "check", &file]);
        assert_eq!((code, &report["ok"], &report["keys"]), (4, &json!(false), &json!([])));
    }
    let deep = format!("{}{}", "{\"a\":".repeat(100_000), "}".repeat(100_000));
    let (_folder, file) = temporary(deep.as_bytes());
    assert_eq!(zeroth(&["config", "check", &file]).code, 4);
}

#[test]
fn huge_configs_are_refused_unread() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("huge.json");
    // Sparse: it takes no disk space, but would take a gigabyte of memory if read.
    std::fs::File::create(&path).unwrap().set_len(1 << 30).unwrap();
    let ended = zeroth(&["config", "check", path.to_str().unwrap()]);
    assert_eq!(ended.code, 2);
    assert!(ended.stderr.contains("16 MiB"), "{}", ended.stderr);
}

#[test]
fn base64_and_json_text_are_configs_too() {
    // {"train_batch_size": 4}
    for argument in ["eyJ0cmFpbl9iYXRjaF9zaXplIjogNH0=", "{\"train_batch_size\": 4}"] {
        let (code, report) = zeroth_json(&["config", "check", argument]);
        assert_eq!((code, report["keys"][0]["value"].as_u64()), (0, Some(4)), "{argument}");
    }
}

#[test]
fn contradictions_are_reported_together() {
    let (_folder, file) = temporary(
        b"{\"train_batch_size\": 8, \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 1e-4}}, \"bf16\": {\"enabled\": true}}",
    );
    let ended = zeroth(&[
        "config",
        "resolve",
        &file,
        "--ranks",
        "8",
        "--per_device_train_batch_size",
        "16",
        "--gradient_accumulation_steps",
        "1",
        "--learning_rate",
        "5e-5",
        "--fp16",
        "True",
    ]);
    assert_eq!(ended.code, 2);
    for line in [
        "Please correct the following DeepSpeed config values that mismatch TrainingArguments values:",
        "- ds train_batch_size=8 vs hf train_batch_size (calculated)=128",
        "- ds optimizer.params.lr=0.0001 vs hf learning_rate=5e-05",
        "- ds bf16.enabled=True vs hf bf16|bf16_full_eval=False",
        "The easiest method is to set these DeepSpeed config values to 'auto'.",
    ] {
        assert!(ended.stderr.contains(line), "{line}\n{}", ended.stderr);
    }
}

#[test]
fn resolve_shows_value_and_origin() {
    let folder = model("Qwen3-8B");
    let (code, resolved) = zeroth_json(&[
        "config",
        "resolve",
        "zero3",
        "--model",
        &folder,
        "--ranks",
        "8",
        "--learning-rate",
        "2e-5",
        "--max-steps",
        "100",
    ]);
    assert_eq!(code, 0);
    let zero = &resolved["config"]["zero_optimization"];
    assert_eq!(zero["reduce_bucket_size"], 4096 * 4096);
    assert_eq!(zero["stage3_prefetch_bucket_size"], 15_099_494);
    assert_eq!(zero["stage3_param_persistence_threshold"], 40_960);
    assert_eq!(resolved["config"]["optimizer"]["params"]["lr"], 2e-5);
    let origin = |path: &str| {
        let origins = resolved["origins"].as_array().unwrap();
        origins.iter().find(|entry| entry["path"] == path).unwrap()["origin"].clone()
    };
    assert_eq!(origin("zero_optimization.stage"), "file");
    assert_eq!(origin("optimizer.params.lr"), "command line");
    assert_eq!(origin("zero_optimization.reduce_bucket_size"), "auto");
    assert_eq!(origin("zero_optimization.stage3_model_persistence_threshold"), "default");
}

#[test]
fn new_reproduces_the_generator_and_tiers_writes_three() {
    let folder = tempfile::tempdir().unwrap();
    let ended = zeroth_in(
        folder.path(),
        &["config", "new", "--micro-batch-size", "2", "--gradient-accumulation", "8"],
    );
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert!(ended.stdout.contains("DeepSpeed config saved to ds_zero3.json"), "{}", ended.stdout);
    let text = std::fs::read_to_string(folder.path().join("ds_zero3.json")).unwrap();
    let expected = json!({
        "train_batch_size": 16,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "none", "pin_memory": false},
            "overlap_comm": true,
            "contiguous_gradients": true,
        },
        "bf16": {"enabled": true},
        "gradient_accumulation_steps": 8,
        "steps_per_print": 50,
        "gradient_clipping": 1.0,
    });
    assert_eq!(text, format!("{expected:#}\n"));

    let ended = zeroth_in(folder.path(), &["config", "tiers", "--device-memory", "24GB"]);
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let read = |tier: &str| -> Value {
        let text = std::fs::read_to_string(folder.path().join(format!("ds_zero3_{tier}.json"))).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    assert_eq!(read("small")["train_batch_size"], 32);
    assert_eq!(read("small")["zero_optimization"]["offload_param"]["device"], "cpu");
    assert_eq!(read("medium")["train_batch_size"], 16);
    assert!(read("large").get("activation_checkpointing").is_some());
    assert!(
        ended.stdout.contains("small.json") && ended.stdout.contains("<- suits this memory"),
        "{}",
        ended.stdout
    );
}

#[test]
fn new_keeps_given_values_and_chooses_the_rest_by_memory() {
    let folder = tempfile::tempdir().unwrap();
    let written = |arguments: &[&str]| -> Value {
        let ended = zeroth_in(folder.path(), &[&["config", "new", "--overwrite"], arguments].concat());
        assert_eq!(ended.code, 0, "{}", ended.stderr);
        serde_json::from_str(&std::fs::read_to_string(folder.path().join("ds_zero3.json")).unwrap()).unwrap()
    };
    let small = written(&["--device-memory", "16GB", "--offload", "false"]);
    assert_eq!(small["gradient_accumulation_steps"], 32, "memory chose the accumulation");
    assert_eq!(small["zero_optimization"]["offload_param"]["device"], "none", "what was typed stays");
    let fine = written(&[
        "--micro-batch-size",
        "1",
        "--gradient-accumulation",
        "4",
        "--world-size",
        "8",
        "--fp16",
        "--stage3-prefetch-bucket-size",
        "auto",
        "--stage3-max-live-parameters",
        "1e9",
    ]);
    assert_eq!(fine["train_batch_size"], 32);
    assert_eq!(fine["fp16"], json!({"enabled": true, "loss_scale": 0, "initial_scale_power": 12}));
    assert_eq!(fine["zero_optimization"]["stage3_prefetch_bucket_size"], "auto");
    assert_eq!(fine["zero_optimization"]["stage3_max_live_parameters"], 1_000_000_000);
}

#[test]
fn presets_are_listed_shown_and_written() {
    let (_, list) = zeroth_json(&["config", "presets"]);
    assert_eq!(list["presets"].as_array().unwrap().len(), 6);
    let shown: Value = serde_json::from_str(&zeroth(&["config", "presets", "zero3_offload"]).stdout).unwrap();
    assert_eq!(shown["zero_optimization"]["offload_param"]["device"], "cpu");
    assert_eq!(shown["zero_optimization"]["overlap_comm"], true);
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(zeroth_in(folder.path(), &["config", "presets", "zero2", "-o", "mine.json"]).code, 0);
    assert!(folder.path().join("mine.json").is_file());
}

#[test]
fn verify_finds_a_batch_size_without_the_ranks() {
    let folder = tempfile::tempdir().unwrap();
    zeroth_in(folder.path(), &["config", "new", "--micro-batch-size", "1", "--gradient-accumulation", "16"]);
    let command = [
        "config",
        "verify",
        "ds_zero3.json",
        "--",
        "deepspeed",
        "--num_gpus=8",
        "train_hf.py",
        "--deepspeed",
        "ds_zero3.json",
        "--per_device_train_batch_size",
        "1",
        "--gradient_accumulation_steps",
        "16",
        "--bf16",
        "True",
    ];
    let ended = zeroth_in(folder.path(), &command);
    assert_eq!(ended.code, 4, "{}{}", ended.stdout, ended.stderr);
    assert!(ended.stdout.contains("128"), "{}", ended.stdout);
    zeroth_in(
        folder.path(),
        &[
            "config",
            "new",
            "--micro-batch-size",
            "1",
            "--gradient-accumulation",
            "16",
            "--world-size",
            "8",
            "--overwrite",
        ],
    );
    let ended = zeroth_in(folder.path(), &command);
    assert_eq!(ended.code, 0, "{}{}", ended.stdout, ended.stderr);
}

/// The file of the ZeRO-3 guide, comments included, and its command.
#[test]
fn verify_agrees_with_the_command_of_the_zero3_guide() {
    let file = "crates/zeroth-config/tests/configs/guide-zero3.json";
    let command = "deepspeed --num_gpus=1 translation/run_translation.py --deepspeed FILE --model_name_or_path t5-3b \
                   --per_device_train_batch_size 1 --output_dir output_dir --overwrite_output_dir --fp16 --do_train \
                   --max_train_samples 500 --num_train_epochs 1"
        .replace("FILE", file);
    let verify = |command: &str| {
        let words: Vec<&str> = command.split(' ').collect();
        zeroth(&[&["config", "verify", file, "--"], &words[..]].concat())
    };
    let ended = verify(&command);
    assert_eq!(ended.code, 0, "{}{}", ended.stdout, ended.stderr);
    assert!(ended.stdout.contains("batch 1 = 1 × 1 × 1 rank; fp16"), "{}", ended.stdout);
    // Its languages and lengths are no concern of the file.
    let more = " --source_lang en --target_lang ro --max_source_length 512 --predict_with_generate";
    let ended = verify(&(command.clone() + more));
    assert_eq!(ended.code, 0, "{}{}", ended.stdout, ended.stderr);
    let ended = verify(&command.replace(" --fp16", " --fp16 --bf16"));
    assert_eq!(ended.code, 4, "{}{}", ended.stdout, ended.stderr);
}

#[test]
fn schema_is_json_and_explain_covers_preset_keys() {
    let schema: Value = serde_json::from_str(&zeroth(&["config", "schema"]).stdout).unwrap();
    assert!(schema["properties"]["zero_optimization"].is_object());
    let preset = std::fs::read_to_string(root().join("crates/zeroth-config/presets/zero3.json")).unwrap();
    let preset: Value = serde_json::from_str(&preset).unwrap();
    for key in preset["zero_optimization"].as_object().unwrap().keys() {
        let ended = zeroth(&["config", "explain", &format!("zero_optimization.{key}")]);
        assert_eq!(ended.code, 0, "{key}");
        assert!(ended.stdout.contains("here"), "{}", ended.stdout);
    }
}

#[test]
fn explain_says_which_values_are_built() {
    for (key, here) in [
        ("zero_optimization.stage", "honoured"),
        ("stage3_prefetch_bucket_size", "honoured, where the other values let it"),
        ("zero_optimization.offload_param.device", "honoured for \"none\", \"cpu\", not yet for \"nvme\""),
        ("fp16.enabled", "honoured"),
        ("fp16.loss_scale", "honoured, where the other values let it"),
    ] {
        let (code, explained) = zeroth_json(&["config", "explain", key]);
        assert_eq!(code, 0, "{key}");
        let found = explained["keys"][0]["here"].as_str().unwrap();
        assert!(found.starts_with(here), "{key}: {found}");
    }
}

#[test]
fn files_are_replaced_on_request_only() {
    let folder = tempfile::tempdir().unwrap();
    let sizes = ["--device-memory", "24GB"];
    let names = ["ds_zero3_small.json", "ds_zero3_medium.json", "ds_zero3_large.json"];
    for (command, files) in [
        ([&["config", "new"][..], &sizes].concat(), &["ds_zero3.json"][..]),
        ([&["config", "new", "-o", "mine.json"][..], &sizes].concat(), &["mine.json"]),
        ([&["config", "tiers"][..], &sizes].concat(), &names),
        ([&["config", "tiers", "-o", "tiers"][..], &sizes].concat(), &["tiers/ds_zero3_large.json"]),
        (vec!["config", "presets", "zero2", "-o", "preset.json"], &["preset.json"]),
    ] {
        assert_eq!(zeroth_in(folder.path(), &command).code, 0);
        for file in files {
            std::fs::write(folder.path().join(file), "mine").unwrap();
        }
        let ended = zeroth_in(folder.path(), &command);
        assert_eq!(ended.code, 2, "{}", ended.stderr);
        for words in [files[0], "there already", "--overwrite"] {
            assert!(ended.stderr.contains(words), "{words}: {}", ended.stderr);
        }
        for file in files {
            assert_eq!(std::fs::read_to_string(folder.path().join(file)).unwrap(), "mine", "{file}");
        }
        let ended = zeroth_in(folder.path(), &[&command[..], &["--overwrite"]].concat());
        assert_eq!(ended.code, 0, "{}", ended.stderr);
        for file in files {
            assert_ne!(std::fs::read_to_string(folder.path().join(file)).unwrap(), "mine", "{file}");
        }
    }
}

#[test]
fn explain_lists_what_a_word_may_mean() {
    let explained = zeroth(&["config", "explain", "offload"]);
    assert_eq!(explained.code, 0, "{}", explained.stderr);
    let keys: Vec<&str> =
        explained.stdout.lines().filter(|line| !line.is_empty() && !line.starts_with(' ')).collect();
    assert_eq!(keys[..2], ["zero_optimization.offload_param", "zero_optimization.offload_optimizer"]);
    for (name, meant) in [
        (
            "offloading",
            "did you mean `zero_optimization.offload_param`, `zero_optimization.offload_optimizer`",
        ),
        ("prefetch", "`zero_optimization.stage3_prefetch_bucket_size`"),
        ("xyzzy", "`zeroth config schema` has all keys"),
    ] {
        let unknown = zeroth(&["config", "explain", name]);
        assert_eq!(unknown.code, 2, "{name}: {}", unknown.stdout);
        assert!(unknown.stderr.contains(meant), "{name}: {}", unknown.stderr);
    }
}
