//! What is neither state nor activation: gathered units, gradients on their way to shards, staging between tiers.
//!
//! A closed form from the largest unit, until the compiled program counts its own buffers. Elements on the move have
//! 2 bytes. One rank has no peers, so it gathers and reduces nothing.

use crate::{Ask, Placement, Shape, TrainType};

const ELEMENT_BYTES: u64 = 2;

/// One buffer is filled while the other is emptied.
const DOUBLE: u64 = 2;

/// Buffers of one device, by what they are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceBuffers {
    /// Units gathered for computing, and the one that arrives meanwhile.
    pub gathered: u64,
    /// Small parameters that stay gathered.
    pub persistent: u64,
    /// Whole gradients before they are cut into shards, and those being summed.
    pub gradients: u64,
    /// Shards on their way from and to host memory.
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

/// The sizes that the terms below are made of, in elements.
struct Units {
    /// The largest unit, LoRA's part included.
    whole: u64,
    /// What of a unit has gradients.
    trained: u64,
    /// What one reduction takes: a bucket, and never more than there is.
    bucket: u64,
}

impl Units {
    fn of(ask: &Ask, shape: &Shape, placement: &Placement) -> Self {
        let adapters = ask.adapters.map_or(0, |adapters| adapters.largest_unit);
        let (whole, trained) = match ask.train_type {
            TrainType::Full => (shape.largest_unit, shape.largest_unit),
            TrainType::Lora => (shape.largest_unit.saturating_add(adapters), adapters),
        };
        Self { whole, trained, bucket: placement.reduce_bucket.min(trained) }
    }
}

/// Buffers of one device.
pub fn device_buffers(ask: &Ask, placement: &Placement) -> DeviceBuffers {
    let Some(shape) = &ask.shape else {
        // Without a model: one gathered layer and its gradient, as DeepSpeed's estimator counts them.
        let layer = if placement.stage == 3 { ask.largest_layer.unwrap_or(0) } else { 0 };
        let bytes = ELEMENT_BYTES.saturating_mul(layer);
        return DeviceBuffers { gathered: bytes, gradients: bytes, ..DeviceBuffers::default() };
    };
    let units = Units::of(ask, shape, placement);
    let peers = ask.ranks > 1;
    let bytes = |elements: u64| elements.saturating_mul(ELEMENT_BYTES);

    // Parameters that are not whole on this device are made whole unit by unit. Overlapped, the next unit arrives
    // while one computes; max_live bounds both together but never goes below one unit.
    let assembled = placement.stage == 3 && (peers || placement.offload.parameters());
    let (mut gathered, mut persistent) = (0, 0);
    if assembled {
        let all = ask.trainable().saturating_add(ask.frozen());
        let live = if placement.overlap && placement.prefetch > 0 {
            units.whole.saturating_mul(DOUBLE).min(placement.max_live.max(units.whole))
        } else {
            units.whole
        };
        gathered = bytes(live.min(all.max(units.whole)));
        persistent = bytes(placement.persistent);
    }

    let gradients = match placement.stage {
        // Whole gradients are counted as states; a bucket is what peers' parts are received in and summed,
        // overlapped, a second one arrives meanwhile.
        0 | 1 if peers => bytes(units.bucket).saturating_mul(if placement.overlap { DOUBLE } else { 1 }),
        0 | 1 => 0,
        // Only shards are kept, so a unit's whole gradient has a place of its own until it is cut (or moved to the
        // host). Overlapped, the bucket being summed is beside the unit that backward writes.
        _ if peers || placement.offload.optimizer() => {
            let summed = if placement.overlap { units.bucket } else { 0 };
            bytes(units.trained.saturating_add(summed))
        }
        _ => 0,
    };

    // Each way to or from the host has two buffers. Gradient shards go down to an optimizer there. Updated parameters
    // cross when optimizer and parameters live apart. Parameter shards come up to be sent to peers; one rank uploads
    // straight to where it computes.
    let reduced_shard = bytes(ask.shard(units.bucket)).saturating_mul(DOUBLE);
    let mut staging: u64 = 0;
    if placement.offload.optimizer() {
        staging = staging.saturating_add(reduced_shard);
    }
    if placement.offload.optimizer() != placement.offload.parameters() {
        staging = staging.saturating_add(reduced_shard);
    }
    if placement.offload.parameters() && peers {
        staging = staging.saturating_add(bytes(ask.shard(units.whole)).saturating_mul(DOUBLE));
    }
    DeviceBuffers { gathered, persistent, gradients, staging }
}

/// Bytes of the one layer that a device must hold gathered to compute at all; 0 where nothing is gathered.
///
/// Without a model, unless the largest layer is given, it is a block of the usual shape of that size.
pub fn gathered_layer(ask: &Ask, placement: &Placement) -> u64 {
    if placement.stage < 3 || (ask.ranks <= 1 && !placement.offload.parameters()) {
        return 0;
    }
    let elements = match &ask.shape {
        Some(shape) => Units::of(ask, shape, placement).whole,
        None => ask.largest_layer.unwrap_or_else(|| usual_block(ask.params)),
    };
    elements.min(ask.params).saturating_mul(ELEMENT_BYTES)
}

/// Parameters of a block in a decoder of so many: 12·h² of width h (attention 4·h², feed-forward 8·h²), and as many blocks
/// as h / 128. Llama 2 and GPT-3 keep that ratio from 7B to 175B.
fn usual_block(params: u64) -> u64 {
    let width = (params as f64 * 128.0 / 12.0).cbrt();
    (12.0 * width * width) as u64
}

/// Buffers of the fullest host, those of all its ranks together.
///
/// States in host memory are pinned and copied from where they lie. What has no such place is the 16-bit form of
/// parameters that an optimizer there has updated and a device holds.
pub fn host_buffers(ask: &Ask, placement: &Placement) -> u64 {
    let Some(shape) = &ask.shape else { return 0 };
    if !placement.offload.optimizer() || placement.offload.parameters() {
        return 0;
    }
    let shard = ask.shard(Units::of(ask, shape, placement).bucket);
    shard.saturating_mul(ELEMENT_BYTES).saturating_mul(DOUBLE).saturating_mul(ask.ranks_on_host())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ActivationShape, Adapters, Offload};

    const UNIT: u64 = 1_000_000;

    fn ask(ranks: u64) -> Ask {
        let activations = ActivationShape { hidden: 1, vocab: 1, stacks: vec![] };
        let shape =
            Shape { largest_unit: UNIT, activations, micro_batch: 1, max_length: 1, recompute: false };
        Ask { shape: Some(shape), ..Ask::new(100 * UNIT, ranks) }
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
        let bare = |ranks| Ask { shape: None, ..ask(ranks) };
        let zero3 = Placement::new("zero3", 3, Offload::None);
        let offloaded = Placement::new("zero3_offload", 3, Offload::OptimizerAndParameters);
        assert_eq!(gathered_layer(&bare(1), &zero3), 0);
        assert!(gathered_layer(&bare(2), &zero3) > 0);
        assert_eq!(gathered_layer(&bare(1), &offloaded), 2 * usual_block(100 * UNIT));
        assert_eq!(gathered_layer(&bare(4), &Placement::new("zero2", 2, Offload::Optimizer)), 0);
        let typed = Ask { largest_layer: Some(UNIT), ..bare(1) };
        assert_eq!(gathered_layer(&typed, &offloaded), 2 * UNIT);
        assert_eq!(gathered_layer(&ask(1), &offloaded), 2 * UNIT, "with a model, its largest unit");
        // No layer is larger than the model.
        assert_eq!(gathered_layer(&Ask::new(10, 1), &offloaded), 20);
    }

    #[test]
    fn stage_3_holds_two_gathered_units_and_one_units_gradient() {
        let placement = Placement { overlap: false, ..Placement::new("zero3", 3, Offload::None) };
        let serial = device_buffers(&ask(4), &placement);
        assert_eq!((serial.gathered, serial.gradients, serial.staging), (2 * UNIT, 2 * UNIT, 0));
        let overlapped = device_buffers(&ask(4), &Placement { overlap: true, ..placement });
        assert_eq!((overlapped.gathered, overlapped.gradients), (4 * UNIT, 4 * UNIT));
    }

    #[test]
    fn max_live_bounds_what_is_gathered_but_not_below_one_unit() {
        let gathered = |max_live| {
            let placement = Placement { max_live, ..Placement::new("zero3", 3, Offload::None) };
            device_buffers(&ask(4), &placement).gathered
        };
        assert_eq!([1, 1_500_000, 9_000_000].map(gathered), [2 * UNIT, 3 * UNIT, 4 * UNIT]);
    }

    #[test]
    fn one_rank_needs_buffers_only_for_what_is_offloaded() {
        for stage in 0..=3 {
            assert_eq!(device_buffers(&ask(1), &Placement::new("x", stage, Offload::None)).total(), 0);
        }
        let offloaded = Placement::new("zero3_offload", 3, Offload::OptimizerAndParameters);
        assert!(device_buffers(&ask(1), &offloaded).gathered > 0);
    }

    #[test]
    fn a_bucket_is_never_larger_than_the_unit_nor_than_the_key() {
        let gradients = |reduce_bucket| {
            let placement = Placement { reduce_bucket, ..Placement::new("zero1", 1, Offload::None) };
            device_buffers(&ask(4), &placement).gradients
        };
        assert_eq!([200_000_000, 1_000].map(gradients), [4 * UNIT, 4_000]);
    }

    #[test]
    fn an_optimizer_on_the_host_stages_gradients_down_and_parameters_up() {
        let placement = Placement::new("zero2_offload", 2, Offload::Optimizer);
        assert_eq!(device_buffers(&ask(4), &placement).staging, 2 * (2 * 2 * UNIT / 4));
        assert_eq!(host_buffers(&ask(4), &placement), 4 * (2 * 2 * UNIT / 4));
    }

    #[test]
    fn lora_has_gradients_of_its_own_part_of_a_unit_only() {
        let adapters = Some(Adapters { params: 50_000, largest_unit: 500 });
        let lora = Ask { train_type: TrainType::Lora, adapters, ..ask(4) };
        let buffers = device_buffers(&lora, &Placement::new("zero3", 3, Offload::None));
        assert_eq!((buffers.gathered, buffers.gradients), (4 * (UNIT + 500), 4 * 500));
    }

    #[test]
    fn without_a_model_stage_3_counts_the_largest_layer_as_deepspeed_does() {
        let ask = Ask { largest_layer: Some(32_899_072), ..Ask::new(2_851_598_336, 8) };
        assert_eq!(device_buffers(&ask, &Placement::new("zero3", 3, Offload::None)).total(), 4 * 32_899_072);
        assert_eq!(device_buffers(&ask, &Placement::new("zero2", 2, Offload::None)).total(), 0);
    }
}
