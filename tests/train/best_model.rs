//! The best model, early stopping, and checkpoints with weights only.

use std::fs;
use std::path::{Path, PathBuf};

use super::strategies::{evaluated, saved};
use super::{json, metrics, new_data, new_model, number, text, train_on, written};
use crate::common::{Ended, zeroth, zeroth_json};

/// A model that soon overfits 4 rows, so that the loss on others falls first and rises later.
struct Fixture(tempfile::TempDir);

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        new_model(folder.path(), 32, 1, 64, 40);
        let rows = fs::read_to_string(new_data(folder.path(), 8, 12, 40)).unwrap();
        let rows: Vec<&str> = rows.lines().collect();
        written(folder.path(), "train.jsonl", &rows[..4]);
        written(folder.path(), "held-out.jsonl", &rows[4..]);
        Self(folder)
    }

    fn train(&self, name: &str, more: &[&str]) -> Ended {
        let folder = self.0.path();
        let held_out = folder.join("held-out.jsonl");
        let flags = [
            ["--eval-data", text(&held_out)],
            ["--max-steps", "8"],
            ["--learning-rate", "1e-2"],
            ["--lr-scheduler-type", "constant"],
            ["--weight-decay", "0"],
            ["--fp32", "true"],
            ["--per-device-train-batch-size", "2"],
        ];
        train_on(
            &folder.join("new-model"),
            &folder.join("train.jsonl"),
            &folder.join(name),
            &[&flags.concat(), more].concat(),
        )
    }

    fn run(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The weights that `checkpoint export` writes for a step.
    fn exported(&self, run: &str, step: u64) -> Vec<u8> {
        let to = self.run(&format!("{run}-exported-{step}"));
        if !to.exists() {
            let from = self.run(run).join(format!("checkpoints/step-{step}"));
            let ended =
                zeroth(&["checkpoint", "export", text(&from), "--output", text(&to), "--dtype", "fp32"]);
            ended.assert_done();
        }
        weights(&to)
    }
}

fn weights(model: &Path) -> Vec<u8> {
    fs::read(model.join("model.safetensors")).unwrap()
}

/// Steps and losses of a run's evaluations.
fn losses(run: &Path) -> Vec<(u64, f64)> {
    let lines = metrics(run).into_iter().filter(|line| line.get("eval_loss").is_some());
    lines.map(|line| (line["step"].as_u64().unwrap(), number(&line["eval_loss"]))).collect()
}

/// The step with the lowest loss, or with the highest.
fn best(losses: &[(u64, f64)], greatest: bool) -> u64 {
    let sign = if greatest { -1.0 } else { 1.0 };
    losses.iter().min_by(|one, other| (sign * one.1).total_cmp(&(sign * other.1))).unwrap().0
}

const EVERY: [&str; 4] = ["--eval_steps", "1", "--save_steps", "1"];

#[test]
fn the_model_is_that_of_the_best_checkpoint() {
    let fixture = Fixture::new();
    let flags = [&EVERY[..], &["--load_best_model_at_end"]].concat();
    let ended = fixture.train("best", &flags);
    ended.assert_done();
    let run = fixture.run("best");
    let found = losses(&run);
    let step = best(&found, false);
    assert!(step > 1 && step < 8, "the fixture has a best step in the middle: {found:?}");
    assert_eq!(weights(&run.join("model")), fixture.exported("best", step));
    assert_ne!(weights(&run.join("model")), fixture.exported("best", 8));
    assert_eq!(json(&run.join("model/export.json"))["step"], step);
    let said = format!("the model is that of step {step}, the best checkpoint by eval_loss");
    assert!(ended.stderr.contains(&said), "{}", ended.stderr);
    // Complete: nothing is changed.
    let again = fixture.train("best", &[&flags[..], &["--resume", "auto"]].concat());
    again.assert_done();
    assert!(again.stderr.contains("already complete (8 steps)"), "{}", again.stderr);
    // Without the flag it is the last.
    fixture.train("last", &EVERY).assert_done();
    assert_eq!(weights(&fixture.run("last/model")), fixture.exported("best", 8));
    // A larger metric is better: the worst step. Perplexity orders as the loss does.
    let worst = ["--metric_for_best_model", "perplexity", "--greater_is_better", "true"];
    let ended = fixture.train("worst", &[&flags[..], &worst].concat());
    ended.assert_done();
    let step = best(&found, true);
    assert_eq!(weights(&fixture.run("worst/model")), fixture.exported("best", step));
    assert!(ended.stderr.contains("by eval_perplexity"), "{}", ended.stderr);
    // Only evaluations that were saved can be exported: those of every third step.
    let apart = ["--eval_steps", "1", "--save_steps", "3", "--load_best_model_at_end"];
    fixture.train("apart", &apart).assert_done();
    let kept: Vec<_> = found.iter().copied().filter(|(step, _)| [3, 6, 8].contains(step)).collect();
    assert_eq!(json(&fixture.run("apart/model/export.json"))["step"], best(&kept, false));
}

#[test]
fn the_best_checkpoint_survives_the_limit_ranks_and_resuming() {
    let fixture = Fixture::new();
    let flags = [&EVERY[..], &["--load_best_model_at_end", "--save_total_limit", "1"]].concat();
    let ranks = ["--ranks", "2", "--per-device-train-batch-size", "1"];
    fixture.train("whole", &[&flags[..], &ranks].concat()).assert_done();
    let found = losses(&fixture.run("whole"));
    let step = best(&found, false);
    assert!(step > 1 && step < 7, "{found:?}");
    assert_eq!(saved(&fixture.run("whole")), [step, 8], "the best and the newest");
    assert_eq!(weights(&fixture.run("whole/model")), fixture.exported("whole", step));
    // Stopped after the best step and resumed: the best is remembered.
    let shorter = ["--max-steps", "7"];
    fixture.train("parts", &[&flags[..], &shorter].concat()).assert_done();
    assert_eq!(saved(&fixture.run("parts")), [step, 7]);
    let resumed = fixture.train("parts", &[&flags[..], &["--resume", "auto"]].concat());
    resumed.assert_done();
    assert_eq!(saved(&fixture.run("parts")), [step, 8], "{}", resumed.stderr);
    assert_eq!(weights(&fixture.run("parts/model")), fixture.exported("parts", step));
    // Into another folder: the best checkpoint stays where it is.
    let from = fixture.run("parts/checkpoints/step-8");
    let moved = [&flags[..], &["--resume", text(&from), "--max-steps", "9"]].concat();
    fixture.train("moved", &moved).assert_done();
    assert_eq!(saved(&fixture.run("moved")), [9]);
    assert_eq!(weights(&fixture.run("moved/model")), weights(&fixture.run("parts/model")));
    // If the best is gone, the next best is taken.
    fs::remove_dir_all(fixture.run(&format!("parts/checkpoints/step-{step}"))).unwrap();
    let longer = [&flags[..], &["--resume", "auto", "--max-steps", "9"]].concat();
    let kept = weights(&fixture.run("parts/model"));
    let again = fixture.train("parts", &[&flags[..], &["--resume", "auto"]].concat());
    assert!(again.code == 0 && again.stderr.contains("already complete"), "{}", again.stderr);
    assert_eq!(weights(&fixture.run("parts/model")), kept, "all that is left of the best step");
    let ended = fixture.train("parts", &longer);
    ended.assert_done();
    assert!(ended.stderr.contains("no longer exists"), "{}", ended.stderr);
    assert_eq!(weights(&fixture.run("parts/model")), fixture.exported("parts", 9));
}

#[test]
fn early_stopping_ends_a_run_that_no_longer_improves() {
    let fixture = Fixture::new();
    fixture.train("free", &EVERY).assert_done();
    let found = losses(&fixture.run("free"));
    let step = best(&found, false);
    let patience = ["--early_stopping_patience", "2"];
    for (name, more) in
        [("stopped", vec![]), ("ranks", vec!["--ranks", "2", "--per-device-train-batch-size", "1"])]
    {
        // Saves are rarer than evaluations: the last step is saved all the same.
        let flags = [&["--eval_steps", "1", "--save_steps", "100"], &patience[..], &more].concat();
        let ended = fixture.train(name, &flags);
        ended.assert_done();
        let run = fixture.run(name);
        let last = step + 2;
        assert!(last < 8, "{found:?}");
        assert_eq!(evaluated(&run), (1..=last).collect::<Vec<_>>(), "{}", ended.stderr);
        assert_eq!(saved(&run), [last]);
        let said =
            format!("stopped early at step {last}: eval_loss has not improved in 2 evaluations (best ");
        assert!(ended.stderr.contains(&said), "{}", ended.stderr);
        assert_eq!(json(&run.join("model/export.json"))["step"], last);
        if name == "stopped" {
            assert_eq!(weights(&run.join("model")), fixture.exported("free", last), "training is the same");
        }
        // Complete, although steps are left; without the flag it goes on.
        let again = fixture.train(name, &[&flags[..], &["--resume", "auto"]].concat());
        again.assert_done();
        assert!(again.stderr.contains(&format!("already complete ({last} steps)")), "{}", again.stderr);
        fs::remove_dir_all(run.join("model")).unwrap();
        fixture.train(name, &[&flags[..], &["--resume", "auto"]].concat()).assert_done();
        assert_eq!(json(&run.join("model/export.json"))["step"], last, "only the model was missing");
        assert_eq!(evaluated(&run).len() as u64, last);
    }
    let on = ["--eval_steps", "1", "--save_steps", "100", "--resume", "auto"];
    fixture.train("stopped", &on).assert_done();
    assert_eq!(evaluated(&fixture.run("stopped")).last(), Some(&8));
    // The count survives a resume: one evaluation without improvement before, one after.
    let one_more = (step + 1).to_string();
    let shorter = [&EVERY[..], &patience, &["--max-steps", &one_more]].concat();
    fixture.train("resumed", &shorter).assert_done();
    let flags = [&EVERY[..], &patience, &["--load_best_model_at_end", "--resume", "auto"]].concat();
    fixture.train("resumed", &flags).assert_done();
    assert_eq!(evaluated(&fixture.run("resumed")).last(), Some(&(step + 2)));
    assert_eq!(weights(&fixture.run("resumed/model")), fixture.exported("resumed", step));
    // No improvement exceeds the threshold: it ends after the first evaluation and two more.
    let strict = [&EVERY[..], &patience, &["--early_stopping_threshold", "100"]].concat();
    let ended = fixture.train("strict", &strict);
    ended.assert_done();
    assert_eq!(evaluated(&fixture.run("strict")), [1, 2, 3]);
    assert!(ended.stderr.contains("has not improved by more than 100 in 2 evaluations"), "{}", ended.stderr);
    // Without checkpoints the model says that the run is complete.
    let unsaved = ["--eval_steps", "1", "--save_strategy", "no", patience[0], patience[1]];
    fixture.train("unsaved", &unsaved).assert_done();
    assert_eq!(saved(&fixture.run("unsaved")), [0; 0]);
    let again = fixture.train("unsaved", &[&unsaved[..], &["--resume", "auto"]].concat());
    assert!(again.code == 0 && again.stderr.contains("already complete"), "{}", again.stderr);
}

#[test]
fn save_strategy_best_saves_improvements() {
    let fixture = Fixture::new();
    let flags = ["--eval_steps", "1", "--save_strategy", "best", "--load_best_model_at_end"];
    fixture.train("best", &flags).assert_done();
    let found = losses(&fixture.run("best"));
    let mut improved = Vec::new();
    for (step, loss) in &found {
        if improved.iter().all(|(_, before)| loss < before) {
            improved.push((*step, *loss));
        }
    }
    let steps: Vec<u64> = improved.iter().map(|(step, _)| *step).collect();
    assert!(steps.len() > 1 && steps.last() < Some(&8), "{found:?}");
    assert_eq!(saved(&fixture.run("best")), steps);
    let step = *steps.last().unwrap();
    assert_eq!(weights(&fixture.run("best/model")), fixture.exported("best", step));
    let again = fixture.train("best", &[&flags[..], &["--resume", "auto"]].concat());
    assert!(again.code == 0 && again.stderr.contains("already complete (8 steps)"), "{}", again.stderr);
}

#[test]
fn checkpoints_with_weights_only_are_exported_and_never_resumed() {
    let fixture = Fixture::new();
    let flags = ["--save_steps", "4", "--save_only_model"];
    fixture.train("whole", &["--save_steps", "4"]).assert_done();
    fixture.train("small", &flags).assert_done();
    assert_eq!(saved(&fixture.run("small")), [4, 8]);
    for step in [4, 8] {
        assert_eq!(fixture.exported("small", step), fixture.exported("whole", step));
    }
    let bytes = |run: &str| {
        let (code, found) =
            zeroth_json(&["checkpoint", "inspect", text(&fixture.run(run).join("checkpoints/step-8"))]);
        assert_eq!(code, 0);
        (found["bytes"].as_u64().unwrap(), found["states"].clone())
    };
    let ((whole, _), (small, states)) = (bytes("whole"), bytes("small"));
    assert!(small * 2 < whole, "{small} {whole}");
    assert_eq!(states, serde_json::json!(["weights"]));
    let from = fixture.run("small/checkpoints/step-4");
    let refused = fixture.train("other", &["--resume", text(&from)]);
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    let words = ["step-4 has weights only", "after step 4 of 8", "zeroth checkpoint export"];
    assert!(words.iter().all(|word| refused.stderr.contains(word)), "{}", refused.stderr);
    // Complete runs stay complete, and longer ones are refused.
    let resume = |more: &[&str]| fixture.train("small", &[&flags[..], &["--resume", "auto"], more].concat());
    let again = resume(&[]);
    assert!(again.code == 0 && again.stderr.contains("already complete"), "{}", again.stderr);
    let refused = resume(&["--max-steps", "9"]);
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    assert!(refused.stderr.contains("step-8 has weights only"), "{}", refused.stderr);
    // A checkpoint with optimizer state is preferred.
    fs::remove_dir_all(fixture.run("small/checkpoints/step-4")).unwrap();
    let copied = std::process::Command::new("cp")
        .arg("-r")
        .args([fixture.run("whole/checkpoints/step-4"), fixture.run("small/checkpoints/")])
        .status();
    assert!(copied.unwrap().success());
    let resumed = resume(&["--max-steps", "9"]);
    resumed.assert_done();
    assert!(resumed.stderr.contains("step-8 was skipped: it has weights only"), "{}", resumed.stderr);
    assert!(resumed.stderr.contains("after 4 of 9 steps"), "{}", resumed.stderr);
}
