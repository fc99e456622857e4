//! The plan: a row for every placement, and the answer.

use crate::advice::{self, Advice};
use crate::changes::{self, Change};
use crate::deepspeed::{self, Machines, Need, Zero3Options};
use crate::recommend::recommend;
use crate::{
    Ask, AskError, BytesPerParameter, Offload, Placement, States, TrainType, device_buffers, device_states,
    gathered_layer, host_buffers, host_states, sent_per_step, volume_in_parameters,
};
use serde::Serialize;
use zeroth_base::format_bytes;
use zeroth_program::Bytes;

/// The answer to an [`Ask`]. Serialized, it is the JSON object of `zeroth plan`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// The model's parameters.
    pub params: u64,
    /// Ranks of the job.
    pub ranks: u64,
    /// One row for each placement, in the order given.
    pub rows: Vec<Row>,
    /// The placement to take, if there is one.
    pub recommended: Option<String>,
    /// Why, or what is missing.
    pub reason: String,
    /// How a trained parameter's bytes are counted.
    pub states: States,
    /// A trained parameter's bytes.
    pub bytes_per_parameter: BytesPerParameter,
    /// Where nothing fits: single changes after which something does.
    pub changes: Vec<Change>,
    /// What is usually advised, beside what the numbers say.
    pub advice: Vec<Advice>,
    /// What the numbers leave out.
    pub notes: Vec<String>,
}

/// One placement and what it costs.
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
    /// Stage 0's device bytes divided by these; none where these are 0.
    pub saving: Option<f64>,
    /// Whether it is within the budgets; none where no budget was given.
    pub fits: Option<bool>,
    /// Bytes of the one layer that a device holds gathered at stage 3, 0 elsewhere. `fits` counts it, whether or not the
    /// buffers do.
    pub gathered_layer: u64,
    /// Communication as the ZeRO paper counts it, in multiples of the model's parameters.
    pub volume_in_parameters: f64,
    /// What DeepSpeed's estimator says for the same, where it has a formula for it.
    pub deepspeed_estimate: Option<Need>,
}

/// What a placement needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// Bytes on each device.
    pub device: Bytes,
    /// Bytes of the fullest host.
    pub host: Bytes,
    /// Bytes of the layer that a device holds gathered.
    pub gathered_layer: u64,
}

impl Footprint {
    /// Bytes without which a device cannot compute: the total, and a gathered layer where no buffer holds it.
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

/// Plans a job in every placement given.
pub fn plan(ask: &Ask, placements: &[Placement]) -> Result<Plan, AskError> {
    ask.check()?;
    placements.iter().try_for_each(Placement::check)?;
    let rows = rows(ask, placements);
    let (recommended, reason) = recommend(ask, &rows);
    let none_fits = !rows.is_empty() && rows.iter().all(|row| row.fits == Some(false));
    Ok(Plan {
        params: ask.params,
        ranks: ask.ranks,
        notes: notes(ask, &rows, recommended.as_deref()),
        recommended,
        reason,
        states: ask.states,
        bytes_per_parameter: ask.bytes_per_parameter(),
        changes: if none_fits { changes::changes(ask, placements) } else { Vec::new() },
        advice: advice::beside(ask, &rows),
        rows,
    })
}

impl Plan {
    /// Whether a row fits, or no budget says that it does not.
    pub fn is_possible(&self) -> bool {
        self.rows.iter().any(|row| row.fits != Some(false))
    }
}

/// What one placement needs. The ask and the placement are taken as they are, unchecked.
pub fn footprint(ask: &Ask, placement: &Placement) -> Footprint {
    let tokens = |shape: &crate::Shape| shape.micro_batch.saturating_mul(shape.max_length);
    let activations =
        ask.shape.as_ref().map_or(0, |shape| shape.activations.bytes(tokens(shape), shape.recompute));
    let buffers = device_buffers(ask, placement).total();
    let mut device = device_states(ask, placement.stage, placement.offload);
    let mut host = host_states(ask, placement.offload);
    // What exceeds max_in_cpu stays on the device: 16-bit parameters, rank by rank.
    if let Some(most) = placement.max_in_cpu.filter(|_| placement.offload.parameters()) {
        let shard = ask.shard(ask.trainable()).saturating_add(ask.shard(ask.frozen()));
        let stays = shard.saturating_sub(most).saturating_mul(2);
        device.parameters = device.parameters.saturating_add(stays);
        host.parameters = host.parameters.saturating_sub(stays.saturating_mul(ask.ranks_on_host()));
    }
    Footprint {
        device: device.with(activations, buffers),
        host: host.with(0, host_buffers(ask, placement)),
        gathered_layer: gathered_layer(ask, placement),
    }
}

fn rows(ask: &Ask, placements: &[Placement]) -> Vec<Row> {
    // Savings are against plain data parallelism, planned like the rest where it is among them.
    let stage_0 = placements.iter().find(|placement| placement.stage == 0);
    let baseline = stage_0.cloned().unwrap_or_else(|| Placement::new("zero0", 0, Offload::None));
    let baseline = footprint(ask, &baseline).device.total;
    placements
        .iter()
        .map(|placement| {
            let needs = footprint(ask, placement);
            let Footprint { device, host, gathered_layer } = needs;
            Row {
                preset: placement.preset.clone(),
                stage: placement.stage,
                offload: placement.offload,
                train_type: ask.train_type,
                device_bytes: device,
                host_bytes: host,
                comm_bytes_per_step: sent_per_step(ask, placement.stage),
                saving: (device.total > 0).then(|| baseline as f64 / device.total as f64),
                fits: ask.fits(needs.device_needs(), host.total),
                gathered_layer,
                volume_in_parameters: volume_in_parameters(ask, placement.stage),
                deepspeed_estimate: deepspeed_estimate(ask, placement),
            }
        })
        .collect()
}

/// DeepSpeed estimates ZeRO-2 and ZeRO-3 with all parameters trained. `zero_init`: we never hold a whole model in
/// each process either.
fn deepspeed_estimate(ask: &Ask, placement: &Placement) -> Option<Need> {
    if ask.train_type != TrainType::Full {
        return None;
    }
    let machines = Machines { gpus_per_node: ask.ranks_on_host(), nodes: ask.hosts() };
    match (placement.stage, placement.offload) {
        (2, offload) => Some(deepspeed::zero2(ask.params, machines, offload.optimizer())),
        (3, Offload::None | Offload::Optimizer | Offload::OptimizerAndParameters) => {
            let optimizer = placement.offload.optimizer();
            let options =
                Zero3Options { optimizer, parameters: placement.offload.parameters(), zero_init: true };
            Some(deepspeed::zero3(ask.params, ask.largest_layer?, machines, options))
        }
        _ => None,
    }
}

/// About what a GPU's context takes of its memory.
const CONTEXT: u64 = 500_000_000;

fn notes(ask: &Ask, rows: &[Row], recommended: Option<&str>) -> Vec<String> {
    let mut notes = Vec::new();
    let tight = rows.iter().find(|row| Some(row.preset.as_str()) == recommended).filter(|row| {
        ask.device_memory.is_some_and(|budget| row.device_needs().saturating_add(CONTEXT) > budget)
    });
    if let (Some(row), Some(budget)) = (tight, ask.device_memory) {
        notes.push(format!(
            "{} leaves {} of the device, less than a GPU's own context takes (about 0.5 GB): recompute blocks or \
             shorten rows to be safe",
            row.preset,
            format_bytes(budget - row.device_needs().min(budget))
        ));
    }
    if ask.shape.is_some() {
        notes.push(
            "activations and buffers are closed forms from the model's shape; a run counts its own".into(),
        );
    } else {
        let counted = if ask.largest_layer.is_some() {
            "activations are 0, and buffers are the largest layer at stage 3 only: the rest needs a model"
        } else {
            "activations and buffers are 0: they need a model"
        };
        notes.push(counted.into());
        let layer = rows.iter().map(|row| row.gathered_layer).max().unwrap_or(0);
        if layer > 0 && ask.largest_layer.is_none() {
            notes.push(format!(
                "whether stage 3 fits also counts one gathered layer, {}: a block of the usual shape of this size; \
                 --largest-layer gives another",
                format_bytes(layer)
            ));
        }
    }
    if ask.device_memory.is_some() {
        notes.push("a device's own context and libraries, about 0.5 GB on a GPU, come on top".into());
    }
    if ask.train_type == TrainType::Lora && ask.adapters.is_none() {
        notes.push(
            "LoRA's own parameters are not counted: their number needs a model (usually below 1%)".into(),
        );
    }
    // The question behind "it fitted before I added ZeRO".
    let each = ask.bytes_per_parameter();
    if ask.train_type == TrainType::Full {
        let apart = match ask.more_apart() {
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
            format_bytes(ask.params.saturating_mul(8)),
        ));
    }
    notes
}
