//! A job is resolved by one call, the same for a launcher and its ranks.

use std::path::Path;

use zeroth::config::resolve::Flags;
use zeroth::job::{
    JobError, JobRequest, LauncherHandoff, LoraRequest, PlanOptions, PlanRequestError, StartedRanks, resolve,
    resolve_plan,
};
use zeroth::kernel::Tier;
use zeroth::machine::{DeviceKind, known_gpu};
use zeroth::plan::compile;
use zeroth::train::BatchShape;

const ROW: &str = "{\"input_ids\": [1, 2, 3, 4], \"labels\": [1, 2, 3, 4]}\n";

fn model() -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/qwen3-tied");
    folder.display().to_string()
}

#[test]
fn a_rank_makes_the_job_of_its_launcher_by_the_same_request() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("rows.jsonl");
    std::fs::write(&data, ROW.repeat(8)).unwrap();
    let request = JobRequest {
        device: Some(DeviceKind::Cpu),
        epochs: Some(2.0),
        flags: Flags { per_device_train_batch_size: Some(2), ..Flags::default() },
        ..JobRequest::new(model(), vec![data], folder.path().join("run"))
    };
    let started = StartedRanks { world: 2, local_world: 2, host: 0, local_rank: 0 };
    let mut launcher = resolve(&request, Some(started), None, &|_| {}).unwrap();
    assert_eq!((launcher.job.steps, launcher.ranks), (4, 2));
    assert_eq!(launcher.job.shape, BatchShape { micro_batch: 2, accumulation: 1, ranks: 2 });
    launcher.check_weights().unwrap();
    let handoff = LauncherHandoff::read(launcher.handoff.to_text().unwrap().as_bytes()).unwrap();
    let mut rank =
        resolve(&request, Some(StartedRanks { local_rank: 1, ..started }), Some(handoff), &|_| {}).unwrap();
    let [one, other] = [&mut launcher, &mut rank].map(|job| job.fit().unwrap().unwrap());
    let arenas = [one, other].map(|compiled| Tier::ALL.map(|tier| compiled.memory.arena(tier)));
    assert_eq!(arenas[0], arenas[1]);
    assert_eq!(launcher.resolved.to_json(), rank.resolved.to_json());
    let missing = JobRequest { model: "no-such-model".to_owned(), ..request };
    assert!(matches!(resolve(&missing, None, None, &|_| {}), Err(JobError::Inputs(_))));
}

#[test]
fn a_plan_compiles_the_step_of_the_run_by_the_same_request() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("rows.jsonl");
    std::fs::write(&data, ROW.repeat(8)).unwrap();
    for (deepspeed, lora) in [("zero1", None), ("zero3_offload", Some(LoraRequest::default()))] {
        let mut request = JobRequest {
            device: Some(DeviceKind::Cpu),
            ranks: Some(2),
            deepspeed: deepspeed.to_owned(),
            flags: Flags {
                per_device_train_batch_size: Some(2),
                gradient_accumulation_steps: Some(2),
                lora: lora.is_some(),
                ..Flags::default()
            },
            lora,
            device_memory: Some(1 << 30),
            ..JobRequest::new(model(), vec![data.clone()], folder.path().join("run"))
        };
        request.data.reading.max_length = Some(4);
        let planned = resolve_plan(&request, &PlanOptions::default()).unwrap();
        let [placement] = &planned.placements[..] else { panic!("one config is one placement") };
        let (planned, fits) = compile(&planned.request, placement).unwrap().unwrap();
        let trained = resolve(&request, None, None, &|_| {}).unwrap().fit().unwrap().unwrap();
        assert!(fits);
        assert_eq!(planned.to_string(), trained.to_string(), "{deepspeed}");
        let arenas = [&planned, &trained].map(|compiled| Tier::ALL.map(|tier| compiled.memory.arena(tier)));
        assert_eq!(arenas[0], arenas[1], "{deepspeed}");
    }
}

#[test]
fn a_plan_of_every_preset_needs_no_data() {
    let request = JobRequest::new(model(), Vec::new(), "");
    let options = PlanOptions { every_preset: true, ..PlanOptions::default() };
    let planned = resolve_plan(&request, &options).unwrap();
    assert_eq!(planned.placements.len(), 6);
    assert_eq!(planned.request.params, planned.model.unwrap().table.total());
    let card = Some(known_gpu("V100-32GB").unwrap());
    let refused = resolve_plan(&request, &PlanOptions { card, ..options });
    assert!(matches!(refused, Err(JobError::Plan(PlanRequestError::NoBf16 { .. }))));
}
