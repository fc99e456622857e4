//! Checkpoint directories: replacing, listing, pruning, and interrupted saves.

use std::fs;
use std::path::Path;

use zeroth_base::ProcessOwner;
use zeroth_train::checkpoint::{
    Checkpoint, CheckpointError, CheckpointPath, UnfinishedCheckpoint, clean, list, newest_valid, prune,
    resolve,
};

use super::sample::{Model, files_in, gone, names_in};

/// The step of the newest valid checkpoint, and the number of newer ones rejected.
fn newest(checkpoints: &Path) -> (Option<u64>, usize) {
    let newest = newest_valid(checkpoints).unwrap();
    (newest.found.map(|found| found.manifest().step), newest.refused.len())
}

fn damage(folder: &Path) {
    let path = folder.join("rank-00000-of-00001.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
}

#[test]
fn interrupted_saves_lose_nothing() {
    let (model, folder, scratch) = (Model::new(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    model.save(folder.path(), 5);
    let whole = model.save_cut(scratch.path(), 10, &[600], 1000).unwrap();
    let unfinished = folder.path().join(format!(".step-10.unfinished-{}", gone()));
    fs::create_dir_all(unfinished.join("model")).unwrap();
    let check = |expected| {
        let newest = newest_valid(folder.path()).unwrap();
        assert!(newest.refused.is_empty());
        let found = newest.found.unwrap();
        assert_eq!(found.manifest().step, expected);
        assert!(model.is_held_by(&found, 1000));
    };
    check(5);
    for path in files_in(&whole) {
        let bytes = fs::read(&path).unwrap();
        let target = unfinished.join(path.strip_prefix(&whole).unwrap());
        for length in [0, bytes.len() / 2, bytes.len()] {
            fs::write(&target, &bytes[..length]).unwrap();
            check(5);
        }
    }
    // Everything but the rename: not a checkpoint. Then renamed, with an old `latest`.
    assert_eq!(list(folder.path()).unwrap().len(), 1);
    fs::rename(&unfinished, folder.path().join("step-10")).unwrap();
    assert_eq!(fs::read_to_string(folder.path().join("latest")).unwrap(), "step-5");
    check(10);
}

#[test]
fn saves_remove_stale_files() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    model.save(folder.path(), 5);
    let gone = gone();
    for name in [".step-10.unfinished", ".step-3.removed", ".step-5.replaced"] {
        let left = folder.path().join(format!("{name}-{gone}"));
        fs::create_dir(&left).unwrap();
        fs::write(left.join("rank-00000-of-00001.safetensors"), "half").unwrap();
    }
    fs::write(folder.path().join(format!(".latest.unfinished-{gone}")), "step").unwrap();
    // The same process id with another start time: a reused id.
    let own = ProcessOwner::own().to_string();
    let (reused, _) = own.rsplit_once('-').unwrap();
    fs::create_dir(folder.path().join(format!(".step-9.unfinished-{reused}-1"))).unwrap();
    // Of a process of another host with the id of one that is gone here, and of earlier versions, on whatever host.
    let there = [
        ".step-3.replaced-00000001-00000002-4194304-1",
        ".step-9.unfinished-00000001-00000002-4194304-1",
        ".step-9.unfinished-4194304-1",
    ];
    let foreign = [".step-x.unfinished-1-1", ".notes", "best"];
    for name in foreign.iter().chain(&there) {
        fs::create_dir(folder.path().join(name)).unwrap();
    }
    let in_use = UnfinishedCheckpoint::begin(folder.path(), 6).unwrap();
    let own = in_use.path().file_name().unwrap().to_str().unwrap().to_owned();
    let mut expected: Vec<&str> = [&foreign[..], &there[..]].concat();
    expected.extend([own.as_str(), "latest", "step-5"]);
    expected.sort_unstable();
    assert_eq!(names_in(folder.path()), expected);
    clean(folder.path()).unwrap();
    assert!(in_use.path().exists(), "this process is alive");
}

#[test]
fn interrupted_replacements_are_restored() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    let path = model.save(folder.path(), 5);
    fs::rename(&path, folder.path().join(format!(".step-5.replaced-{}", gone()))).unwrap();
    clean(folder.path()).unwrap();
    assert_eq!(newest(folder.path()), (Some(5), 0));
}

#[test]
fn saving_a_step_again_replaces_it() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    let first = model.save(folder.path(), 5);
    damage(&first);
    assert_eq!(newest(folder.path()), (None, 1));
    let second = model.save_cut(folder.path(), 5, &[40, 80], 99).unwrap();
    assert_eq!(first, second);
    assert_eq!(names_in(folder.path()), ["latest", "step-5"]);
    let checkpoint = Checkpoint::open(&second).unwrap();
    assert_eq!(checkpoint.manifest().ranks, 3);
    assert_eq!(newest(folder.path()), (Some(5), 0));
}

#[test]
fn pruning_keeps_the_newest_valid_checkpoint() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    for step in [1, 2, 3, 10, 20] {
        model.save(folder.path(), step);
    }
    let steps = || list(folder.path()).unwrap().iter().map(|found| found.step).collect::<Vec<_>>();
    assert_eq!(prune(folder.path(), None, None, None).unwrap().removed.len(), 0);
    assert_eq!(prune(folder.path(), Some(9), None, None).unwrap().removed.len(), 0);
    let removed = prune(folder.path(), Some(4), Some(20), None).unwrap().removed;
    assert_eq!(removed, [folder.path().join("step-1")]);
    assert_eq!(steps(), [2, 3, 10, 20], "by number, not by name");

    damage(&folder.path().join("step-10"));
    damage(&folder.path().join("step-20"));
    prune(folder.path(), Some(2), None, None).unwrap();
    assert_eq!(steps(), [3, 10, 20], "3 is the newest good one");
    prune(folder.path(), Some(0), None, None).unwrap();
    assert_eq!(steps(), [3, 20], "a limit of none keeps one");
    assert_eq!(newest(folder.path()), (Some(3), 1));
    assert_eq!(names_in(folder.path()), ["latest", "step-20", "step-3"]);
}

#[test]
fn pruning_keeps_the_best_checkpoint() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    let steps = || list(folder.path()).unwrap().iter().map(|found| found.step).collect::<Vec<_>>();
    for step in 1..=6 {
        model.save(folder.path(), step);
    }
    prune(folder.path(), Some(4), Some(6), Some(1)).unwrap();
    assert_eq!(steps(), [1, 4, 5, 6], "the best counts towards the limit");
    prune(folder.path(), Some(2), Some(6), Some(5)).unwrap();
    assert_eq!(steps(), [5, 6]);
    prune(folder.path(), Some(1), Some(6), Some(5)).unwrap();
    assert_eq!(steps(), [5, 6], "beside the newest");
    prune(folder.path(), Some(1), Some(6), Some(9)).unwrap();
    assert_eq!(steps(), [6], "a best step that was not saved keeps nothing");
}

#[test]
fn latest_is_informational() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    assert_eq!(newest(&folder.path().join("none")), (None, 0));
    model.save(folder.path(), 3);
    model.save(folder.path(), 12);
    for wrong in ["step-3", "step-99", "", "\u{0}"] {
        fs::write(folder.path().join("latest"), wrong).unwrap();
        assert_eq!(newest(folder.path()), (Some(12), 0));
    }
}

#[test]
fn paths_of_steps_runs_and_directories_resolve() {
    let (model, run) = (Model::new(), tempfile::tempdir().unwrap());
    let checkpoints = run.path().join("checkpoints");
    let error = resolve(run.path()).unwrap_err();
    assert!(matches!(error, CheckpointError::NoCheckpoints { .. }), "{error}");
    let step = model.save(&checkpoints, 5);
    assert_eq!(resolve(run.path()).unwrap(), CheckpointPath::Run(checkpoints.clone()));
    assert_eq!(resolve(&checkpoints).unwrap(), CheckpointPath::Run(checkpoints.clone()));
    assert_eq!(resolve(&step).unwrap(), CheckpointPath::Step(step.clone()));
    fs::remove_file(step.join("manifest.json")).unwrap();
    for path in [step, run.path().join("absent")] {
        let error = resolve(&path).unwrap_err();
        assert!(matches!(error, CheckpointError::NotACheckpoint { .. }), "{error}");
    }
}
