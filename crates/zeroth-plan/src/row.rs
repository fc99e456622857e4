//! Rows of a plan: a placement with its memory and communication.

use serde::{Serialize, Serializer};
use zeroth_base::format_bytes;
use zeroth_config::resolve::Choice;
use zeroth_kernel::{ByTier, Tier};
use zeroth_program::{Bytes, FrozenPlacement};

use crate::PrefetchLimit;
use crate::choice::{self, summary};
use crate::closed_form::{device_buffers, gathered_layer};
use crate::deepspeed::Estimate;
use crate::format::pair;
use crate::sizing::{Detail, EarlierSteps};
use crate::{
    BetweenHosts, BytesPerParameter, OffloadedStates, Placement, PlanError, PlanRequest, TrainType,
    by_program, bytes_between_hosts, bytes_sent_per_step, device_states, host_states, hpz_extra_bytes,
};

/// Where the figures of a row come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// The compiled training step.
    Program,
    /// Closed forms.
    Estimate,
}

/// A placement and its costs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The placement's name.
    pub preset: String,
    /// ZeRO's stage.
    pub stage: u8,
    /// What lives in host memory.
    pub offload: OffloadedStates,
    /// What is trained.
    pub train_type: TrainType,
    /// Bytes of each tier: on each device, and of the fullest host.
    #[serde(flatten, serialize_with = "by_tier")]
    pub bytes: ByTier<Bytes>,
    /// Bytes a rank sends in one optimizer step.
    pub comm_bytes_per_step: u64,
    /// Stage 0's device bytes divided by these; `None` where these are 0.
    pub saving: Option<f64>,
    /// Whether it is within the budgets; `None` without a budget.
    pub fits: Option<bool>,
    /// The settings that a run chooses to fit; where nothing fits, those that need least.
    #[serde(serialize_with = "choice::serialize")]
    pub chosen: Vec<Choice>,
    /// Transformer blocks of the model, of which some may be recomputed; 0 in an estimate.
    pub blocks: u64,
    /// Bytes of the fullest host that its processes take in addition to the plan; a host's budget includes them. 0 in an estimate.
    pub process_bytes: u64,
    /// Bytes of the layer that a device holds gathered at stage 3, else 0. `fits` counts it whether or not the buffers
    /// do.
    pub gathered_layer: u64,
    /// Communication volume as the ZeRO paper counts it, in multiples of the model's parameters.
    pub volume_in_parameters: f64,
    /// DeepSpeed's estimate for the same placement, where it has a formula.
    pub deepspeed_estimate: Option<Estimate>,
    /// Where the frozen parameters are; `None` where there are none, and in an estimate.
    pub frozen: Option<FrozenPlacement>,
    /// Where the figures come from.
    pub basis: Basis,
    /// Bytes that the budget of a device leaves free; `None` without one.
    pub device_bytes_free: Option<u64>,
    /// Bytes that the budget of a host leaves free; `None` without one.
    pub host_bytes_free: Option<u64>,
    /// The largest micro-batch of rows of the planned length that fits; `None` without a budget or a model.
    pub largest_micro_batch: Option<u64>,
    /// The longest row found to fit in the planned micro-batch, within a fiftieth of the limit.
    pub longest_row: Option<u64>,
    /// What crosses between hosts in one optimizer step; `None` for one host.
    pub between_hosts: Option<BetweenHosts>,
}

/// The memory that a placement needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Footprint {
    /// Bytes of each tier: on each device, and of the fullest host.
    pub bytes: ByTier<Bytes>,
    /// Bytes of the fullest host that its processes take in addition to the plan.
    pub process: u64,
    /// Bytes of the gathered layer.
    pub gathered_layer: u64,
    /// Bytes a rank sends in one optimizer step.
    pub sent: u64,
    /// Bytes that a host receives from others in one optimizer step.
    pub into_host: u64,
    /// Bytes per trained parameter, where everything is on the device.
    pub bytes_per_parameter: BytesPerParameter,
    /// Where the frozen parameters are.
    pub frozen: Option<FrozenPlacement>,
    /// What keeps experts from being prefetched.
    pub prefetch: Option<PrefetchLimit>,
    /// The settings that a run chooses.
    pub choices: Vec<Choice>,
    /// Transformer blocks of the model.
    pub blocks: u64,
    /// Where the figures come from.
    pub basis: Basis,
}

impl Footprint {
    /// The bytes a device needs.
    pub fn device_needs(&self) -> u64 {
        device_needs(self.bytes[Tier::Device], self.gathered_layer, self.basis)
    }

    /// The bytes that the fullest host needs besides those of its devices.
    pub fn host_needs(&self) -> u64 {
        self.bytes[Tier::Host].total.saturating_add(self.process)
    }

    /// Whether it is within the budgets; `None` without a budget.
    pub(crate) fn fits(&self, request: &PlanRequest) -> Option<bool> {
        request.fits(self.device_needs(), self.host_needs())
    }
}

impl Row {
    /// The bytes a device needs.
    pub fn device_needs(&self) -> u64 {
        device_needs(self.bytes[Tier::Device], self.gathered_layer, self.basis)
    }

    /// The bytes that the fullest host needs besides those of its devices.
    pub fn host_needs(&self) -> u64 {
        self.bytes[Tier::Host].total.saturating_add(self.process_bytes)
    }
}

/// A field for each tier, `device_bytes` and so on.
fn by_tier<S: Serializer>(bytes: &ByTier<Bytes>, to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(bytes.iter().map(|(tier, bytes)| (format!("{}_bytes", tier.name()), bytes)))
}

/// The total, and in an estimate a gathered layer where no buffer holds it.
fn device_needs(device: Bytes, gathered_layer: u64, basis: Basis) -> u64 {
    match basis {
        Basis::Program => device.total,
        Basis::Estimate => device.total.saturating_add(gathered_layer.saturating_sub(device.buffers)),
    }
}

/// The memory that a placement needs: of the compiled step, or else in closed form. Request and placement are not
/// validated.
pub fn footprint(request: &PlanRequest, placement: &Placement) -> Result<Footprint, PlanError> {
    let compiled = by_program::footprint(request, placement, Detail::Bytes, &mut EarlierSteps::default())?;
    Ok(compiled.unwrap_or_else(|| estimate(request, placement)))
}

/// The same, for whether something fits at all, with the steps of earlier calls for this job and placement with other
/// rows.
pub(crate) fn least_footprint(
    request: &PlanRequest,
    placement: &Placement,
    earlier: &mut EarlierSteps,
) -> Result<Footprint, PlanError> {
    let compiled = by_program::footprint(request, placement, Detail::Verdict, earlier)?;
    Ok(compiled.unwrap_or_else(|| estimate(request, placement)))
}

fn estimate(request: &PlanRequest, placement: &Placement) -> Footprint {
    let stage = placement.settings.stage;
    let mut device = device_states(request, stage, placement.offload);
    let mut host = host_states(request, placement.offload);
    // Parameters beyond max_in_cpu stay on the device.
    if let Some(most) = placement.settings.offload.parameters.filter(|_| placement.offload.parameters()) {
        let shard = request.shard(request.trainable()).saturating_add(request.shard(request.frozen()));
        let stays = shard.saturating_sub(most).saturating_mul(2);
        device.parameters = device.parameters.saturating_add(stays);
        host.parameters = host.parameters.saturating_sub(stays.saturating_mul(request.ranks_on_host()));
    }
    if placement.settings.hpz && stage >= 3 && request.hosts() > 1 && !placement.offload.parameters() {
        let group = placement.settings.group.unwrap_or_else(|| request.usual_group());
        device.parameters = device.parameters.saturating_add(hpz_extra_bytes(request, group));
    }
    Footprint {
        bytes: ByTier::on_device(device.with(0, device_buffers(request, stage))).with(Tier::Host, host),
        gathered_layer: gathered_layer(request, placement),
        sent: bytes_sent_per_step(request, stage),
        into_host: bytes_between_hosts(request, &placement.settings),
        bytes_per_parameter: request.bytes_per_parameter(),
        process: 0,
        frozen: None,
        prefetch: None,
        choices: Vec::new(),
        blocks: 0,
        basis: Basis::Estimate,
    }
}

/// `zero2 needs 52 GB of the device's 44 GB`, with the host's share where it has one, and what a run chooses for it.
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
    let host = request.host_needs(row.device_needs(), row.host_needs());
    let is_short = request.host_memory.is_some_and(|budget| host > budget);
    if row.offload != OffloadedStates::None || host > row.host_needs() || is_short {
        needs = format!("{needs} and {}", part(host, request.host_memory, "host"));
    }
    match summary(&row.chosen, row.blocks) {
        chosen if chosen.is_empty() => needs,
        chosen => format!("{needs} ({chosen})"),
    }
}
