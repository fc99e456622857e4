//! Micro-batches: their contents, and that ranks and accumulation split the sample order without changing it.

use std::path::Path;

use proptest::prelude::*;
use serde_json::Value;
use zeroth_data::{
    CacheFolder, DecoderStart, Encoder, EncoderOptions, PairLimits, PrepareOptions, Samples, SamplesBuilder,
    Truncation, prepare,
};
use zeroth_kernel::RowKey;
use zeroth_train::{BatchShape, Batches, RowSizes, SampleOrder, TokenBatch};

/// Samples of these lengths; sample i is i, i + 1, …, all trained.
fn samples(lengths: &[usize]) -> Samples {
    let mut builder = SamplesBuilder::new(u64::MAX);
    for (sample, &length) in lengths.iter().enumerate() {
        let ids: Vec<i32> = (0..length as i32).map(|place| sample as i32 + place).collect();
        builder.push(&ids, &ids);
    }
    builder.finish().unwrap()
}

fn shape(micro_batch: u64, accumulation: u64, ranks: u64) -> BatchShape {
    BatchShape { micro_batch, accumulation, ranks }
}

#[test]
fn micro_batches_concatenate_samples_and_shift_labels() {
    let mut builder = SamplesBuilder::new(9);
    builder.push(&[5, 6, 7], &[-100, 6, 7]);
    builder.push(&[8], &[8]);
    builder.push(&[9, 10], &[9, 10]);
    let samples = builder.finish().unwrap();
    let batches = Batches::new(&samples, SampleOrder::new(samples.count(), None), shape(2, 1, 1));

    let mut batch = TokenBatch::default();
    batches.fill(1, 0, 0, &mut batch).unwrap(); // the third sample, and the first one again in the next epoch
    let key = |sample, position, epoch| RowKey { sample, position, epoch };
    assert_eq!(
        batch,
        TokenBatch {
            ids: vec![9, 10, 5, 6, 7],
            labels: vec![10, -100, 6, 7, -100],
            positions: vec![0, 1, 0, 1, 2],
            starts: vec![0, 2, 5],
            keys: vec![key(2, 0, 0), key(2, 1, 0), key(0, 0, 1), key(0, 1, 1), key(0, 2, 1)],
            targets: None,
        }
    );
    assert_eq!(batch.tokens(), 5);
    assert_eq!((batches.tokens(1), batches.trained_tokens(1)), (5, 3));
    assert_eq!((batches.tokens(0), batches.trained_tokens(0)), (4, 2));
}

#[test]
fn packed_samples_are_separate_sequences() {
    let mut builder = SamplesBuilder::with(4, Truncation::Drop, true);
    for ids in [&[1, 2][..], &[3, 4, 5], &[6], &[7, 8]] {
        builder.push(ids, ids);
    }
    let samples = builder.finish().unwrap(); // packs {0, 3} and {1, 2}
    assert_eq!(samples.count().get(), 2);
    let batches = Batches::new(&samples, SampleOrder::new(samples.count(), None), shape(1, 2, 1));

    let mut batch = TokenBatch::with_capacity(4, batches.most_sequences() as usize);
    let key = |sample, position| RowKey { sample, position, epoch: 3 };
    batches.fill(3, 0, 0, &mut batch).unwrap();
    assert_eq!(
        batch,
        TokenBatch {
            ids: vec![1, 2, 7, 8],
            labels: vec![2, -100, 8, -100],
            positions: vec![0, 1, 0, 1],
            starts: vec![0, 2, 4],
            keys: vec![key(0, 0), key(0, 1), key(3, 0), key(3, 1)],
            targets: None,
        }
    );
    batches.fill(3, 1, 0, &mut batch).unwrap();
    assert_eq!((&batch.ids[..], &batch.starts[..]), (&[3, 4, 5, 6][..], &[0, 3, 4][..]));
    assert_eq!(
        (batches.micro_batch_tokens(3, 1, 0), batches.tokens(3), batches.trained_tokens(3)),
        (4, 8, 4)
    );
    assert_eq!((batches.largest_micro_batch(0, 9), batches.most_sequences()), ([4, 0], 2));
}

#[test]
fn pairs_fill_two_streams_and_shift_the_labels_right() {
    let mut builder = SamplesBuilder::of_pairs(PairLimits { source: 4, target: 3 }, false);
    builder.push(&[5, 6, 1], &[7, 1]);
    builder.push(&[8, 1], &[-100, 9, 1]);
    let samples = builder.finish().unwrap();
    let start = DecoderStart { token: 2, pad: Some(0) };
    let batches = Batches::new(&samples, SampleOrder::new(samples.count(), None), shape(2, 1, 1))
        .with_decoder_start(Some(start));
    let mut batch = TokenBatch::with_streams([16, 16], 2);
    batches.fill(0, 0, 0, &mut batch).unwrap();
    let key = |sample, position| RowKey { sample, position, epoch: 0 };
    let targets = TokenBatch {
        ids: vec![2, 7, 2, 0, 9],
        labels: vec![7, 1, -100, 9, 1],
        positions: vec![0, 1, 0, 1, 2],
        starts: vec![0, 2, 5],
        keys: vec![key(0, 0), key(0, 1), key(1, 0), key(1, 1), key(1, 2)],
        targets: None,
    };
    let sources = TokenBatch {
        ids: vec![5, 6, 1, 8, 1],
        labels: vec![-100; 5],
        positions: vec![0, 1, 2, 0, 1],
        starts: vec![0, 3, 5],
        keys: vec![key(0, 0), key(0, 1), key(0, 2), key(1, 0), key(1, 1)],
        targets: Some(Box::new(targets)),
    };
    assert_eq!(batch, sources);
    assert_eq!((batch.tokens(), batches.tokens(0), batches.trained_tokens(0)), (10, 10, 4));
    assert_eq!(batches.largest_micro_batch(0, 1), [5, 5]);
    // A rank without samples has two empty streams.
    batches.fill_some(0, 0, &mut batch).unwrap();
    assert_eq!((&batch.starts[..], &batch.targets.as_ref().unwrap().starts[..]), (&[0][..], &[0][..]));
    // Packs are of pairs.
    let mut builder = SamplesBuilder::of_pairs(PairLimits { source: 5, target: 5 }, true);
    for length in [3, 2, 2] {
        builder.push(&vec![4; length], &vec![6; length]);
    }
    let samples = builder.finish().unwrap();
    let batches = Batches::new(&samples, SampleOrder::new(samples.count(), None), shape(1, 1, 1))
        .with_decoder_start(Some(start));
    batches.fill(0, 0, 0, &mut batch).unwrap();
    assert_eq!(
        (&batch.starts[..], &batch.targets.as_ref().unwrap().starts[..]),
        (&[0, 3, 5][..], &[0, 3, 5][..])
    );
    assert_eq!((batches.largest_micro_batch(0, 9), batches.most_sequences()), ([5, 5], 2));
}

#[test]
fn refilling_reuses_buffers() {
    let samples = samples(&[3, 5, 2, 7]);
    let batches = Batches::new(&samples, SampleOrder::new(samples.count(), Some(1)), shape(2, 2, 1));
    let mut batch = TokenBatch::with_capacity(16, 2);
    let places = |batch: &TokenBatch| {
        (
            batch.ids.as_ptr(),
            batch.labels.as_ptr(),
            batch.positions.as_ptr(),
            batch.starts.as_ptr(),
            batch.keys.as_ptr(),
        )
    };
    let before = places(&batch);
    for step in 0..50 {
        batches.fill(step, step % 2, 0, &mut batch).unwrap();
        assert_eq!(places(&batch), before);
    }
}

#[test]
fn token_counts_match_the_golden_runs() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/llama-dynamic");
    let steps: Value =
        serde_json::from_str(&std::fs::read_to_string(folder.join("steps.json")).unwrap()).unwrap();
    let config: Value =
        serde_json::from_str(&std::fs::read_to_string(folder.join("config.json")).unwrap()).unwrap();
    let vocabulary = config["vocab_size"].as_u64().unwrap();
    let options = PrepareOptions {
        max_length: u64::MAX,
        truncation: Truncation::Drop,
        max_samples: None,
        packing: false,
    };
    let cache = tempfile::tempdir().unwrap();
    let encoder = Encoder::open(&folder, EncoderOptions::new(vocabulary)).unwrap();
    let cache = CacheFolder::at(cache.path());
    let samples = prepare(&[folder.join("data.jsonl")], &encoder, &options, &cache).unwrap().samples;
    for run in steps["runs"].as_array().unwrap() {
        let batch = run["batch"].as_u64().unwrap();
        let ranks = if batch.is_multiple_of(5) { 5 } else { 2 };
        let batches =
            Batches::new(&samples, SampleOrder::new(samples.count(), None), shape(1, batch / ranks, ranks));
        assert_eq!(batches.shape().train_batch(), batch);
        let counted = |count: &dyn Fn(u64) -> u64| -> Value { (0..20).map(count).collect() };
        assert_eq!(counted(&|step| batches.tokens(step)), run["tokens"], "{}", run["name"]);
        assert_eq!(counted(&|step| batches.trained_tokens(step)), run["trained_tokens"], "{}", run["name"]);
    }
}

#[test]
fn long_runs_bound_the_largest_micro_batch() {
    let samples = samples(&[3, 9, 1]);
    let batches = Batches::new(&samples, SampleOrder::new(samples.count(), None), shape(2, 1, 1));
    assert_eq!(batches.largest_micro_batch(0, 3), [12, 0]);
    assert_eq!(batches.largest_micro_batch(0, 1), [12, 0]);
    assert_eq!(batches.largest_micro_batch(1, 1), [4, 0]);
    assert_eq!(batches.largest_micro_batch(0, 100_000_000), [18, 0]);
}

proptest! {
    #[test]
    fn every_sample_is_taken_once_an_epoch_on_any_ranks(
        lengths in proptest::collection::vec(1_usize..12, 1..40),
        seed in any::<Option<u64>>(),
        (micro_batch, accumulation, ranks) in (1_u64..4, 1_u64..4, 1_u64..6),
    ) {
        let samples = samples(&lengths);
        let count = lengths.len() as u64;
        let order = SampleOrder::new(samples.count(), seed);
        let batches = Batches::new(&samples, order, shape(micro_batch, accumulation, ranks));
        let train_batch = batches.shape().train_batch();
        // As many steps as samples: a whole number of epochs.
        let mut taken = vec![0_u64; lengths.len()];
        let mut batch = TokenBatch::default();
        for step in 0..count {
            let (mut tokens, mut trained) = (0, 0);
            for micro in 0..accumulation {
                for rank in 0..ranks {
                    let expected = batches.micro_batch_tokens(step, micro, rank);
                    batches.fill(step, micro, rank, &mut batch).unwrap();
                    prop_assert_eq!(batch.tokens() as u64, expected);
                    tokens += expected;
                    trained += batch.labels.iter().filter(|&&label| label != -100).count() as u64;
                    for start in batch.starts.windows(2) {
                        let key = batch.keys[start[0] as usize];
                        // Epoch by epoch: taken so often before, in so many epochs.
                        prop_assert_eq!(u64::from(key.epoch), taken[key.sample as usize]);
                        taken[key.sample as usize] += 1;
                        prop_assert_eq!(start[1] - start[0], lengths[key.sample as usize] as u32);
                    }
                }
            }
            prop_assert_eq!((batches.tokens(step), batches.trained_tokens(step)), (tokens, trained));
        }
        prop_assert!(taken.iter().all(|&times| times == train_batch));
    }

    #[test]
    fn ranks_together_take_what_one_rank_takes(
        lengths in proptest::collection::vec(1_usize..12, 1..30),
        seed in any::<Option<u64>>(),
        (micro_batch, accumulation, ranks) in (1_u64..4, 1_u64..4, 1_u64..6),
        step in 0_u64..100,
    ) {
        let samples = samples(&lengths);
        let order = SampleOrder::new(samples.count(), seed);
        let many = Batches::new(&samples, order, shape(micro_batch, accumulation, ranks));
        let one = Batches::new(&samples, order, shape(micro_batch * accumulation * ranks, 1, 1));
        let together: Vec<_> = (0..accumulation)
            .flat_map(|micro| (0..ranks).map(move |rank| (micro, rank)))
            .flat_map(|(micro, rank)| many.places(step, micro, rank))
            .collect();
        prop_assert_eq!(together, one.places(step, 0, 0).collect::<Vec<_>>());
        prop_assert_eq!(many.trained_tokens(step), one.trained_tokens(step));
    }

    #[test]
    fn row_sizes_cover_every_micro_batch_and_the_largest_is_reached(
        lengths in proptest::collection::vec(1_usize..300, 1..20),
        seed in any::<Option<u64>>(),
        (micro_batch, accumulation, ranks) in (1_u64..4, 1_u64..3, 1_u64..4),
        (first, steps) in (0_u64..9, 1_u64..20),
    ) {
        let samples = samples(&lengths);
        let order = SampleOrder::new(samples.count(), seed);
        let batches = Batches::new(&samples, order, shape(micro_batch, accumulation, ranks));
        let sizes = RowSizes::new(batches.largest_micro_batch(first, steps)[0]);
        let mut largest = 0;
        for step in first..first + steps {
            for (micro, rank) in (0..accumulation).flat_map(|micro| (0..ranks).map(move |rank| (micro, rank))) {
                let tokens = batches.micro_batch_tokens(step, micro, rank);
                largest = largest.max(tokens);
                prop_assert!(sizes.size_for(tokens as usize).is_some());
            }
        }
        prop_assert_eq!(batches.largest_micro_batch(first, steps), [largest, 0]);
        prop_assert!(sizes.all().len() <= 8);
        prop_assert!(sizes.largest() < largest as usize + 16);
    }
}
