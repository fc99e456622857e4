//! On one mesh every stage, key and place gives the same bits: the sums' order is all that a mesh changes.

use zeroth_base::Axis;
use zeroth_engine::RunError;
use zeroth_program::{Action, Gather, Offload, Recompute, Settings, Types, UpdatedBy};

use super::{MESHES, at_stage, setup};
use crate::job::distill::distillations;
use crate::job::{BF16, F32, Golden, Outcome, ROOMY, Setup, is_full, on_ranks};
use crate::same_bits::assert_same;

const HUGE: u64 = u64::MAX / 4;

/// Ways to train at a stage.
fn variants(stage: u8, accumulation: u64, types: Types) -> Vec<Settings> {
    let base = Settings { stage, accumulation, types, ..ROOMY };
    let states = Offload { optimizer: Some(1.0), sub_group_size: 4096, ..Offload::NOTHING };
    let all = Offload { parameters: Some(u64::MAX), ..states };
    let recompute = Recompute::Block { blocks: None, checkpoints: None, offloaded: true };
    let mut all_variants = vec![
        base,
        Settings { reduce_bucket: 0, overlap: true, ..base },
        Settings {
            reduce_bucket: 5000,
            max_live: 4000,
            prefetch: 1,
            overlap: true,
            persistence: 100,
            ..base
        },
        Settings { max_reuse: HUGE, prefetch: HUGE, overlap: true, gather: Some(Gather::Copy), ..base },
        Settings { reduce_scatter: false, reduce_bucket: 7000, overlap: true, ..base },
        Settings { allgather_partitions: false, persistence: 700, ..base },
        Settings { allgather_bucket: 0, persistence: 30, overlap: true, ..base },
        Settings { offload: all, recompute, prefetch: 1, overlap: true, persistence: 30, ..base },
        Settings {
            offload: Offload { pageable: true, param_buffer_size: 1, param_buffers: 2, ..all },
            ..base
        },
        Settings { offload: Offload { updated_by: Some(UpdatedBy::Host), ..states }, overlap: true, ..base },
        Settings { recompute: Recompute::Attention, persistence: 1_000_000, ..base },
    ];
    if stage == 3 && accumulation == 1 {
        all_variants.extend(hpz_variants(base));
    }
    all_variants
}

/// Ways to train with parameters that are sharded within groups.
fn hpz_variants(base: Settings) -> Vec<Settings> {
    let base = Settings { hpz: true, ..base };
    let offload = Offload { optimizer: Some(1.0), sub_group_size: 4096, ..Offload::NOTHING };
    let copied = Settings { gather: Some(Gather::Copy), ..base };
    vec![
        Settings { gather: Some(Gather::View), ..base },
        Settings { reduce_bucket: 5000, overlap: true, prefetch: 1, persistence: 100, ..copied },
        Settings { allgather_bucket: 0, max_reuse: HUGE, overlap: true, ..base },
        Settings { allgather_partitions: false, persistence: 30, ..base },
        Settings { reduce_scatter: false, reduce_bucket: 7000, overlap: true, ..copied },
        Settings { offload, overlap: true, recompute: Recompute::NormSwiGlu, ..base },
        Settings {
            offload: Offload { updated_by: Some(UpdatedBy::Host), ..offload },
            overlap: true,
            ..copied
        },
    ]
}

/// Trains all of them in list order or in one that waits allow, in turns, and with `ZEROTH_FULL=1` in both.
fn assert_all_same(golden: &Golden, mesh: (u64, u64), variants: &[Settings], due: impl Fn(usize) -> bool) {
    let expected = golden.train(&setup(mesh, variants[0]));
    for (at, settings) in variants.iter().enumerate().filter(|(at, _)| is_full() || due(*at)) {
        let is_chaos_due = (at + usize::from(settings.stage)).is_multiple_of(2);
        let plain = setup(mesh, *settings);
        if is_full() || !is_chaos_due {
            // As GPUs reduce, and as CPUs do.
            let plain = Setup { exchanges: at % 3 == 1 && settings.gather != Some(Gather::View), ..plain };
            assert_same(&expected, &golden.train(&plain), &format!("{} {plain:?}", golden.name));
        }
        if is_full() || is_chaos_due {
            let chaos = Setup { chaos: Some(4000 + at as u64), ..plain };
            assert_same(&expected, &golden.train(&chaos), &format!("{} {chaos:?}", golden.name));
        }
    }
}

/// Every stage of a model on a mesh; a part of the ways of each, and all of them with `ZEROTH_FULL=1`.
fn assert_model(golden: &Golden, turn: usize, mesh: (u64, u64), types: Types, part: usize) {
    let all: Vec<Settings> = (0..=3).flat_map(|stage| variants(stage, 1, types)).collect();
    assert_all_same(golden, mesh, &all, |at| (at + turn).is_multiple_of(part));
}

#[test]
fn every_program_of_a_dense_model_gives_the_same_bits() {
    let cases = [("qwen3-tied", BF16), ("llama-biases-tied", F32), ("mistral-window", BF16)];
    for (turn, ((name, types), mesh)) in cases.into_iter().zip(MESHES).enumerate() {
        let meshes = if is_full() { MESHES.to_vec() } else { vec![mesh] };
        for mesh in meshes {
            assert_model(&Golden::named(name), turn, mesh, types, 2);
        }
    }
}

#[test]
fn every_program_of_other_models_gives_the_same_bits() {
    let named = |name: &str| Golden::named(name);
    let models = [
        (named("moe/qwen3-moe-normalized"), BF16),
        (named("t5/t5-v1_1"), F32),
        (Golden::lora("qwen3-tied-all", 0.0), BF16),
        (Golden::distilled(&distillations()[0]), F32),
    ];
    for (turn, (golden, types)) in models.iter().enumerate() {
        let meshes = if is_full() { MESHES.to_vec() } else { vec![MESHES[turn % 3]] };
        for mesh in meshes {
            assert_model(golden, turn, mesh, *types, 5);
        }
    }
}

#[test]
fn with_accumulation_stages_agree_in_pairs_and_with_hpz_alone() {
    let golden = Golden::named("llama-one-kv-head");
    for (turn, (stages, mesh)) in
        [([0, 1], (2, 2)), ([2, 3], (2, 2)), ([2, 3], (3, 2))].into_iter().enumerate()
    {
        let accumulation = if mesh == (2, 2) { 4 } else { 2 };
        let all: Vec<Settings> =
            stages.into_iter().flat_map(|stage| variants(stage, accumulation, BF16)).collect();
        assert_all_same(&golden, mesh, &all, |at| (at + turn).is_multiple_of(3));
        let hpz = hpz_variants(Settings { accumulation, types: BF16, ..at_stage(3) });
        assert_all_same(&golden, mesh, &hpz, |at| at.is_multiple_of(2));
    }
}

#[test]
fn another_mesh_is_another_training_and_near() {
    let golden = Golden::named("qwen3-tied");
    let train = |group: u64| -> Outcome {
        let settings = Settings { group: Some(group), types: F32, ..at_stage(3) };
        golden.train(&Setup { ranks: 6, micro_batch: 2, steps: 3, settings, ..Setup::default() })
    };
    let [flat, by_two, by_three, one_each] = [6, 2, 3, 1].map(train);
    assert_same(&flat, &one_each, "groups of one rank add up in rank order");
    for mesh in [&by_two, &by_three] {
        let pairs = || flat.gradients.iter().flatten().zip(mesh.gradients.iter().flatten());
        assert!(pairs().any(|(a, b)| a.to_bits() != b.to_bits()), "sums of other numbers round otherwise");
        let square =
            |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
        let apart = square(&mut pairs().map(|(a, b)| a - b)) / square(&mut pairs().map(|(a, _)| *a));
        assert!(apart.sqrt() < 1e-6, "{}", apart.sqrt());
    }
}

#[test]
fn parameters_are_read_in_place_within_groups() {
    let golden = Golden::named("qwen3-tied");
    let settings = Settings { hpz: true, types: BF16, gather: Some(Gather::View), ..at_stage(3) };
    let setup = setup((2, 2), settings);
    let compiled = golden.compile(&setup);
    let (_, mapped) = compiled.memory.views;
    assert_eq!(mapped, compiled.program.layout.flats.iter().map(zeroth_program::Flat::bytes).sum::<u64>());
    let instructions = compiled.program.sections.iter().flat_map(|section| &section.instructions);
    let gathers = instructions.filter(|one| matches!(one.action, Action::AllGather(_, Axis::Rail)));
    assert_eq!(gathers.count(), 0, "parameters cross no rail before the update");
    on_ranks(setup.world(), &|comm| {
        let engine = golden.engine(&compiled, 1, comm);
        assert_eq!(engine.transport_note(), None, "windows of the group are open");
    });
}

#[test]
fn a_rank_that_joined_another_mesh_is_refused() {
    let golden = Golden::named("qwen3-tied");
    let compiled = golden.compile(&setup((2, 2), ROOMY));
    let one_group = Setup { ranks: 4, ..Setup::default() }.world();
    on_ranks(one_group, &|comm| {
        let device = Box::new(zeroth_cpu::CpuDevice::new(1, compiled.memory.arenas()).unwrap());
        let (recipe, decayed) = (golden.recipe(), &|_| true);
        let rank = zeroth_engine::RankSetup { comm, device, recipe, decayed, seed: 0 };
        let refused = zeroth_engine::Engine::new(&compiled, rank).err().unwrap();
        assert!(matches!(refused, RunError::Mesh { ranks: 4, group: 4, .. }), "{refused}");
        assert!(refused.to_string().contains("compiled for 4 in groups of 2"), "{refused}");
    });
}
