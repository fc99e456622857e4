//! metrics.jsonl: keys, digits, and recovery after a kill.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::Value;
use zeroth_kernel::LOSSES;
use zeroth_train::{EvalMetrics, MetricsError, MetricsFile, RouterLoad, StepMetrics, read_losses};

fn line(step: u64) -> StepMetrics {
    StepMetrics {
        step,
        loss: 2.25,
        loss_parts: [None; LOSSES],
        router: None,
        grad_norm: 0.1,
        lr: 1e-5,
        tokens: 300,
        step_ms: 1500.0,
        loss_scale: 1.0,
        skipped: false,
        device_bytes_peak: 1 << 33,
        host_bytes_peak: 4096,
        samples_seen: 8 * step,
    }
}

fn evaluation(step: u64) -> EvalMetrics {
    EvalMetrics {
        step,
        eval_loss: 2.0,
        loss_parts: [None; LOSSES],
        eval_perplexity: 2_f64.exp(),
        eval_tokens: 50,
        samples_seen: 8 * step,
    }
}

/// A folder with a metrics.jsonl of steps 1 to 5 and an evaluation after the third.
fn written() -> (tempfile::TempDir, PathBuf, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("metrics.jsonl");
    let mut file = MetricsFile::create(&path).unwrap();
    for step in 1..=5 {
        file.step(&line(step), None);
        if step == 3 {
            file.evaluation(&evaluation(3));
        }
    }
    file.sync();
    let lines = text(&path).lines().map(str::to_owned).collect();
    (folder, path, lines)
}

fn text(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

fn joined(lines: &[String]) -> String {
    lines.join("\n") + "\n"
}

#[test]
fn metrics_keys_are_ordered() {
    let (_folder, _, lines) = written();
    assert_eq!(
        lines[0],
        "{\"step\":1,\"loss\":2.25,\"grad_norm\":0.1,\"lr\":0.00001,\"tokens\":300,\"tokens_per_second\":200.0,\
         \"step_ms\":1500.0,\"loss_scale\":1.0,\"skipped\":false,\"device_bytes_peak\":8589934592,\
         \"host_bytes_peak\":4096,\"samples_seen\":8}"
    );
    assert_eq!(
        lines[3],
        "{\"step\":3,\"eval_loss\":2.0,\"eval_perplexity\":7.38905609893065,\"eval_tokens\":50,\"samples_seen\":24}"
    );
}

#[test]
fn non_finite_numbers_are_null() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("metrics.jsonl");
    let mut file = MetricsFile::create(&path).unwrap();
    file.step(&StepMetrics { loss: f64::NAN, grad_norm: f64::INFINITY, skipped: true, ..line(1) }, None);
    let value: Value = serde_json::from_str(&text(&path)).unwrap();
    assert_eq!(
        (&value["loss"], &value["grad_norm"], &value["skipped"]),
        (&Value::Null, &Value::Null, &true.into())
    );
    file.step(&line(2), None);
    assert_eq!(read_losses(&path).unwrap(), [(2, 2.25)]);
    assert!(!text(&path).contains("mfu"), "absent where the devices' peak is unknown");
    file.step(&line(3), Some(0.25));
    let last: Value = serde_json::from_str(text(&path).lines().last().unwrap()).unwrap();
    assert_eq!((&last["step"], &last["mfu"]), (&3.into(), &0.25.into()));
}

#[test]
fn resuming_removes_later_steps() {
    let (_folder, path, lines) = written();
    let mut file = MetricsFile::resume(&path, 3).unwrap();
    assert_eq!(text(&path), joined(&lines[..4]));
    file.step(&line(4), None);
    assert_eq!(text(&path), joined(&lines[..5]));
}

#[test]
fn torn_lines_are_removed() {
    let (_folder, path, lines) = written();
    for torn in 1..lines[5].len() {
        std::fs::write(&path, joined(&lines[..5]) + &lines[5][..torn]).unwrap();
        MetricsFile::resume(&path, 5).unwrap();
        assert_eq!(text(&path), joined(&lines[..5]), "torn after {torn} bytes");
    }
}

#[test]
fn a_line_without_newline_is_completed() {
    let (_folder, path, lines) = written();
    std::fs::write(&path, lines.join("\n")).unwrap();
    let mut file = MetricsFile::resume(&path, 5).unwrap();
    file.step(&line(6), None);
    assert!(text(&path).starts_with(&joined(&lines)));
    assert_eq!(read_losses(&path).unwrap().len(), 6);
}

#[test]
fn later_lines_are_removed_in_any_order() {
    let (_folder, path, lines) = written();
    std::fs::write(&path, joined(&[lines[0].clone(), lines[5].clone(), lines[1].clone()])).unwrap();
    MetricsFile::resume(&path, 2).unwrap();
    assert_eq!(text(&path), joined(&lines[..2]));
}

#[test]
fn foreign_lines_are_reported() {
    let (_folder, path, lines) = written();
    let broken = joined(&[lines[0].clone(), "{\"step".to_owned(), lines[1].clone()]);
    std::fs::write(&path, &broken).unwrap();
    let error = MetricsFile::resume(&path, 2).unwrap_err();
    assert!(matches!(error, MetricsError::Foreign { line: 2, .. }), "{error}");
    assert_eq!(text(&path), broken);
    MetricsFile::resume(&path, 1).unwrap();
    assert_eq!(text(&path), joined(&lines[..1]));
}

#[test]
fn resuming_creates_a_missing_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("metrics.jsonl");
    MetricsFile::resume(&path, 7).unwrap().step(&line(8), None);
    assert_eq!(read_losses(&path).unwrap(), [(8, 2.25)]);
    let error = MetricsFile::create(&folder.path().join("absent/metrics.jsonl")).unwrap_err();
    assert!(error.to_string().starts_with("cannot create "), "{error}");
}

proptest! {
    #[test]
    fn numbers_read_back_equal(loss in any::<f64>(), small in any::<f32>(), tokens in any::<u64>(), step_ms in 1e-3_f64..1e9) {
        let line = StepMetrics { loss, grad_norm: f64::from(small), tokens, step_ms, ..line(1) };
        let text = serde_json::to_string(&line).unwrap();
        // Parsed with the standard library, which is exact; serde_json may be one unit off.
        let same = |key: &str, number: f64| {
            let digits = text.split_once(&format!("\"{key}\":")).unwrap().1.split(',').next().unwrap();
            if number.is_finite() { digits.parse() == Ok(number) } else { digits == "null" }
        };
        prop_assert!(same("loss", loss) && same("grad_norm", f64::from(small)) && same("step_ms", step_ms), "{}", text);
        prop_assert!(same("tokens_per_second", tokens as f64 / (step_ms / 1000.0)), "{}", text);
        let counted = format!("\"tokens\":{tokens},");
        prop_assert!(text.contains(&counted), "{}", text);
    }
}

#[test]
fn a_loss_of_several_parts_has_a_key_for_each() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("metrics.jsonl");
    let mut file = MetricsFile::create(&path).unwrap();
    let mut loss_parts = [None; LOSSES];
    (loss_parts[0], loss_parts[1]) = (Some(("ce_loss", 2.0)), Some(("aux_loss", 0.25)));
    file.step(&line(1), None);
    file.step(&StepMetrics { loss_parts, ..line(2) }, None);
    let router = Some(RouterLoad { busiest: 0.5, idlest: 0.0, entropy: 0.75 });
    file.step(&StepMetrics { router, ..line(3) }, None);
    let lines: Vec<String> = text(&path).lines().map(str::to_owned).collect();
    let expected = "\"loss\":2.25,\"ce_loss\":2.0,\"aux_loss\":0.25,\"grad_norm\"";
    assert!(lines[1].contains(expected), "{}", lines[1]);
    assert!(lines[0].contains("\"loss\":2.25,\"grad_norm\""), "{}", lines[0]);
    let expected = "\"router_busiest\":0.5,\"router_idlest\":0.0,\"router_entropy\":0.75,\"grad_norm\"";
    assert!(lines[2].contains(expected), "{}", lines[2]);
}
