//! The record of the best model over resumes: of other evaluation data, and without the flag that asks for it.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::strategies::saved;
use super::{json, new_data, new_model, text, train_on, written};
use crate::common::Ended;

const FIRST: &str = "held-out.jsonl";
const OTHER: &str = "other.jsonl";

struct Fixture(tempfile::TempDir);

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        new_model(folder.path(), 32, 1, 64, 40);
        let rows = fs::read_to_string(new_data(folder.path(), 12, 12, 40)).unwrap();
        let rows: Vec<&str> = rows.lines().collect();
        written(folder.path(), "train.jsonl", &rows[..4]);
        written(folder.path(), FIRST, &rows[4..8]);
        written(folder.path(), OTHER, &rows[8..]);
        Self(folder)
    }

    fn run(&self) -> PathBuf {
        self.0.path().join("run")
    }

    fn train(&self, evaluated: &str, steps: &str, more: &[&str]) -> Ended {
        let folder = self.0.path();
        let evaluated = folder.join(evaluated);
        let flags =
            ["--eval-data", text(&evaluated), "--max-steps", steps, "--eval-steps", "1", "--save-steps", "1"];
        let recipe =
            ["--learning-rate", "1e-2", "--lr-scheduler-type", "constant", "--weight-decay", "0", "--fp32"];
        let rows = ["--per-device-train-batch-size", "2", "--resume", "auto"];
        let more = [&flags[..], &recipe, &rows, more].concat();
        let ended = train_on(&folder.join("new-model"), &folder.join("train.jsonl"), &self.run(), &more);
        ended.assert_done();
        ended
    }

    /// The record of a checkpoint.
    fn record(&self, step: u64) -> Value {
        json(&self.run().join(format!("checkpoints/step-{step}/manifest.json")))["best"].clone()
    }
}

fn exported(run: &Path) -> Value {
    json(&run.join("model/export.json"))["step"].clone()
}

const BEST: [&str; 3] = ["--load-best-model-at-end", "--save-total-limit", "2"];

#[test]
fn other_evaluation_data_starts_a_new_record_with_a_note() {
    let fixture = Fixture::new();
    fixture.train(FIRST, "4", &BEST);
    let first = fixture.record(4);
    let ended = fixture.train(OTHER, "6", &BEST);
    let (step, metric) = (&first["evaluated"]["step"], "eval_loss");
    let said = format!(
        "the evaluation data is not that of the checkpoint: the best model is chosen anew (it was step {step}, {metric} "
    );
    assert_eq!(ended.stderr.matches(&said).count(), 1, "{}", ended.stderr);
    let second = fixture.record(6);
    assert_ne!(first["data"], second["data"]);
    for kind in ["evaluated", "saved"] {
        assert!(second[kind]["step"].as_u64().unwrap() > 4, "{second}");
    }
    assert_eq!(exported(&fixture.run()), second["saved"]["step"]);
    // The same data goes on, and a run that is complete is left alone whatever the data is.
    let ended = fixture.train(OTHER, "7", &BEST);
    assert!(!ended.stderr.contains("chosen anew"), "{}", ended.stderr);
    let step = exported(&fixture.run());
    let again = fixture.train(FIRST, "7", &BEST);
    assert!(again.stderr.contains("already complete"), "{}", again.stderr);
    assert_eq!(exported(&fixture.run()), step);
}

#[test]
fn a_resume_without_the_flag_does_not_forget_the_best() {
    let fixture = Fixture::new();
    fixture.train(FIRST, "8", &BEST);
    let before = fixture.record(8);
    let best = before["saved"]["step"].as_u64().unwrap();
    assert!(best < 8, "{before}");
    // Evaluations of the same data are compared, those of others are not.
    let limit = ["--save-total-limit", "2"];
    fixture.train(FIRST, "9", &limit);
    let after = fixture.record(9);
    assert_eq!(after["saved"], before["saved"]);
    assert!(fixture.record(9)["stale"].as_u64() > before["stale"].as_u64());
    let ended = fixture.train(OTHER, "10", &limit);
    assert!(!ended.stderr.contains("chosen anew"), "{}", ended.stderr);
    assert_eq!(fixture.record(10), after);
    assert_eq!(exported(&fixture.run()), 10);
    assert_eq!(saved(&fixture.run()), [best, 10]);
    let ended = fixture.train(FIRST, "11", &BEST);
    assert!(ended.stderr.contains(&format!("the model is that of step {best}")), "{}", ended.stderr);
    assert_eq!(exported(&fixture.run()), best);
}
