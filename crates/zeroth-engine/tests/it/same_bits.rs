//! Passes move work and do not change arithmetic: every program of a model trains to the same bits, in list order and in
//! any order that its waits allow.

use zeroth_base::DType;
use zeroth_kernel::{Optimizer, Recipe, Tier};
use zeroth_program::{Gather, Offload, Recompute, Settings, StateStream, Types, UpdatedBy};

use crate::job::{BF16, F32, Golden, Outcome, ROOMY, Setup, is_full};

const STEPS: usize = 3;

/// Programs of one model on `ranks` ranks that must agree: every stage, and every key that moves work.
fn programs(ranks: u64, accumulation: u64, micro_batch: u64, stages: &[u8], types: Types) -> Vec<Setup> {
    let huge = u64::MAX / 4;
    let mut all = Vec::new();
    for stage in stages {
        let base = Settings { stage: *stage, accumulation, types, ..ROOMY };
        // (reduce bucket, max_live, max_reuse, prefetch, overlap, persistence, threads)
        for (reduce_bucket, max_live, max_reuse, prefetch, overlap, persistence, threads) in [
            (huge, huge, 0, 0, false, 0, 1),
            (0, huge, 0, 0, false, 0, 2),
            (5000, huge, 0, 0, true, 0, 1),
            (huge, huge, 0, huge, true, 0, 3),
            (6000, 0, 0, 1, true, 30, 1),
            (0, 4000, 3000, huge, true, 100, 2),
            (20_000, 8000, huge, 5000, true, 700, 1),
            (huge, huge, huge, huge, true, 1_000_000, 1),
        ] {
            let settings =
                Settings { persistence, reduce_bucket, max_live, max_reuse, prefetch, overlap, ..base };
            let setup = Setup { steps: STEPS, ranks, micro_batch, threads, settings, ..Setup::default() };
            all.push(setup);
            // By default shards are read in place; chaos, whose guards forbid that, gathers copies in any case.
            if *stage == 3 && ranks > 1 {
                let settings = Settings { gather: Some(Gather::Copy), ..settings };
                all.push(Setup { settings, ..setup });
            }
        }
    }
    all
}

pub(crate) fn assert_same(expected: &Outcome, found: &Outcome, what: &str) {
    let bits = |weights: &[Vec<f32>]| weights.iter().flatten().map(|w| w.to_bits()).collect::<Vec<_>>();
    for (a, b) in expected.records.iter().zip(&found.records) {
        assert_eq!(a.loss.to_bits(), b.loss.to_bits(), "{what}: loss {} {}", a.loss, b.loss);
        assert_eq!(a.norm.to_bits(), b.norm.to_bits(), "{what}: norm {} {}", a.norm, b.norm);
    }
    assert!(found.records.iter().all(|record| record.apply == 1), "{what}");
    assert!(bits(&expected.gradients) == bits(&found.gradients), "{what}: gradients differ");
    assert!(bits(&expected.weights) == bits(&found.weights), "{what}: weights differ");
}

/// In list order, and in an order that the waits allow: programs take turns, of each stage others, and with `ZEROTH_FULL=1` do both.
fn assert_all_same(golden: &Golden, setups: &[Setup]) {
    let expected = golden.train(&setups[0]);
    for (at, setup) in setups.iter().enumerate() {
        let is_chaos_due = (at + usize::from(setup.settings.stage)).is_multiple_of(2);
        if is_full() || !is_chaos_due {
            assert_same(&expected, &golden.train(setup), &format!("{} {setup:?}", golden.name));
        }
        if is_full() || is_chaos_due {
            let chaos = Setup { chaos: Some(1000 + at as u64), ..*setup };
            assert_same(&expected, &golden.train(&chaos), &format!("{} {chaos:?}", golden.name));
        }
    }
}

#[test]
fn no_key_that_moves_work_changes_a_bit_without_accumulation() {
    for (name, types) in [("qwen3-tied", BF16), ("llama-biases-tied", F32)] {
        let setups = programs(3, 1, 4, &[0, 1, 2, 3], types);
        assert!(setups.len() >= 30);
        assert_all_same(&Golden::named(name), &setups);
    }
}

#[test]
fn every_stage_gives_the_same_bits_on_one_rank() {
    for (name, types) in [("mistral-window", BF16), ("qwen3-biases-yarn", F32)] {
        assert_all_same(&Golden::named(name), &programs(1, 1, 4, &[0, 3], types));
    }
}

fn assert_stages_agree_with_accumulation(stages: [u8; 2], types: Types) {
    assert_all_same(&Golden::named("llama-one-kv-head"), &programs(2, 4, 2, &stages, types));
}

#[test]
fn with_accumulation_stages_0_and_1_agree_in_bf16() {
    assert_stages_agree_with_accumulation([0, 1], BF16);
}

#[test]
fn with_accumulation_stages_2_and_3_agree_in_bf16() {
    assert_stages_agree_with_accumulation([2, 3], BF16);
}

#[test]
fn with_accumulation_stages_0_and_1_agree_in_fp32() {
    assert_stages_agree_with_accumulation([0, 1], F32);
}

#[test]
fn with_accumulation_stages_2_and_3_agree_in_fp32() {
    assert_stages_agree_with_accumulation([2, 3], F32);
}

#[test]
fn sums_in_16_bits_are_the_same_in_every_program_that_keeps_shards_and_near_those_in_32() {
    let golden = Golden::named("qwen3-tied");
    for (ranks, accumulation, micro_batch) in [(3, 1, 4), (2, 4, 2), (1, 4, 4)] {
        let mut setups = programs(ranks, accumulation, micro_batch, &[2, 3], BF16);
        let away = |stage, offload| Settings { stage, accumulation, offload, ..setups[0].settings };
        let beside = [(2, OFFLOAD[0]), (3, OFFLOAD[2]), (3, OFFLOAD[4]), (3, OFFLOAD[6])]
            .map(|(stage, offload)| Setup { settings: away(stage, offload), ..setups[0] });
        setups.extend(beside);
        let wide = golden.train(&setups[0]);
        for setup in &mut setups {
            setup.settings.grad_accum_dtype = DType::Bf16;
        }
        assert_all_same(&golden, &setups);
        let narrow = golden.train(&setups[0]);
        let gradients = |outcome: &Outcome| outcome.gradients.concat();
        let (wide, narrow) = (gradients(&wide), gradients(&narrow));
        let length =
            |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
        let apart =
            length(&mut wide.iter().zip(&narrow).map(|(a, b)| a - b)) / length(&mut wide.iter().copied());
        assert!(apart > 0.0 && apart.sqrt() < 1e-2, "{ranks} ranks, {accumulation}: {}", apart.sqrt());
        assert!(narrow.iter().all(|value| value.to_bits().trailing_zeros() >= 16), "they are rounded");
    }
}

/// Every way to compute again, and to park what is kept.
const RECOMPUTE: [Recompute; 8] = [
    Recompute::NormSwiGlu,
    Recompute::Attention,
    Recompute::Block { blocks: None, checkpoints: None, offloaded: false },
    Recompute::Block { blocks: None, checkpoints: None, offloaded: true },
    Recompute::Block { blocks: None, checkpoints: Some(1), offloaded: false },
    Recompute::Block { blocks: None, checkpoints: Some(2), offloaded: true },
    Recompute::Block { blocks: Some(1), checkpoints: None, offloaded: false },
    Recompute::Block { blocks: Some(2), checkpoints: Some(1), offloaded: true },
];

#[test]
fn recomputation_gives_the_same_bits() {
    // qwen2-yarn-tied has three blocks: two checkpoints make runs of two and one.
    for (name, types, ranks, micro_batch) in
        [("qwen2-yarn-tied", BF16, 2, 2), ("qwen3-biases-yarn", F32, 1, 4), ("llama-biases-tied", BF16, 1, 4)]
    {
        let mut setups = vec![];
        for stage in [0, 3] {
            let base = Settings { stage, types, ..ROOMY };
            let setup = |settings| Setup { steps: STEPS, ranks, micro_batch, settings, ..Setup::default() };
            setups.push(setup(base));
            setups.extend(
                RECOMPUTE.map(|recompute| setup(Settings { recompute, overlap: true, prefetch: 1, ..base })),
            );
        }
        assert_all_same(&Golden::named(name), &setups);
    }
}

/// Everything, or a part, in host memory: (optimizer's share, parameters' elements, tile, tiles, piece, pieces, pageable).
const OFFLOAD: [Offload; 13] = [
    Offload { optimizer: Some(1.0), ..Offload::NOTHING },
    Offload { parameters: Some(u64::MAX), ..Offload::NOTHING },
    Offload { optimizer: Some(1.0), parameters: Some(u64::MAX), ..Offload::NOTHING },
    Offload {
        optimizer: Some(0.5),
        parameters: Some(9000),
        sub_group_size: 2048,
        sub_group_buffers: 3,
        ..Offload::NOTHING
    },
    Offload {
        optimizer: Some(1.0),
        parameters: Some(u64::MAX),
        sub_group_size: 1,
        sub_group_buffers: 2,
        param_buffer_size: 1,
        param_buffers: 2,
        pageable: true,
        updated_by: None,
        update_window: None,
        stream: None,
    },
    Offload { sub_group_size: 4096, param_buffer_size: 1, ..Offload::NOTHING },
    // States that pass through the device: gradients here or there, with and without memory of their own.
    Offload { optimizer: Some(1.0), stream: Some(stream(0, Tier::Host)), ..Offload::NOTHING },
    Offload {
        optimizer: Some(1.0),
        stream: Some(stream(40_000, Tier::Device)),
        sub_group_size: 2048,
        ..Offload::NOTHING
    },
    Offload {
        optimizer: Some(1.0),
        parameters: Some(u64::MAX),
        stream: Some(stream(0, Tier::Device)),
        sub_group_size: 2048,
        sub_group_buffers: 3,
        ..Offload::NOTHING
    },
    Offload {
        optimizer: Some(0.5),
        parameters: Some(9000),
        stream: Some(stream(0, Tier::Host)),
        sub_group_size: 4096,
        sub_group_buffers: 2,
        ..Offload::NOTHING
    },
    Offload {
        optimizer: Some(1.0),
        parameters: Some(u64::MAX),
        stream: Some(stream(1 << 20, Tier::Host)),
        sub_group_size: 2048,
        param_buffer_size: 4096,
        ..Offload::NOTHING
    },
    // Updated in host memory, beside the next forward.
    Offload {
        optimizer: Some(1.0),
        updated_by: Some(UpdatedBy::Host),
        sub_group_size: 2048,
        sub_group_buffers: 3,
        ..Offload::NOTHING
    },
    Offload {
        optimizer: Some(1.0),
        parameters: Some(9000),
        updated_by: Some(UpdatedBy::Host),
        sub_group_size: 4096,
        ..Offload::NOTHING
    },
];

const fn stream(window: u64, gradients: Tier) -> StateStream {
    StateStream { window, gradients }
}

/// Every place of states beside none, at each of `stages`: (model, types, ranks, accumulation, micro batch).
fn assert_places_agree(cases: &[(&str, Types, u64, u64, u64)], stages: &[u8]) {
    for &(name, types, ranks, accumulation, micro_batch) in cases {
        let mut setups = vec![];
        for stage in stages {
            let base = Settings { stage: *stage, accumulation, types, ..ROOMY };
            let setup = |settings| Setup { steps: STEPS, ranks, micro_batch, settings, ..Setup::default() };
            setups.push(setup(base));
            for (offload, overlap) in OFFLOAD.into_iter().zip([false, true].into_iter().cycle()) {
                let (recompute, prefetch) = if overlap {
                    (Recompute::Block { blocks: None, checkpoints: None, offloaded: true }, 1)
                } else {
                    (Recompute::Nothing, 0)
                };
                let settings = Settings { offload, overlap, recompute, prefetch, persistence: 30, ..base };
                setups.push(setup(settings));
            }
        }
        assert_all_same(&Golden::named(name), &setups);
    }
}

// One test for each few programs: together they would be the longest of all, and a busy machine would take them for hung.

#[test]
fn where_states_live_does_not_change_a_bit_of_three_ranks() {
    assert_places_agree(&[("qwen3-tied", BF16, 3, 1, 4)], &[0, 1, 2, 3]);
}

#[test]
fn where_states_live_does_not_change_a_bit_of_two_ranks() {
    assert_places_agree(&[("llama-one-kv-head", F32, 2, 1, 2)], &[0, 1, 2, 3]);
}

#[test]
fn where_states_live_does_not_change_a_bit_of_one_rank() {
    let cases = [("mistral-window", BF16, 1, 1, 4), ("qwen3-biases-yarn", F32, 1, 1, 4)];
    assert_places_agree(&cases, &[0, 1, 2, 3]);
}

#[test]
fn where_states_live_does_not_change_a_bit_of_accumulated_gradients() {
    let cases = [("llama-dynamic", BF16, 2, 4, 2), ("llama-one-kv-head", F32, 1, 4, 1)];
    assert_places_agree(&cases, &[0, 1]);
    assert_places_agree(&cases, &[2, 3]);
}

#[test]
fn parameters_read_in_place_and_copied_have_the_same_bits() {
    for (name, types, ranks, accumulation, micro_batch) in
        [("qwen3-tied", BF16, 3, 1, 4), ("llama-one-kv-head", F32, 2, 1, 2), ("llama-dynamic", BF16, 2, 4, 2)]
    {
        let golden = Golden::named(name);
        for (persistence, parameters) in [(0, None), (30, None), (0, Some(9000))] {
            let offload = Offload { parameters, ..Offload::NOTHING };
            let base = Settings { stage: 3, accumulation, types, persistence, offload, ..ROOMY };
            let setup = |gather| {
                let settings = Settings { gather: Some(gather), ..base };
                Setup { ranks, micro_batch, settings, ..Setup::default() }
            };
            let [view, copy] = [Gather::View, Gather::Copy].map(setup);
            let [maps, none] = [&view, &copy].map(|setup| golden.compile(setup).memory.views.1);
            assert!(maps > 0 && none == 0, "{name}: one of them maps shards, {maps} {none}");
            assert_same(&golden.train(&view), &golden.train(&copy), &format!("{name} {base:?}"));
        }
    }
}

#[test]
fn how_shards_travel_does_not_change_a_bit() {
    for (name, types) in [("qwen3-tied", BF16), ("mistral-no-window-tied", F32)] {
        let mut setups = vec![];
        for stage in [0, 1, 2, 3] {
            let base = Settings { stage, types, persistence: 100, ..ROOMY };
            let variants = [
                base,
                Settings { reduce_scatter: false, reduce_bucket: 7000, ..base },
                Settings { reduce_scatter: false, overlap: true, ..base },
                Settings { allgather_bucket: 0, overlap: true, ..base },
                Settings { allgather_partitions: false, ..base },
                Settings { memory_efficient_linear: false, gather: Some(Gather::Copy), ..base },
            ];
            setups.extend(variants.map(|settings| Setup {
                steps: STEPS,
                ranks: 3,
                micro_batch: 4,
                settings,
                ..Setup::default()
            }));
        }
        assert_all_same(&Golden::named(name), &setups);
    }
}

#[test]
fn what_lands_rounded_has_the_bits_of_what_is_rounded_later() {
    // A product rounds to its own type only, so with these all lands in f32 first.
    let mixed = Types { compute: DType::F32, communication: DType::Bf16 };
    for (name, types) in [("qwen3-tied", BF16), ("qwen3-biases-yarn", F32), ("llama-biases-tied", mixed)] {
        for (stages, accumulation) in [(&[0u8, 1, 2, 3][..], 1), (&[0, 1], 2), (&[2, 3], 2)] {
            let mut setups = vec![];
            for (stage, reduce_bucket, exchanges) in stages.iter().flat_map(|stage| {
                let sizes = [(u64::MAX / 4, false), (u64::MAX / 4, true), (5000, true), (5000, false)];
                sizes.map(|(bucket, exchanges)| (*stage, bucket, exchanges))
            }) {
                let settings = Settings { stage, types, accumulation, reduce_bucket, overlap: true, ..ROOMY };
                let (ranks, micro_batch) = (3, 4 / accumulation);
                setups.push(Setup {
                    steps: STEPS,
                    ranks,
                    micro_batch,
                    settings,
                    exchanges,
                    ..Setup::default()
                });
            }
            let golden = Golden::named(name);
            let expected = golden.train(&setups[0]);
            for setup in &setups {
                assert_same(&expected, &golden.train(setup), &format!("{name} {setup:?}"));
            }
        }
    }
}

/// Every key that moves work, and some together, on top of a stage.
fn variants(base: Settings) -> Vec<Settings> {
    let huge = u64::MAX / 4;
    // Bounds of gathers count where parameters are gathered by copy; else shards are read in place.
    let copy = Settings { gather: Some(Gather::Copy), ..base };
    let mut all = vec![
        base,
        copy,
        Settings { reduce_bucket: 0, ..base },
        Settings { reduce_bucket: 5000, overlap: true, ..base },
        Settings { prefetch: huge, overlap: true, ..copy },
        Settings { prefetch: 1, overlap: true, persistence: 30, ..base },
        Settings { prefetch: 1, overlap: true, persistence: 30, ..copy },
        Settings { persistence: 1_000_000, ..base },
        Settings { max_reuse: huge, ..copy },
        Settings { max_live: 0, max_reuse: 3000, ..copy },
        Settings { reduce_scatter: false, ..base },
        Settings { allgather_bucket: 0, overlap: true, ..base },
        Settings { allgather_partitions: false, ..base },
        Settings { memory_efficient_linear: false, ..copy },
    ];
    all.extend(RECOMPUTE.map(|recompute| Settings { recompute, ..base }));
    all.extend(OFFLOAD.map(|offload| Settings { offload, overlap: true, prefetch: 1, ..base }));
    all
}

/// Twenty steps of every second variant of `stage` from `first` on, of the next stage the others, beside those of stage `beside`'s
/// plain program; every variant with `ZEROTH_FULL=1`.
fn assert_twenty_steps_agree(beside: u8, stage: u8, accumulation: u64, first: usize) {
    let golden = Golden::named("qwen2-yarn-tied");
    let base = |stage| Settings { stage, accumulation, types: BF16, ..ROOMY };
    let setup = |threads, settings| Setup { ranks: 2, micro_batch: 2, threads, settings, ..Setup::default() };
    let expected = golden.train(&setup(1, base(beside)));
    assert_eq!(expected.records.len(), 20);
    let is_due = |place: usize| is_full() || (place + usize::from(stage)).is_multiple_of(2);
    let variants = variants(base(stage)).into_iter().enumerate().skip(first);
    for (place, settings) in variants.filter(|(place, _)| is_due(*place)) {
        let setup = setup(1 + place % 2, settings);
        assert_same(&expected, &golden.train(&setup), &format!("{setup:?}"));
    }
}

// Fifty programs of twenty steps, a hundred with `ZEROTH_FULL=1`, in tests of a few seconds each.

#[test]
fn twenty_bf16_steps_have_the_same_bits_in_every_program_of_stage_0() {
    let count = variants(ROOMY).len();
    assert!(4 * count + 4 * (count - 17) >= 100, "{count} variants are fewer than a hundred programs");
    assert_twenty_steps_agree(0, 0, 1, 0);
}

#[test]
fn twenty_bf16_steps_have_the_same_bits_in_every_program_of_stage_1() {
    assert_twenty_steps_agree(0, 1, 1, 0);
}

#[test]
fn twenty_bf16_steps_have_the_same_bits_in_every_program_of_stage_2() {
    assert_twenty_steps_agree(0, 2, 1, 0);
}

#[test]
fn twenty_bf16_steps_have_the_same_bits_in_every_program_of_stage_3() {
    assert_twenty_steps_agree(0, 3, 1, 0);
}

#[test]
fn twenty_bf16_steps_with_accumulation_have_the_same_bits_in_every_program_of_stage_0() {
    assert_twenty_steps_agree(0, 0, 4, 17);
}

#[test]
fn twenty_bf16_steps_with_accumulation_have_the_same_bits_in_every_program_of_stage_1() {
    assert_twenty_steps_agree(0, 1, 4, 17);
}

#[test]
fn twenty_bf16_steps_with_accumulation_have_the_same_bits_in_every_program_of_stage_2() {
    assert_twenty_steps_agree(2, 2, 4, 17);
}

#[test]
fn twenty_bf16_steps_with_accumulation_have_the_same_bits_in_every_program_of_stage_3() {
    assert_twenty_steps_agree(2, 3, 4, 17);
}

#[test]
fn every_optimizer_and_moments_of_16_bits_agree_across_stages_and_places() {
    let golden = Golden::named("llama-one-kv-head");
    let both = Offload {
        optimizer: Some(1.0),
        parameters: Some(u64::MAX),
        sub_group_size: 2048,
        ..Offload::NOTHING
    };
    let mut losses = Vec::new();
    for &optimizer in Optimizer::ALL {
        for (moments, stochastic_rounding) in [(DType::F32, false), (DType::Bf16, false), (DType::Bf16, true)]
        {
            let setups: Vec<Setup> =
                [(0, Offload::NOTHING), (2, Offload::NOTHING), (3, Offload::NOTHING), (3, both)]
                    .into_iter()
                    .map(|(stage, offload)| {
                        let settings = Settings {
                            stage,
                            offload,
                            types: BF16,
                            optimizer,
                            moment_dtype: moments,
                            stochastic_rounding,
                            ..ROOMY
                        };
                        let recipe = Recipe {
                            momentum: 0.9,
                            initial_accumulator: 0.1,
                            t_alpha: 4,
                            t_beta3: 4,
                            ..golden.recipe()
                        };
                        let scaling = Some(recipe);
                        Setup { steps: 6, ranks: 3, micro_batch: 4, settings, scaling, ..Setup::default() }
                    })
                    .collect();
            let expected = golden.train(&setups[0]);
            for setup in &setups[1..] {
                assert_same(&expected, &golden.train(setup), &format!("{setup:?}"));
            }
            losses.push(expected.records[5].loss.to_bits());
        }
    }
    // Each of them is another training.
    losses.sort_unstable();
    losses.dedup();
    assert!(losses.len() >= 16, "{}", losses.len());
}

#[test]
fn bf16_follows_fp32_and_is_not_it() {
    // Weights of 8 bits' precision and moments in f32: losses stay near PyTorch's fp32 ones, and are not equal. Step 4 is ill
    // conditioned: there PyTorch's gradients in bf16 are 5 % from those in f64, and 5 to 16 % if activations are perturbed by a
    // unit of their last place. So one norm of the twenty may be more than 5 % away.
    let golden = Golden::named("qwen2-yarn-tied");
    let setup = |types| Setup { micro_batch: 4, settings: Settings { types, ..ROOMY }, ..Setup::default() };
    let (wide, narrow) = (golden.train(&setup(F32)), golden.train(&setup(BF16)));
    let mut apart = Vec::new();
    for (wide, narrow) in wide.records.iter().zip(&narrow.records) {
        assert!((wide.loss - narrow.loss).abs() < 0.02 * wide.loss, "{} {}", wide.loss, narrow.loss);
        assert_ne!(wide.loss, narrow.loss);
        apart.push((wide.norm - narrow.norm).abs() / wide.norm);
    }
    let mean = apart.iter().sum::<f64>() / apart.len() as f64;
    let far = apart.iter().filter(|apart| **apart >= 0.05).count();
    assert!(mean < 0.02 && far <= 1 && apart.iter().all(|apart| *apart < 0.2), "norms are {apart:.4?} apart");
}

#[test]
fn every_program_of_a_model_with_experts_gives_the_same_bits() {
    for (name, types, ranks, accumulation, micro_batch) in [
        ("moe/qwen3-moe-normalized", BF16, 3, 1, 4),
        ("moe/qwen3-moe-sparse-step", F32, 2, 1, 2),
        ("moe/mixtral-aux-3-layers", BF16, 1, 1, 4),
    ] {
        let huge = u64::MAX / 4;
        let mut setups = vec![];
        for (at, recompute) in RECOMPUTE.into_iter().enumerate() {
            let stage = (at % 4) as u8;
            let base = Settings { stage, accumulation, types, recompute, ..ROOMY };
            let offload = OFFLOAD[usize::from(stage) * 2];
            let setup = |settings| Setup { steps: STEPS, ranks, micro_batch, settings, ..Setup::default() };
            let copied = Settings { gather: Some(Gather::Copy), overlap: true, prefetch: huge, ..base };
            let moved = Settings { offload, max_live: 9000, reduce_bucket: 6000, ..copied };
            // Each stage with and without.
            setups.push(setup(if at / 4 == at % 2 { base } else { moved }));
        }
        assert_all_same(&Golden::named(name), &setups);
    }
}
