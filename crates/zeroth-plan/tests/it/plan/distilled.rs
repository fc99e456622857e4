//! Plans of distillations: a teacher's memory is planned by the program that trains with it.

use zeroth_base::DType;
use zeroth_graph::DistillSpec;
use zeroth_kernel::{Optimizer, Tier};
use zeroth_machine::DeviceKind;
use zeroth_model::{ModelConfig, Objective, ParameterTable, table};
use zeroth_plan::{
    Basis, BatchShape, Budget, Freedom, OffloadedStates, Placement, PlanRequest, PlannedRows, PlannedSource,
    PlannedTeacher, Sizing, TrainableModel, plan,
};
use zeroth_program::{Settings, TeacherPlacement, Types};

use crate::common::GPU;

const TOKENS: u64 = 64;
const WHOLE: TeacherPlacement = TeacherPlacement::WHOLE;
const OFFLOADED: TeacherPlacement = TeacherPlacement { sharded: true, offloaded: true };

/// A model of this width with 3 blocks and 512 tokens.
pub(super) fn model(width: u64) -> (ModelConfig, ParameterTable) {
    let config = serde_json::json!({
        "model_type": "qwen3", "hidden_size": width, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 3 * width, "vocab_size": 512,
        "tie_word_embeddings": true, "max_position_embeddings": 128,
    });
    let config = ModelConfig::from_json(&config.to_string(), "test").expect("a config");
    let table = table(&config);
    (config, table)
}

fn teacher(placement: Option<TeacherPlacement>, source: PlannedSource) -> PlannedTeacher {
    let spec = DistillSpec { beta: 0.0, temperature: 2.0, squared: true };
    PlannedTeacher { spec, alpha: 0.5, source, placement }
}

fn weights() -> PlannedSource {
    let (config, table) = model(256);
    PlannedSource::Weights { config: Box::new(config), table }
}

fn settings() -> Settings {
    let types = Types { compute: DType::Bf16, communication: DType::Bf16 };
    Settings { types, optimizer: Optimizer::AdamW, ..Settings::inference(DType::Bf16) }
}

#[test]
fn a_plan_has_the_arena_of_the_distillation() {
    let (config, own) = model(64);
    let cache = PlannedSource::Cache { k: 20, vocab: 512, tail: true };
    let mut totals = Vec::new();
    for teacher in [
        None,
        Some(teacher(None, cache)),
        Some(teacher(Some(OFFLOADED), weights())),
        Some(teacher(Some(WHOLE), weights())),
    ] {
        let placement =
            Placement { settings: settings(), ..Placement::new("zero0", 0, OffloadedStates::None) };
        let rows = PlannedRows { micro_batch: 1, max_length: TOKENS, max_target_length: 0, recompute: false };
        let device = GPU;
        let trained = TrainableModel::distilled(config.clone(), own.clone(), None, device, teacher.clone());
        let request = PlanRequest {
            rows: Some(rows),
            model: Some(trained.unwrap()),
            ..PlanRequest::new(own.total(), 1)
        };
        let row = plan(&request, &[placement]).unwrap().rows.remove(0);
        let (largest, shape) = (|_| [TOKENS, 0], BatchShape { micro_batch: 1, accumulation: 1, ranks: 1 });
        let mut sizing = Sizing::new(&config, &own, DeviceKind::Cuda.target(1), shape, settings(), &largest);
        sizing.objective = teacher.as_ref().map_or(Objective::CrossEntropy, PlannedTeacher::objective);
        sizing.settings.teacher = teacher.as_ref().and_then(|teacher| teacher.placement).unwrap_or(WHOLE);
        let compiled = sizing.compile().unwrap();
        assert_eq!(row.basis, Basis::Program);
        let planned = Tier::ALL.map(|tier| row.bytes[tier].total);
        assert_eq!(planned, Tier::ALL.map(|tier| compiled.memory.arena(tier)), "{teacher:?}");
        totals.push(planned[0]);
    }
    assert!(totals.is_sorted_by(|less, more| less < more), "{totals:?}");
}

#[test]
fn a_misfit_names_the_changes_of_the_teacher_that_fit() {
    let (config, own) = model(64);
    let (largest, shape) = (|_| [TOKENS, 0], BatchShape { micro_batch: 1, accumulation: 1, ranks: 1 });
    let planned = teacher(None, weights());
    let arena = |of: &PlannedTeacher| {
        let mut sizing = Sizing::new(&config, &own, DeviceKind::Cuda.target(1), shape, settings(), &largest);
        sizing.objective = of.objective();
        sizing.compile().unwrap().memory.arena(Tier::Device)
    };
    let changes = |given: u64, of: &PlannedTeacher| -> Vec<String> {
        let mut sizing = Sizing::new(&config, &own, DeviceKind::Cuda.target(1), shape, settings(), &largest);
        sizing.objective = of.objective();
        let budget = Budget::of_device(given);
        let misfit = sizing.fit(budget, Freedom::default()).unwrap().map(drop).unwrap_err();
        let names = misfit.remedies.into_iter().map(|(name, _)| name);
        names.filter(|name| name.starts_with("--")).collect()
    };
    let [quantize, offload, cache] = [
        "--teacher-quantize nf4",
        "--teacher-deepspeed zero3_offload",
        "--kd-cache, of `zeroth distill cache`",
    ];
    let cached = teacher(None, PlannedSource::Cache { k: 20, vocab: 512, tail: true });
    assert_eq!(changes(arena(&planned) - 1, &planned), [quantize, offload, cache]);
    assert_eq!(changes(arena(&cached), &planned), [cache]);
    assert!(changes(arena(&cached) - 1, &cached).is_empty());
}
