//! Students with a teacher: every program and every placement of the teacher trains them to the same bits, and a teacher takes
//! nothing but its weights and, during forward, one layer. `golden.rs` compares distillations with TRL.

use zeroth_engine::{FurtherInput, RunError, StreamBatch};
use zeroth_graph::Group;
use zeroth_kernel::Tier;
use zeroth_program::{
    Action, BufferId, Category, Compiled, Gather, Offload, Recompute, SectionKind, Settings,
    TeacherPlacement, TopLogProbs, Types,
};

use super::{BLOCK, BOTH, OPTIMIZER, assert_same};
use crate::job::distill::{TeacherSource, Teaching};
use crate::job::{BF16, F32, Golden, Outcome, ROOMY, Setup, is_full};

const WHOLE: TeacherPlacement = TeacherPlacement::WHOLE;
const SHARDED: TeacherPlacement = TeacherPlacement { sharded: true, offloaded: false };
const OFFLOADED: TeacherPlacement = TeacherPlacement { sharded: true, offloaded: true };

/// (ranks, accumulation, micro-batch): batches of the golden runs of `jsd`.
const SPLITS: [(u64, u64, u64); 6] = [(1, 1, 4), (1, 4, 1), (2, 1, 2), (3, 1, 4), (5, 1, 4), (5, 4, 1)];

/// The distillation with the most runs, of a teacher in nf4 or not.
pub(super) fn golden(nf4: bool) -> Golden {
    let mut golden = Golden::distilled("jsd");
    let Some(Teaching { source: TeacherSource::Model(teacher), .. }) = &mut golden.teacher else {
        panic!("it is online")
    };
    if nf4 {
        for parameter in teacher.table.units.iter_mut().flat_map(|unit| &mut unit.parameters) {
            parameter.trained = false;
        }
        teacher.table.quantize();
    }
    golden
}

/// Stages 0 to 3 of the student by placements of the teacher, with offload and recomputation of the student.
fn programs((ranks, accumulation, micro_batch): (u64, u64, u64), types: Types) -> Vec<Setup> {
    let mut all = Vec::new();
    for stage in 0..=3u8 {
        for (at, teacher) in [WHOLE, SHARDED, OFFLOADED].into_iter().enumerate() {
            let pageable = Offload { pageable: true, param_buffer_size: 1, param_buffers: 2, ..BOTH };
            for (turn, offload) in [Offload::NOTHING, OPTIMIZER, pageable].into_iter().enumerate() {
                let recompute = [Recompute::Nothing, BLOCK, Recompute::NormSwiGlu, Recompute::Attention]
                    [(at + turn + usize::from(stage)) % 4];
                let overlap = turn != 1;
                let gather = (turn == 2).then_some(Gather::Copy);
                let settings = Settings {
                    stage,
                    accumulation,
                    types,
                    offload,
                    recompute,
                    overlap,
                    teacher,
                    gather,
                    prefetch: 3000 * turn as u64,
                    ..ROOMY
                };
                all.push(Setup { ranks, micro_batch, settings, steps: 2, sizes: 3, ..Setup::default() });
            }
        }
    }
    all
}

fn assert_same_losses(expected: &Outcome, found: &Outcome, what: &str) {
    assert_same(expected, found, what);
    let bits = |outcome: &Outcome| outcome.losses.concat().into_iter().map(f64::to_bits).collect::<Vec<_>>();
    assert_eq!(bits(found), bits(expected), "{what}");
}

/// A part of the programs of each split, others for the next; all of them with `ZEROTH_FULL=1`.
fn every_placement_trains_to_the_same_bits(golden: &Golden, types: Types, apart: usize) {
    let is_full = is_full();
    for (number, split) in SPLITS.into_iter().enumerate() {
        let setups = programs(split, types);
        // Stages 0 and 1 accumulate before they reduce, stages 2 and 3 after.
        let (late, early): (Vec<Setup>, Vec<Setup>) =
            setups.iter().partition(|setup| split.1 == 1 || setup.settings.stage < 2);
        for setups in [late, early].into_iter().filter(|setups| !setups.is_empty()) {
            let expected = golden.train(&setups[0]);
            let due = setups.iter().enumerate().skip(1);
            for (at, setup) in due.filter(|(at, _)| is_full || (at + number).is_multiple_of(apart)) {
                let chaos = (at % 2 == 1).then_some(300 + at as u64);
                let setup = Setup { chaos, ..*setup };
                assert_same_losses(&expected, &golden.train(&setup), &format!("{setup:?}"));
            }
        }
    }
}

#[test]
fn every_placement_of_a_teacher_trains_to_the_same_bits_in_f32() {
    every_placement_trains_to_the_same_bits(&golden(false), F32, 5);
}

#[test]
fn every_placement_of_a_teacher_trains_to_the_same_bits_in_bf16() {
    every_placement_trains_to_the_same_bits(&golden(false), BF16, 7);
}

#[test]
fn every_placement_of_a_teacher_in_nf4_trains_to_the_same_bits() {
    every_placement_trains_to_the_same_bits(&golden(true), BF16, 7);
}

#[test]
fn a_distillation_from_a_cache_trains_to_the_same_bits() {
    let golden = golden(false).offline(7, &Setup { micro_batch: 3, ..Setup::default() });
    every_placement_trains_to_the_same_bits(&golden, F32, 9);
}

#[test]
fn every_placement_of_a_teacher_has_the_same_most_probable_tokens() {
    for (nf4, types) in [(false, F32), (false, BF16), (true, BF16)] {
        let golden = golden(nf4);
        let teacher = golden.teacher.as_ref().unwrap().model().unwrap();
        let top = TopLogProbs { k: 5, temperature: 2.0 };
        let cache = |ranks, teaching, chaos| {
            let settings = Settings { types, teacher: teaching, ..ROOMY };
            teacher.cache(&Setup { ranks, micro_batch: 6, settings, chaos, ..Setup::default() }, top)
        };
        let expected = cache(1, WHOLE, None);
        for (ids, log_probs) in &expected.rows {
            for (ids, log_probs) in ids.chunks(5).zip(log_probs.chunks(5)) {
                assert!(log_probs.is_sorted_by(|a, b| a >= b), "{log_probs:?}");
                let mass: f32 = log_probs.iter().map(|log_prob| log_prob.exp()).sum();
                assert!(mass < 1.0 + 1e-5, "{mass}");
                assert!(ids.iter().all(|id| (0..53).contains(id)));
            }
        }
        for (ranks, placement) in [(1, OFFLOADED), (2, WHOLE), (2, SHARDED), (3, OFFLOADED)] {
            let found = cache(ranks, placement, None);
            assert!(found.rows == expected.rows, "{types:?}, nf4 {nf4}, {ranks} ranks, {placement:?}");
        }
    }
}

/// A student and a teacher with experts of their own.
fn experts() -> Golden {
    let mut golden = Golden::named("moe/mixtral-no-window");
    let twin = Golden::distilled("jsd").teacher.unwrap();
    let teacher = Golden::named("moe/qwen3-moe-normalized");
    // The smaller vocabulary counts.
    let most = teacher.config.vocab.min(golden.config.vocab) as i32;
    for row in &mut golden.rows {
        row.clamp(most);
    }
    golden.teacher = Some(Teaching { source: TeacherSource::Model(Box::new(teacher)), ..twin });
    golden
}

#[test]
fn the_routers_of_a_teacher_are_not_counted_and_every_placement_trains_to_the_same_bits() {
    let golden = experts();
    let setup = |ranks, stage, teacher, chaos| {
        let settings = Settings { stage, teacher, recompute: BLOCK, types: BF16, ..ROOMY };
        Setup { ranks, micro_batch: 4 / ranks, settings, steps: 2, chaos, ..Setup::default() }
    };
    let compiled = golden.compile(&setup(1, 0, WHOLE, None));
    let units = compiled.program.routers.iter().map(|router| &compiled.graph.units[router.unit.index()]);
    let groups: Vec<Group> = units.map(|unit| unit.group).collect();
    assert_eq!(groups, [Group::Model; 2]);
    for ranks in [1, 2] {
        let expected = golden.train(&setup(ranks, 0, WHOLE, None));
        for (stage, teacher) in [(3, SHARDED), (1, OFFLOADED)] {
            let found = golden.train(&setup(ranks, stage, teacher, Some(77)));
            assert_same_losses(&expected, &found, &format!("{ranks} ranks, stage {stage}, {teacher:?}"));
        }
    }
}

fn compile(golden: &Golden, settings: Settings, ranks: u64) -> Compiled {
    golden.compile(&Setup { ranks, micro_batch: 4, settings, ..Setup::default() })
}

/// The teacher's flats.
fn teacher_flats(compiled: &Compiled) -> Vec<usize> {
    let flats = compiled.program.layout.flats.iter().enumerate();
    flats.filter(|(_, flat)| flat.group == Group::Teacher).map(|(at, _)| at).collect()
}

#[test]
fn a_teacher_is_placed_apart_from_its_student() {
    let golden = golden(false);
    for (stage, offload, teacher, ranks) in [
        (0, Offload::NOTHING, SHARDED, 2),
        (0, Offload::NOTHING, OFFLOADED, 1),
        (2, OPTIMIZER, OFFLOADED, 3),
        (3, BOTH, WHOLE, 2),
        (3, Offload::NOTHING, SHARDED, 1),
    ] {
        let what = format!("stage {stage}, {teacher:?}, {ranks} ranks");
        let settings = Settings { stage, offload, teacher, gather: Some(Gather::Copy), ..ROOMY };
        let compiled = compile(&golden, settings, ranks);
        let program = &compiled.program;
        let mut bytes = [0, 0];
        for (flat, laid) in program.layout.flats.iter().enumerate() {
            let is_teacher = laid.group == Group::Teacher;
            let (is_cut, on_host) = match (is_teacher, stage) {
                (true, _) => (teacher.sharded, teacher.offloaded),
                (false, stage) => (stage == 3, offload.parameters.is_some()),
            };
            let residency = program.residency[flat];
            assert_eq!(residency.weights.is_offloaded(), on_host, "{what}");
            assert_eq!(program.is_sharded(flat), is_cut && (ranks > 1 || on_host), "{what}");
            if is_teacher {
                let held = if is_cut { laid.shard_capacity(ranks) } else { laid.padded() };
                bytes[usize::from(on_host)] += 4 * held;
            }
        }
        assert_eq!(Tier::ALL.map(|tier| compiled.teacher_bytes(tier)), bytes, "{what}");
    }
}

#[test]
fn a_teacher_is_gathered_in_forward_and_leaves_one_activation() {
    let golden = golden(false);
    for recompute in [Recompute::Nothing, Recompute::NormSwiGlu, Recompute::Attention, BLOCK] {
        let settings =
            Settings { recompute, teacher: SHARDED, gather: Some(Gather::Copy), overlap: true, ..ROOMY };
        let compiled = compile(&golden, settings, 2);
        let (flats, program) = (teacher_flats(&compiled), &compiled.program);
        for (section, memory) in program.sections.iter().zip(&compiled.memory.sections) {
            let gathered = |flat: &usize| {
                section
                    .instructions
                    .iter()
                    .filter(|i| matches!(i.action, Action::AllGather(of, _) if of == *flat))
                    .count()
            };
            // Once in forward; the head's norm ends forward, and its projection is read by the loss.
            let mut expected = vec![usize::from(section.is_micro_batch()); flats.len()];
            *expected.last_mut().unwrap() *= 2;
            let found: Vec<usize> = flats.iter().map(gathered).collect();
            assert_eq!(found, expected, "{recompute:?} {:?}", section.kind);
            if !section.is_micro_batch() {
                continue;
            }
            let of_teacher = |node: usize| {
                compiled.graph.units[compiled.graph.nodes[node].unit.index()].group == Group::Teacher
            };
            let last = section
                .instructions
                .iter()
                .rposition(|i| matches!(i.action, Action::Forward(node) if of_teacher(node)))
                .unwrap();
            let loss = section.instructions.iter().position(|i| matches!(i.action, Action::Backward(_)));
            let outputs: Vec<usize> = (0..compiled.graph.nodes.len())
                .filter(|node| of_teacher(*node))
                .flat_map(|node| &compiled.graph.nodes[node].outputs)
                .map(|value| value.index())
                .collect();
            let alive: Vec<_> = memory
                .buffers
                .iter()
                .filter(|placed| placed.buffer.id.value().is_some_and(|value| outputs.contains(&value)))
                .filter(|placed| *placed.lifetime.end() > last)
                .collect();
            assert_eq!(alive.len(), 1, "{recompute:?}: {alive:?}");
            assert_eq!(Some(*alive[0].lifetime.end()), loss, "until the loss");
        }
    }
}

#[test]
fn an_evaluation_is_that_of_the_student_alone() {
    let online = golden(false);
    let setup = Setup { micro_batch: 4, ..Setup::default() };
    let offline = golden(false).offline(7, &setup);
    let mut plain = golden(false);
    plain.teacher = None;
    let [expected, found, cached] = [&plain, &online, &offline].map(|golden| {
        let compiled = golden.compile(&setup);
        let section = compiled.program.sections.iter().find(|s| s.kind == SectionKind::Eval).unwrap();
        let reads_teacher = |instruction: &zeroth_program::Instruction| {
            instruction.reads.iter().any(|flat| teacher_flats(&compiled).contains(flat))
        };
        assert!(!section.instructions.iter().any(reads_teacher));
        let mut engine = golden.engine(&compiled, 1, None);
        golden.with_batch(4, |batch| engine.evaluate(batch)).unwrap()
    });
    assert_eq!([found, cached].map(f64::to_bits), [expected.to_bits(); 2]);
}

#[test]
fn what_a_cache_has_of_a_teacher_is_checked() {
    let setup = Setup { micro_batch: 1, ..Setup::default() };
    let golden = golden(false).offline(7, &setup);
    let compiled = golden.compile(&setup);
    let mut engine = golden.engine(&compiled, 1, None);
    golden.with_batch(1, |batch| {
        let count = 7 * batch.ids.len();
        let (ids, log_probs) = (vec![52; count], vec![-2.0; count]);
        let mut refused = |inputs: &[FurtherInput<'_>]| {
            let batch = StreamBatch { streams: &[*batch], inputs };
            engine.step_streams(&[batch], 1, 0, &[1e-3]).map_err(|error| error.to_string()).unwrap_err()
        };
        let (right_ids, right_probs) = (FurtherInput::Indices(&ids), FurtherInput::Statistics(&log_probs));
        assert_eq!(refused(&[]), "a micro-batch has 0 further inputs, and the model has 2");
        let message = refused(&[right_ids, right_ids]);
        assert!(message.contains("should be of kind Statistic"), "{message}");
        let message = refused(&[right_ids, FurtherInput::Statistics(&log_probs[1..])]);
        assert!(message.contains("numbers of a further input"), "{message}");
        // The teacher has 53 tokens.
        for id in [53, -1] {
            let mut ids = ids.clone();
            ids[3] = id;
            let message = refused(&[FurtherInput::Indices(&ids), right_probs]);
            assert!(message.contains(&format!("the number {id}, and the model has 53")), "{message}");
        }
        let batch = StreamBatch { streams: &[*batch], inputs: &[right_ids, right_probs] };
        engine.step_streams(&[batch], 1, 0, &[1e-3]).unwrap();
        assert!(engine.record().unwrap().head.loss.is_finite());
        let mut both = (Vec::new(), Vec::new());
        let error = engine.top_log_probs(&batch.streams[0], &mut both.0, &mut both.1).unwrap_err();
        assert!(matches!(error, RunError::NoTopLogProbs));
    });
}

#[test]
fn a_teacher_in_host_memory_takes_one_layer_of_the_device() {
    let golden = golden(false);
    let of = |teacher| {
        let settings = Settings { stage: 0, teacher, gather: Some(Gather::Copy), ..ROOMY };
        compile(&golden, settings, 1)
    };
    let [whole, offloaded] = [WHOLE, OFFLOADED].map(of);
    let weights = whole.teacher_bytes(Tier::Device);
    assert_eq!([offloaded.teacher_bytes(Tier::Device), offloaded.teacher_bytes(Tier::Host)], [0, weights]);
    let peak = |compiled: &Compiled, category| compiled.memory.peak(Tier::Device, category);
    let saved = peak(&whole, Category::Parameters) - peak(&offloaded, Category::Parameters);
    assert_eq!(saved, weights);
    let largest = teacher_flats(&offloaded)
        .iter()
        .map(|flat| offloaded.program.layout.flats[*flat].bytes())
        .max()
        .unwrap();
    let more = peak(&offloaded, Category::Buffers).saturating_sub(peak(&whole, Category::Buffers));
    assert!(more <= largest, "{more} beside layers of {largest}");
    let placed = offloaded.memory.static_buffers.iter();
    let on_host = placed.filter(|placed| placed.buffer.tier == Tier::Host);
    assert!(on_host.clone().count() > 0);
    assert!(on_host.into_iter().all(|placed| matches!(placed.buffer.id, BufferId::Weights(_))));
}
