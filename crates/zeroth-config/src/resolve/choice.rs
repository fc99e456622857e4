//! Settings that are chosen to fit the memory, because the user left them open.

use serde_json::{Value, json};

use crate::schema::{FrozenPlacement, Recompute, UpdatedBy};

/// A choice that does not change what is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// `zeroth.recompute` and `zeroth.recompute_blocks`.
    Recompute(Recompute),
    /// `zero_optimization.stage3_prefetch_bucket_size`.
    Prefetch(u64),
    /// `zeroth.frozen`.
    Frozen(FrozenPlacement),
    /// `zeroth.update_window`.
    UpdateWindow(u64),
    /// `zeroth.update`.
    UpdatedBy(UpdatedBy),
    /// `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps`.
    Batch {
        /// Samples per micro-batch.
        micro_batch: u64,
        /// Micro-batches per optimizer step.
        accumulation: u64,
    },
}

impl Choice {
    /// Its keys and their values, as a file spells them.
    pub fn settings(self) -> Vec<(&'static str, Value)> {
        match self {
            Self::Recompute(recompute) => {
                let blocks = match recompute {
                    Recompute::Block { blocks, .. } => blocks,
                    Recompute::Nothing | Recompute::NormSwiGlu | Recompute::Attention => None,
                };
                let policy = ("zeroth.recompute", recompute.word().into());
                let blocks = blocks.map(|blocks| ("zeroth.recompute_blocks", blocks.into()));
                [policy].into_iter().chain(blocks).collect()
            }
            Self::Prefetch(bucket) => {
                vec![("zero_optimization.stage3_prefetch_bucket_size", bucket.into())]
            }
            Self::Frozen(placement) => vec![("zeroth.frozen", placement.word().into())],
            Self::UpdateWindow(bytes) => vec![("zeroth.update_window", bytes.into())],
            Self::UpdatedBy(device) => vec![("zeroth.update", device.word().into())],
            Self::Batch { micro_batch, accumulation } => vec![
                ("train_micro_batch_size_per_gpu", micro_batch.into()),
                ("gradient_accumulation_steps", accumulation.into()),
            ],
        }
    }

    /// The settings of several choices, as `plan --format json` lists them.
    pub fn to_json(choices: &[Self]) -> Value {
        let settings = choices.iter().flat_map(|choice| choice.settings());
        settings.map(|(key, value)| json!({"key": key, "value": value})).collect()
    }
}
