//! SIGKILL of a process that saves continuously: every visible checkpoint is valid.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use zeroth_train::checkpoint::{list, newest_valid, prune};

use super::sample::Model;

/// The environment variable with the killed process's folder.
const SAVE_INTO: &str = "ZEROTH_TEST_SAVE_INTO";

fn save_for_ever(checkpoints: &Path) {
    let model = Model::of_width(32);
    let first = list(checkpoints).unwrap().last().map_or(1, |newest| newest.step + 1);
    for step in first.. {
        // Every step twice, so that replacing is interrupted too.
        for cuts in [&[100][..], &[][..]] {
            model.save_cut(checkpoints, step, cuts, 500).unwrap();
        }
        prune(checkpoints, Some(3), Some(step), None).unwrap();
    }
}

#[test]
fn kills_never_leave_partial_checkpoints() {
    if let Some(folder) = std::env::var_os(SAVE_INTO) {
        return save_for_ever(Path::new(&folder));
    }
    let folder = tempfile::tempdir().unwrap();
    let model = Model::of_width(32);
    model.save(folder.path(), 1);
    let mut before = 1;
    for turn in 0..20_u64 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "checkpoint::kills::kills_never_leave_partial_checkpoints"])
            .env(SAVE_INTO, folder.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // Waits until a newer checkpoint appears, then a varying moment longer.
        while list(folder.path()).unwrap().last().is_none_or(|newest| newest.step <= before) {
            assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(1_709 * turn % 13_000));
        child.kill().unwrap();
        child.wait().unwrap();
        let newest = newest_valid(folder.path()).unwrap();
        assert!(newest.refused.is_empty(), "{:?}", newest.refused);
        let found = newest.found.unwrap();
        let step = found.manifest().step;
        assert!(step > before, "{step} after {before}");
        assert!(model.is_held_by(&found, 5_000));
        before = step;
    }
}
