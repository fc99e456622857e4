//! Foreign files in a checkpoint's folder survive saves, pruning and cleaning.

use std::fs;

use zeroth_train::checkpoint::{Checkpoint, clean, list, prune};

use super::sample::{Model, gone, names_in};

#[test]
fn saving_a_step_again_keeps_foreign_files() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    let step = model.save(folder.path(), 5);
    fs::write(step.join("notes.txt"), "mine").unwrap();
    fs::create_dir(step.join("plots")).unwrap();
    fs::write(step.join("plots/a.svg"), "mine").unwrap();
    fs::write(step.join("model/README.md"), "mine").unwrap();
    model.save(folder.path(), 5);
    Checkpoint::open(&step).unwrap().verify().unwrap();
    for name in ["notes.txt", "plots/a.svg", "model/README.md"] {
        assert_eq!(fs::read_to_string(step.join(name)).unwrap(), "mine", "{name}");
    }
    assert_eq!(names_in(folder.path()), ["latest", "step-5"]);
}

#[test]
fn pruning_and_cleaning_keep_foreign_files() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    for step in [1, 2, 3] {
        model.save(folder.path(), step);
    }
    fs::write(folder.path().join("step-1/notes.txt"), "mine").unwrap();
    let left = folder.path().join(format!(".step-9.unfinished-{}", gone()));
    fs::create_dir(&left).unwrap();
    fs::write(left.join("notes.txt"), "mine").unwrap();
    clean(folder.path()).unwrap();
    assert!(left.join("notes.txt").exists());
    let removed = prune(folder.path(), Some(1), Some(3), None).unwrap().removed;
    assert_eq!(removed, [folder.path().join("step-2")]);
    let steps: Vec<u64> = list(folder.path()).unwrap().iter().map(|found| found.step).collect();
    assert_eq!(steps, [1, 3]);
    assert!(folder.path().join("step-1/notes.txt").exists());
}

#[test]
fn a_file_named_like_a_step_is_not_replaced() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    fs::write(folder.path().join("step-5"), "mine").unwrap();
    let error = model.save_cut(folder.path(), 5, &[], 1000).unwrap_err().to_string();
    assert!(error.contains("step-5: a file of that name exists"), "{error}");
    assert_eq!(names_in(folder.path()), ["step-5"]);
    assert_eq!(fs::read_to_string(folder.path().join("step-5")).unwrap(), "mine");
}
