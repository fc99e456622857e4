//! A job is resolved by one call, the same for a launcher and its ranks.

use std::path::Path;

use zeroth::config::resolve::Flags;
use zeroth::job::{
    JobError, JobRequest, LauncherHandoff, LoraRequest, PlanOptions, PlanRequestError, RankShare,
    StartedRanks, resolve, resolve_plan,
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
    let mut launcher = resolve(&request, Some(StartedRanks::on_one_host(2)), None, &|_| {}).unwrap();
    assert_eq!((launcher.job.steps, launcher.ranks), (4, 2));
    assert_eq!(launcher.job.shape, BatchShape { micro_batch: 2, accumulation: 1, ranks: 2 });
    launcher.check_weights().unwrap();
    let handoff = LauncherHandoff::read(launcher.handoff.to_text().unwrap().as_bytes()).unwrap();
    let mut rank = resolve(&request, Some(StartedRanks::on_one_host(2)), Some(handoff), &|_| {}).unwrap();
    let [one, other] = [&mut launcher, &mut rank].map(|job| job.fit().unwrap().unwrap());
    let arenas = [one, other].map(|compiled| Tier::ALL.map(|tier| compiled.memory.arena(tier)));
    assert_eq!(arenas[0], arenas[1]);
    assert_eq!(launcher.resolved.to_json(), rank.resolved.to_json());
    let missing = JobRequest { model: "no-such-model".to_owned(), ..request };
    assert!(matches!(resolve(&missing, None, None, &|_| {}), Err(JobError::Inputs(_))));
}

#[test]
fn another_host_finds_its_own_tokens_and_all_plan_for_the_least_share() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("rows.jsonl");
    std::fs::write(&data, ROW.repeat(8)).unwrap();
    let request = JobRequest {
        device: Some(DeviceKind::Cpu),
        flags: Flags { max_steps: Some(2), ..Flags::default() },
        ..JobRequest::new(model(), vec![data], folder.path().join("run"))
    };
    let place = |host| StartedRanks { world: 2, local_world: 1, host, local_rank: 0 };
    let mut first = resolve(&request, Some(place(0)), None, &|_| {}).unwrap();
    let handoff = first.handoff.for_other_host();
    assert_eq!(handoff.caches, None);
    let text = handoff.to_text().unwrap();
    let handoff = LauncherHandoff::read(text.as_bytes()).unwrap();
    let mut other = resolve(&request, Some(place(1)), Some(handoff), &|_| {}).unwrap();
    assert_eq!(other.job.samples.hash(), first.job.samples.hash());
    assert!(other.handoff.caches.is_some());
    // A host with one CPU and less memory.
    let shares = [
        RankShare { threads: 4, free_host_memory: Some(1 << 40), ..first.share.clone() },
        RankShare { threads: 1, free_host_memory: Some(1 << 30), ..other.share.clone() },
    ];
    assert_eq!([shares[0].host, shares[1].host], [0, 1]);
    for job in [&mut first, &mut other] {
        job.limit_to(&shares);
        assert_eq!((job.handoff.threads, job.threads), (1, 1));
        assert_eq!(job.handoff.budget.together, Some(1 << 30));
    }
    let [one, other] = [&mut first, &mut other].map(|job| job.fit().unwrap().unwrap());
    let arenas = [one, other].map(|compiled| Tier::ALL.map(|tier| compiled.memory.arena(tier)));
    assert_eq!(arenas[0], arenas[1]);
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
