//! Manifests with valid checksums and invalid numbers are refused by field name.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use zeroth_train::checkpoint::Checkpoint;

use super::sample::Model;

/// Writes a manifest with a matching checksum.
fn forge(folder: &Path, manifest: &Value) {
    let path = folder.join("manifest.json");
    fs::write(&path, serde_json::to_string_pretty(manifest).unwrap()).unwrap();
    let output = Command::new("sha256sum").arg(&path).output().unwrap();
    let hash = &String::from_utf8(output.stdout).unwrap()[..64];
    let sums = fs::read_to_string(folder.join("SHA256SUMS")).unwrap();
    fs::write(folder.join("SHA256SUMS"), format!("{hash}{}", &sums[64..])).unwrap();
}

#[test]
fn out_of_range_numbers_are_refused() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    let step = model.save(folder.path(), 10);
    let whole: Value = serde_json::from_slice(&fs::read(step.join("manifest.json")).unwrap()).unwrap();
    let huge = json!(1_u64 << 62);
    for (pointer, value, words) in [
        ("/step", huge.clone(), "`step` is 4611686018427387904: expected 0 to "),
        (
            "/samples_seen",
            huge.clone(),
            "`samples_seen` is 4611686018427387904, but 10 steps take 12 samples",
        ),
        ("/samples_seen", json!(u64::MAX), "`samples_seen` is 18446744073709551615: expected "),
        (
            "/batch/train_batch_size",
            huge.clone(),
            "`batch.train_batch_size` is 4611686018427387904: expected 1 to 4294967296",
        ),
        ("/batch/train_batch_size", json!(0), "`batch.train_batch_size` is 0: expected 1 to "),
        ("/batch/train_batch_size", json!(13), "`batch.train_batch_size` is 13, but `batch.micro_batch` × "),
        ("/batch/micro_batch", huge.clone(), "`batch.micro_batch` is "),
        ("/batch/accumulation", json!(0), "`batch.accumulation` is 0"),
        ("/ranks", huge.clone(), "`ranks` is "),
        ("/ranks", json!(0), "`ranks` is 0"),
        ("/stage", json!(4), "`stage` is 4: expected 0 to 3"),
        ("/data/samples", json!(0), "`data.samples` is 0"),
        (
            "/control/applied",
            json!(u64::MAX),
            "`control` counts 18446744073709551615 applied and 0 skipped steps of 10",
        ),
        ("/control/skipped", json!(1), "`control` counts 10 applied and 1 skipped steps of 10"),
        ("/control/iteration", huge, "`control.iteration` is "),
        ("/control/last_overflow", json!(11), "`control.last_overflow` is 11: expected -1 to 10"),
        ("/control/last_overflow", json!(i64::MIN), "`control.last_overflow` is -9223372036854775808"),
        (
            "/control/loss_scale",
            json!("inf"),
            "`control.loss_scale` is inf: expected a finite number above 0",
        ),
        ("/control/loss_scale", json!("NaN"), "`control.loss_scale` is NaN"),
        ("/control/loss_scale", json!("0"), "`control.loss_scale` is 0"),
        ("/best/evaluated/step", json!(11), "`best.evaluated.step` is 11: expected 1 to 10"),
        ("/best/saved/step", json!(0), "`best.saved.step` is 0: expected 1 to 10"),
        ("/best/saved/value", json!("NaN"), "`best.saved.value` is NaN: expected a finite number"),
        ("/best/stale", json!(u64::MAX), "`best.stale` is 18446744073709551615: expected 0 to 10"),
        ("/model/total", json!(1), "`model.total` is 1, but its parameters have "),
        ("/model/parameters/0/shape", json!([1_u64 << 40, 1_u64 << 40]), "too many elements for a model"),
        ("/model/parameters/0/shape", json!([1_u64 << 47]), "too many elements for a model"),
    ] {
        let mut manifest = whole.clone();
        *manifest.pointer_mut(pointer).unwrap() = value.clone();
        forge(&step, &manifest);
        let message = Checkpoint::open(&step).unwrap_err().to_string();
        assert!(message.contains(words), "{pointer} {value}: {message}");
        assert!(message.contains("manifest.json is invalid: "), "{message}");
    }
    forge(&step, &whole);
    Checkpoint::open(&step).unwrap();
}

#[test]
fn misnamed_step_folders_are_refused() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    let step = model.save(folder.path(), 10);
    let renamed = folder.path().join("step-12");
    fs::rename(&step, &renamed).unwrap();
    let message = Checkpoint::open(&renamed).unwrap_err().to_string();
    assert!(
        message.contains("its `step` is 10, but its folder is step-12: rename the folder to step-10"),
        "{message}"
    );
    let copy = folder.path().join("good");
    fs::rename(&renamed, &copy).unwrap();
    Checkpoint::open(&copy).unwrap();
}
