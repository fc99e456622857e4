//! Full and read-only disks. The test re-executes itself in a mount namespace with its own file system.

use std::path::{Path, PathBuf};
use std::process::Command;

use zeroth_train::checkpoint::{CheckpointError, newest_valid};

use super::sample::{Model, names_in};

/// The environment variable with the mounted folder.
const MOUNTED: &str = "ZEROTH_TEST_MOUNTED";

/// The folder of a 1 MiB file system inside the namespace; outside, runs the test there and returns `None`.
#[allow(clippy::print_stderr, reason = "who runs the tests should know what was not tested")]
fn small_disk(test: &str) -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os(MOUNTED) {
        return Some(folder.into());
    }
    let folder = tempfile::tempdir().unwrap();
    let script = "mount -t tmpfs -o size=1m tmpfs \"$0\" || exit 77; exec \"$@\"";
    let ended = Command::new("unshare")
        .args(["-rm", "sh", "-c", script])
        .arg(folder.path())
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(MOUNTED, folder.path())
        .output();
    match ended {
        Ok(ended) if ended.status.success() => {
            let said = String::from_utf8_lossy(&ended.stdout);
            assert!(said.contains("1 passed"), "the test inside did not run: {said}");
        }
        // 1 is unshare's exit code where namespaces are forbidden; 101 is a failed test.
        Ok(ended) if ended.status.code() == Some(101) => {
            panic!("{}{}", String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
        }
        refused => {
            let why = refused.map_or_else(
                |error| error.to_string(),
                |ended| String::from_utf8_lossy(&ended.stderr).into_owned(),
            );
            eprintln!(
                "skipped, no filesystem can be mounted here ({}); as root: mount -t tmpfs -o size=1m tmpfs /mnt, then \
                 {MOUNTED}=/mnt cargo test -p zeroth-train --test it {test}",
                why.trim()
            );
        }
    }
    None
}

#[test]
fn a_full_disk_keeps_old_checkpoints() {
    let Some(disk) = small_disk("checkpoint::disk::a_full_disk_keeps_old_checkpoints") else {
        return;
    };
    let model = Model::of_width(64);
    let mut saved = 0;
    let error = loop {
        match model.save_cut(&disk, saved + 1, &[1000], 4096) {
            Ok(_) => saved += 1,
            Err(error) => break error,
        }
    };
    let CheckpointError::DiskFull { path, needed, free } = &error else { panic!("{error}") };
    assert!(saved >= 1 && *needed > 0 && free.is_some(), "{saved} {needed} {free:?}");
    assert!(path.starts_with(&disk));
    let message = error.to_string();
    assert!(message.contains("earlier checkpoints are intact"), "{message}");
    let newest = newest_valid(&disk).unwrap();
    assert!(newest.refused.is_empty(), "what did not fit is not to be seen: {:?}", names_in(&disk));
    let found = newest.found.unwrap();
    assert_eq!(found.manifest().step, saved);
    assert!(model.is_held_by(&found, 10_000));
    assert!(names_in(&disk).iter().all(|name| !name.starts_with('.')), "{:?}", names_in(&disk));
}

#[test]
fn unwritable_folders_are_reported_with_a_remedy() {
    let test = "checkpoint::disk::unwritable_folders_are_reported_with_a_remedy";
    let Some(disk) = small_disk(test) else { return };
    let model = Model::new();
    model.save(&disk, 1);
    let remounted = Command::new("mount").args(["-o", "remount,ro"]).arg(&disk).status().unwrap();
    assert!(remounted.success());
    let error = model.save_cut(&disk, 2, &[], 100).unwrap_err();
    let is_named = |path: &Path| path.starts_with(&disk);
    assert!(matches!(&error, CheckpointError::NotWritable { path, .. } if is_named(path)), "{error}");
    assert!(error.to_string().contains("Grant this user write permission"), "{error}");
    assert_eq!(newest_valid(&disk).unwrap().found.unwrap().manifest().step, 1);
}
