//! Communication and staging buffers: gathered units, gradients before reduction, copies between tiers.
//!
//! A closed form from the largest unit. Elements in transfer have 2 bytes. One rank gathers and reduces nothing.

use crate::{Placement, PlanRequest, Shape, TrainType};

const ELEMENT_BYTES: u64 = 2;

/// Double buffering.
const DOUBLE: u64 = 2;

/// The buffers of a device by purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceBuffers {
    /// Gathered units: the current one and the prefetched one.
    pub gathered: u64,
    /// Persistent parameters.
    pub persistent: u64,
    /// Unsharded gradients before reduction, and those being reduced.
    pub gradients: u64,
    /// Staging buffers of copies from and to host memory.
    pub staging: u64,
}

impl DeviceBuffers {
    /// The sum.
    pub fn total(self) -> u64 {
        self.gathered
            .saturating_add(self.persistent)
            .saturating_add(self.gradients)
            .saturating_add(self.staging)
    }
}

/// Unit sizes in elements.
struct Units {
    /// The largest unit, LoRA included.
    whole: u64,
    /// Its trained parameters.
    trained: u64,
    /// Elements per reduction: a bucket, at most the trained parameters.
    bucket: u64,
}

impl Units {
    fn of(request: &PlanRequest, shape: &Shape, placement: &Placement) -> Self {
        let adapters = request.adapters.map_or(0, |adapters| adapters.largest_unit);
        let (whole, trained) = match request.train_type {
            TrainType::Full => (shape.largest_unit, shape.largest_unit),
            TrainType::Lora => (shape.largest_unit.saturating_add(adapters), adapters),
        };
        Self { whole, trained, bucket: placement.settings.reduce_bucket.min(trained) }
    }
}

/// The buffers of a device.
pub fn device_buffers(request: &PlanRequest, placement: &Placement) -> DeviceBuffers {
    let settings = &placement.settings;
    let Some(shape) = &request.shape else {
        // Without a model, one gathered layer and its gradient, as DeepSpeed's estimator counts them.
        let layer = if settings.stage == 3 { request.largest_layer.unwrap_or(0) } else { 0 };
        let bytes = ELEMENT_BYTES.saturating_mul(layer);
        return DeviceBuffers { gathered: bytes, gradients: bytes, ..DeviceBuffers::default() };
    };
    let units = Units::of(request, shape, placement);
    let peers = request.ranks > 1;
    let bytes = |elements: u64| elements.saturating_mul(ELEMENT_BYTES);

    // Sharded or offloaded parameters are gathered unit by unit. With overlap the next unit is prefetched; max_live
    // bounds both together, but never below one unit.
    let assembled = settings.stage == 3 && (peers || placement.offload.parameters());
    let (mut gathered, mut persistent) = (0, 0);
    if assembled {
        let all = request.trainable().saturating_add(request.frozen());
        let live = if settings.overlap && settings.prefetch > 0 {
            units.whole.saturating_mul(DOUBLE).min(settings.max_live.max(units.whole))
        } else {
            units.whole
        };
        gathered = bytes(live.min(all.max(units.whole)));
        persistent = bytes(placement.persistent);
    }

    let gradients = match settings.stage {
        // Unsharded gradients count as states. A bucket receives and sums peers' parts; with overlap a second one is in
        // transfer.
        0 | 1 if peers => bytes(units.bucket).saturating_mul(if settings.overlap { DOUBLE } else { 1 }),
        0 | 1 => 0,
        // Only shards persist, so a unit's full gradient needs a buffer until it is reduced or moved to the host. With
        // overlap, the bucket being reduced is in addition to the unit that backward writes.
        _ if peers || placement.offload.optimizer() => {
            let summed = if settings.overlap { units.bucket } else { 0 };
            bytes(units.trained.saturating_add(summed))
        }
        _ => 0,
    };

    // Each direction between device and host is double buffered: gradient shards down to an offloaded optimizer;
    // updated parameters, where optimizer and parameters are in different tiers; parameter shards up for the
    // all-gather. One rank uploads straight into the gathered unit.
    let reduced_shard = bytes(request.shard(units.bucket)).saturating_mul(DOUBLE);
    let mut staging: u64 = 0;
    if placement.offload.optimizer() {
        staging = staging.saturating_add(reduced_shard);
    }
    if placement.offload.optimizer() != placement.offload.parameters() {
        staging = staging.saturating_add(reduced_shard);
    }
    if placement.offload.parameters() && peers {
        staging = staging.saturating_add(bytes(request.shard(units.whole)).saturating_mul(DOUBLE));
    }
    DeviceBuffers { gathered, persistent, gradients, staging }
}

/// Bytes of the gathered layer without which a device cannot compute; 0 where nothing is gathered.
///
/// Without a model or a given largest layer, it is a block of the usual shape.
pub fn gathered_layer(request: &PlanRequest, placement: &Placement) -> u64 {
    if placement.settings.stage < 3 || (request.ranks <= 1 && !placement.offload.parameters()) {
        return 0;
    }
    let elements = match &request.shape {
        Some(shape) => Units::of(request, shape, placement).whole,
        None => request.largest_layer.unwrap_or_else(|| usual_block(request.params)),
    };
    elements.min(request.params).saturating_mul(ELEMENT_BYTES)
}

/// Parameters of a block in a decoder with `params` parameters: 12·h² at width h (attention 4·h², feed-forward 8·h²),
/// with h / 128 blocks. Llama 2 and GPT-3 keep that ratio from 7B to 175B.
fn usual_block(params: u64) -> u64 {
    let width = (params as f64 * 128.0 / 12.0).cbrt();
    (12.0 * width * width) as u64
}

/// Buffers of all ranks on the fullest host.
///
/// Offloaded states are pinned and copied directly. Only the 16-bit form of parameters that an offloaded optimizer
/// updated for the device needs a staging buffer.
pub fn host_buffers(request: &PlanRequest, placement: &Placement) -> u64 {
    let Some(shape) = &request.shape else { return 0 };
    if !placement.offload.optimizer() || placement.offload.parameters() {
        return 0;
    }
    let shard = request.shard(Units::of(request, shape, placement).bucket);
    shard.saturating_mul(ELEMENT_BYTES).saturating_mul(DOUBLE).saturating_mul(request.ranks_on_host())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ActivationShape, Adapters, Offload};

    const UNIT: u64 = 1_000_000;

    fn request(ranks: u64) -> PlanRequest {
        let activations = ActivationShape { hidden: 1, vocab: 1, stacks: vec![] };
        let shape = Shape {
            largest_unit: UNIT,
            activations,
            micro_batch: 1,
            max_length: 1,
            max_target_length: 0,
            recompute: false,
        };
        PlanRequest { shape: Some(shape), ..PlanRequest::new(100 * UNIT, ranks) }
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
        let bare = |ranks| PlanRequest { shape: None, ..request(ranks) };
        let zero3 = Placement::new("zero3", 3, Offload::None);
        let offloaded = Placement::new("zero3_offload", 3, Offload::OptimizerAndParameters);
        assert_eq!(gathered_layer(&bare(1), &zero3), 0);
        assert!(gathered_layer(&bare(2), &zero3) > 0);
        assert_eq!(gathered_layer(&bare(1), &offloaded), 2 * usual_block(100 * UNIT));
        assert_eq!(gathered_layer(&bare(4), &Placement::new("zero2", 2, Offload::Optimizer)), 0);
        let typed = PlanRequest { largest_layer: Some(UNIT), ..bare(1) };
        assert_eq!(gathered_layer(&typed, &offloaded), 2 * UNIT);
        assert_eq!(gathered_layer(&request(1), &offloaded), 2 * UNIT, "with a model, its largest unit");
        // No layer is larger than the model.
        assert_eq!(gathered_layer(&PlanRequest::new(10, 1), &offloaded), 20);
    }

    #[test]
    fn stage_3_holds_two_gathered_units_and_one_units_gradient() {
        let mut placement = Placement::new("zero3", 3, Offload::None);
        placement.settings.overlap = false;
        let serial = device_buffers(&request(4), &placement);
        assert_eq!((serial.gathered, serial.gradients, serial.staging), (2 * UNIT, 2 * UNIT, 0));
        placement.settings.overlap = true;
        let overlapped = device_buffers(&request(4), &placement);
        assert_eq!((overlapped.gathered, overlapped.gradients), (4 * UNIT, 4 * UNIT));
    }

    #[test]
    fn max_live_bounds_what_is_gathered_but_not_below_one_unit() {
        let gathered = |max_live| {
            let mut placement = Placement::new("zero3", 3, Offload::None);
            placement.settings.max_live = max_live;
            device_buffers(&request(4), &placement).gathered
        };
        assert_eq!([1, 1_500_000, 9_000_000].map(gathered), [2 * UNIT, 3 * UNIT, 4 * UNIT]);
    }

    #[test]
    fn one_rank_needs_buffers_only_for_what_is_offloaded() {
        for stage in 0..=3 {
            assert_eq!(device_buffers(&request(1), &Placement::new("x", stage, Offload::None)).total(), 0);
        }
        let offloaded = Placement::new("zero3_offload", 3, Offload::OptimizerAndParameters);
        assert!(device_buffers(&request(1), &offloaded).gathered > 0);
    }

    #[test]
    fn a_bucket_is_never_larger_than_the_unit_nor_than_the_key() {
        let gradients = |reduce_bucket| {
            let mut placement = Placement::new("zero1", 1, Offload::None);
            placement.settings.reduce_bucket = reduce_bucket;
            device_buffers(&request(4), &placement).gradients
        };
        assert_eq!([200_000_000, 1_000].map(gradients), [4 * UNIT, 4_000]);
    }

    #[test]
    fn an_optimizer_on_the_host_stages_gradients_down_and_parameters_up() {
        let placement = Placement::new("zero2_offload", 2, Offload::Optimizer);
        assert_eq!(device_buffers(&request(4), &placement).staging, 2 * (2 * 2 * UNIT / 4));
        assert_eq!(host_buffers(&request(4), &placement), 4 * (2 * 2 * UNIT / 4));
    }

    #[test]
    fn lora_has_gradients_of_its_own_part_of_a_unit_only() {
        let adapters = Some(Adapters { params: 50_000, largest_unit: 500 });
        let lora = PlanRequest { train_type: TrainType::Lora, adapters, ..request(4) };
        let buffers = device_buffers(&lora, &Placement::new("zero3", 3, Offload::None));
        assert_eq!((buffers.gathered, buffers.gradients), (4 * (UNIT + 500), 4 * 500));
    }

    #[test]
    fn without_a_model_stage_3_counts_the_largest_layer_as_deepspeed_does() {
        let request = PlanRequest { largest_layer: Some(32_899_072), ..PlanRequest::new(2_851_598_336, 8) };
        assert_eq!(
            device_buffers(&request, &Placement::new("zero3", 3, Offload::None)).total(),
            4 * 32_899_072
        );
        assert_eq!(device_buffers(&request, &Placement::new("zero2", 2, Offload::None)).total(), 0);
    }
}
