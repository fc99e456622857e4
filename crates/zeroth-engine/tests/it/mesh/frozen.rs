//! Frozen parameters on meshes: adapters over a base, dense and in nf4, and teachers. Wherever they are, a student and its adapters
//! train to the same bits.

use zeroth_base::Axis;
use zeroth_program::{Action, FrozenPlacement, Gather, Offload, Settings, TeacherPlacement, Types};

use super::{at_stage, setup};
use crate::frozen::{dense_and_nf4_teachers, model_in_nf4};
use crate::job::{BF16, F32, Golden, ROOMY, Setup, is_full};
use crate::same_bits::assert_same;

const SHARDED: TeacherPlacement = TeacherPlacement { sharded: true, offloaded: false };
const OFFLOADED: TeacherPlacement = TeacherPlacement { sharded: true, offloaded: true };

/// Every stage, with frozen parameters everywhere that they can be.
fn variants(types: Types) -> Vec<Settings> {
    let mut all = Vec::new();
    for stage in 0..=3 {
        for hpz in [false, true].into_iter().filter(|hpz| stage == 3 || !hpz) {
            for (at, (frozen, teacher)) in [
                (FrozenPlacement::ByStage, TeacherPlacement::WHOLE),
                (FrozenPlacement::Sharded, SHARDED),
                (FrozenPlacement::Whole, OFFLOADED),
            ]
            .into_iter()
            .enumerate()
            {
                let base = Settings { stage, hpz, types, frozen, teacher, ..ROOMY };
                let pieces =
                    Offload { pageable: true, param_buffer_size: 1, param_buffers: 2, ..Offload::NOTHING };
                let copied = Settings { gather: Some(Gather::Copy), overlap: true, prefetch: 5000, ..base };
                all.extend([base, Settings { offload: pieces, reduce_bucket: 5000, ..copied }]);
                if at == 1 && !hpz {
                    let host =
                        Offload { optimizer: Some(1.0), parameters: Some(u64::MAX), ..Offload::NOTHING };
                    all.push(Settings { offload: host, overlap: true, ..base });
                }
            }
        }
    }
    all
}

/// A part of the programs, every other one in any order; all of them with `ZEROTH_FULL=1`.
fn assert_all_same(golden: &Golden, mesh: (u64, u64), types: Types, turn: usize) {
    let all = variants(types);
    let at = |settings: Settings| Setup { steps: 2, ..setup(mesh, settings) };
    let expected = golden.train(&at(all[0]));
    for (place, settings) in all.iter().enumerate().skip(1) {
        if is_full() || (place + turn).is_multiple_of(4) || settings.hpz && place % 2 == turn % 2 {
            let chaos = (place / 2 % 2 == 1).then_some(8000 + place as u64);
            let setup = Setup { chaos, ..at(*settings) };
            assert_same(&expected, &golden.train(&setup), &format!("{} {setup:?}", golden.name));
        }
    }
}

#[test]
fn adapters_train_to_the_same_bits_wherever_their_base_is() {
    assert_all_same(&Golden::lora("llama-biases-tied-qv", 0.0), (2, 2), BF16, 0);
    assert_all_same(&Golden::lora("qwen3-tied-all", 0.1), (3, 2), F32, 1);
}

#[test]
fn a_base_in_nf4_trains_to_the_same_bits_wherever_it_is() {
    assert_all_same(&model_in_nf4(), (2, 2), BF16, 2);
    assert_all_same(&model_in_nf4(), (2, 3), F32, 3);
}

#[test]
fn students_train_to_the_same_bits_wherever_their_teacher_is() {
    for (turn, (golden, mesh)) in dense_and_nf4_teachers().iter().zip([(2, 2), (3, 2)]).enumerate() {
        assert_all_same(golden, mesh, if turn == 0 { F32 } else { BF16 }, turn);
    }
}

#[test]
fn frozen_parameters_cross_no_rail_with_hpz() {
    let golden = Golden::lora("llama-biases-tied-qv", 0.0);
    let rails = |hpz: bool| {
        let compiled = golden.compile(&setup((2, 2), Settings { hpz, types: BF16, ..at_stage(3) }));
        let instructions = compiled.program.sections.iter().flat_map(|section| &section.instructions);
        let along_rail = instructions.filter(|one| one.action.collective_axis() == Some(Axis::Rail));
        let flats: Vec<usize> = along_rail
            .filter(|one| !matches!(one.action, Action::AllGatherReports(_)))
            .filter_map(|one| one.action.flat())
            .collect();
        flats.iter().filter(|flat| !compiled.program.is_trained(**flat)).count()
    };
    assert!(rails(false) > 0);
    assert_eq!(rails(true), 0);
}
