//! Meshes of groups and rails: positions, shards, and the bytes that cross between hosts.

use proptest::prelude::*;
use zeroth_base::{Axis, DType};
use zeroth_graph::Graph;
use zeroth_program::{BLOCK, Layout, Program, ProgramError, Settings, World, compile};

use crate::file_check::file_check;
use crate::layout::graph;
use crate::memory::{self, MIDDLE, SETTINGS, model};

/// Any mesh, and the units of a model: (elements, trained).
fn meshes() -> impl Strategy<Value = World> {
    (1u64..6, 1u64..6).prop_map(|(groups, group)| World { ranks: groups * group, group })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_places_shards_are_one_range_and_all_shards_are_the_flat(
        units in prop::collection::vec(prop::collection::vec((1u64..90_000, any::<bool>()), 0..5), 0..4),
        world in meshes(),
        persistence in 0u64..4000,
        bucket in 0u64..100_000,
    ) {
        let graph: Graph = graph(&units);
        let layout = Layout::new(&graph, world, persistence, u64::MAX, DType::F32);
        let World { ranks, group } = world;
        let groups = world.groups();
        // Positions are a permutation of the ranks.
        let mut positions: Vec<u64> = (0..ranks).map(|rank| world.position(rank)).collect();
        positions.sort_unstable();
        prop_assert_eq!(positions, (0..ranks).collect::<Vec<_>>());
        for (index, flat) in layout.flats.iter().enumerate() {
            let mut end = 0;
            for place in 0..group {
                let whole = flat.group_shard(place, world);
                prop_assert_eq!(whole.start, end);
                prop_assert!(whole.end - whole.start <= flat.group_shard_capacity(world));
                prop_assert_eq!(flat.extent(Axis::Group, 0, place, world), whole.clone());
                for number in 0..groups {
                    let rank = number * group + place;
                    let shard = layout.shard(index, rank);
                    prop_assert_eq!(shard.start, end, "rank {}", rank);
                    prop_assert_eq!(shard.start % BLOCK, 0);
                    prop_assert_eq!(flat.extent(Axis::Rail, place, number, world), shard.clone());
                    prop_assert_eq!(layout.group_shard(index, rank), whole.clone());
                    end = shard.end;
                }
                prop_assert_eq!(whole.end, end);
            }
            prop_assert_eq!(end, flat.padded());
            // Chunks of a gather cover what the ranks along its axis have.
            for axis in Axis::ALL {
                let held = match axis {
                    Axis::Group => flat.group_shard_capacity(world),
                    Axis::Rail => flat.shard_capacity(ranks),
                };
                let mut end = 0;
                for chunk in flat.gather_chunks(axis, world, bucket) {
                    prop_assert_eq!(chunk.start, end);
                    let moved = (chunk.end - chunk.start) * world.along(axis);
                    prop_assert!(moved <= bucket.max(BLOCK * world.along(axis)));
                    end = chunk.end;
                }
                prop_assert_eq!(end, held);
            }
        }
    }

    #[test]
    fn one_group_and_groups_of_one_rank_shard_alike(ranks in 1u64..9) {
        let graph = graph(&[vec![(70_000, true), (2500, false)], vec![(5000, true)]]);
        let layouts = [ranks, 1].map(|group| Layout::new(&graph, World { ranks, group }, 0, 0, DType::F32));
        for (flat, rank) in (0..layouts[0].flats.len()).flat_map(|flat| (0..ranks).map(move |rank| (flat, rank))) {
            prop_assert_eq!(layouts[0].shard(flat, rank), layouts[1].shard(flat, rank));
        }
    }
}

#[test]
fn groups_that_are_no_groups_are_refused() {
    let (graph, backward) = model([64, 64, 1, 1, 64, 1, 64], 8);
    for group in [0, 4, 12] {
        let world = World { ranks: 6, group };
        let refused = compile(&graph, &backward, world, &SETTINGS).unwrap_err();
        assert_eq!(refused, ProgramError::Groups(world));
        assert!(refused.to_string().contains(&format!("6 ranks cannot be groups of {group}")), "{refused}");
    }
}

/// A model without a vocabulary to speak of: all of its units are blocks, which are gathered twice.
const BLOCKS: [u64; 7] = [8192, 28_672, 64, 8, 128, 4, 64];

/// Bytes into a host of `per_host` ranks in one step, in units of 2 bytes a parameter.
fn into_host(sizes: [u64; 7], ranks: u64, per_host: u64, settings: Settings) -> f64 {
    let (graph, backward) = model(sizes, 8);
    let program: Program = compile(&graph, &backward, settings.world(ranks), &settings).unwrap();
    let psi = 2 * memory::elements(&graph);
    program.bytes_between_hosts_per_step(per_host) as f64 / psi as f64
}

#[test]
fn bytes_between_hosts_are_those_of_the_table() {
    let near = |found: f64, expected: f64| (found / expected - 1.0).abs() < 0.03;
    // (hosts of 8 ranks, flat reduction, two levels, ZeRO-3 on the mesh, with hpZ)
    for (hosts, flat, two_levels, each, hpz) in
        [(2, 4.0, 1.0, 2.0, 1.5), (16, 7.5, 1.875, 3.75, 2.8125), (128, 7.9375, 1.984, 3.969, 2.977)]
    {
        let (ranks, group) = (8 * hosts, Some(8));
        let of = |settings| into_host(BLOCKS, ranks, 8, settings);
        // Stage 2 reduces every micro-batch and gathers once a step: one more is one more reduction.
        let reduction = |group| {
            let of = |accumulation| of(Settings { stage: 2, group, accumulation, ..SETTINGS });
            of(3) - of(2)
        };
        for (what, found, expected) in [
            ("flat", reduction(None), flat),
            ("rails only", reduction(Some(1)), flat),
            ("two levels", reduction(group), two_levels),
            ("stage 3", of(Settings { group, ..SETTINGS }), each),
            ("stage 3, three micro-batches", of(Settings { group, accumulation: 3, ..SETTINGS }), 3.0 * each),
            ("hpZ", of(Settings { group, hpz: true, ..SETTINGS }), hpz),
            // Gradients have waited in fp32, as partial sums are.
            ("hpZ, three micro-batches", of(Settings { group, hpz: true, accumulation: 3, ..SETTINGS }), hpz),
        ] {
            assert!(near(found, expected), "{hosts} hosts, {what}: {found} and not {expected}");
        }
    }
}

#[test]
fn a_reduction_of_two_hosts_of_four_moves_twice_or_once_its_parameters() {
    // As counted on the interfaces of two hosts: 16.0 and 8.0 MB for 8 MB of parameters.
    let of = |group: Option<u64>, accumulation: u64| {
        into_host(MIDDLE, 8, 4, Settings { stage: 2, group, accumulation, ..SETTINGS })
    };
    for (group, expected) in [(None, 2.0), (Some(1), 2.0), (Some(4), 1.0), (Some(2), 2.0)] {
        let found = of(group, 3) - of(group, 2);
        assert!((found / expected - 1.0).abs() < 0.01, "{group:?}: {found} and not {expected}");
    }
}

#[test]
fn bytes_along_both_axes_are_all_bytes() {
    let (graph, backward) = model(MIDDLE, 8);
    for stage in 0..=3 {
        for (group, hpz) in [(None, false), (Some(2), false), (Some(2), stage == 3), (Some(1), false)] {
            let settings = Settings { stage, group, hpz, ..SETTINGS };
            let program = compile(&graph, &backward, settings.world(6), &settings).unwrap();
            let [in_group, rail] = Axis::ALL.map(|axis| program.bytes_sent_per_step_along(axis));
            assert_eq!(in_group + rail, program.bytes_sent_per_step());
            assert_eq!((in_group > 0, rail > 0), (group != Some(1), group.is_some()), "{settings:?}");
            // Of equal shards every rank of a host receives what rank 0 sends along its rail.
            if group == Some(2) {
                let into = program.bytes_between_hosts_per_step(2) as f64;
                assert!((into / (2 * rail) as f64 - 1.0).abs() < 0.01, "{settings:?}: {into} {rail}");
            }
        }
    }
}

/// The lines of the dump of a small model on two groups of two ranks.
fn dump(settings: &Settings) -> String {
    crate::dumps::compiled_for(World { ranks: 4, group: 2 }, settings, crate::dumps::CUDA, 1).to_string()
}

#[test]
fn a_gather_runs_along_the_rail_and_then_in_the_group() {
    file_check(
        &dump(&crate::dumps::SETTINGS),
        "
        CHECK: program: stage 3, ranks 4 in groups of 2,
        CHECK: section only:
        CHECK: = all_gather flat0 along(rail) reads(weights0) writes(gathered0.0) [comm]
        NEXT: = all_gather flat0 along(group) writes(gathered0.0) [comm]
        NEXT: = forward embedding
        CHECK: = all_to_all flat1{{*}} along(group) reads(comm_grad1) writes(recv_chunk
        CHECK: = sum_ranks flat1{{*}} along(group) reads(recv_chunk{{*}} writes(partial_sums
        CHECK: = all_to_all flat1{{*}} along(rail) reads(partial_sums{{*}} writes(recv_chunk
        CHECK: = sum_ranks flat1{{*}} along(rail) reads(recv_chunk{{*}} writes(reduced_grad1)
        CHECK: section update:
        CHECK: = all_gather_reports along(group) reads(report) writes(reports)
        NEXT: = all_gather_reports along(rail) writes(reports)
        NOT: = all_gather flat
        ",
    );
}

#[test]
fn with_hpz_parameters_cross_the_rail_after_the_update_and_gradients_in_the_last_micro_batch() {
    let settings = Settings { hpz: true, accumulation: 3, ..crate::dumps::SETTINGS };
    file_check(
        &dump(&settings),
        "
        CHECK: section first:
        NOT: along(rail)
        CHECK: = sum_ranks flat1{{*}} along(group) reads(recv_chunk{{*}} writes(partial_grad1)
        NOT: along(rail)
        CHECK: section last:
        CHECK: = all_gather flat0 along(group) reads(weights0) writes(gathered0.0) [comm]
        CHECK: = sum_ranks flat1{{*}} along(group) reads(recv_chunk{{*}} writes(partial_grad1)
        CHECK: = all_to_all flat1{{*}} along(rail) reads(partial_grad1) writes(recv_chunk
        CHECK: = sum_ranks flat1{{*}} along(rail) reads(recv_chunk{{*}} writes(reduced_grad1)
        CHECK: section update:
        CHECK: = update flat0
        CHECK: = all_gather_weights flat0{{*}} along(rail) writes(weights0)
        NOT: = all_gather_weights flat0{{*}} along(group)
        ",
    );
}
