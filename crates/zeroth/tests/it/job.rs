//! A job is resolved by one call, the same for a launcher and its ranks.

use std::path::Path;

use zeroth::config::resolve::Flags;
use zeroth::job::{JobError, JobRequest, LauncherHandoff, resolve};
use zeroth::kernel::Tier;
use zeroth::machine::DeviceKind;
use zeroth::train::BatchShape;

#[test]
fn a_rank_makes_the_job_of_its_launcher_by_the_same_request() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("rows.jsonl");
    let row = "{\"input_ids\": [1, 2, 3, 4], \"labels\": [1, 2, 3, 4]}\n";
    std::fs::write(&data, row.repeat(8)).unwrap();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/qwen3-tied");
    let request = JobRequest {
        device: Some(DeviceKind::Cpu),
        epochs: Some(2.0),
        flags: Flags { per_device_train_batch_size: Some(2), ..Flags::default() },
        ..JobRequest::new(model.display().to_string(), vec![data], folder.path().join("run"))
    };
    let mut launcher = resolve(&request, Some(2), None, &|_| {}).unwrap();
    assert_eq!((launcher.job.steps, launcher.ranks), (4, 2));
    assert_eq!(launcher.job.shape, BatchShape { micro_batch: 2, accumulation: 1, ranks: 2 });
    launcher.check_weights().unwrap();
    let handoff = LauncherHandoff::read(launcher.handoff.to_text().unwrap().as_bytes()).unwrap();
    let mut rank = resolve(&request, Some(2), Some(handoff), &|_| {}).unwrap();
    let [one, other] = [&mut launcher, &mut rank].map(|job| job.fit().unwrap().unwrap());
    let arenas = [one, other].map(|compiled| Tier::ALL.map(|tier| compiled.memory.arena(tier)));
    assert_eq!(arenas[0], arenas[1]);
    assert_eq!(launcher.resolved.to_json(), rank.resolved.to_json());
    let missing = JobRequest { model: "no-such-model".to_owned(), ..request };
    assert!(matches!(resolve(&missing, None, None, &|_| {}), Err(JobError::Inputs(_))));
}
