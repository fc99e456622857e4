//! Programs for inference: next-token logits against the losses that training programs find (which tests hold against
//! PyTorch), and what they hold.

use zeroth_base::DType;
use zeroth_cpu::CpuTarget;
use zeroth_engine::{RunError, StreamRows};
use zeroth_kernel::{Target, Tier};
use zeroth_model::{BatchTokens, forward};
use zeroth_program::Category;
use zeroth_program::Compiled;

use crate::job::{Golden, ROOMY, goldens};

const TARGET: &dyn Target = &CpuTarget { threads: 2 };

fn inference(golden: &Golden, run: DType, sequences: u64, row_sizes: &[u64]) -> Compiled {
    let graph =
        forward(&golden.config, &golden.table, BatchTokens::of_tokens(*row_sizes.last().unwrap())).unwrap();
    Compiled::inference(graph, run, sequences, 0, TARGET, row_sizes.to_vec()).unwrap()
}

/// The loss of the token after a prefix says the same as its logits: -log of its share of the softmax.
fn loss_of(logits: &[f32], label: i32) -> f64 {
    let peak = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|logit| f64::from(logit - peak).exp()).sum();
    total.ln() - f64::from(logits[label as usize] - peak)
}

/// Sequences end to end, with the given labels at their last tokens alone.
fn packed(prefixes: &[&[i32]], labels: &[i32]) -> (Vec<i32>, Vec<i32>, Vec<i32>, Vec<u32>) {
    let (mut ids, mut trained, mut positions, mut starts) = (Vec::new(), Vec::new(), Vec::new(), vec![0]);
    for (prefix, label) in prefixes.iter().zip(labels) {
        ids.extend_from_slice(prefix);
        positions.extend(0..prefix.len() as i32);
        trained.resize(ids.len(), -100);
        *trained.last_mut().unwrap() = *label;
        starts.push(ids.len() as u32);
    }
    (ids, trained, positions, starts)
}

#[test]
fn logits_of_every_golden_model_give_the_loss_that_training_programs_find() {
    for golden in goldens() {
        let vocab = golden.config.vocab as i32;
        let prefix = |length: usize, salt: i32| -> Vec<i32> {
            (0..length as i32).map(|place| (place * 7 + salt) % vocab).collect()
        };
        // Longer than any window, and longer than where dynamic rotations begin to stretch.
        let prefixes = [prefix(1, 3), prefix(29, 5), prefix(12, 1)];
        let prefixes: Vec<&[i32]> = prefixes.iter().map(Vec::as_slice).collect();
        let labels = [vocab - 1, 0, 4];
        let (ids, trained, positions, starts) = packed(&prefixes, &labels);
        let batch =
            StreamRows { ids: &ids, labels: &trained, positions: &positions, starts: &starts, keys: &[] };
        let compiled = inference(&golden, DType::F32, 4, &[16, 48]);
        let logits = golden.single_rank_engine(&compiled).logits(&batch).unwrap();
        assert_eq!(logits.len(), 3 * vocab as usize, "three sequences of four that there is room for");
        let losses: Vec<f64> = logits
            .chunks_exact(vocab as usize)
            .zip(labels)
            .map(|(logits, label)| loss_of(logits, label))
            .collect();

        let graph = forward(&golden.config, &golden.table, BatchTokens::of_tokens(48)).unwrap();
        let training = Compiled::new(graph, 1, &ROOMY, TARGET, vec![16, 48]).unwrap();
        let mut learning = golden.single_rank_engine(&training);
        assert!(matches!(learning.logits(&batch), Err(RunError::NoLogits)));
        let expected = learning.evaluate(&batch).unwrap();
        let found: f64 = losses.iter().sum();
        assert!((found - expected).abs() < 1e-5, "{}: {found} {expected}", golden.name);

        // Alone, and rounded up to another number of rows, a sequence has the same bits.
        let (ids, trained, positions, starts) = packed(&prefixes[2..], &labels[2..]);
        let alone =
            StreamRows { ids: &ids, labels: &trained, positions: &positions, starts: &starts, keys: &[] };
        let again = golden.single_rank_engine(&compiled).logits(&alone).unwrap();
        assert_eq!(again, logits[2 * vocab as usize..], "{}", golden.name);
    }
}

#[test]
fn a_program_for_inference_holds_weights_once_and_nothing_for_training() {
    let golden = &goldens()[0];
    for (run, size) in [(DType::F32, 4), (DType::Bf16, 2)] {
        let compiled = inference(golden, run, 1, &[32]);
        let peak = |category| compiled.memory.peak(Tier::Device, category);
        let padded: u64 = compiled.program.layout.flats.iter().map(zeroth_program::Flat::padded).sum();
        assert_eq!(peak(Category::Parameters), padded * size);
        assert_eq!((peak(Category::Gradients), peak(Category::Optimizer)), (0, 0));
        assert_eq!(compiled.memory.arena(Tier::Host), 0);
        compiled.program.check(u64::MAX).unwrap();
    }
}

#[test]
fn more_sequences_than_compiled_for_are_refused() {
    let golden = &goldens()[0];
    let compiled = inference(golden, DType::F32, 1, &[32]);
    let (ids, labels, positions, starts) = packed(&[&[1, 2], &[3]], &[0, 0]);
    let batch = StreamRows { ids: &ids, labels: &labels, positions: &positions, starts: &starts, keys: &[] };
    let refused = golden.single_rank_engine(&compiled).logits(&batch).unwrap_err();
    assert!(matches!(refused, RunError::Sequences { found: 2, most: 1 }), "{refused}");
}
