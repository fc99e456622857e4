//! Bytes a rank sends in one optimizer step.
//!
//! An all-gather or a reduce-scatter of Ψ elements, as a ring does it and as our all-to-all does it, makes every rank
//! send N-1 pieces of Ψ/N elements. Pieces are whole elements (the division rounds up) of 2 bytes. An all-reduce is
//! one of each. With k micro-batches a step:
//!
//! | stage | sends | why |
//! |---|---|---|
//! | 0 | 2Ψ | micro-batches add locally; one all-reduce |
//! | 1 | Ψ + Ψ | one reduce-scatter of gradients, one all-gather of updated parameters |
//! | 2 | kΨ + Ψ | a rank keeps only its gradient shard, so every micro-batch is reduced |
//! | 3 | 3kΨ | gathered for forward, gathered for backward, gradients reduced; no gather after the update |
//!
//! Recomputation adds nothing: the gather for backward serves it. With LoRA the gradients, and below stage 3 the
//! gathers, are of LoRA's parameters only; stage 3 gathers everything.

use crate::Ask;

const ELEMENT_BYTES: u64 = 2;

/// How often a step moves the trained parameters' elements, and all elements.
struct Moves {
    trained: u64,
    all: u64,
}

impl Moves {
    fn of(stage: u8, accumulation: u64) -> Self {
        match stage {
            0 | 1 => Self { trained: 2, all: 0 },
            2 => Self { trained: accumulation.saturating_add(1), all: 0 },
            _ => Self { trained: accumulation, all: accumulation.saturating_mul(2) },
        }
    }
}

/// Bytes one rank sends in one optimizer step.
pub fn sent_per_step(ask: &Ask, stage: u8) -> u64 {
    let moves = Moves::of(stage, ask.accumulation);
    let piece = |elements| ask.shard(elements).saturating_mul(ELEMENT_BYTES);
    let everything = ask.trainable().saturating_add(ask.frozen());
    let trained = moves.trained.saturating_mul(piece(ask.trainable()));
    let all = moves.all.saturating_mul(piece(everything));
    trained.saturating_add(all).saturating_mul(ask.ranks.saturating_sub(1))
}

/// The same as the ZeRO paper counts it: elements a rank moves, as a multiple of the model's parameters, for many
/// ranks. 2, 2, 2 and 3 without accumulation.
pub fn volume_in_parameters(ask: &Ask, stage: u8) -> f64 {
    if ask.params == 0 {
        return 0.0;
    }
    let moves = Moves::of(stage, ask.accumulation);
    let everything = ask.trainable().saturating_add(ask.frozen());
    (moves.trained as f64 * ask.trainable() as f64 + moves.all as f64 * everything as f64) / ask.params as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Adapters, TrainType};

    /// Section 7 of the ZeRO paper: data parallel 2Ψ, stages 1 and 2 the same, stage 3 half as much again.
    #[test]
    fn volumes_are_the_papers() {
        let ask = Ask::new(8_000_000_000, 5);
        assert_eq!([0, 1, 2, 3].map(|stage| volume_in_parameters(&ask, stage)), [2.0, 2.0, 2.0, 3.0]);
        let one_way = 4 * 2 * 1_600_000_000;
        let sent = [0, 1, 2, 3].map(|stage| sent_per_step(&ask, stage));
        assert_eq!(sent, [2 * one_way, 2 * one_way, 2 * one_way, 3 * one_way]);
    }

    #[test]
    fn accumulation_multiplies_what_stages_2_and_3_reduce_and_gather() {
        let ask = Ask { accumulation: 16, ..Ask::new(8_000_000_000, 5) };
        assert_eq!([0, 1, 2, 3].map(|stage| volume_in_parameters(&ask, stage)), [2.0, 2.0, 17.0, 48.0]);
    }

    #[test]
    fn one_rank_sends_nothing() {
        let ask = Ask { accumulation: 4, ..Ask::new(8_000_000_000, 1) };
        assert_eq!([0, 1, 2, 3].map(|stage| sent_per_step(&ask, stage)), [0; 4]);
    }

    #[test]
    fn lora_sends_its_own_gradients_and_gathers_all_at_stage_3() {
        let adapters = Some(Adapters { params: 1_000, largest_unit: 100 });
        let ask = Ask { train_type: TrainType::Lora, adapters, ..Ask::new(1_000_000, 2) };
        assert_eq!(sent_per_step(&ask, 2), 2 * 2 * 500);
        assert_eq!(sent_per_step(&ask, 3), 2 * 500 + 2 * 2 * 500_500);
    }
}
