//! Decoding with cached keys and values against a forward over the whole sequence, and what is refused.

#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

mod job;

use job::{Golden, goldens, moe_goldens};
use zeroth_base::DType;
use zeroth_engine::{Engine, MicroBatch, NewToken, RunError};
use zeroth_model::{Batch, forward};
use zeroth_program::{Compiled, Target};

const TARGET: Target = Target::Cpu { threads: 2 };
/// Tokens of the longest sequence: longer than every window of the golden models.
const TOKENS: usize = 29;

fn compile(golden: &Golden, run: DType, sequences: u64, cached_tokens: u64) -> Compiled {
    let graph = forward(&golden.config, &golden.table, Batch { tokens: 48 }).unwrap();
    Compiled::inference(graph, run, sequences, cached_tokens, TARGET, vec![16, 48]).unwrap()
}

/// Sequences end to end: ids, labels, positions and starts.
fn packed(sequences: &[&[i32]]) -> (Vec<i32>, Vec<i32>, Vec<i32>, Vec<u32>) {
    let (mut ids, mut positions, mut starts) = (Vec::new(), Vec::new(), vec![0]);
    for sequence in sequences {
        ids.extend_from_slice(sequence);
        positions.extend(0..sequence.len() as i32);
        starts.push(ids.len() as u32);
    }
    (ids.clone(), vec![-100; ids.len()], positions, starts)
}

fn whole(engine: &mut Engine<'_>, sequences: &[&[i32]]) -> Vec<f32> {
    let (ids, labels, positions, starts) = packed(sequences);
    engine
        .logits(&MicroBatch { ids: &ids, labels: &labels, positions: &positions, starts: &starts, keys: &[] })
        .unwrap()
}

fn prefill(engine: &mut Engine<'_>, sequences: &[&[i32]], first_rows: &[u32]) -> Result<Vec<f32>, RunError> {
    let (ids, labels, positions, starts) = packed(sequences);
    let batch = MicroBatch { ids: &ids, labels: &labels, positions: &positions, starts: &starts, keys: &[] };
    engine.prefill(&batch, first_rows)
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

#[test]
fn decoded_tokens_of_every_golden_model_have_the_bits_of_a_whole_forward() {
    for golden in goldens().into_iter().chain(moe_goldens()) {
        let vocab = golden.config.vocab as i32;
        let longest = golden.config.max_positions.map_or(TOKENS, |most| TOKENS.min(most as usize));
        let sequence =
            |salt: i32| -> Vec<i32> { (0..longest as i32).map(|place| (place * 7 + salt) % vocab).collect() };
        let sequences = [sequence(3), sequence(5), sequence(1)];
        let compiled = compile(&golden, DType::F32, 3, 3 * longest as u64);
        let mut engine = golden.single_rank_engine(&compiled);
        // The last sequence is first in the cache, and prompts have different lengths.
        let first_rows = [longest as u32, 2 * longest as u32, 0];
        let mut lengths = [1, longest / 2, 3];
        let prompts: Vec<&[i32]> = (0..3).map(|at| &sequences[at][..lengths[at]]).collect();
        let found = prefill(&mut engine, &prompts, &first_rows).unwrap();
        assert_eq!(bits(&found), bits(&whole(&mut engine, &prompts)), "{}: prefill", golden.name);
        loop {
            let active: Vec<usize> = (0..3).filter(|at| lengths[*at] < longest).collect();
            if active.is_empty() {
                break;
            }
            let token = |at: &usize| NewToken {
                id: sequences[*at][lengths[*at]],
                position: lengths[*at] as u32,
                first_row: first_rows[*at],
            };
            let tokens: Vec<NewToken> = active.iter().map(token).collect();
            let found = engine.decode(&tokens).unwrap();
            for at in &active {
                lengths[*at] += 1;
            }
            for (logits, at) in found.chunks_exact(vocab as usize).zip(&active) {
                let expected = whole(&mut engine, &[&sequences[*at][..lengths[*at]]]);
                assert_eq!(bits(logits), bits(&expected), "{}: {} tokens", golden.name, lengths[*at]);
            }
        }
    }
}

#[test]
fn decoding_in_16_bits_stays_near_a_whole_forward() {
    let golden = &goldens()[0];
    for (run, bound) in [(DType::Bf16, 0.05), (DType::F16, 0.01)] {
        let compiled = compile(golden, run, 1, 24);
        let mut engine = golden.single_rank_engine(&compiled);
        let ids: Vec<i32> = (0..16).map(|place| (place * 5 + 2) % golden.config.vocab as i32).collect();
        prefill(&mut engine, &[&ids[..4]], &[8]).unwrap();
        for place in 4..ids.len() {
            let token = NewToken { id: ids[place], position: place as u32, first_row: 8 };
            let (found, expected) = (engine.decode(&[token]).unwrap(), whole(&mut engine, &[&ids[..=place]]));
            let size = expected.iter().fold(0.0f32, |most, logit| most.max(logit.abs()));
            for (found, expected) in found.iter().zip(&expected) {
                assert!((found - expected).abs() <= bound * size, "{run}, {place}: {found} {expected}");
            }
        }
    }
}

#[test]
fn what_the_cache_cannot_hold_is_refused() {
    let golden = &goldens()[0];
    let token = NewToken { id: 1, position: 3, first_row: 0 };
    let without = compile(golden, DType::F32, 1, 0);
    assert!(matches!(golden.single_rank_engine(&without).decode(&[token]), Err(RunError::NoCache)));
    let found = prefill(&mut golden.single_rank_engine(&without), &[&[1, 2]], &[0]);
    assert!(matches!(found, Err(RunError::NoCache)));

    let compiled = compile(golden, DType::F32, 1, 4);
    let mut engine = golden.single_rank_engine(&compiled);
    prefill(&mut engine, &[&[1, 2, 3]], &[0]).unwrap();
    engine.decode(&[token]).unwrap();
    let beyond = engine.decode(&[NewToken { position: 4, ..token }]).unwrap_err();
    assert!(matches!(beyond, RunError::CacheRows { row: 4, rows: 4 }), "{beyond}");
    let beyond = prefill(&mut engine, &[&[1, 2, 3]], &[2]).unwrap_err();
    assert!(matches!(beyond, RunError::CacheRows { row: 4, rows: 4 }), "{beyond}");
    let two = engine.decode(&[NewToken { position: 0, ..token }, token]).unwrap_err();
    assert!(matches!(two, RunError::Sequences { found: 2, most: 1 }), "{two}");
}

#[test]
fn cached_keys_are_not_used_beyond_dynamic_rotary_scaling() {
    let golden =
        goldens().into_iter().find(|golden| golden.name.contains("dynamic")).expect("a model with it");
    let positions = golden.config.max_positions.unwrap() as u32;
    let compiled = compile(&golden, DType::F32, 1, u64::from(positions) + 1);
    let token = NewToken { id: 1, position: positions, first_row: 0 };
    let refused = golden.single_rank_engine(&compiled).decode(&[token]).unwrap_err();
    assert!(matches!(refused, RunError::Rescaled { .. }), "{refused}");
    assert!(refused.to_string().contains(&format!("longer than {positions} tokens")), "{refused}");
}
