//! Exact bytes of model states per GPU, for claims and advice about numbers of GPUs.

use zeroth_base::format_bytes;

use crate::{OffloadedStates, PlanRequest, States, TrainType, device_states};

/// The largest count tried.
const MOST: u64 = 1 << 20;

/// The smallest count, up to about a million, for which the monotonic predicate `holds` is true.
pub(crate) fn smallest_count(holds: impl Fn(u64) -> bool) -> Option<u64> {
    if !holds(MOST) {
        return None;
    }
    let (mut below, mut at) = (0, MOST);
    while at - below > 1 {
        let middle = below + (at - below) / 2;
        if holds(middle) { at = middle } else { below = middle }
    }
    Some(at)
}

/// The number of LoRA parameters where only the model's size is known: 0.3%. Rank 8 on all linear layers is 20.2M of
/// Qwen2.5-7B's 7.6B (0.27%), and a smaller part of larger models.
pub(crate) fn usual_adapters(params: u64) -> u64 {
    params / 1000 * 3
}

/// Bytes of model states: replicated on every GPU, and sharded across them.
///
/// Claims use round numbers, so shares are exact fractions here: 30B over 21 GPUs must not fail by 6 bytes.
pub(crate) struct StateBytes {
    replicated: u128,
    sharded: u128,
}

impl StateBytes {
    pub(crate) fn of(states: States, params: u64, stage: u8, train_type: TrainType) -> Self {
        let adapter_params = Some(usual_adapters(params));
        Self::of_job(
            &PlanRequest { adapter_params, train_type, states, ..PlanRequest::new(params, 1) },
            stage,
        )
    }

    pub(crate) fn of_job(request: &PlanRequest, stage: u8) -> Self {
        let all = device_states(request, 0, OffloadedStates::None);

        let sharded_from = [(3, all.parameters), (2, all.gradients), (1, all.optimizer)];
        let sum = |sharded| {
            let parts = sharded_from.iter().filter(|(from, _)| (stage >= *from) == sharded);
            parts.map(|(_, bytes)| u128::from(*bytes)).sum()
        };
        Self { replicated: sum(false), sharded: sum(true) }
    }

    /// Bytes per GPU, times the number of GPUs.
    pub(crate) fn times(&self, ranks: u64) -> u128 {
        self.replicated * u128::from(ranks) + self.sharded
    }

    pub(crate) fn is_within(&self, ranks: u64, bytes: u64) -> bool {
        self.times(ranks) <= u128::from(bytes) * u128::from(ranks)
    }

    pub(crate) fn on(&self, ranks: u64) -> String {
        format_bytes((self.times(ranks) / u128::from(ranks)) as u64)
    }

    /// The replicated bytes: the limit for many GPUs.
    pub(crate) fn limit(&self) -> String {
        format_bytes(self.replicated as u64)
    }
}
