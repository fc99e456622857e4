//! Settings of a resumed run that differ from those of its checkpoint: all that decide what its steps do are listed, no others.

use std::path::Path;

use super::{text, train};
use crate::common::Ended;

const CHANGED: &str = "changed since the checkpoint: ";

/// The changes that a command lists.
fn changes(ended: &Ended) -> Vec<&str> {
    ended.assert_done();
    let lines = ended.stderr.lines().filter_map(|line| line.strip_prefix("note: ")?.strip_prefix(CHANGED));
    lines.collect()
}

/// Resumes from a checkpoint in a folder of its own.
fn resumed(folder: &Path, number: usize, from: &Path, flags: &[&str]) -> Ended {
    let output = folder.join(format!("resumed-{number}"));
    train("qwen3-tied", &output, &[flags, &["--resume", text(from)]].concat())
}

#[test]
fn what_changes_the_remaining_steps_is_listed_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let config = r#"{"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0, "steps_per_print": 10}"#;
    let shared = ["--train-type", "lora", "--max-steps", "6", "--save-steps", "3", "--learning-rate", "1e-3"];
    let shared = [&shared[..], &["--ranks", "2"]].concat();
    let usual = [&shared[..], &["--deepspeed", config]].concat();
    let started = train("qwen3-tied", &run, &[&usual[..], &["--lora-dropout", "0.1"]].concat());
    started.assert_done();
    // The fit's own choice, which it makes again.
    assert!(started.stderr.contains("zeroth.frozen is \"whole\""), "{}", started.stderr);
    let from = run.join("checkpoints/step-3");
    let dropout = ["--lora-dropout", "0.1"];
    let with = |more: &[&'static str]| [&usual[..], &dropout, more].concat();
    let other_config = |clipping: &str, printing: &str| {
        format!(
            r#"{{"zero_optimization": {{"stage": 3}}, "gradient_clipping": {clipping}, "steps_per_print": {printing}, "csv_monitor": {{"enabled": true}}}}"#
        )
    };
    let (reports, clips) = (other_config("1.0", "2"), other_config("0.5", "10"));
    let steps = "steps of the run (--max-steps, --num-train-epochs): 6 → ";
    let cases: [(Vec<&str>, Vec<String>); 9] = [
        (with(&[]), vec![]),
        (with(&["--save-steps", "2", "--logging-steps", "1", "--threads-per-rank", "1"]), vec![]),
        (with(&["--max-steps", "5"]), vec![format!("{steps}5")]),
        (usual.clone(), vec!["--lora-dropout: 0.1 → 0.05".to_owned()]),
        (with(&["--max-skipped-steps", "3"]), vec!["--max-skipped-steps: 0 → 3".to_owned()]),
        (with(&["--learning-rate", "2e-3"]), vec!["optimizer.params.lr: 0.001 → 0.002".to_owned()]),
        ([&shared[..], &dropout, &["--deepspeed", &reports]].concat(), vec![]),
        (
            [&shared[..], &dropout, &["--deepspeed", &clips]].concat(),
            vec!["gradient_clipping: 1.0 → 0.5".to_owned()],
        ),
        (with(&["--ranks", "1"]), vec!["ranks: 2 → 1".to_owned()]),
    ];
    for (number, (flags, expected)) in cases.iter().enumerate() {
        let ended = resumed(folder.path(), number, &from, flags);
        assert_eq!(changes(&ended), *expected, "{flags:?}: {}", ended.stderr);
    }
}
