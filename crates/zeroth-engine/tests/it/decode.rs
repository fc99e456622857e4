//! Decoding with cached keys and values against a forward over the whole sequence, and what is refused.

use zeroth_base::DType;
use zeroth_cpu::CpuTarget;
use zeroth_engine::{Engine, NewToken, NewTokens, RunError, StreamBatch, StreamRows};
use zeroth_kernel::{CacheRange, Target};
use zeroth_model::{BatchTokens, forward};
use zeroth_program::{CachedTokens, Compiled, StreamSizes};

use crate::job::{Golden, goldens, moe_goldens, t5_goldens};

const TARGET: &dyn Target = &CpuTarget { threads: 2 };
/// Tokens of the longest sequence: longer than every window of the golden models.
const TOKENS: usize = 29;

fn compile(golden: &Golden, run: DType, sequences: u64, cached_tokens: u64) -> Compiled {
    let graph = forward(&golden.config, &golden.table, BatchTokens::of_tokens(48)).unwrap();
    Compiled::inference(graph, run, sequences, cached_tokens, TARGET, vec![16, 48]).unwrap()
}

/// Sequences end to end.
struct Packed {
    ids: Vec<i32>,
    labels: Vec<i32>,
    positions: Vec<i32>,
    starts: Vec<u32>,
}

impl Packed {
    fn new(sequences: &[&[i32]]) -> Self {
        let (mut ids, mut positions, mut starts) = (Vec::new(), Vec::new(), vec![0]);
        for sequence in sequences {
            ids.extend_from_slice(sequence);
            positions.extend(0..sequence.len() as i32);
            starts.push(ids.len() as u32);
        }
        Self { labels: vec![-100; ids.len()], ids, positions, starts }
    }

    fn view(&self) -> StreamRows<'_> {
        let Self { ids, labels, positions, starts } = self;
        StreamRows { ids, labels, positions, starts, keys: &[] }
    }
}

fn whole(engine: &mut Engine<'_>, sequences: &[&[i32]]) -> Vec<f32> {
    engine.logits(&Packed::new(sequences).view()).unwrap()
}

fn prefill(engine: &mut Engine<'_>, sequences: &[&[i32]], first_rows: &[u32]) -> Result<Vec<f32>, RunError> {
    engine.prefill(&Packed::new(sequences).view(), first_rows)
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

/// A program of an encoder-decoder for sources and targets of so many tokens.
fn compile_pairs(golden: &Golden, [source, target]: [u64; 2], cached: CachedTokens) -> Compiled {
    let graph = forward(&golden.config, &golden.table, BatchTokens::of_pairs(source, target)).unwrap();
    let sizes = StreamSizes::of_streams(vec![vec![source / 2, target], vec![source, target]]);
    Compiled::inference(graph, DType::F32, 3, cached, TARGET, sizes).unwrap()
}

/// Next-token logits of a whole target.
fn whole_pair(engine: &mut Engine<'_>, source: &[i32], target: &[i32]) -> Vec<f32> {
    let [source, target] = [source, target].map(|sequence| Packed::new(&[sequence]));
    let streams = [source.view(), target.view()];
    engine.logits_streams(&StreamBatch { streams: &streams, inputs: &[] }).unwrap()
}

#[test]
fn decoded_tokens_of_every_encoder_decoder_have_the_bits_of_a_whole_forward() {
    for golden in t5_goldens() {
        let vocab = golden.config.vocab as i32;
        let ids = |count: i32, salt: i32| -> Vec<i32> {
            (0..count).map(|place| (place * 7 + place / 3 + salt) % vocab).collect()
        };
        let sources = [ids(9, 2), ids(1, 6), ids(21, 4)];
        let cached = CachedTokens { tokens: 66, source_tokens: 40 };
        let (compiled, reference) = (
            compile_pairs(&golden, [32, 13], cached),
            compile_pairs(&golden, [32, 24], CachedTokens::default()),
        );
        let mut engine = golden.single_rank_engine(&compiled);
        let mut reference = golden.single_rank_engine(&reference);
        // Sources are cached in another order than they are encoded in, in two calls, and not one after the other.
        let rows = [[25, 34], [0, 1], [3, 24]].map(|[first, end]| CacheRange { first, end });
        let encode = |engine: &mut Engine<'_>, sources: &[&[i32]], first_rows: &[u32]| {
            engine.encode(&Packed::new(sources).view(), first_rows).unwrap();
        };
        encode(&mut engine, &[&sources[0], &sources[1]], &[25, 0]);
        encode(&mut engine, &[&sources[2]], &[3]);
        let mut assert_decodes = |words: &str, sequences: &[(usize, u32, &[i32], usize)]| {
            let tokens = sequences.iter().map(|(source, first_row, target, from)| NewTokens {
                ids: &target[*from..],
                position: *from as u32,
                first_row: *first_row,
                source: rows[*source],
            });
            let found = engine.decode_sequences(&tokens.collect::<Vec<_>>()).unwrap();
            assert_eq!(found.len(), sequences.len() * vocab as usize);
            for (logits, (source, _, target, _)) in found.chunks_exact(vocab as usize).zip(sequences) {
                let expected = whole_pair(&mut reference, &sources[*source], target);
                assert_eq!(
                    bits(logits),
                    bits(&expected),
                    "{}: {words}, {} tokens",
                    golden.name,
                    target.len()
                );
            }
        };
        let targets = [ids(22, 1), ids(22, 3), ids(22, 0)];
        // Row 0, 22 or 44 of the cache is a sequence's first. Feeds have one token or several for each.
        for (turn, ends) in [[1, 1, 4], [2, 6, 5], [5, 7, 11], [6, 8, 22], [7, 19, 22]].windows(2).enumerate()
        {
            let fed = |at: usize| (at, 22 * at as u32, &targets[at][..ends[1][at]], ends[0][at]);
            if turn == 0 {
                let first = [0, 1, 2].map(|at| (at, 22 * at as u32, &targets[at][..ends[0][at]], 0));
                assert_decodes("the first tokens", &first);
            }
            let fed: Vec<_> = (0..3).filter(|at| ends[0][*at] < ends[1][*at]).map(fed).collect();
            assert_decodes("the next tokens", &fed);
        }
        // Two beams of one source: the second sequence is replaced by another of the first source, which takes a suffix anew.
        let beam = [&targets[0][..5], &ids(6, 9)].concat();
        assert_decodes("a beam", &[(0, 22, &beam, 0)]);
        let suffix = [&beam[..8], &ids(3, 5)].concat();
        assert_decodes("a beam's suffix", &[(0, 0, &targets[0][..8], 7), (0, 22, &suffix, 8)]);
    }
}

#[test]
fn what_an_encoder_decoder_cannot_decode_is_refused() {
    let golden = &t5_goldens()[0];
    let cached = CachedTokens { tokens: 8, source_tokens: 6 };
    let compiled = compile_pairs(golden, [8, 4], cached);
    let mut engine = golden.single_rank_engine(&compiled);
    let source = Packed::new(&[&[1, 2, 3]]);
    let beyond = engine.encode(&source.view(), &[4]).unwrap_err();
    assert!(matches!(beyond, RunError::CacheRows { row: 6, rows: 6 }), "{beyond}");
    engine.encode(&source.view(), &[3]).unwrap();
    let without = engine.decode(&[NewToken { id: 1, position: 0, first_row: 0 }]).unwrap_err();
    assert!(matches!(without, RunError::NoSource), "{without}");
    let tokens =
        |ids, position, end| NewTokens { ids, position, first_row: 0, source: CacheRange { first: 3, end } };
    let beyond = engine.decode_sequences(&[tokens(&[1, 2], 7, 6)]).unwrap_err();
    assert!(matches!(beyond, RunError::CacheRows { row: 8, rows: 8 }), "{beyond}");
    let beyond = engine.decode_sequences(&[tokens(&[1, 2], 0, 7)]).unwrap_err();
    assert!(matches!(beyond, RunError::CacheRows { row: 6, rows: 6 }), "{beyond}");
    let more = engine.decode_sequences(&[tokens(&[1, 2, 3, 4, 5], 0, 6)]).unwrap_err();
    assert!(matches!(more, RunError::Rows { rows: 5, most: 4 }), "{more}");
    assert!(matches!(engine.logits(&source.view()), Err(RunError::NoLogits)));
    assert!(matches!(engine.prefill(&source.view(), &[0]), Err(RunError::NoLogits)));

    let decoder = &goldens()[0];
    let compiled = compile(decoder, DType::F32, 1, 4);
    let refused = decoder.single_rank_engine(&compiled).encode(&source.view(), &[0]).unwrap_err();
    assert!(matches!(refused, RunError::NoEncoder), "{refused}");
}
