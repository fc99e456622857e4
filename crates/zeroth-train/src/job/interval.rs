//! When evaluations, checkpoints and progress lines are due: Hugging Face's strategies.

use std::fmt;
use std::num::NonZeroU64;

/// How often something recurs during a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interval {
    /// `no`: not at all.
    Never,
    /// `steps`: every N steps, and after the last one.
    Steps(NonZeroU64),
    /// `epoch`: after the step that consumes an epoch's last sample, and after the last step.
    Epoch,
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Never => f.write_str("no"),
            Self::Steps(steps) => write!(f, "{steps}"),
            Self::Epoch => f.write_str("epoch"),
        }
    }
}

/// The steps of a run and the length of its epochs. An epoch's remainder flows into the next step, so a step may
/// belong to two epochs, or to more if the train batch exceeds the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunSteps {
    /// Steps of the run.
    pub total: u64,
    /// Samples per epoch.
    pub samples: NonZeroU64,
    /// Samples per step.
    pub train_batch: u64,
}

impl RunSteps {
    /// Epochs that are complete after a step.
    fn epochs_after(&self, step: u64) -> u64 {
        step.saturating_mul(self.train_batch) / self.samples
    }

    /// Whether a step, counted from 1, consumes the last sample of an epoch.
    fn ends_epoch(&self, step: u64) -> bool {
        self.epochs_after(step) > self.epochs_after(step.saturating_sub(1))
    }
}

impl Interval {
    /// Every `steps` steps; never for 0.
    pub fn steps(steps: u64) -> Self {
        NonZeroU64::new(steps).map_or(Self::Never, Self::Steps)
    }

    /// Whether it is due after a step, counted from 1.
    pub fn is_due(self, step: u64, run: RunSteps) -> bool {
        match self {
            Self::Never => false,
            Self::Steps(every) => step.is_multiple_of(every.get()) || step == run.total,
            Self::Epoch => run.ends_epoch(step) || step == run.total,
        }
    }

    /// How often it is due after the steps `done` + 1 to the last.
    pub fn count(self, done: u64, run: RunSteps) -> u64 {
        let done = done.min(run.total);
        let (regular, is_last_regular) = match self {
            Self::Never => return 0,
            Self::Steps(every) => (run.total / every - done / every, run.total.is_multiple_of(every.get())),
            Self::Epoch if run.train_batch >= run.samples.get() => (run.total - done, true),
            Self::Epoch => (run.epochs_after(run.total) - run.epochs_after(done), run.ends_epoch(run.total)),
        };
        regular + u64::from(!is_last_regular && done < run.total)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(total: u64, samples: u64, train_batch: u64) -> RunSteps {
        RunSteps { total, samples: NonZeroU64::new(samples).unwrap(), train_batch }
    }

    fn due(interval: Interval, run: RunSteps) -> Vec<u64> {
        (1..=run.total).filter(|step| interval.is_due(*step, run)).collect()
    }

    #[test]
    fn epochs_end_with_the_step_that_takes_their_last_sample() {
        // 10 samples, 4 per step: sample 10 is in step 3, sample 20 in step 5, sample 30 in step 8.
        assert_eq!(due(Interval::Epoch, run(9, 10, 4)), [3, 5, 8, 9]);
        assert_eq!(due(Interval::Epoch, run(6, 8, 4)), [2, 4, 6]);
        // Every step ends an epoch, or several.
        assert_eq!(due(Interval::Epoch, run(3, 3, 8)), [1, 2, 3]);
        assert_eq!(due(Interval::steps(2), run(5, 10, 4)), [2, 4, 5]);
        assert_eq!(due(Interval::steps(0), run(5, 10, 4)), [0; 0]);
    }

    proptest! {
        #[test]
        fn the_count_is_that_of_the_due_steps(
            (total, samples, batch) in (1_u64..60, 1_u64..40, 1_u64..20),
            (done, every) in (0_u64..70, 0_u64..20),
        ) {
            let run = run(total, samples, batch);
            for interval in [Interval::steps(every), Interval::Epoch] {
                let after = due(interval, run).iter().filter(|step| **step > done).count() as u64;
                prop_assert_eq!(interval.count(done, run), after, "{:?}", interval);
            }
        }
    }
}
