//! Disk space: a run that would fill the disk is refused, with suggestions that fit.

use std::path::Path;

use super::{new_data, new_model, train_on};
use crate::common::Ended;

const STEPS: &str = "40";

fn run(folder: &Path, more: &[&str]) -> Ended {
    let model = new_model(folder, 64, 2, 192, 300);
    let data = new_data(folder, 24, 20, 300);
    train_on(&model, &data, &folder.join("run"), &[&["--max-steps", STEPS, "--dry-run"], more].concat())
}

/// The flags that a refusal suggests.
fn advice(refused: &Ended) -> Vec<Vec<String>> {
    assert_eq!(refused.code, 3, "{}", refused.stderr);
    let lines = refused.stderr.lines().skip_while(|line| !line.contains("of disk space are needed")).skip(1);
    let lines: Vec<&str> = lines.collect();
    lines
        .iter()
        .map(|line| {
            line.split([' ', ':']).filter(|word| !word.is_empty()).take(2).map(str::to_owned).collect()
        })
        .collect()
}

#[test]
fn suggested_disk_settings_fit() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let typed: [&[&str]; 6] = [
        &["--save-steps", "4"],
        &["--save-steps", "4", "--save-total-limit", "5"],
        &["--save-steps", "40"],
        &["--save-steps", "20", "--save-total-limit", "1"],
        &["--save-steps", "7", "--save-total-limit", "1"],
        &["--save-steps", "4000"],
    ];
    let mut advised = 0;
    for flags in typed {
        for space in ["200kB", "1.3MB", "2.6MB", "4MB", "6MB"] {
            let flags = [flags, &["--disk-space", space]].concat();
            let refused = run(folder, &flags);
            if refused.code == 0 {
                continue;
            }
            for change in advice(&refused) {
                let change: Vec<&str> = change.iter().map(String::as_str).collect();
                assert!(!flags.windows(2).any(|pair| pair == change), "{change:?}: {}", refused.stderr);
                // The last of repeated flags wins.
                let mended = run(folder, &[&flags[..], &change].concat());
                assert_eq!(mended.code, 0, "{flags:?} {change:?}: {}", mended.stderr);
                advised += 1;
            }
        }
    }
    assert!(advised > 20, "{advised}");
}

#[test]
fn a_disk_too_small_for_one_checkpoint_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = run(folder.path(), &["--save-steps", "4000", "--disk-space", "300kB"]);
    assert_eq!(refused.code, 3, "{}", refused.stderr);
    assert!(!refused.stderr.contains("--save-steps 4"), "{}", refused.stderr);
    assert!(!refused.stderr.contains("--save-total-limit"), "{}", refused.stderr);
    assert!(refused.stderr.contains("  --disk-space "), "{}", refused.stderr);
}

#[test]
fn budgets_without_a_unit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for flag in ["--disk-space", "--device-memory", "--host-memory"] {
        let refused = run(folder.path(), &[flag, "44"]);
        assert_eq!(refused.code, 2, "{flag}: {}", refused.stderr);
        let hint = "is 44 bytes: a unit is missing, did you mean 44GB?";
        assert!(refused.stderr.contains(flag) && refused.stderr.contains(hint), "{flag}: {}", refused.stderr);
    }
}
