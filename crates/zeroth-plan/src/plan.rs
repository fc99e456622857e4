//! The plan: a row for every placement, and a recommendation.

use crate::advice::{self, Advice};
use crate::between_hosts::{self, BetweenHosts, between_hosts};
use crate::changes::{self, Change};
use crate::deepspeed::{self, Cluster, Estimate, Zero3Options};
use crate::most_tokens::most_tokens;
use crate::recommend::recommend;
use crate::row::{Basis, Footprint, Row, footprint};
use crate::{
    BytesPerParameter, OffloadedStates, Placement, PlanError, PlanRequest, PlannedRows, States, TrainType,
    volume_in_parameters,
};
use serde::Serialize;
use zeroth_base::format_bytes;
use zeroth_kernel::Tier;
use zeroth_program::{Bytes, Settings};

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
    let planned = of_each(placements, |placement| {
        let needs = footprint(request, placement)?;
        let most_tokens = most_tokens(request, placement, &needs)?;
        let between_hosts = between_hosts(request, placement, &needs)?;
        Ok((needs, Further { most_tokens, between_hosts }))
    })?;
    let (footprints, further): (Vec<Footprint>, Vec<Further>) = planned.into_iter().unzip();
    let rows = rows(request, placements, &footprints, &further)?;
    let bytes_per_parameter =
        footprints.first().map_or_else(|| request.bytes_per_parameter(), |first| first.bytes_per_parameter);
    let (recommended, reason) = recommend(request, &rows);
    let none_fits = !rows.is_empty() && rows.iter().all(|row| row.fits == Some(false));
    Ok(Plan {
        params: request.params,
        ranks: request.ranks,
        notes: notes(request, &rows, &footprints, bytes_per_parameter, recommended.as_deref()),
        recommended,
        reason,
        states: request.states,
        bytes_per_parameter,
        changes: if none_fits { changes::changes(request, placements) } else { Vec::new() },
        advice: advice::compared(request, &rows),
        rows,
    })
}

impl Plan {
    /// Whether some row fits or no budget was given.
    pub fn is_possible(&self) -> bool {
        self.rows.iter().any(|row| row.fits != Some(false))
    }
}

/// Plans every placement, each in a thread of its own: compiling a step takes milliseconds.
fn of_each<T: Send>(
    placements: &[Placement],
    plan: impl Fn(&Placement) -> Result<T, PlanError> + Sync,
) -> Result<Vec<T>, PlanError> {
    std::thread::scope(|scope| {
        let plan = &plan;
        let threads: Vec<_> =
            placements.iter().map(|placement| scope.spawn(move || plan(placement))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// What a row shows beside its own footprint.
struct Further {
    most_tokens: Option<u64>,
    between_hosts: Option<BetweenHosts>,
}

fn rows(
    request: &PlanRequest,
    placements: &[Placement],
    footprints: &[Footprint],
    further: &[Further],
) -> Result<Vec<Row>, PlanError> {
    // Savings are relative to plain data parallelism, as planned where it is among the placements.
    let baseline = match placements.iter().position(|placement| placement.settings.stage == 0) {
        Some(at) => footprints[at].clone(),
        None => footprint(request, &replicated(placements.first()))?,
    };
    let free = |need: u64, budget: Option<u64>| budget.map(|budget| budget.saturating_sub(need));
    let row = |((placement, needs), further): ((&Placement, &Footprint), &Further)| {
        let (tokens, rows) = (further.most_tokens, request.rows);
        let per = |count: fn(PlannedRows) -> u64| Some(tokens? / count(rows?).max(1));
        let Footprint { bytes, process, gathered_layer, sent, frozen, basis, blocks, .. } = *needs;
        let on_device = bytes[Tier::Device].total;
        Row {
            preset: placement.preset.clone(),
            stage: placement.settings.stage,
            offload: placement.offload,
            train_type: request.train_type,
            bytes,
            comm_bytes_per_step: sent,
            saving: (on_device > 0).then(|| baseline.bytes[Tier::Device].total as f64 / on_device as f64),
            fits: needs.fits(request),
            chosen: needs.choices.clone(),
            blocks,
            process_bytes: process,
            gathered_layer,
            volume_in_parameters: volume_in_parameters(request, placement.settings.stage),
            deepspeed_estimate: deepspeed_estimate(request, placement),
            frozen,
            basis,
            device_bytes_free: free(needs.device_needs(), request.device_memory),
            host_bytes_free: free(
                request.host_needs(needs.device_needs(), needs.host_needs()),
                request.host_memory,
            ),
            largest_micro_batch: per(|rows| rows.max_length),
            longest_row: per(|rows| rows.micro_batch),
            between_hosts: further.between_hosts,
        }
    };
    Ok(placements.iter().zip(footprints).zip(further).map(row).collect())
}

/// Plain data parallelism with the remaining settings of a placement.
fn replicated(placement: Option<&Placement>) -> Placement {
    let plain = Placement::new("zero0", 0, OffloadedStates::None);
    let Some(Placement { settings, .. }) = placement else { return plain };
    let offload = zeroth_program::Offload { optimizer: None, parameters: None, ..settings.offload };
    Placement { settings: Settings { stage: 0, offload, ..*settings }, ..plain }
}

/// DeepSpeed estimates ZeRO-2 and ZeRO-3 with all parameters trained. `zero_init` is true, since no process here holds
/// a whole model either.
fn deepspeed_estimate(request: &PlanRequest, placement: &Placement) -> Option<Estimate> {
    if request.train_type != TrainType::Full {
        return None;
    }
    let cluster = Cluster { gpus_per_node: request.ranks_on_host(), nodes: request.hosts() };
    match (placement.settings.stage, placement.offload) {
        (2, offload) => Some(deepspeed::zero2(request.params, cluster, offload.optimizer())),
        (3, OffloadedStates::None | OffloadedStates::Optimizer | OffloadedStates::OptimizerAndParameters) => {
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

fn notes(
    request: &PlanRequest,
    rows: &[Row],
    footprints: &[Footprint],
    each: BytesPerParameter,
    recommended: Option<&str>,
) -> Vec<String> {
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
    let is_estimate = rows.iter().any(|row| row.basis == Basis::Estimate);
    if is_estimate {
        let counted = if request.largest_layer.is_some() {
            "activations are 0, and buffers are the largest layer at stage 3 only: no training step is compiled"
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
    if let Some((row, limit)) = rows.iter().zip(footprints).find_map(|(row, f)| Some((row, f.prefetch?))) {
        notes.push(format!("{}: {limit}", row.preset));
    }
    let hpz = |row: &Row| between_hosts::note(request, &row.preset, &row.between_hosts?, row.device_needs());
    notes.extend(rows.iter().filter_map(hpz));
    notes.extend(shared_activations(rows));
    if request.device_memory.is_some() {
        notes.push("a device's own context and libraries, about 0.5 GB on a GPU, come on top".into());
    }
    if request.train_type == TrainType::Lora && request.adapter_params.is_none() {
        notes.push(
            "LoRA's own parameters are not counted: their number needs a model (usually below 1%)".into(),
        );
    }
    // For users whose job fitted before they added ZeRO.
    if request.train_type == TrainType::Full {
        let apart = match request.offload_extra_bytes() {
            _ if !is_estimate => String::new(),
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

/// Says why some rows have next to no activations: where gradients are whole, their memory is free until backward has
/// produced them, and activations lie there first.
fn shared_activations(rows: &[Row]) -> Option<String> {
    let own = |row: &&Row| row.basis == Basis::Program && row.chosen.is_empty();
    let most = rows.iter().filter(own).max_by_key(|row| row.bytes[Tier::Device].activations)?;
    let activations = most.bytes[Tier::Device].activations;
    let shares = |row: &&Row| {
        let Bytes { activations: own, gradients, .. } = row.bytes[Tier::Device];
        own < activations / 4 && gradients > activations / 2
    };
    let names: Vec<&str> = rows.iter().filter(own).filter(shares).map(|row| row.preset.as_str()).collect();
    (!names.is_empty()).then(|| {
        format!(
            "activations of {} lie where gradients come later, and count there as gradients; {} has {} of its own, since \
             its gradients are sharded",
            names.join(" and "),
            most.preset,
            format_bytes(activations)
        )
    })
}
