//! What `plan` answers: the JSON's shape, what is recommended, and what would fit where nothing does.

mod distilled;

use serde_json::{Value, json};
use zeroth_kernel::Tier;
use zeroth_model::{ModelConfig, named_config, table};
use zeroth_plan::{
    ChangeKind, OffloadedStates, Placement, Plan, PlanError, PlanRequest, PlannedRows, Row, States,
    TrainType, TrainableModel, plan,
};

use crate::common::{GPU, presets};

const GB: u64 = 1_000_000_000;

/// LoRA of rank 8 on q, k, v, o, gate, up and down of Qwen3-8B.
const ADAPTERS: u64 = 36 * 8 * (8192 + 5120 + 5120 + 8192 + 3 * (4096 + 12_288));

/// A model on GPUs, whose steps are compiled.
fn compiled(config: ModelConfig, ranks: u64, micro_batch: u64, max_length: u64) -> PlanRequest {
    let table = table(&config);
    let params = table.total();
    PlanRequest {
        rows: Some(PlannedRows { micro_batch, max_length, max_target_length: 0, recompute: false }),
        model: Some(TrainableModel::new(config, table, None, GPU).expect("a model of today")),
        states: States::Run,
        ..PlanRequest::new(params, ranks)
    }
}

fn qwen3_8b(ranks: u64, micro_batch: u64, max_length: u64) -> PlanRequest {
    let named = named_config("Qwen/Qwen3-8B").expect("a built-in config");
    let config = ModelConfig::from_named(&named).expect("a config");
    PlanRequest { adapter_params: Some(ADAPTERS), ..compiled(config, ranks, micro_batch, max_length) }
}

fn planned(request: &PlanRequest) -> Plan {
    plan(request, &presets()).expect("the request is sound")
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().expect("an object").keys().map(String::as_str).collect()
}

#[test]
fn the_json_has_the_contracts_keys_in_the_contracts_order() {
    let json = serde_json::to_value(planned(&PlanRequest::new(8 * GB, 5))).unwrap();
    assert_eq!(keys(&json)[..5], ["params", "ranks", "rows", "recommended", "reason"]);
    let row = &json["rows"][3];
    assert_eq!(
        keys(row)[..9],
        [
            "preset",
            "stage",
            "offload",
            "train_type",
            "device_bytes",
            "host_bytes",
            "comm_bytes_per_step",
            "saving",
            "fits"
        ]
    );
    let bytes = ["parameters", "gradients", "optimizer", "activations", "buffers", "total"];
    assert_eq!(keys(&row["device_bytes"]), bytes);
    assert_eq!(keys(&row["host_bytes"]), bytes);
    let offloads: Vec<&Value> = (0..6).map(|at| &json["rows"][at]["offload"]).collect();
    assert_eq!(json!(offloads), json!(["none", "none", "none", "optimizer", "none", "optimizer+parameters"]));
    assert_eq!(row["train_type"], "full");
    assert_eq!(row["fits"], Value::Null);
}

/// The primer's table, exactly: 96, 44.8, 32 and 19.2 GB, so 44 GB GPUs need ZeRO-2.
#[test]
fn eight_billion_on_5_gpus_of_44_gb_without_a_master_copy_take_zero2() {
    let request =
        PlanRequest { states: States::Plain, device_memory: Some(44 * GB), ..PlanRequest::new(8 * GB, 5) };
    let plan = planned(&request);
    let totals: Vec<u64> = plan.rows.iter().map(|row| row.bytes[Tier::Device].total).collect();
    assert_eq!(totals, [96 * GB, 44_800_000_000, 32 * GB, 16 * GB, 19_200_000_000, 0]);
    let savings: Vec<Option<f64>> = plan.rows.iter().map(|row| row.saving).collect();
    let expected = [1.0, 96.0 / 44.8, 3.0, 6.0, 5.0].map(Some);
    assert_eq!(savings[..5], expected);
    assert_eq!(savings[5], None, "nothing on the device: no ratio");
    assert_eq!(plan.recommended.as_deref(), Some("zero2"));
    let reason = "zero1 needs 44.8 GB of the device's 44 GB; zero2 needs 32 GB of the device's 44 GB and is the first \
                  that fits";
    assert_eq!(plan.reason, reason);
    assert!(plan.changes.is_empty());
}

/// The primer's case 1 says that Qwen3-8B on 5 GPUs of 44 GB needs ZeRO-3. A run's states and activations with ZeRO-2 just
/// fit, because master weights are not stored beside weights as a whole; on GPUs of 32 GB it is so.
#[test]
fn qwen3_8b_on_5_gpus_takes_zero2_of_44_gb_and_zero3_of_32() {
    let mut request = qwen3_8b(5, 1, 2048);
    request.rows.as_mut().unwrap().recompute = true;
    let within = |gb: u64| planned(&PlanRequest { device_memory: Some(gb * GB), ..request.clone() });
    for (gb, preset) in [(44, "zero2"), (40, "zero2"), (32, "zero3")] {
        let plan = within(gb);
        assert_eq!(plan.recommended.as_deref(), Some(preset), "{}", plan.reason);
    }
    let by_gpu = &within(40).advice[1];
    assert!(by_gpu.says.contains("40 GB GPU, 8B model: ZeRO-2"), "{by_gpu:?}");
    assert_eq!(by_gpu.agrees, Some(true));
}

#[test]
fn without_device_memory_the_size_decides_and_the_reason_says_so() {
    for (params, preset) in [
        (3 * GB, "zero1"),
        (8 * GB, "zero2"),
        (20 * GB, "zero3"),
        (32 * GB, "zero3"),
        (100 * GB, "zero3_offload"),
    ] {
        let plan = planned(&PlanRequest::new(params, 8));
        assert_eq!(plan.recommended.as_deref(), Some(preset));
        assert!(plan.reason.contains("by model size alone"), "{}", plan.reason);
        assert!(plan.rows.iter().all(|row| row.fits.is_none()));
    }
}

#[test]
fn a_host_that_is_too_small_rules_offload_out() {
    let request = PlanRequest {
        device_memory: Some(20 * GB),
        host_memory: Some(100 * GB),
        ..PlanRequest::new(8 * GB, 1)
    };
    let plan = planned(&request);
    assert_eq!(plan.recommended, None);
    let host = plan.changes.iter().find(|change| change.change == ChangeKind::HostMemory).unwrap();
    assert_eq!((host.to, host.preset.as_str()), (112 * GB, "zero2_offload"));
    assert!(plan.reason.contains("12,000,000,000 bytes (12 GB) of host memory"), "{}", plan.reason);
}

#[test]
fn every_lever_is_offered_where_it_alone_is_enough() {
    let levers = |request: &PlanRequest| -> Vec<(ChangeKind, u64)> {
        let plan = planned(request);
        assert_eq!(plan.recommended, None, "{}", plan.reason);
        assert!(!plan.is_possible());
        plan.changes.iter().map(|change| (change.change, change.to)).collect()
    };
    // 32 sequences of 8192: activations do not fit anywhere.
    let wide = PlanRequest { device_memory: Some(80 * GB), ..qwen3_8b(4, 32, 8192) };
    let found = levers(&wide);
    for kind in [ChangeKind::MicroBatch, ChangeKind::DeviceMemory] {
        assert!(found.iter().any(|(found, _)| *found == kind), "{kind:?} in {found:?}");
    }
    // 30B on one GPU of 80 GB with a small host: LoRA or more GPUs.
    let large = PlanRequest {
        adapter_params: Some(80_000_000),
        device_memory: Some(80 * GB),
        host_memory: Some(64 * GB),
        ..PlanRequest::new(30 * GB, 1)
    };
    // 16 · 30 / 80 = 6 GPUs for the states of ZeRO-3, and one more for a gathered layer of 1.1 GB; the host needs 14 bytes
    // a parameter for ZeRO-2.
    let expected = [
        (ChangeKind::Lora, 80_000_000),
        (ChangeKind::Ranks, 7),
        (ChangeKind::DeviceMemory, 480 * GB),
        (ChangeKind::HostMemory, 420 * GB),
    ];
    assert_eq!(levers(&large), expected);
}

#[test]
fn the_micro_batch_offered_is_the_largest_that_fits() {
    let unlimited = |micro_batch| compiled(distilled::model(64).0, 2, micro_batch, 64);
    let needs = planned(&unlimited(8)).rows.iter().map(Row::device_needs).min();
    let request = |micro_batch| PlanRequest { device_memory: needs, ..unlimited(micro_batch) };
    let largest = (1..=40).rev().find(|micro_batch| planned(&request(*micro_batch)).is_possible()).unwrap();
    assert!((2..40).contains(&largest), "{largest}");
    for asked in [2, largest, largest + 1, 40] {
        let plan = planned(&request(asked));
        let offered = plan.changes.iter().find(|change| change.change == ChangeKind::MicroBatch);
        let found = if plan.is_possible() { Some(asked) } else { offered.map(|change| change.to) };
        assert_eq!(found, Some(largest.min(asked)), "{asked}");
    }
}

#[test]
fn several_hosts_grow_by_the_host() {
    let request = PlanRequest {
        ranks_per_host: 2,
        device_memory: Some(GB),
        host_memory: Some(0),
        ..PlanRequest::new(GB, 4)
    };
    let plan = planned(&request);
    let hosts = plan.changes.iter().find(|change| change.change == ChangeKind::Hosts).unwrap();
    // 16 bytes a parameter over 16 ranks leave no room for a gathered layer of 116 MB, over 19 they do.
    assert_eq!((hosts.from, hosts.to), (2, 10));
    assert_eq!(hosts.apply(&request).ranks, 20);
}

#[test]
fn deepspeeds_estimate_stands_beside_the_rows_it_has_formulas_for() {
    let request = PlanRequest { largest_layer: Some(32_899_072), ..PlanRequest::new(2_851_598_336, 8) };
    let plan = planned(&request);
    let gib = |preset: &str| {
        let row = plan.rows.iter().find(|row| row.preset == preset).unwrap();
        row.deepspeed_estimate.map(|need| format!("{:.2}", need.gpu_bytes as f64 / f64::from(1 << 30)))
    };
    assert_eq!(gib("zero1"), None);
    assert_eq!(gib("zero2").as_deref(), Some("11.29"));
    assert_eq!(gib("zero3").as_deref(), Some("6.10"));
    assert_eq!(gib("zero3_offload").as_deref(), Some("0.12"));
}

#[test]
fn one_placement_of_a_file_is_answered_for_itself() {
    let file = [Placement::new("ds_zero3.json", 3, OffloadedStates::Parameters)];
    let request = PlanRequest { device_memory: Some(44 * GB), ..PlanRequest::new(8 * GB, 5) };
    let answer = plan(&request, &file).unwrap();
    assert_eq!(answer.recommended.as_deref(), Some("ds_zero3.json"));
    assert_eq!(serde_json::to_value(&answer).unwrap()["rows"][0]["offload"], "parameters");
    let zero0 = plan(&PlanRequest { device_memory: Some(200 * GB), ..request }, &presets()[..1]).unwrap();
    assert_eq!((zero0.recommended.as_deref(), zero0.is_possible()), (None, true));
}

#[test]
fn notes_say_what_is_left_out() {
    let notes = |request: &PlanRequest| planned(request).notes.join("\n");
    let bare = PlanRequest::new(8 * GB, 5);
    assert!(notes(&bare).contains("--largest-layer gives another"));
    assert!(!notes(&PlanRequest { largest_layer: Some(1), ..bare.clone() }).contains("--largest-layer"));
    assert!(
        notes(&PlanRequest { train_type: TrainType::Lora, ..bare })
            .contains("LoRA's own parameters are not counted")
    );
}

#[test]
fn questions_without_an_answer_are_refused_with_what_to_change() {
    let refused =
        |request: &PlanRequest, placement: Placement| plan(request, &[placement]).unwrap_err().to_string();
    let zero2 = || Placement::new("zero2", 2, OffloadedStates::None);
    assert_eq!(refused(&PlanRequest::new(1, 0), zero2()), "0 ranks requested: give at least 1");
    assert_eq!(
        plan(&PlanRequest { accumulation: 0, ..PlanRequest::new(1, 1) }, &[]),
        Err(PlanError::Zero { what: "micro-batches in a step" })
    );
    let request = PlanRequest::new(8 * GB, 5);
    assert!(
        refused(&request, Placement::new("x", 4, OffloadedStates::None))
            .contains("the stages are 0, 1, 2 and 3")
    );
    let message = refused(&request, Placement::new("x", 2, OffloadedStates::OptimizerAndParameters));
    assert!(message.contains("x offloads parameters at stage 2"), "{message}");
    assert!(message.contains("set stage 3 or higher"), "{message}");
}

#[test]
fn parameters_beyond_max_in_cpu_stay_on_the_device() {
    let request = PlanRequest::new(8 * GB, 4);
    let offloaded = |max_in_cpu| {
        let mut placement = Placement::new("file", 3, OffloadedStates::OptimizerAndParameters);
        placement.settings.offload.parameters = max_in_cpu;
        let row = plan(&request, &[placement]).expect("the request is sound").rows.remove(0);
        (row.bytes[Tier::Device].parameters, row.bytes[Tier::Host].parameters)
    };
    // Shards of 2e9 elements: 4 GB each, 16 GB on the host.
    assert_eq!(offloaded(None), (0, 16 * GB));
    assert_eq!(offloaded(Some(500_000_000)), (3 * GB, 4 * GB));
    assert_eq!(offloaded(Some(u64::MAX)), (0, 16 * GB));
}

#[test]
fn a_row_that_leaves_no_room_for_a_context_is_called_tight() {
    let tight = |device_memory| {
        let request = PlanRequest { device_memory: Some(device_memory), ..PlanRequest::new(8 * GB, 4) };
        planned(&request).notes.iter().any(|note| note.contains("context takes"))
    };
    // Stage 1 needs 56 GB.
    assert!(tight(56 * GB + 100_000_000));
    assert!(!tight(57 * GB));
}
