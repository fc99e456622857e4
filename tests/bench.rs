//! `zeroth bench` on this machine: all figures exist and are consistent; none is compared with a fixed value.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::common::{Ended, zeroth, zeroth_json};

/// Checks that percentages match the figures.
fn check_lines(part: &str, lines: &Value) {
    let lines = lines.as_array().unwrap();
    assert!(!lines.is_empty(), "{part}");
    for line in lines {
        let figure = |of: &Value, name: &str| of[name].as_f64().unwrap_or_else(|| panic!("{part}: {line}"));
        let (best, median) = (figure(line, "best"), figure(line, "median"));
        assert!(best >= median && median > 0.0, "{part}: {line}");
        assert!(line["threads"].as_u64().unwrap() >= 1, "{part}: {line}");
        assert!(["GFLOP/s", "GB/s", "tokens/s"].contains(&line["unit"].as_str().unwrap()), "{part}: {line}");
        if line["limit"].is_null() {
            assert!(line["percent"].is_null(), "{part}: {line}");
            continue;
        }
        for (name, achieved) in [("best", best), ("median", median)] {
            let expected = 100.0 * achieved / figure(&line["limit"], name);
            assert!((figure(&line["percent"], name) / expected - 1.0).abs() < 1e-9, "{part}: {line}");
        }
        // A limit measured in this run with as many threads or ranks is a line of the same group. A step's limit runs
        // between its steps.
        let limit = &line["limit"]["name"];
        let is_limit = |other: &&Value| other["name"] == *limit && other["threads"] == line["threads"];
        assert!(part == "step" || lines.iter().any(|other| is_limit(&other)), "{part}: {line}");
    }
    assert!(lines.iter().any(|line| !line["limit"].is_null()), "{part} has a limit");
}

fn names(lines: &Value) -> Vec<&str> {
    lines.as_array().unwrap().iter().map(|line| line["name"].as_str().unwrap()).collect()
}

/// Runs a command with its profile in a folder, and parses its JSON.
fn zeroth_with(cache: &Path, arguments: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_zeroth"))
        .args(arguments)
        .args(["--format", "json"])
        .env("ZEROTH_CACHE", cache)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn quick_bench_has_every_kernel_and_optimizer_line() {
    let folder = tempfile::tempdir().unwrap();
    let asked = ["bench", "optimizer", "kernels", "--quick", "--rounds", "1", "--threads", "2"];
    let found = zeroth_with(folder.path(), &asked);
    assert_eq!((found["quick"].as_bool(), found["rounds"].as_u64()), (Some(true), Some(1)));
    assert!(!found["machine"]["processor"].as_str().unwrap().is_empty());
    let parts = found["parts"].as_object().unwrap();
    assert_eq!(parts.keys().collect::<Vec<_>>(), ["kernels", "optimizer"]);
    parts.iter().for_each(|(part, lines)| check_lines(part, lines));
    let kernels = names(&parts["kernels"]);
    for expected in [
        "bf16 forward 1024x1024x1024",
        "fp32 dw 1024x1024x1024",
        "bf16 attention backward 2x512, 8 heads, 4 kv",
        "bf16 head_loss with gradients 128x512x32000",
        "residual and rms_norm",
        "f32 in registers",
    ] {
        assert!(kernels.contains(&expected), "{expected} is missing: {kernels:?}");
    }
}

#[test]
fn profiles_are_saved_by_part_and_shown_by_doctor() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().to_str().unwrap();
    assert!(zeroth_with(folder.path(), &["doctor"])["profile"].is_null());
    let asked =
        ["bench", "collectives", "disk", "step", "--quick", "--rounds", "1", "--threads", "2", "--dir", dir];
    let found = zeroth_with(folder.path(), &asked);
    let parts = found["parts"].as_object().unwrap();
    parts.iter().for_each(|(part, lines)| check_lines(part, lines));
    assert!(names(&parts["collectives"]).contains(&"reduce-scatter, bf16 to f32, 16 MiB"));
    let step = &found["step"];
    assert_eq!(step["params"], 41_559_552);
    let shares = step["percent_of_time"].as_object().unwrap().values();
    let whole: f64 = shares.map(|share| share.as_f64().unwrap()).sum();
    assert!((whole - 100.0).abs() < 1e-6, "{step}");
    // The measured folder contains only the profile.
    let path = found["profile"].as_str().unwrap();
    assert!(path.starts_with(dir), "{path}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);

    let doctor = zeroth_with(folder.path(), &["doctor"]);
    assert_eq!(doctor["profile"]["path"], found["profile"]);
    for (part, lines) in parts {
        assert_eq!(doctor["profile"]["parts"][part]["lines"], *lines, "{part}");
        assert_eq!(doctor["profile"]["parts"][part]["quick"], true);
    }

    // Measuring one group again replaces only its own lines.
    let again = zeroth_with(folder.path(), &["bench", "disk", "--quick", "--rounds", "2", "--dir", dir]);
    let kept: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(kept["parts"]["disk"]["lines"], again["parts"]["disk"]);
    assert_eq!(kept["parts"]["step"]["lines"], parts["step"]);
}

#[test]
fn invalid_profiles_are_replaced_unless_no_save() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("profile.json");
    let (dir, file) = (folder.path().to_str().unwrap(), path.to_str().unwrap());
    let disk = ["bench", "disk", "--quick", "--rounds", "1", "--dir", dir, "--profile", file];
    std::fs::write(&path, "not a profile").unwrap();
    let (code, found) = zeroth_json(&[&disk[..], &["--no-save"]].concat());
    assert_eq!((code, &found["profile"]), (0, &Value::Null));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "not a profile");
    let ended = zeroth(&disk);
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert!(ended.stderr.contains("replaced") && ended.stderr.contains("profile.json"), "{}", ended.stderr);
    assert!(
        ended.stdout.contains("raw read") && ended.stdout.contains("saved as this machine's profile"),
        "{}",
        ended.stdout
    );
    let kept: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!(kept["version"], 1);
}

#[test]
fn invalid_bench_arguments_are_refused_up_front() {
    for (arguments, code, phrase) in [
        (vec!["bench", "gemm"], 2, "kernels"),
        (vec!["bench", "--rounds", "0"], 2, "0"),
        (vec!["bench", "--threads", "0"], 2, "0"),
        (vec!["bench", "step", "--stage", "4"], 2, "4"),
        (vec!["bench", "step", "--size", "7b"], 2, "0.6b"),
        (vec!["bench", "collectives", "--ranks", "1"], 2, "need at least 2 ranks"),
        (vec!["bench", "disk", "--dir", "no/such/folder"], 2, "no/such/folder"),
        (vec!["bench", "disk", "--dir", "README.md"], 2, "is not a folder"),
    ] {
        let ended: Ended = zeroth(&arguments);
        assert_eq!(ended.code, code, "{arguments:?}\n{}{}", ended.stdout, ended.stderr);
        assert!(ended.stderr.contains(phrase), "{arguments:?} should say `{phrase}`:\n{}", ended.stderr);
        assert!(ended.is_orderly(), "{}", ended.stderr);
    }
}
