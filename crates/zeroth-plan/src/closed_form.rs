//! Model-state memory in closed form: bytes per device and host, by stage and offload.
//!
//! The ZeRO paper's formulas (arXiv 1910.02054, section 3 and figure 1): stage 1 shards the optimizer, stage 2
//! gradients too, stage 3 parameters too. All sums saturate.

use zeroth_program::Bytes;

use crate::{OffloadedStates, Placement, PlanRequest};

/// Bytes of a frozen parameter: its 16-bit value.
const FROZEN_BYTES: u64 = 2;

/// Bytes of a gathered parameter, and of its gradient.
const GATHERED_BYTES: u64 = 2;

/// Model states on a rank's device.
pub fn device_states(request: &PlanRequest, stage: u8, offload: OffloadedStates) -> Bytes {
    let each = request.bytes_per_parameter();
    let held = |elements, cut_from| if stage >= cut_from { request.shard(elements) } else { elements };
    let parameters = if offload.parameters() {
        0
    } else {
        let trained = each.parameters.saturating_mul(held(request.trainable(), 3));
        trained.saturating_add(FROZEN_BYTES.saturating_mul(held(request.frozen(), 3)))
    };
    // Below stage 2 gradients are unsharded until the step: the host reads its shard, and the device keeps the flat.
    let gradients = if offload.optimizer() && stage >= 2 {
        0
    } else {
        each.gradients.saturating_mul(held(request.trainable(), 2))
    };
    let optimizer = if offload.optimizer() {
        0
    } else {
        request.optimizer_bytes(offload).saturating_mul(held(request.trainable(), 1))
    };
    Bytes::of_states(parameters, gradients, optimizer)
}

/// Model states on the fullest host: the shards of all its ranks.
pub fn host_states(request: &PlanRequest, offload: OffloadedStates) -> Bytes {
    let each = request.bytes_per_parameter();
    let shards = |bytes: u64, elements| {
        bytes.saturating_mul(request.shard(elements)).saturating_mul(request.ranks_on_host())
    };
    let parameters = if offload.parameters() {
        shards(each.parameters, request.trainable()).saturating_add(shards(FROZEN_BYTES, request.frozen()))
    } else {
        0
    };
    let (gradients, optimizer) = if offload.optimizer() {
        (
            shards(each.gradients, request.trainable()),
            shards(request.optimizer_bytes(offload), request.trainable()),
        )
    } else {
        (0, 0)
    };
    Bytes::of_states(parameters, gradients, optimizer)
}

/// Buffers of a device: at stage 3 the largest layer, if it is given, gathered and with its gradient, as DeepSpeed's
/// estimator counts them.
pub(crate) fn device_buffers(request: &PlanRequest, stage: u8) -> u64 {
    let layer = if stage == 3 { request.largest_layer.unwrap_or(0) } else { 0 };
    layer.saturating_mul(2 * GATHERED_BYTES)
}

/// Bytes of the gathered layer without which a device cannot compute; 0 where nothing is gathered. Unless the largest
/// layer is given, it is a block of the usual shape.
pub(crate) fn gathered_layer(request: &PlanRequest, placement: &Placement) -> u64 {
    if placement.settings.stage < 3 || (request.ranks <= 1 && !placement.offload.parameters()) {
        return 0;
    }
    let elements = request.largest_layer.unwrap_or_else(|| usual_block(request.params));
    elements.min(request.params).saturating_mul(GATHERED_BYTES)
}

/// Parameters of a block in a decoder with `params` parameters: 12·h² at width h (attention 4·h², feed-forward 8·h²),
/// with h / 128 blocks. Llama 2 and GPT-3 keep that ratio from 7B to 175B.
fn usual_block(params: u64) -> u64 {
    let width = (params as f64 * 128.0 / 12.0).cbrt();
    (12.0 * width * width) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{States, TrainType};

    const GB: u64 = 1_000_000_000;

    /// Figure 1 of the ZeRO paper prints 120, 31.4, 16.6 and 1.9 GB.
    #[test]
    fn the_papers_figure_for_seven_and_a_half_billion_on_64_ranks() {
        let request = PlanRequest::new(7_500_000_000, 64);
        let totals = [0, 1, 2, 3].map(|stage| device_states(&request, stage, OffloadedStates::None).total);
        assert_eq!(totals, [120 * GB, 31_406_250_000, 16_640_625_000, 1_875_000_000]);
    }

    /// The primer's table: 96, 45, 32 and 19 GB.
    #[test]
    fn eight_billion_on_5_ranks_without_a_master_copy() {
        let request = PlanRequest { states: States::Plain, ..PlanRequest::new(8 * GB, 5) };
        let totals = [0, 1, 2, 3].map(|stage| device_states(&request, stage, OffloadedStates::None).total);
        assert_eq!(totals, [96 * GB, 44_800_000_000, 32 * GB, 19_200_000_000]);
    }

    #[test]
    fn states_take_14_bytes_a_parameter_on_one_rank_and_16_on_many() {
        for (ranks, accumulation, bytes) in [(1, 1, 14), (2, 1, 16), (1, 2, 16)] {
            assert_eq!(States::Run.bytes_per_parameter(ranks, accumulation).total(), bytes);
        }
    }

    #[test]
    fn a_runs_master_weights_are_whole_where_weights_or_states_are_in_host_memory() {
        let request = PlanRequest { states: States::Run, ..PlanRequest::new(8 * GB, 5) };
        assert_eq!(device_states(&request, 3, OffloadedStates::None).optimizer, 16 * GB);
        assert_eq!(device_states(&request, 3, OffloadedStates::Parameters).optimizer, 19_200_000_000);
        assert_eq!(host_states(&request, OffloadedStates::Optimizer).optimizer, 96 * GB);
        let narrow = PlanRequest { accumulates_in_16_bits: true, ..request.clone() };
        assert_eq!(device_states(&narrow, 3, OffloadedStates::None).gradients, 3_200_000_000);
        assert_eq!(device_states(&request, 3, OffloadedStates::None).gradients, 6_400_000_000);
        // In fp16 they are whole everywhere.
        let request = PlanRequest { in_bf16: false, ..request };
        assert_eq!(request.bytes_per_parameter().total(), 18);
        assert_eq!(device_states(&request, 3, OffloadedStates::None).optimizer, 19_200_000_000);
        assert_eq!(host_states(&request, OffloadedStates::Optimizer).optimizer, 96 * GB);
    }

    #[test]
    fn an_offloaded_optimizer_takes_gradient_shards_with_it_from_stage_2_on() {
        let request = PlanRequest::new(8 * GB, 5);
        assert_eq!(
            device_states(&request, 1, OffloadedStates::Optimizer),
            Bytes::of_states(16 * GB, 16 * GB, 0)
        );
        assert_eq!(device_states(&request, 2, OffloadedStates::Optimizer), Bytes::of_states(16 * GB, 0, 0));
        assert_eq!(
            device_states(&request, 3, OffloadedStates::Optimizer),
            Bytes::of_states(3_200_000_000, 0, 0)
        );
        assert_eq!(host_states(&request, OffloadedStates::Optimizer), Bytes::of_states(0, 16 * GB, 96 * GB));
        assert_eq!(device_states(&request, 3, OffloadedStates::OptimizerAndParameters).total, 0);
        assert_eq!(host_states(&request, OffloadedStates::OptimizerAndParameters).total, 128 * GB);
        assert_eq!(device_states(&request, 3, OffloadedStates::Parameters).total, 22_400_000_000);
        assert_eq!(host_states(&request, OffloadedStates::Parameters).total, 16 * GB);
    }

    #[test]
    fn a_host_counts_its_own_ranks_only() {
        let request = PlanRequest { ranks_per_host: 8, ..PlanRequest::new(8 * GB, 16) };
        assert_eq!(host_states(&request, OffloadedStates::Optimizer).total, 56 * GB);
        let fuller_than_the_job = PlanRequest { ranks_per_host: 8, ..PlanRequest::new(8 * GB, 2) };
        assert_eq!(host_states(&fuller_than_the_job, OffloadedStates::Optimizer).total, 112 * GB);
    }

    #[test]
    fn loras_frozen_base_is_sharded_at_stage_3_only() {
        let adapter_params = Some(20_000_000);
        let request =
            PlanRequest { train_type: TrainType::Lora, adapter_params, ..PlanRequest::new(7 * GB, 2) };
        let parameters = |stage| device_states(&request, stage, OffloadedStates::None).parameters;
        assert_eq!([0, 1, 2].map(parameters), [14_040_000_000; 3]);
        assert_eq!(parameters(3), 7_020_000_000);
        assert_eq!(device_states(&request, 2, OffloadedStates::None).optimizer, 120_000_000);
    }

    #[test]
    fn a_shard_is_whole_elements() {
        let request = PlanRequest::new(7, 5);
        assert_eq!(device_states(&request, 3, OffloadedStates::None), Bytes::of_states(4, 4, 24));
    }

    #[test]
    fn a_usual_block_is_near_those_of_known_models() {
        // Llama-2-7B, Llama-2-13B, Llama-3.1-70B, GPT-3: parameters, and those of a block.
        for (params, block) in [
            (6_738_415_616, 202_383_360_u64),
            (13_015_864_320, 317_204_480),
            (70_553_706_496, 855_654_400),
            (174_600_000_000, 1_812_000_000),
        ] {
            let ratio = usual_block(params) as f64 / block as f64;
            assert!((0.9..1.2).contains(&ratio), "{params}: {ratio}");
        }
        assert_eq!(usual_block(0), 0);
    }

    #[test]
    fn a_layer_is_gathered_where_parameters_are_not_whole() {
        let bare = |ranks| PlanRequest::new(100_000_000, ranks);
        let zero3 = Placement::new("zero3", 3, OffloadedStates::None);
        let offloaded = Placement::new("zero3_offload", 3, OffloadedStates::OptimizerAndParameters);
        assert_eq!(gathered_layer(&bare(1), &zero3), 0);
        assert!(gathered_layer(&bare(2), &zero3) > 0);
        assert_eq!(gathered_layer(&bare(1), &offloaded), 2 * usual_block(100_000_000));
        assert_eq!(gathered_layer(&bare(4), &Placement::new("zero2", 2, OffloadedStates::Optimizer)), 0);
        let typed = PlanRequest { largest_layer: Some(1_000_000), ..bare(1) };
        assert_eq!(gathered_layer(&typed, &offloaded), 2_000_000);
        // No layer is larger than the model.
        assert_eq!(gathered_layer(&PlanRequest::new(10, 1), &offloaded), 20);
    }

    #[test]
    fn stage_3_counts_the_largest_layer_as_deepspeed_does() {
        let request = PlanRequest { largest_layer: Some(32_899_072), ..PlanRequest::new(2_851_598_336, 8) };
        assert_eq!([2, 3].map(|stage| device_buffers(&request, stage)), [0, 4 * 32_899_072]);
    }
}
