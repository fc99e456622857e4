//! The order of samples. A position counts samples since the start of the run, over all epochs. It is all a
//! checkpoint needs to resume, and it is independent of the number of ranks.

use std::num::NonZeroU64;

use super::permutation::Permutation;
use crate::checkpoint::MAX_SAMPLES;

/// The order in which a dataset's samples are consumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleOrder {
    samples: NonZeroU64,
    shuffle: Option<u64>,
}

/// A sample, and the epoch in which it is consumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EpochSample {
    /// Epoch, from 0.
    pub epoch: u32,
    /// Its index in the dataset.
    pub sample: u64,
}

/// The length of a run. `--max-steps` overrides `--num-train-epochs`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RunLength {
    /// `--max-steps`.
    Steps(u64),
    /// `--num-train-epochs`, which may be a fraction.
    Epochs(f64),
}

/// An invalid run length.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum RunLengthError {
    #[error("--num-train-epochs is {0}: give a number above 0, as in 3 or 0.5")]
    Epochs(f64),
    #[error("--max-steps is 0: give at least 1, or --num-train-epochs")]
    NoSteps,
    #[error(
        "{steps} steps of {train_batch} samples exceed the supported number of samples: give fewer steps (--max-steps)"
    )]
    TooLong { steps: u64, train_batch: u64 },
}

impl SampleOrder {
    /// Orders `samples` as in the file, or reshuffled every epoch with the seed `shuffle`.
    pub fn new(samples: NonZeroU64, shuffle: Option<u64>) -> Self {
        Self { samples, shuffle }
    }

    /// Whether every epoch is reshuffled.
    pub fn is_shuffled(&self) -> bool {
        self.shuffle.is_some()
    }

    /// The sample at a position.
    pub fn sample_at(&self, position: u64) -> EpochSample {
        self.epoch_of(position).place(position)
    }

    /// Iterates from a position on, without end. Cheaper than repeated [`Self::sample_at`].
    pub fn from(&self, position: u64) -> impl Iterator<Item = EpochSample> + use<> {
        let order = *self;
        let mut epoch = order.epoch_of(position);
        (position..).map(move |position| {
            if position - epoch.first == order.samples.get() {
                epoch = order.epoch_of(position);
            }
            epoch.place(position)
        })
    }

    fn epoch_of(&self, position: u64) -> Epoch {
        let number = (position / self.samples) as u32;
        let permutation = self.shuffle.map(|seed| Permutation::new(self.samples.get(), seed, number));
        Epoch { number, first: position - position % self.samples, permutation }
    }

    /// Steps per epoch, as a fraction: the remainder of an epoch flows into the next.
    pub fn steps_per_epoch(&self, train_batch: NonZeroU64) -> f64 {
        self.samples.get() as f64 / train_batch.get() as f64
    }

    /// The steps of a run: those requested, or ⌈epochs × samples / train_batch⌉.
    ///
    /// Hugging Face rounds up per epoch, because its epochs end with a short step. Here only the end of the run is
    /// rounded up, and the last step borrows from the next epoch.
    pub fn total_steps(&self, length: RunLength, train_batch: NonZeroU64) -> Result<u64, RunLengthError> {
        let steps = self.steps_of(length, train_batch)?;
        let positions = steps.checked_mul(train_batch.get());
        if positions.is_none_or(|positions| positions > MAX_SAMPLES) {
            return Err(RunLengthError::TooLong { steps, train_batch: train_batch.get() });
        }
        Ok(steps)
    }

    fn steps_of(&self, length: RunLength, train_batch: NonZeroU64) -> Result<u64, RunLengthError> {
        match length {
            RunLength::Steps(0) => Err(RunLengthError::NoSteps),
            RunLength::Steps(steps) => Ok(steps),
            RunLength::Epochs(epochs) => {
                let steps = epochs * self.steps_per_epoch(train_batch);
                if !(epochs > 0.0 && steps < (1_u64 << 53) as f64) {
                    return Err(RunLengthError::Epochs(epochs));
                }
                // 0.1 × 30 is slightly above 3 in binary; the difference must not become a step.
                let whole = steps.round();
                let steps = if (steps - whole).abs() <= 1e-9 * whole { whole } else { steps.ceil() };
                Ok(steps as u64)
            }
        }
    }
}

/// The order within one epoch.
struct Epoch {
    number: u32,
    first: u64,
    permutation: Option<Permutation>,
}

impl Epoch {
    fn place(&self, position: u64) -> EpochSample {
        let place = position - self.first;
        let sample = self.permutation.as_ref().map_or(place, |permutation| permutation.at(place));
        EpochSample { epoch: self.number, sample }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn order(samples: u64, shuffle: Option<u64>) -> SampleOrder {
        SampleOrder::new(NonZeroU64::new(samples).unwrap(), shuffle)
    }

    fn batch(samples: u64) -> NonZeroU64 {
        NonZeroU64::new(samples).unwrap()
    }

    #[test]
    fn unshuffled_order_follows_the_file_across_epochs() {
        let taken: Vec<_> = order(3, None).from(0).take(7).map(|place| (place.epoch, place.sample)).collect();
        assert_eq!(taken, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]);
    }

    #[test]
    fn every_epoch_and_seed_has_its_own_order() {
        let epoch = |seed: u64, epoch: u64| -> Vec<u64> {
            order(50, Some(seed)).from(50 * epoch).take(50).map(|place| place.sample).collect()
        };
        let orders = [epoch(42, 0), epoch(42, 1), epoch(43, 0), epoch(42 + (1 << 32), 0)];
        for (index, one) in orders.iter().enumerate() {
            assert!(!orders[..index].contains(one), "{index}");
        }
        assert_eq!(epoch(42, 1), orders[1]);
    }

    #[test]
    fn total_steps_are_derived_from_epochs_and_batch_size() {
        let steps =
            |samples, length, train_batch| order(samples, None).total_steps(length, batch(train_batch));
        assert_eq!(steps(100, RunLength::Epochs(3.0), 8), Ok(38)); // 37.5
        assert_eq!(steps(100, RunLength::Epochs(2.5), 10), Ok(25));
        assert_eq!(steps(30, RunLength::Epochs(0.1), 3), Ok(1)); // 1.0000000000000002 in binary
        assert_eq!(steps(30, RunLength::Epochs(0.101), 3), Ok(2));
        assert_eq!(steps(3, RunLength::Epochs(0.01), 8), Ok(1));
        assert_eq!(steps(100, RunLength::Steps(7), 8), Ok(7));
        assert_eq!(steps(100, RunLength::Steps(0), 8), Err(RunLengthError::NoSteps));
        for wrong in [0.0, -1.0, f64::INFINITY] {
            assert_eq!(steps(100, RunLength::Epochs(wrong), 8), Err(RunLengthError::Epochs(wrong)));
        }
        assert!(steps(100, RunLength::Epochs(f64::NAN), 8).is_err());
        let beyond = RunLengthError::TooLong { steps: 1 << 60, train_batch: 8 };
        assert_eq!(steps(100, RunLength::Steps(1 << 60), 8), Err(beyond));
        assert!(steps(100, RunLength::Steps(u64::MAX), 1).is_err());
        assert_eq!(order(100, None).steps_per_epoch(batch(8)), 12.5);
    }

    proptest! {
        #[test]
        fn every_epoch_visits_every_sample_once(samples in 1_u64..400, seed in any::<u64>(), epoch in 0_u64..1000) {
            let taken: Vec<_> = order(samples, Some(seed)).from(samples * epoch).take(samples as usize).collect();
            prop_assert!(taken.iter().all(|place| u64::from(place.epoch) == epoch));
            let mut indices: Vec<_> = taken.iter().map(|place| place.sample).collect();
            indices.sort_unstable();
            prop_assert!(indices.into_iter().eq(0..samples));
        }

        #[test]
        fn iteration_matches_random_access(samples in 1_u64..50, seed in any::<Option<u64>>(), first in 0_u64..500) {
            let order = order(samples, seed);
            for (position, place) in (first..).zip(order.from(first)).take(120) {
                prop_assert_eq!(order.sample_at(position), place);
            }
        }
    }
}
