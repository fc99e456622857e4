//! `--split-dataset-ratio`: holds out a share of the data for evaluation, chosen by the seed.

use std::collections::HashSet;

use zeroth_data::{DataError, Packing, Samples};

use super::permutation::Permutation;

/// Stands for an epoch that no run reaches: the choice is independent of the order of any epoch.
const HELD_OUT: u32 = u32::MAX;

/// A dataset that cannot be split.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "names say what they are")]
pub enum SplitError {
    #[error(
        "--split-dataset-ratio {ratio} takes {held_out} of {samples} samples for evaluation and leaves none to train on: \
         give a smaller ratio, more rows, or --eval-data"
    )]
    NothingToTrain { ratio: f64, held_out: u64, samples: u64 },
    #[error(transparent)]
    Data(#[from] DataError),
}

/// Divides unpacked samples into training and evaluation: ⌈ratio × samples⌉ are held out, chosen by the seed and
/// independent of the number of ranks. Both parts keep the order of the file.
pub fn split_dataset(
    samples: &Samples,
    ratio: f64,
    seed: u64,
    packing: Packing,
) -> Result<(Samples, Samples), SplitError> {
    let all = samples.totals().samples;
    let held_out = share_of(ratio, all);
    if held_out >= all {
        return Err(SplitError::NothingToTrain { ratio, held_out, samples: all });
    }
    let permutation = Permutation::new(all, seed, HELD_OUT);
    let chosen: HashSet<u64> = (0..held_out).map(|place| permutation.at(place)).collect();
    Ok(samples.hold_out(packing, |sample| chosen.contains(&sample))?)
}

/// A share of a whole, rounded up; at least 1. 0.1 × 30 is slightly above 3 in binary: the difference must not count.
pub fn share_of(share: f64, whole: u64) -> u64 {
    let part = share * whole as f64;
    let rounded = part.round();
    let part = if (part - rounded).abs() <= 1e-9 * rounded { rounded } else { part.ceil() };
    (part as u64).max(1)
}

#[cfg(test)]
mod tests {
    use zeroth_data::SamplesBuilder;

    use super::*;

    fn samples(count: i32) -> Samples {
        let mut builder = SamplesBuilder::new(9);
        for row in 0..count {
            builder.push(&[row, row], &[row, row]);
        }
        builder.finish().unwrap()
    }

    fn rows(samples: &Samples) -> Vec<i32> {
        (0..samples.count().get()).map(|sample| samples.ids(sample).unwrap()[0]).collect()
    }

    #[test]
    fn parts_are_disjoint_complete_and_chosen_by_the_seed() {
        let whole = samples(40);
        let split = |seed| {
            let (train, evaluation) = split_dataset(&whole, 0.25, seed, Packing::Off).unwrap();
            (rows(&train), rows(&evaluation))
        };
        let (train, evaluation) = split(42);
        assert_eq!((train.len(), evaluation.len()), (30, 10));
        assert!(train.is_sorted() && evaluation.is_sorted());
        let mut both = [train.clone(), evaluation.clone()].concat();
        both.sort_unstable();
        assert!(both.into_iter().eq(0..40));
        assert_eq!(split(42), (train, evaluation.clone()));
        assert_ne!(split(43).1, evaluation);
        assert_ne!(evaluation, (0..10).collect::<Vec<_>>());
    }

    #[test]
    fn something_must_remain_to_train() {
        let (train, evaluation) = split_dataset(&samples(2), 0.01, 1, Packing::Off).unwrap();
        assert_eq!((train.count().get(), evaluation.count().get()), (1, 1));
        let error = split_dataset(&samples(3), 0.9, 1, Packing::Off).unwrap_err().to_string();
        assert!(error.contains("takes 3 of 3 samples"), "{error}");
        assert!(split_dataset(&samples(1), 0.01, 1, Packing::Off).is_err());
    }

    #[test]
    fn shares_are_rounded_up() {
        let of = |share, whole| share_of(share, whole);
        assert_eq!([of(0.1, 30), of(0.1, 31), of(0.001, 30), of(0.5, 1), of(0.3, 10)], [3, 4, 1, 1, 3]);
    }
}
