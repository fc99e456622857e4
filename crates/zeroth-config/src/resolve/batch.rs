//! Computes the three batch sizes from those given, as DeepSpeed does.

/// The batch sizes of a run; the product of the last two and the ranks is the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchSizes {
    /// Samples of one optimizer step.
    pub train: u64,
    /// Samples one rank computes at a time.
    pub micro: u64,
    /// Micro-batches before the optimizer steps.
    pub accumulation: u64,
}

/// Batch sizes that do not go together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each message names its fields")]
pub enum BatchError {
    #[error(
        "Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * \
         world_size {train} != {micro} * {accumulation} * {ranks}\n{fix}"
    )]
    Mismatch { train: u64, micro: u64, accumulation: u64, ranks: u64, fix: String },
    #[error("Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided")]
    NoneGiven,
    #[error("the batch sizes multiply to more than 2^64 samples; check them for a slip")]
    TooLarge,
}

/// DeepSpeed's table: what is missing is computed with whole divisions, and then all must fit.
pub fn triangulate(
    train: Option<u64>,
    micro: Option<u64>,
    accumulation: Option<u64>,
    ranks: u64,
) -> Result<BatchSizes, BatchError> {
    let product = |a: u64, b: u64, c: u64| {
        a.checked_mul(b).and_then(|ab| ab.checked_mul(c)).ok_or(BatchError::TooLarge)
    };
    let divided = |total: u64, by: u64| total.checked_div(by).unwrap_or(0);
    let batch = match (train, micro, accumulation) {
        (Some(train), Some(micro), Some(accumulation)) => BatchSizes { train, micro, accumulation },
        (Some(train), Some(micro), None) => {
            BatchSizes { train, micro, accumulation: divided(divided(train, micro), ranks) }
        }
        (Some(train), None, Some(accumulation)) => {
            BatchSizes { train, micro: divided(divided(train, ranks), accumulation), accumulation }
        }
        (Some(train), None, None) => BatchSizes { train, micro: divided(train, ranks), accumulation: 1 },
        (None, Some(micro), accumulation) => {
            let accumulation = accumulation.unwrap_or(1);
            BatchSizes { train: product(micro, accumulation, ranks)?, micro, accumulation }
        }
        (None, None, _) => return Err(BatchError::NoneGiven),
    };
    let BatchSizes { train, micro, accumulation } = batch;
    if train == 0 || micro == 0 || accumulation == 0 || product(micro, accumulation, ranks)? != train {
        let fix = fix(batch, ranks);
        return Err(BatchError::Mismatch { train, micro, accumulation, ranks, fix });
    }
    Ok(batch)
}

/// The smallest change that makes the sizes consistent.
fn fix(batch: BatchSizes, ranks: u64) -> String {
    let (micro, accumulation) = (batch.micro.max(1), batch.accumulation.max(1));
    let share = micro.saturating_mul(accumulation);
    let all = share.saturating_mul(ranks);
    // The cause of many such reports: a batch that leaves out the ranks.
    if batch.train == share && ranks > 1 {
        return format!(
            "train_batch_size {} is micro-batch × accumulation and leaves out the {ranks} ranks: write {all}, or \
             \"auto\"",
            batch.train
        );
    }
    format!("write train_batch_size {all}, or leave it to \"auto\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(train: u64, micro: u64, accumulation: u64) -> BatchSizes {
        BatchSizes { train, micro, accumulation }
    }

    #[test]
    fn every_row_of_deepspeeds_table() {
        // (train, micro, accumulation, ranks) given -> computed.
        for (given, expected) in [
            ((Some(32), Some(16), Some(1), 2), Ok(batch(32, 16, 1))),
            ((Some(32), Some(8), None, 2), Ok(batch(32, 8, 2))),
            ((Some(32), None, Some(2), 2), Ok(batch(32, 8, 2))),
            ((None, Some(16), Some(2), 2), Ok(batch(64, 16, 2))),
            ((Some(32), None, None, 2), Ok(batch(32, 16, 1))),
            ((None, Some(16), None, 2), Ok(batch(32, 16, 1))),
            ((None, None, Some(4), 2), Err(BatchError::NoneGiven)),
            ((None, None, None, 2), Err(BatchError::NoneGiven)),
        ] {
            let (train, micro, accumulation, ranks) = given;
            assert_eq!(triangulate(train, micro, accumulation, ranks), expected, "{given:?}");
        }
    }

    #[test]
    fn what_does_not_divide_fails_and_is_not_rounded() {
        // DeepSpeed's own test cases: 2 ranks, (33, 17, 2) and (32, 18, 1).
        for (train, micro, accumulation) in [(33, 17, 2), (32, 18, 1)] {
            let error = triangulate(Some(train), Some(micro), Some(accumulation), 2).unwrap_err();
            let said = format!("{train} != {micro} * {accumulation} * 2");
            assert!(error.to_string().contains(&said), "{error}");
        }
        assert!(
            triangulate(Some(33), Some(17), None, 2).is_err(),
            "33 // 17 // 2 = 0 must not become a batch"
        );
        assert!(triangulate(Some(3), None, None, 2).is_err());
    }

    #[test]
    fn a_batch_that_leaves_out_the_ranks_is_told_so() {
        let error = triangulate(Some(16), Some(1), Some(16), 8).unwrap_err().to_string();
        assert!(error.contains("leaves out the 8 ranks: write 128"), "{error}");
    }

    proptest::proptest! {
        #[test]
        fn whatever_is_given_the_result_fits_or_is_refused(
            train in proptest::option::of(0u64..100_000),
            micro in proptest::option::of(0u64..1_000),
            accumulation in proptest::option::of(0u64..1_000),
            ranks in 1u64..2_000,
        ) {
            if let Ok(batch) = triangulate(train, micro, accumulation, ranks) {
                proptest::prop_assert_eq!(batch.micro * batch.accumulation * ranks, batch.train);
                proptest::prop_assert!(batch.train > 0);
                proptest::prop_assert!(train.is_none_or(|given| given == batch.train));
                proptest::prop_assert!(micro.is_none_or(|given| given == batch.micro));
                proptest::prop_assert!(accumulation.is_none_or(|given| given == batch.accumulation));
            }
        }
    }
}
