//! Rows of a plan: a placement with its memory and communication.

use serde::Serialize;
use zeroth_base::format_bytes;
use zeroth_program::Bytes;

use crate::deepspeed::Estimate;
use crate::format::pair;
use crate::{
    Offload, Placement, PlanRequest, TrainType, device_buffers, device_states, gathered_layer, host_buffers,
    host_states,
};

/// A placement and its costs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The placement's name.
    pub preset: String,
    /// ZeRO's stage.
    pub stage: u8,
    /// What lives in host memory.
    pub offload: Offload,
    /// What is trained.
    pub train_type: TrainType,
    /// Bytes on each device.
    pub device_bytes: Bytes,
    /// Bytes of the fullest host.
    pub host_bytes: Bytes,
    /// Bytes a rank sends in one optimizer step.
    pub comm_bytes_per_step: u64,
    /// Stage 0's device bytes divided by these; `None` where these are 0.
    pub saving: Option<f64>,
    /// Whether it is within the budgets; `None` without a budget.
    pub fits: Option<bool>,
    /// Bytes of the layer that a device holds gathered at stage 3, else 0. `fits` counts it whether or not the buffers
    /// do.
    pub gathered_layer: u64,
    /// Communication volume as the ZeRO paper counts it, in multiples of the model's parameters.
    pub volume_in_parameters: f64,
    /// DeepSpeed's estimate for the same placement, where it has a formula.
    pub deepspeed_estimate: Option<Estimate>,
}

/// The memory that a placement needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// Bytes on each device.
    pub device: Bytes,
    /// Bytes of the fullest host.
    pub host: Bytes,
    /// Bytes of the gathered layer.
    pub gathered_layer: u64,
}

impl Footprint {
    /// The bytes a device needs: the total, and a gathered layer where no buffer holds it.
    pub fn device_needs(&self) -> u64 {
        self.device.total.saturating_add(self.gathered_layer.saturating_sub(self.device.buffers))
    }
}

impl Row {
    /// [`Footprint::device_needs`] of this row.
    pub fn device_needs(&self) -> u64 {
        let Self { device_bytes: device, host_bytes: host, gathered_layer, .. } = *self;
        Footprint { device, host, gathered_layer }.device_needs()
    }
}

/// The memory that a placement needs. Request and placement are not validated.
pub fn footprint(request: &PlanRequest, placement: &Placement) -> Footprint {
    let tokens = |shape: &crate::Shape| shape.micro_batch.saturating_mul(shape.max_length);
    let activations =
        request.shape.as_ref().map_or(0, |shape| shape.activations.bytes(tokens(shape), shape.recompute));
    let buffers = device_buffers(request, placement).total();
    let mut device = device_states(request, placement.stage, placement.offload);
    let mut host = host_states(request, placement.offload);
    // Parameters beyond max_in_cpu stay on the device.
    if let Some(most) = placement.max_in_cpu.filter(|_| placement.offload.parameters()) {
        let shard = request.shard(request.trainable()).saturating_add(request.shard(request.frozen()));
        let stays = shard.saturating_sub(most).saturating_mul(2);
        device.parameters = device.parameters.saturating_add(stays);
        host.parameters = host.parameters.saturating_sub(stays.saturating_mul(request.ranks_on_host()));
    }
    Footprint {
        device: device.with(activations, buffers),
        host: host.with(0, host_buffers(request, placement)),
        gathered_layer: gathered_layer(request, placement),
    }
}

/// `zero2 needs 52 GB of the device's 44 GB`, with the host's share where it has one.
pub(crate) fn needs(request: &PlanRequest, row: &Row) -> String {
    let part = |need, budget: Option<u64>, owner: &str| match budget {
        Some(budget) => {
            let (need, have) = pair(need, budget);
            format!("{need} of the {owner}'s {have}")
        }
        None => format!("{} of a {owner}", format_bytes(need)),
    };
    let mut needs =
        format!("{} needs {}", row.preset, part(row.device_needs(), request.device_memory, "device"));
    if row.offload != Offload::None {
        needs = format!("{needs} and {}", part(row.host_bytes.total, request.host_memory, "host"));
    }
    needs
}
