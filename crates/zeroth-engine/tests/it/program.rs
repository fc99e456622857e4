//! What passes make keeps the rules, for random models and configs: what is read is there, no more is gathered than
//! allowed, buffers that share memory are apart in time, and any allowed order computes the same bits.

use std::collections::BTreeMap;

use proptest::prelude::*;
use zeroth_comm::JoinOptions;
use zeroth_comm::local::LocalJob;
use zeroth_cpu::CpuDevice;
use zeroth_engine::{Engine, RankSetup};
use zeroth_graph::{Backward, Graph};
use zeroth_kernel::{Queue, Tier};
use zeroth_program::BLOCK;
use zeroth_program::Compiled;
use zeroth_program::{
    Action, BufferId, Gather, LiveRange, Offload, Program, ProgramError, Recompute, SectionMemory, Settings,
    StateStream, Types, UpdatedBy, compile,
};

use crate::job::{BF16, F32, Golden, ROOMY, Setup};

/// Sizes of a small qwen3: (hidden, heads, kv heads, blocks, vocabulary, tied).
type Sizes = (u64, u64, u64, u64, u64, bool);

const SIZES: Sizes = (8, 2, 1, 2, 11, false);

fn model((hidden, heads, kv_heads, blocks, vocab, tied): Sizes) -> Golden {
    Golden::synthetic(&serde_json::json!({
        "model_type": "qwen3", "hidden_size": hidden, "num_hidden_layers": blocks, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 4, "intermediate_size": 2 * hidden, "vocab_size": vocab,
        "tie_word_embeddings": tied, "max_position_embeddings": 64,
    }))
}

fn graph(sizes: Sizes) -> (Graph, Backward) {
    let graph = model(sizes).graph(5);
    let backward = graph.backward().unwrap();
    (graph, backward)
}

#[test]
fn a_stage_that_zero_does_not_have_is_refused() {
    let (graph, backward) = graph(SIZES);
    let settings = Settings { stage: 4, ..ROOMY };
    let refused = compile(&graph, &backward, 2, &settings);
    assert_eq!(refused.unwrap_err(), ProgramError::Stage { stage: 4 });
}

#[test]
fn ranks_that_lay_memory_out_differently_are_refused_with_what_differs() {
    let golden = model((64, 4, 2, 2, 200, false));
    let compiled = [1, 2].map(|threads| golden.compile(&Setup { ranks: 2, threads, ..Setup::default() }));
    let job = LocalJob::create(2, 1 << 16).unwrap();
    let refused = std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            let comm = job.join(rank, &JoinOptions::default()).unwrap();
            let (compiled, golden) = (&compiled[rank], &golden);
            scope.spawn(move || {
                let arenas = compiled.memory.arenas();
                let device = Box::new(CpuDevice::new(1, arenas).unwrap());
                let (recipe, decayed) = (golden.recipe(), &|_| true);
                let rank = RankSetup { comm: Some(comm), device, recipe, decayed, seed: 0 };
                Engine::new(compiled, rank).err().map(|error| error.to_string())
            })
        });
        ranks.map(|rank| rank.join().unwrap())
    });
    for refused in refused {
        let refused = refused.expect("they would read each other's numbers at wrong places");
        for words in ["the scratch of kernels in the ", " bytes on rank 0; ", " bytes on rank 1."] {
            assert!(refused.contains(words), "{words}: {refused}");
        }
    }
}

#[test]
fn the_check_finds_a_missing_gather_and_a_lost_reduction() {
    let (graph, backward) = graph(SIZES);
    let program = compile(&graph, &backward, 2, &ROOMY).unwrap();
    let without = |drop: fn(&Action) -> bool| {
        let mut broken = program.clone();
        let instructions = &mut broken.sections[0].instructions;
        let index = instructions.iter().position(|instruction| drop(&instruction.action)).unwrap();
        instructions.remove(index);
        broken.check(u64::MAX).unwrap_err()
    };
    assert!(matches!(
        without(|action| matches!(action, Action::AllGather(..))),
        ProgramError::NotResident { .. }
    ));
    assert!(matches!(
        without(|action| matches!(action, Action::SumRanks(..))),
        ProgramError::Reduced { times: 0, .. }
    ));
}

/// Parameters of a block that a product gives are written in the communication type; norms add up in f32, each in a block of
/// elements of its own.
#[test]
fn only_what_adds_up_lands_in_f32() {
    for (types, tied, stage) in [(BF16, false, 3), (BF16, true, 2), (BF16, false, 0), (F32, false, 3)] {
        let settings = Settings { stage, types, ..ROOMY };
        let golden = model((8, 2, 1, 2, 11, tied));
        let compiled = golden.compile(&Setup { ranks: 2, settings, ..Setup::default() });
        let flats = &compiled.program.layout.flats;
        let blocks = (0..flats.len())
            .filter(|flat| compiled.flat_name(*flat).starts_with("block"))
            .collect::<Vec<_>>();
        assert_eq!(blocks.len(), 2);
        let size = |id: BufferId| {
            // What the update reads as well is not a section's own.
            let all = compiled.memory.sections[0].buffers.iter();
            let passing = all.filter(|placed| placed.live_range == LiveRange::Section);
            let found = passing.map(|placed| placed.buffer).find(|buffer| buffer.id == id);
            found.map(|buffer| buffer.bytes)
        };
        for flat in blocks {
            // Seven projections; two norms of the width and two of a head.
            assert_eq!(flats[flat].slots.len(), 11);
            let whole = flats[flat].padded();
            assert_eq!(
                size(BufferId::CommGrad(flat)),
                Some(whole * types.communication.bytes()),
                "{types:?}"
            );
            let wide = if types == BF16 && stage > 0 { Some(4 * 4 * BLOCK) } else { None };
            assert_eq!(size(BufferId::Grad(flat)), wide, "{types:?}, stage {stage}");
        }
        let instructions = &compiled.program.sections[0].instructions;
        let rests = instructions.iter().filter(|i| matches!(i.action, Action::CastGrad(_))).count();
        // Two blocks, the last norm, and the embedding; what is the head's as well, it rounds with the head.
        assert_eq!(rests, if tied { 3 } else { 4 }, "{types:?}, stage {stage}");
        let none = |action: fn(&Action) -> bool| !instructions.iter().any(|i| action(&i.action));
        assert!(none(|action| matches!(
            action,
            Action::CastAndPackGrad(_) | Action::PackGrad(_) | Action::KeepGrad(_)
        )));
    }
}

/// For each instruction and queue, how many of the queue's instructions are certainly done before it begins.
fn certain(program: &Program, section: usize, memory: &SectionMemory) -> Vec<BTreeMap<Queue, usize>> {
    let instructions = &program.sections[section].instructions;
    let mut clocks: Vec<BTreeMap<Queue, usize>> = Vec::new();
    let mut last: BTreeMap<Queue, usize> = BTreeMap::new();
    for (at, instruction) in instructions.iter().enumerate() {
        let mut clock: BTreeMap<Queue, usize> = BTreeMap::new();
        let earlier = memory.waits[at].iter().copied().chain(last.get(&instruction.queue).copied());
        for earlier in earlier {
            assert!(earlier < at, "a wait looks back");
            for (queue, done) in &clocks[earlier] {
                let known = clock.entry(*queue).or_default();
                *known = (*known).max(*done);
            }
            let known = clock.entry(instructions[earlier].queue).or_default();
            *known = (*known).max(earlier + 1);
        }
        last.insert(instruction.queue, at);
        clocks.push(clock);
    }
    clocks
}

/// Buffers that share memory are apart in time, by what is certain and not by the list.
fn assert_apart(compiled: &Compiled) {
    for (section, memory) in compiled.memory.sections.iter().enumerate() {
        let instructions = &compiled.program.sections[section].instructions;
        let clocks = certain(&compiled.program, section, memory);
        let before = |a: usize, b: usize| clocks[b].get(&instructions[a].queue).is_some_and(|done| *done > a);
        for (index, a) in memory.buffers.iter().enumerate() {
            assert_eq!(a.at % 256, 0);
            if a.live_range == LiveRange::Mapped {
                // Addresses behind the arena, and of a flat the same ones always.
                let (views, bytes) = compiled.memory.views;
                assert!(compiled.memory.arena(Tier::Device) <= views && views <= a.at && a.at % 4096 == 0);
                assert!(a.at + a.buffer.bytes <= views + bytes);
                continue;
            }
            assert!(a.at + a.buffer.bytes <= compiled.memory.arena(a.buffer.tier));
            for b in memory.buffers[index + 1..].iter().filter(|b| b.live_range != LiveRange::Mapped) {
                let shares = a.buffer.tier == b.buffer.tier
                    && a.at < b.at + b.buffer.bytes
                    && b.at < a.at + a.buffer.bytes;
                let all = |first: &[usize], then: &[usize]| {
                    first.iter().all(|first| then.iter().all(|then| before(*first, *then)))
                };
                assert!(
                    !shares || all(&a.accessed_by, &b.accessed_by) || all(&b.accessed_by, &a.accessed_by),
                    "{:?}: {a:?} and {b:?}",
                    memory.kind
                );
            }
        }
    }
}

/// What is gathered and not certainly let go never exceeds the limit.
fn assert_live(compiled: &Compiled, max_live: u64) {
    let program = &compiled.program;
    let (limit, persistent) = (program.live_limit(max_live), program.layout.persistent_elements());
    if !program.shards_parameters() {
        return;
    }
    // What is read in place takes no memory.
    let elements = |flat: usize| {
        if program.is_viewed(flat) { 0 } else { program.layout.flats[flat].elements() }
    };
    for (section, memory) in compiled.memory.sections.iter().enumerate() {
        let instructions = &program.sections[section].instructions;
        let clocks = certain(program, section, memory);
        let mut stays: Vec<(usize, usize)> = Vec::new(); // flat, last instruction that read it
        for (at, instruction) in instructions.iter().enumerate() {
            if let Action::AllGather(flat, _) = instruction.action {
                // Gone is what the list has let go and whose last reader is certainly done.
                let gone = |(flat, last): &&(usize, usize)| {
                    let released = instructions[*last..at].iter().any(|i| i.action == Action::Release(*flat));
                    released && clocks[at].get(&instructions[*last].queue).is_some_and(|done| done > last)
                };
                let there = stays.iter().filter(|stay| !gone(stay));
                let live: u64 = there.map(|(flat, _)| elements(*flat)).sum();
                let all = persistent + live + elements(flat);
                assert!(all <= limit, "{:?} instruction {at}: {all} of {limit}", memory.kind);
                stays.retain(|(other, _)| *other != flat);
                stays.push((flat, at));
            }
            for stay in &mut stays {
                if instruction.reads.contains(&stay.0) {
                    stay.1 = at;
                }
            }
        }
    }
}

/// Any way to compute again.
fn recomputations() -> impl Strategy<Value = Recompute> {
    prop_oneof![
        Just(Recompute::Nothing),
        Just(Recompute::NormSwiGlu),
        Just(Recompute::Attention),
        (prop::option::of(1u64..5), prop::option::of(1u64..5), any::<bool>())
            .prop_map(|(blocks, checkpoints, offloaded)| Recompute::Block { blocks, checkpoints, offloaded }),
    ]
}

/// Any part in host memory, in any tiles and pieces; and any way for shards to travel.
fn travels() -> impl Strategy<Value = Settings> {
    let shares = (prop::option::of(0.0..1.0f64), prop::option::of(0u64..20_000));
    let sizes = (1u64..10_000, 1u64..4, 1u64..10_000, 1u64..4);
    let stream = prop::option::of((0u64..100_000, any::<bool>()).prop_map(|(window, on_host)| {
        let gradients = if on_host { Tier::Host } else { Tier::Device };
        StateStream { window, gradients }
    }));
    (shares, sizes, stream, any::<[bool; 5]>(), 0u64..20_000).prop_map(
        |(
            (optimizer, parameters),
            (sub_group_size, sub_group_buffers, param_buffer_size, param_buffers),
            stream,
            on,
            allgather_bucket,
        )| Settings {
            offload: Offload {
                optimizer,
                parameters,
                sub_group_size,
                sub_group_buffers,
                param_buffer_size,
                param_buffers,
                pageable: on[0],
                updated_by: on[4].then_some(UpdatedBy::Host),
                update_window: None,
                stream,
            },
            reduce_scatter: on[1],
            allgather_partitions: on[2],
            memory_efficient_linear: on[3],
            allgather_bucket,
            ..ROOMY
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_program_keeps_the_rules(
        (hidden, heads, kv_heads, blocks, vocab, tied) in
            (1u64..6, 1u64..4, 1u64..3, 1u64..5, 2u64..40, any::<bool>()),
        ranks in 1u64..9,
        persistence in 0u64..200,
        accumulation in 1u64..5,
        stage in 0u8..4,
        (max_live, max_reuse, prefetch) in (0u64..3000, 0u64..3000, 0u64..3000),
        reduce_bucket in 0u64..20_000,
        (overlap, copies, narrow) in any::<(bool, bool, bool)>(),
        recompute in recomputations(),
        travel in travels(),
    ) {
        let golden = model((2 * hidden, heads * kv_heads, kv_heads, blocks, vocab, tied));
        let types = if narrow { BF16 } else { F32 };
        let settings = Settings {
            stage,
            accumulation,
            types,
            persistence,
            reduce_bucket,
            max_live,
            max_reuse,
            prefetch,
            overlap,
            recompute,
            gather: copies.then_some(Gather::Copy),
            ..travel
        };
        let setup = Setup { ranks, settings, ..Setup::default() };
        let compiled = golden.compile(&setup);
        let residency = compiled.program.check(max_live).unwrap();
        if stage < 3 {
            prop_assert_eq!(residency.gathers, 0);
        }
        assert_apart(&compiled);
        assert_live(&compiled, max_live);
        // Every rank compiles the same program: it does not know its rank.
        let again = golden.compile(&setup);
        prop_assert_eq!(compiled.lowering_parts(), again.lowering_parts());
        prop_assert_eq!(compiled.program.in_order().count() as u64, accumulation + 1);
        prop_assert!(again.program == compiled.program);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn any_program_in_any_order_computes_the_bits_of_the_plain_one(
        (hidden, kv_heads, groups, blocks, vocab, tied) in
            (1u64..6, 1u64..3, 1u64..3, 1u64..4, 2u64..40, any::<bool>()),
        ranks in 1u64..5,
        persistence in 0u64..200,
        accumulation in 1u64..4,
        stage in 0u8..4,
        (max_live, max_reuse, prefetch) in (0u64..3000, 0u64..3000, 0u64..3000),
        reduce_bucket in 0u64..20_000,
        (narrow, threads, seed) in (any::<bool>(), 1usize..3, any::<u32>()),
        recompute in recomputations(),
        travel in travels(),
    ) {
        let golden = model((2 * hidden, groups * kv_heads, kv_heads, blocks, vocab, tied));
        let types: Types = if narrow { BF16 } else { F32 };
        // With accumulation stages 0 and 1 add before the rounding, 2 and 3 after.
        let plain_stage = if accumulation > 1 { stage / 2 * 2 } else { 0 };
        let plain = Settings { stage: plain_stage, accumulation, types, head_rounds: false, ..ROOMY };
        let expected = golden.train(&Setup { ranks, settings: plain, steps: 2, ..Setup::default() });
        let settings = Settings {
            stage,
            accumulation,
            types,
            persistence,
            reduce_bucket,
            max_live,
            max_reuse,
            prefetch,
            overlap: true,
            recompute,
            ..travel
        };
        let chaos = Some(u64::from(seed));
        let setup = Setup { ranks, threads, settings, steps: 2, chaos, ..Setup::default() };
        let found = golden.train(&setup);
        prop_assert_eq!(&expected.records, &found.records);
        prop_assert!(expected.weights == found.weights);
    }
}
