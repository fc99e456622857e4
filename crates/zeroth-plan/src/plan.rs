//! The plan: a row for every placement, and a recommendation.

use crate::advice::{self, Advice};
use crate::changes::{self, Change};
use crate::deepspeed::{self, Cluster, Estimate, Zero3Options};
use crate::recommend::recommend;
use crate::row::{Footprint, Row, footprint};
use crate::{
    BytesPerParameter, Offload, Placement, PlanError, PlanRequest, States, TrainType, bytes_sent_per_step,
    volume_in_parameters,
};
use serde::Serialize;
use zeroth_base::format_bytes;

/// The plan of a job; serialized, the JSON output of `zeroth plan`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// The model's parameters.
    pub params: u64,
    /// Ranks of the job.
    pub ranks: u64,
    /// A row for each placement, in the order given.
    pub rows: Vec<Row>,
    /// The recommended placement, if any.
    pub recommended: Option<String>,
    /// The reason, or what is missing.
    pub reason: String,
    /// How bytes per trained parameter are counted.
    pub states: States,
    /// Bytes per trained parameter.
    pub bytes_per_parameter: BytesPerParameter,
    /// Where nothing fits, single changes after which something does.
    pub changes: Vec<Change>,
    /// Common advice, checked against the plan.
    pub advice: Vec<Advice>,
    /// What the figures leave out.
    pub notes: Vec<String>,
}

/// Plans a job under every given placement.
pub fn plan(request: &PlanRequest, placements: &[Placement]) -> Result<Plan, PlanError> {
    request.check()?;
    placements.iter().try_for_each(Placement::check)?;
    let rows = rows(request, placements);
    let (recommended, reason) = recommend(request, &rows);
    let none_fits = !rows.is_empty() && rows.iter().all(|row| row.fits == Some(false));
    Ok(Plan {
        params: request.params,
        ranks: request.ranks,
        notes: notes(request, &rows, recommended.as_deref()),
        recommended,
        reason,
        states: request.states,
        bytes_per_parameter: request.bytes_per_parameter(),
        changes: if none_fits { changes::changes(request, placements) } else { Vec::new() },
        advice: advice::beside(request, &rows),
        rows,
    })
}

impl Plan {
    /// Whether some row fits or no budget was given.
    pub fn is_possible(&self) -> bool {
        self.rows.iter().any(|row| row.fits != Some(false))
    }
}

fn rows(request: &PlanRequest, placements: &[Placement]) -> Vec<Row> {
    // Savings are relative to plain data parallelism, as planned where it is among the placements.
    let stage_0 = placements.iter().find(|placement| placement.stage == 0);
    let baseline = stage_0.cloned().unwrap_or_else(|| Placement::new("zero0", 0, Offload::None));
    let baseline = footprint(request, &baseline).device.total;
    placements
        .iter()
        .map(|placement| {
            let needs = footprint(request, placement);
            let Footprint { device, host, gathered_layer } = needs;
            Row {
                preset: placement.preset.clone(),
                stage: placement.stage,
                offload: placement.offload,
                train_type: request.train_type,
                device_bytes: device,
                host_bytes: host,
                comm_bytes_per_step: bytes_sent_per_step(request, placement.stage),
                saving: (device.total > 0).then(|| baseline as f64 / device.total as f64),
                fits: request.fits(needs.device_needs(), host.total),
                gathered_layer,
                volume_in_parameters: volume_in_parameters(request, placement.stage),
                deepspeed_estimate: deepspeed_estimate(request, placement),
            }
        })
        .collect()
}

/// DeepSpeed estimates ZeRO-2 and ZeRO-3 with all parameters trained. `zero_init` is true, since no process here holds
/// a whole model either.
fn deepspeed_estimate(request: &PlanRequest, placement: &Placement) -> Option<Estimate> {
    if request.train_type != TrainType::Full {
        return None;
    }
    let cluster = Cluster { gpus_per_node: request.ranks_on_host(), nodes: request.hosts() };
    match (placement.stage, placement.offload) {
        (2, offload) => Some(deepspeed::zero2(request.params, cluster, offload.optimizer())),
        (3, Offload::None | Offload::Optimizer | Offload::OptimizerAndParameters) => {
            let optimizer = placement.offload.optimizer();
            let options =
                Zero3Options { optimizer, parameters: placement.offload.parameters(), zero_init: true };
            Some(deepspeed::zero3(request.params, request.largest_layer?, cluster, options))
        }
        _ => None,
    }
}

/// Approximate memory of a GPU's context.
const CONTEXT: u64 = 500_000_000;

fn notes(request: &PlanRequest, rows: &[Row], recommended: Option<&str>) -> Vec<String> {
    let mut notes = Vec::new();
    let tight = rows.iter().find(|row| Some(row.preset.as_str()) == recommended).filter(|row| {
        request.device_memory.is_some_and(|budget| row.device_needs().saturating_add(CONTEXT) > budget)
    });
    if let (Some(row), Some(budget)) = (tight, request.device_memory) {
        notes.push(format!(
            "{} leaves {} of the device, less than a GPU's own context takes (about 0.5 GB): recompute blocks or \
             shorten rows to be safe",
            row.preset,
            format_bytes(budget - row.device_needs().min(budget))
        ));
    }
    if request.shape.is_some() {
        notes.push(
            "activations and buffers are closed forms from the model's shape; a run counts its own".into(),
        );
    } else {
        let counted = if request.largest_layer.is_some() {
            "activations are 0, and buffers are the largest layer at stage 3 only: the rest needs a model"
        } else {
            "activations and buffers are 0: they need a model"
        };
        notes.push(counted.into());
        let layer = rows.iter().map(|row| row.gathered_layer).max().unwrap_or(0);
        if layer > 0 && request.largest_layer.is_none() {
            notes.push(format!(
                "whether stage 3 fits also counts one gathered layer, {}: a block of the usual shape of this size; \
                 --largest-layer gives another",
                format_bytes(layer)
            ));
        }
    }
    if request.device_memory.is_some() {
        notes.push("a device's own context and libraries, about 0.5 GB on a GPU, come on top".into());
    }
    if request.train_type == TrainType::Lora && request.adapters.is_none() {
        notes.push(
            "LoRA's own parameters are not counted: their number needs a model (usually below 1%)".into(),
        );
    }
    // For users whose job fitted before they added ZeRO.
    let each = request.bytes_per_parameter();
    if request.train_type == TrainType::Full {
        let apart = match request.offload_extra_bytes() {
            0 => String::new(),
            more => format!(" ({more} more with offload)"),
        };
        notes.push(format!(
            "{} bytes a parameter: {} parameters, {} gradients, {} optimizer{apart}. Training wholly in 16 bits without ZeRO \
             holds 8 ({}), which is why adding ZeRO on few ranks can need more",
            each.total(),
            each.parameters,
            each.gradients,
            each.optimizer,
            format_bytes(request.params.saturating_mul(8)),
        ));
    }
    notes
}
