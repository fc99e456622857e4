//! Invalid input is refused before anything is written: exit code 2, or 3 if memory does not suffice.

use std::fs;
use std::path::Path;

use super::{golden, text, train, train_on, written};
use crate::common::Ended;

/// Asserts that a refused run leaves no folder.
fn assert_refused(ended: &Ended, output: &Path, code: i32, words: &[&str]) {
    assert_eq!(ended.code, code, "{}", ended.stderr);
    for word in words {
        assert!(ended.stderr.contains(word), "{word:?} is not in: {}", ended.stderr);
    }
    assert!(!output.exists(), "a refused run wrote something");
}

#[test]
fn a_dry_run_shows_the_first_batch_and_writes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    let flags = ["--dry-run", "--ranks", "2", "--per-device-train-batch-size", "2"];
    let ended = train("qwen3-tied", &output, &flags);
    ended.assert_done();
    assert!(!output.exists());
    // Row 1 has labels for its last two tokens, row 2 for its last one.
    assert!(ended.stdout.contains("\n  50 48 39 11 [57] [24]\n"), "{}", ended.stdout);
    assert!(ended.stdout.contains("\n  38 52 24 34 "), "{}", ended.stdout);
    assert!(ended.stdout.contains(" 32 14 [12]\n"), "{}", ended.stdout);
    let order = ["qwen3 with 12.9K parameters", "zero_optimization.stage", "memory per rank", "planned for"];
    let places = order.map(|words| ended.stderr.find(words).unwrap_or_else(|| panic!("{words}")));
    assert!(places.is_sorted(), "{places:?}");
}

#[test]
fn dump_program_prints_the_program_and_trains_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (output, file) = (folder.path().join("run"), folder.path().join("program.txt"));
    let flags = ["--ranks", "2", "--deepspeed", "zero3", "--dump-program"];
    let ended = train("qwen3-tied", &output, &flags);
    ended.assert_done();
    assert!(!output.exists());
    assert!(ended.stdout.starts_with("program: stage 3, ranks 2"), "{}", ended.stdout);
    assert!(ended.stdout.contains("\nsection update:\n  %0 = "), "{}", ended.stdout);
    let written = train("qwen3-tied", &output, &[&flags[..], &[text(&file)]].concat());
    written.assert_done();
    assert_eq!(fs::read_to_string(&file).unwrap(), ended.stdout);
}

#[test]
fn missing_models_and_data_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    let data = golden("qwen3-tied").join("data.jsonl");
    let ended = train_on(Path::new("no-such-model"), &data, &output, &[]);
    assert_refused(&ended, &output, 2, &["there is no folder `no-such-model`"]);
    let ended = train_on(&golden("qwen3-tied"), Path::new("no-such-rows.jsonl"), &output, &[]);
    assert_refused(&ended, &output, 2, &["data file no-such-rows.jsonl does not exist"]);
}

#[test]
fn invalid_rows_are_reported_with_file_and_line() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    for (rows, words) in [
        (
            vec![r#"{"input_ids": [1, 2]}"#, r#"{"input_ids": [3, 99999]}"#],
            vec!["rows.jsonl: line 2: ", "input_ids[1] is 99999", "67 tokens"],
        ),
        (
            vec![r#"{"input_ids": [1, 2], "labels": [1, 70]}"#],
            vec!["rows.jsonl: line 1: ", "labels[1] is 70"],
        ),
        (
            vec![r#"{"messages": [{"role": "user", "content": "x"}]}"#],
            vec!["rows.jsonl: line 1: ", r#"{"messages": [...]}"#, "has no tokenizer.json"],
        ),
        (
            vec![r#"{"input_ids": [1, 2]}"#, "", r#"{"input_ids": [3, 4"#],
            vec!["rows.jsonl: line 3: ", "not JSON", "column 19"],
        ),
        (
            vec![r#"{"problem": "x", "solution": "y"}"#],
            vec!["rows.jsonl: line 1: ", "no row format has these columns", "problem", "--columns"],
        ),
        (vec!["[1, 2]"], vec!["rows.jsonl: line 1: ", "a JSON object"]),
        (vec![], vec!["rows.jsonl has no rows"]),
    ] {
        let data = written(folder.path(), "rows.jsonl", &rows);
        let ended = train_on(&golden("qwen3-tied"), &data, &output, &["--ranks", "2"]);
        assert_refused(&ended, &output, 2, &words);
    }
}

#[test]
fn unsupported_features_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    for (config, words) in [
        (
            r#"{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "disk"},
                "offload_optimizer": {"device": "nvme", "nvme_path": "disk"}}}"#,
            &["not yet built", "offload_param.device", "offload_optimizer.device", "write \"cpu\""][..],
        ),
        (r#"{"optimizer": {"params": {"amsgrad": true}}}"#, &["not yet built", "optimizer.params.amsgrad"]),
        (r#"{"optimizer": {"type": "Lamb"}}"#, &["not yet built", "optimizer.type", "AdamW"]),
        (r#"{"zeroth": {"collectives": "fast"}}"#, &["not yet built", "zeroth.collectives", "exact"]),
    ] {
        let config = written(folder.path(), "ds.json", &[config]);
        let ended = train("qwen3-tied", &output, &["--deepspeed", text(&config)]);
        assert_refused(&ended, &output, 2, words);
    }
    for (flags, words) in [
        (&["--report-to", "tensorbaord"][..], &["--report-to tensorbaord", "did you mean `tensorboard`"][..]),
        (&["--columns", "quesiton=problem"], &["--columns", "did you mean `question`"]),
    ] {
        assert_refused(&train("qwen3-tied", &output, flags), &output, 2, words);
    }
}

#[test]
fn contradicting_flags_are_reported_together() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    let config = r#"{"train_batch_size": 8, "gradient_clipping": 0.5, "zero_optimization": {"stage": 3}}"#;
    let config = written(folder.path(), "ds.json", &[config]);
    let flags = [
        ["--deepspeed", text(&config)],
        ["--per-device-train-batch-size", "3"],
        ["--gradient-accumulation-steps", "1"],
        ["--max-grad-norm", "2"],
    ];
    let ended = train("qwen3-tied", &output, &flags.concat());
    let words = ["train_batch_size=8", "=3", "gradient_clipping=0.5", "=2", "--max-grad-norm"];
    assert_refused(&ended, &output, 2, &words);
}

#[test]
fn a_misfit_reports_needed_and_given_memory() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    for (flags, words) in [
        (
            &["--device-memory", "100kB"][..],
            &["a rank needs at least 1.", " MB of device memory and 100 kB are given", "are missing"][..],
        ),
        // Three ranks share it.
        (
            &["--host-memory", "300kB", "--ranks", "3"],
            &[
                "a rank needs at least",
                " MB of memory, ",
                "for the process itself, and 100 kB are given",
                "are missing",
            ],
        ),
    ] {
        assert_refused(&train("qwen3-tied", &output, flags), &output, 3, words);
    }
}

#[test]
fn a_model_folder_is_refused_as_output() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("model");
    fs::create_dir(&output).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(golden("qwen3-tied").join(name), output.join(name)).unwrap();
    }
    let ended = train("qwen3-tied", &output, &["--overwrite-output-dir", "--max-steps", "1"]);
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    assert!(ended.stderr.contains("it is not a run folder"), "{}", ended.stderr);
    let same = |name: &str| {
        fs::read(output.join(name)).unwrap() == fs::read(golden("qwen3-tied").join(name)).unwrap()
    };
    assert!(same("config.json") && same("model.safetensors"));
}
