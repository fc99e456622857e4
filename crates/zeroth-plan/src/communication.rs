//! Communication volume: bytes a rank sends per optimizer step.
//!
//! In an all-gather or a reduce-scatter of Ψ elements, as a ring or as our all-to-all, every rank sends N-1 pieces of
//! Ψ/N elements. Pieces are whole elements (the division rounds up) of 2 bytes. An all-reduce is one of each. With k
//! micro-batches per step:
//!
//! | stage | sends | why |
//! |---|---|---|
//! | 0 | 2Ψ | micro-batches add locally; one all-reduce |
//! | 1 | Ψ + Ψ | one reduce-scatter of gradients, one all-gather of updated parameters |
//! | 2 | kΨ + Ψ | a rank keeps only its gradient shard, so every micro-batch is reduced |
//! | 3 | 3kΨ | gathered for forward, gathered for backward, gradients reduced; no gather after the update |
//!
//! Recomputation adds nothing: the all-gather for backward serves it. With LoRA the gradients, and below stage 3 the
//! all-gathers, are of LoRA's parameters only; stage 3 gathers everything.

use crate::PlanRequest;

const ELEMENT_BYTES: u64 = 2;

/// How often a step communicates the trained elements, and all elements.
pub(crate) struct Transfers {
    pub(crate) trained: u64,
    pub(crate) all: u64,
}

impl Transfers {
    pub(crate) fn of(stage: u8, accumulation: u64) -> Self {
        match stage {
            0 | 1 => Self { trained: 2, all: 0 },
            2 => Self { trained: accumulation.saturating_add(1), all: 0 },
            _ => Self { trained: accumulation, all: accumulation.saturating_mul(2) },
        }
    }
}

/// Bytes a rank sends per optimizer step.
pub fn bytes_sent_per_step(request: &PlanRequest, stage: u8) -> u64 {
    let transfers = Transfers::of(stage, request.accumulation);
    let piece = |elements| request.shard(elements).saturating_mul(ELEMENT_BYTES);
    let everything = request.trainable().saturating_add(request.frozen());
    let trained = transfers.trained.saturating_mul(piece(request.trainable()));
    let all = transfers.all.saturating_mul(piece(everything));
    trained.saturating_add(all).saturating_mul(request.ranks.saturating_sub(1))
}

/// The volume as the ZeRO paper counts it: elements per rank as a multiple of the model's parameters, for many ranks.
/// 2, 2, 2 and 3 without accumulation.
pub fn volume_in_parameters(request: &PlanRequest, stage: u8) -> f64 {
    if request.params == 0 {
        return 0.0;
    }
    let transfers = Transfers::of(stage, request.accumulation);
    let everything = request.trainable().saturating_add(request.frozen());
    (transfers.trained as f64 * request.trainable() as f64 + transfers.all as f64 * everything as f64)
        / request.params as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TrainType;

    /// Section 7 of the ZeRO paper: data parallel 2Ψ, stages 1 and 2 the same, stage 3 half as much again.
    #[test]
    fn volumes_are_the_papers() {
        let request = PlanRequest::new(8_000_000_000, 5);
        assert_eq!([0, 1, 2, 3].map(|stage| volume_in_parameters(&request, stage)), [2.0, 2.0, 2.0, 3.0]);
        let one_way = 4 * 2 * 1_600_000_000;
        let sent = [0, 1, 2, 3].map(|stage| bytes_sent_per_step(&request, stage));
        assert_eq!(sent, [2 * one_way, 2 * one_way, 2 * one_way, 3 * one_way]);
    }

    #[test]
    fn accumulation_multiplies_what_stages_2_and_3_reduce_and_gather() {
        let request = PlanRequest { accumulation: 16, ..PlanRequest::new(8_000_000_000, 5) };
        assert_eq!([0, 1, 2, 3].map(|stage| volume_in_parameters(&request, stage)), [2.0, 2.0, 17.0, 48.0]);
    }

    #[test]
    fn one_rank_sends_nothing() {
        let request = PlanRequest { accumulation: 4, ..PlanRequest::new(8_000_000_000, 1) };
        assert_eq!([0, 1, 2, 3].map(|stage| bytes_sent_per_step(&request, stage)), [0; 4]);
    }

    #[test]
    fn lora_sends_its_own_gradients_and_gathers_all_at_stage_3() {
        let adapter_params = Some(1_000);
        let request =
            PlanRequest { train_type: TrainType::Lora, adapter_params, ..PlanRequest::new(1_000_000, 2) };
        assert_eq!(bytes_sent_per_step(&request, 2), 2 * 2 * 500);
        assert_eq!(bytes_sent_per_step(&request, 3), 2 * 500 + 2 * 2 * 500_500);
    }
}
