//! Where nothing fits: single changes after which something does.
//!
//! Each change is found by planning again with it, and is listed only if a placement then fits.

use crate::format::exact;
use crate::recommend::precedence;
use crate::row::{Footprint, footprint, least_footprint};
use crate::sizing::EarlierSteps;
use crate::{Placement, PlanRequest, PlannedRows, TrainType};
use serde::Serialize;
use zeroth_base::{counted, format_bytes, format_count};

/// The largest number of ranks tried.
pub const MOST_RANKS: u64 = 4096;

/// The shortest sequence length tried.
pub const SHORTEST_LENGTH: u64 = 256;

/// The quantity a change modifies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    /// Train LoRA's parameters instead of all.
    Lora,
    /// Gradient checkpointing on.
    Recompute,
    /// Fewer sequences in a micro-batch.
    MicroBatch,
    /// Shorter sequences.
    MaxLength,
    /// More ranks, on one host or on several.
    Ranks,
    /// More hosts with as many ranks each.
    Hosts,
    /// More memory on each device.
    DeviceMemory,
    /// More memory on each host.
    HostMemory,
}

/// A single change after which a placement fits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Change {
    /// The quantity.
    pub change: ChangeKind,
    /// The value before (trained parameters, sequences, tokens, ranks, hosts, bytes; 0 for recomputation).
    pub from: u64,
    /// The value after.
    pub to: u64,
    /// The placement that then fits.
    pub preset: String,
    /// Bytes it then needs on each device.
    pub device_bytes: u64,
    /// Bytes it then needs of the fullest host.
    pub host_bytes: u64,
    /// A description.
    pub text: String,
}

impl Change {
    /// Applies the change to a request.
    pub fn apply(&self, request: &PlanRequest) -> PlanRequest {
        with_change(request, self.change, self.to)
    }
}

/// The single changes after which one of the placements fits, the least invasive first.
pub fn changes(request: &PlanRequest, placements: &[Placement]) -> Vec<Change> {
    let search = Search::new(request, placements);
    [
        search.recompute(),
        search.micro_batch(),
        search.max_length(),
        search.lora(),
        search.ranks().or_else(|| search.hosts()),
        search.device_memory(),
        search.host_memory(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn with_change(request: &PlanRequest, kind: ChangeKind, to: u64) -> PlanRequest {
    let mut request = request.clone();
    let mut resize = |change: &dyn Fn(&mut PlannedRows)| request.rows.as_mut().map_or((), change);
    match kind {
        ChangeKind::Lora => request.train_type = TrainType::Lora,
        ChangeKind::Recompute => resize(&|rows| rows.recompute = true),
        ChangeKind::MicroBatch => resize(&|rows| rows.micro_batch = to),
        ChangeKind::MaxLength => resize(&|rows| *rows = rows.scaled_to(to)),
        // Planned on one host, since what fits on one also fits spread over several. With several hosts, the last one
        // is filled.
        ChangeKind::Ranks => {
            request.ranks_per_host = if request.hosts() > 1 { request.ranks_on_host() } else { to };
            request.ranks = to;
        }
        ChangeKind::Hosts => {
            request.ranks_per_host = request.ranks_on_host();
            request.ranks = to.saturating_mul(request.ranks_per_host);
        }
        ChangeKind::DeviceMemory => request.device_memory = Some(to),
        ChangeKind::HostMemory => request.host_memory = Some(to),
    }
    request
}

struct Search<'a> {
    request: &'a PlanRequest,
    /// In order of recommendation.
    placements: Vec<&'a Placement>,
}

impl<'a> Search<'a> {
    fn new(request: &'a PlanRequest, placements: &'a [Placement]) -> Self {
        let mut placements: Vec<&Placement> = placements.iter().collect();
        placements.sort_by_key(|placement| precedence(placement));
        Self { request, placements }
    }

    /// The first placement that fits after the change.
    fn try_at(&self, kind: ChangeKind, to: u64) -> Option<&'a Placement> {
        let request = with_change(self.request, kind, to);
        self.placements.iter().find_map(|placement| {
            // A change that cannot be compiled is none to offer.
            let needs = least_footprint(&request, placement, &mut EarlierSteps::default()).ok()?;
            (needs.fits(&request) == Some(true)).then_some(*placement)
        })
    }

    fn change(&self, kind: ChangeKind, from: u64, to: u64) -> Option<Change> {
        let placement = self.try_at(kind, to)?;
        // As a run of it would choose.
        let changed = with_change(self.request, kind, to);
        let needs = footprint(&changed, placement).ok().filter(|needs| needs.fits(&changed) == Some(true))?;
        let device = needs.device_needs();
        let host = self.request.host_needs(device, needs.host_needs());
        let did = match kind {
            ChangeKind::Lora => {
                format!("train LoRA's {} parameters instead of all {}", format_count(to), format_count(from))
            }
            ChangeKind::Recompute => "turn gradient checkpointing on".to_owned(),
            ChangeKind::MicroBatch => format!("take micro-batches of {to} instead of {from}"),
            ChangeKind::MaxLength => match self.request.rows.map(|rows| rows.scaled_to(to)) {
                Some(PlannedRows { max_target_length: target @ 1.., .. }) => format!(
                    "cut sources at {to} tokens instead of {from}, and targets at {target} (--max-source-length, \
                     --max-target-length)"
                ),
                _ => format!("cut sequences at {to} tokens instead of {from}"),
            },
            ChangeKind::Ranks => format!("use {} instead of {from}", counted(to, "rank")),
            ChangeKind::Hosts => format!("use {to} hosts like this one instead of {from}"),
            ChangeKind::DeviceMemory => {
                format!("take devices with {}, {} more", exact(to), format_bytes(to.saturating_sub(from)))
            }
            ChangeKind::HostMemory => {
                format!("take hosts with {}, {} more", exact(to), format_bytes(to.saturating_sub(from)))
            }
        };
        let and_host =
            if host > 0 { format!(" and {} of a host", format_bytes(host)) } else { String::new() };
        let text = format!("{did}: {} then needs {}{and_host}", placement.preset, format_bytes(device));
        let preset = placement.preset.clone();
        Some(Change { change: kind, from, to, preset, device_bytes: device, host_bytes: host, text })
    }

    fn recompute(&self) -> Option<Change> {
        if self.request.rows?.recompute { None } else { self.change(ChangeKind::Recompute, 0, 1) }
    }

    /// The largest micro-batch that fits, by bisection.
    fn micro_batch(&self) -> Option<Change> {
        let now = self.request.rows?.micro_batch;
        let (mut fits, mut too_large) = (1, now);
        if now <= 1 || self.try_at(ChangeKind::MicroBatch, fits).is_none() {
            return None;
        }
        while too_large - fits > 1 {
            let middle = fits + (too_large - fits) / 2;
            if self.try_at(ChangeKind::MicroBatch, middle).is_some() {
                fits = middle;
            } else {
                too_large = middle;
            }
        }
        self.change(ChangeKind::MicroBatch, now, fits)
    }

    fn max_length(&self) -> Option<Change> {
        let now = self.request.rows?.max_length;
        let mut to = now / 2;
        while to >= SHORTEST_LENGTH {
            if let Some(change) = self.change(ChangeKind::MaxLength, now, to) {
                return Some(change);
            }
            to /= 2;
        }
        None
    }

    fn lora(&self) -> Option<Change> {
        let adapters = self.request.adapter_params?;
        match self.request.train_type {
            TrainType::Full => self.change(ChangeKind::Lora, self.request.params, adapters),
            TrainType::Lora => None,
        }
    }

    fn ranks(&self) -> Option<Change> {
        // With several hosts, ranks are added on the last one, which may not be full.
        let (now, hosts) = (self.request.ranks, self.request.hosts());
        let most = if hosts > 1 {
            hosts.saturating_mul(self.request.ranks_on_host()).min(MOST_RANKS)
        } else {
            MOST_RANKS
        };
        self.smallest(ChangeKind::Ranks, now, most)
    }

    fn hosts(&self) -> Option<Change> {
        let now = self.request.hosts();
        let most = MOST_RANKS / self.request.ranks_on_host().max(1);
        self.smallest(ChangeKind::Hosts, now, most)
    }

    /// The smallest count above `now` with which something fits: doubled until it does, then bisected.
    fn smallest(&self, kind: ChangeKind, now: u64, most: u64) -> Option<Change> {
        // More ranks only add to what a host holds, so the most tell nothing about fewer.
        let is_limit = self.request.host_memory.is_none();
        if now >= most || (is_limit && self.try_at(kind, most).is_none()) {
            return None;
        }
        let (mut too_few, mut enough) = (now, now + 1);
        while self.try_at(kind, enough).is_none() {
            if enough == most {
                return None;
            }
            (too_few, enough) = (enough, enough.saturating_mul(2).min(most));
        }
        while enough - too_few > 1 {
            let middle = too_few.midpoint(enough);
            *(if self.try_at(kind, middle).is_some() { &mut enough } else { &mut too_few }) = middle;
        }
        self.change(kind, now, enough)
    }

    fn device_memory(&self) -> Option<Change> {
        self.memory(ChangeKind::DeviceMemory, self.request.device_memory?, |needs| needs.device_needs())
    }

    fn host_memory(&self) -> Option<Change> {
        self.memory(ChangeKind::HostMemory, self.request.host_memory?, |needs| needs.host_needs())
    }

    /// The smallest need of one memory among placements within the other's budget.
    fn memory(&self, kind: ChangeKind, now: u64, total: impl Fn(Footprint) -> u64) -> Option<Change> {
        let unbounded = with_change(self.request, kind, u64::MAX);
        let needs = |placement: &&Placement| {
            least_footprint(self.request, placement, &mut EarlierSteps::default()).ok()
        };
        let needs = self.placements.iter().filter_map(needs);
        let within =
            needs.filter(|needs| unbounded.missing(needs.device_needs(), needs.host_needs()) == (0, 0));
        let least = within.map(total).min()?;
        if least > now { self.change(kind, now, least) } else { None }
    }
}
