//! The reduced gradient of every mesh against sums of the ranks' own gradients, added here, one element at a time.
//!
//! A rank's own gradient is that of an engine on one rank. Ranks divide their losses by counts from 1 to 2⁴⁰, so that what is
//! added has exponents up to 40 apart, and many near the last bit of an fp32 sum: sums of bf16 of one magnitude are exact, and
//! prove no order.

use std::sync::Mutex;

use zeroth_engine::{Engine, StateKind, StreamRows};
use zeroth_program::{Compiled, Gather, Settings, Types};

use super::MESHES;
use crate::job::{BF16, F32, Golden, ROOMY, Setup, is_full, on_ranks};

/// A model with flats of several blocks and of one: shards of all sizes, empty ones too.
fn model() -> Golden {
    Golden::synthetic(&serde_json::json!({
        "model_type": "qwen3", "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 300, "vocab_size": 150,
        "tie_word_embeddings": false, "max_position_embeddings": 64,
    }))
}

/// What the losses of a rank are divided by.
fn count(rank: u64) -> u64 {
    1 << [0, 22, 23, 24, 21, 40][rank as usize]
}

/// A mesh with micro-batches of one row.
fn setup(mesh: (u64, u64), settings: Settings) -> Setup {
    Setup { micro_batch: 1, ..super::setup(mesh, settings) }
}

/// The micro-batches of a rank, one row each.
fn train(golden: &Golden, engine: &mut Engine<'_>, rank: u64, ranks: u64, accumulation: u64) {
    let row = |micro: u64| micro * ranks + rank;
    let step = |engine: &mut Engine<'_>, batches: &[StreamRows<'_>]| {
        engine.step(batches, count(rank), 0, &[1e-3]).unwrap();
        engine.record().unwrap();
    };
    golden.with_rows(row(0), 1, |first| match accumulation {
        1 => step(engine, &[*first]),
        _ => golden.with_rows(row(1), 1, |second| step(engine, &[*first, *second])),
    });
}

/// The gradient that the update reads, in the order of the parameters' elements.
fn gradient(compiled: &Compiled, engine: &mut Engine<'_>, into: &Mutex<Vec<Vec<f32>>>) {
    engine
        .read(StateKind::Gradient, &mut |param, range, elements| {
            let mut into = into.lock().unwrap();
            into[param.index()][range.start as usize..range.end as usize].copy_from_slice(elements);
            Ok(())
        })
        .unwrap();
    assert_eq!(into.lock().unwrap().len(), compiled.graph.params.len());
}

fn empty(compiled: &Compiled) -> Mutex<Vec<Vec<f32>>> {
    let elements = compiled.graph.params.iter().map(|param| vec![f32::NAN; param.elements() as usize]);
    Mutex::new(elements.collect())
}

/// The reduced gradient of a mesh.
fn reduced(golden: &Golden, setup: &Setup) -> Vec<f32> {
    let compiled = golden.compile(setup);
    compiled.program.check(setup.settings.max_live).unwrap();
    let found = empty(&compiled);
    on_ranks(setup.world(), &|comm| {
        let mut engine = golden.engine(&compiled, setup.threads, comm);
        if let Some(seed) = setup.chaos {
            engine.enable_chaos(seed + engine.rank());
        }
        let rank = engine.rank();
        train(golden, &mut engine, rank, setup.ranks, setup.settings.accumulation);
        gradient(&compiled, &mut engine, &found);
    });
    found.into_inner().unwrap().concat()
}

/// A rank's own gradient of one of its micro-batches, in the communication dtype.
fn own(golden: &Golden, types: Types, row: u64, rank: u64) -> Vec<f32> {
    let settings = Settings { stage: 0, types, ..ROOMY };
    let compiled = golden.compile(&Setup { settings, ..Setup::default() });
    let mut engine = golden.engine(&compiled, 1, None);
    let found = empty(&compiled);
    golden.with_rows(row, 1, |row| engine.step(&[*row], count(rank), 0, &[1e-3]).unwrap());
    engine.record().unwrap();
    gradient(&compiled, &mut engine, &found);
    found.into_inner().unwrap().concat()
}

/// Adds up rows of numbers in f32, in order.
fn sum(rows: impl Iterator<Item = Vec<f32>>) -> Vec<f32> {
    rows.reduce(|sum, row| sum.iter().zip(row).map(|(sum, value)| sum + value).collect()).unwrap()
}

/// Sums in groups, and then of their sums.
fn two_level(ranks: &[Vec<f32>], group: u64) -> Vec<f32> {
    sum(ranks.chunks(group as usize).map(|group| sum(group.iter().cloned())))
}

fn assert_bits(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len());
    let differs = |(found, expected): (&f32, &f32)| found.to_bits() != expected.to_bits();
    let count = found.iter().zip(expected).filter(|pair| differs(*pair)).count();
    assert_eq!(count, 0, "{what}: {count} of {} elements", found.len());
}

/// Elements that differ.
fn apart(a: &[f32], b: &[f32]) -> usize {
    a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()).count()
}

/// Ways to reduce: bytes travel otherwise, and nothing is added in another order.
fn ways(settings: Settings) -> Vec<(Settings, bool)> {
    let chunks = Settings { reduce_bucket: 13_000, overlap: true, ..settings };
    vec![
        (settings, false),
        (chunks, false),
        (settings, true),
        (chunks, true),
        (Settings { reduce_scatter: false, ..settings }, false),
        (Settings { reduce_scatter: false, ..chunks }, true),
    ]
}

#[test]
fn groups_add_up_first_and_rails_add_up_their_sums() {
    let golden = model();
    for types in [BF16, F32] {
        for (turn, (groups, group)) in MESHES.into_iter().enumerate() {
            let ranks = groups * group;
            let own: Vec<_> = (0..ranks).map(|rank| own(&golden, types, rank, rank)).collect();
            let (flat, expected) = (sum(own.iter().cloned()), two_level(&own, group));
            // Otherwise the test would prove nothing.
            let differing = apart(&flat, &expected);
            assert!(differing > flat.len() / 50, "{groups} × {group}: {differing} of {}", flat.len());
            // Half of the stages, and all of them with `ZEROTH_FULL=1`.
            for stage in (0..=3).filter(|stage| is_full() || (turn + stage).is_multiple_of(2)) {
                let stage = stage as u8;
                let base = Settings { stage, types, ..ROOMY };
                let hpz = Settings { hpz: stage == 3, gather: Some(Gather::Copy), ..base };
                for (settings, exchanges) in ways(base).into_iter().chain(ways(hpz)) {
                    let setup = Setup { exchanges, ..setup((groups, group), settings) };
                    assert_bits(&reduced(&golden, &setup), &expected, &format!("{setup:?}"));
                }
                let chaos = Setup { chaos: Some(77), ..setup((groups, group), base) };
                assert_bits(&reduced(&golden, &chaos), &expected, &format!("{chaos:?}"));
                let one_group = Setup { ranks, settings: base, ..Setup::default() };
                assert_bits(&reduced(&golden, &one_group), &flat, &format!("{one_group:?}"));
                // Groups of one rank have rails only, which add up in rank order.
                let one_each = Settings { group: Some(1), ..base };
                let one_each = Setup { settings: one_each, ..one_group };
                assert_bits(&reduced(&golden, &one_each), &flat, &format!("{one_each:?}"));
            }
        }
    }
}

#[test]
fn micro_batches_add_up_after_the_rail_and_with_hpz_before_it() {
    let golden = model();
    for (types, (groups, group)) in [(BF16, (2, 2)), (F32, (3, 2)), (BF16, (2, 3))] {
        let ranks = groups * group;
        let own = |micro: u64| -> Vec<Vec<f32>> {
            (0..ranks).map(|rank| own(&golden, types, micro * ranks + rank, rank)).collect()
        };
        let micro = [own(0), own(1)];
        // The sum of a micro-batch is added to what earlier ones have left.
        let then = |earlier: Vec<f32>, later: Vec<f32>| sum([later, earlier].into_iter());
        let after = then(two_level(&micro[0], group), two_level(&micro[1], group));
        let of_group = |ranks: &[Vec<f32>], number: u64| {
            sum(ranks.chunks(group as usize).nth(number as usize).unwrap().iter().cloned())
        };
        let before =
            sum((0..groups).map(|number| then(of_group(&micro[0], number), of_group(&micro[1], number))));
        assert!(apart(&before, &after) > before.len() / 100, "{groups} × {group}");
        for (stage, hpz, expected) in [(2, false, &after), (3, false, &after), (3, true, &before)] {
            let base = Settings { stage, hpz, types, accumulation: 2, ..ROOMY };
            for (settings, exchanges) in ways(base) {
                let setup = Setup { exchanges, ..setup((groups, group), settings) };
                assert_bits(&reduced(&golden, &setup), expected, &format!("{setup:?}"));
            }
        }
    }
}
