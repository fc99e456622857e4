//! Old checkpoints that cannot be removed: noted once, and the run continues.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{metrics, text, train};
use crate::common::{Ended, zeroth};

/// A folder bind-mounted onto itself, so that it can be neither renamed nor removed.
struct Fixed(PathBuf);

impl Fixed {
    /// Bind-mounts a folder; `None` without permission.
    fn mount(run: &Path, folder: &Path) -> Option<Self> {
        let mounted = Command::new("mount").args(["--bind", text(folder), text(folder)]).output();
        if mounted.is_ok_and(|output| output.status.success()) {
            return Some(Self(run.to_owned()));
        }
        println!("skipped: mounting needs root (sudo -E cargo test -p zeroth-cli old_checkpoints)");
        None
    }
}

impl Drop for Fixed {
    fn drop(&mut self) {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let places = mounts.lines().filter_map(|line| line.split(' ').nth(1));
        for place in places.filter(|place| Path::new(place).starts_with(&self.0)) {
            let _ = Command::new("umount").args(["-l", place]).status();
        }
    }
}

fn goes_on(run: &Path, steps: &str) -> Ended {
    let flags = ["--save-steps", "1", "--save-total-limit", "1", "--resume", "auto", "--max-steps", steps];
    train("qwen3-tied", run, &flags)
}

#[test]
fn unremovable_checkpoints_do_not_stop_a_run() {
    // Either the folder cannot be renamed, or its contents cannot be removed.
    for fixed in ["", "model"] {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        goes_on(&run, "1").assert_done();
        let fixed = run.join("checkpoints/step-1").join(fixed);
        let Some(fixed) = Fixed::mount(&run, &fixed) else { return };
        for (steps, done) in [("4", 4), ("6", 6)] {
            let ended = goes_on(&run, steps);
            ended.assert_done();
            assert_eq!(metrics(&run).len(), done);
            assert_eq!(
                ended.stderr.matches("cannot remove an old checkpoint").count(),
                1,
                "{}",
                ended.stderr
            );
            assert!(ended.stderr.contains("note: "), "{}", ended.stderr);
            let kept = run.join("checkpoints").join(format!("step-{steps}"));
            let verified = zeroth(&["checkpoint", "verify", text(&kept)]);
            assert_eq!(verified.code, 0, "{}", verified.stderr);
            assert!(!run.join("checkpoints/step-3").exists(), "others go");
        }
        drop(fixed);
        goes_on(&run, "7").assert_done();
        let left: Vec<_> = fs::read_dir(run.join("checkpoints")).unwrap().collect();
        assert_eq!(left.len(), 2, "{left:?}");
    }
}
