//! Where nothing fits: the single changes after which something does.
//!
//! None is guessed. Each is found by planning again with the change made, and is listed only if a row then fits.

use crate::figures::exact;
use crate::recommend::precedence;
use crate::{Ask, Footprint, Placement, Shape, TrainType, footprint};
use serde::Serialize;
use zeroth_base::{format_bytes, format_count};

/// The largest job that is tried.
pub const MOST_RANKS: u64 = 4096;

/// Sequences are not cut below this many tokens.
pub const SHORTEST_LENGTH: u64 = 256;

/// What a change turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Lever {
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

/// One change to the ask after which a placement fits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Change {
    /// What is turned.
    pub change: Lever,
    /// From this number (parameters trained, sequences, tokens, ranks, hosts, bytes; recomputation 0) …
    pub from: u64,
    /// … to this.
    pub to: u64,
    /// The placement that then fits.
    pub preset: String,
    /// Bytes it then needs on each device.
    pub device_bytes: u64,
    /// Bytes it then needs of the fullest host.
    pub host_bytes: u64,
    /// The same in words.
    pub text: String,
}

impl Change {
    /// The ask with this change made.
    pub fn apply(&self, ask: &Ask) -> Ask {
        turned(ask, self.change, self.to)
    }
}

/// The single changes after which one of the placements fits, the least invasive first.
pub fn changes(ask: &Ask, placements: &[Placement]) -> Vec<Change> {
    let search = Search::new(ask, placements);
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

fn turned(ask: &Ask, lever: Lever, to: u64) -> Ask {
    let mut ask = ask.clone();
    let mut reshape = |turn: &dyn Fn(&mut Shape)| ask.shape.as_mut().map_or((), turn);
    match lever {
        Lever::Lora => ask.train_type = TrainType::Lora,
        Lever::Recompute => reshape(&|shape| shape.recompute = true),
        Lever::MicroBatch => reshape(&|shape| shape.micro_batch = to),
        Lever::MaxLength => reshape(&|shape| shape.max_length = to),
        // Counted as one host: what fits on one fits when spread over several. Of several, the last is filled.
        Lever::Ranks => {
            ask.ranks_per_host = if ask.hosts() > 1 { ask.ranks_on_host() } else { to };
            ask.ranks = to;
        }
        Lever::Hosts => {
            ask.ranks_per_host = ask.ranks_on_host();
            ask.ranks = to.saturating_mul(ask.ranks_per_host);
        }
        Lever::DeviceMemory => ask.device_memory = Some(to),
        Lever::HostMemory => ask.host_memory = Some(to),
    }
    ask
}

struct Search<'a> {
    ask: &'a Ask,
    /// In the order in which they are recommended.
    placements: Vec<&'a Placement>,
}

impl<'a> Search<'a> {
    fn new(ask: &'a Ask, placements: &'a [Placement]) -> Self {
        let mut placements: Vec<&Placement> = placements.iter().collect();
        placements.sort_by_key(|placement| precedence(placement));
        Self { ask, placements }
    }

    /// The first placement that fits once the lever stands at `to`.
    fn try_at(&self, lever: Lever, to: u64) -> Option<(&'a Placement, Footprint)> {
        let ask = turned(self.ask, lever, to);
        self.placements.iter().find_map(|placement| {
            let needs = footprint(&ask, placement);
            (ask.fits(needs.device_needs(), needs.host.total) == Some(true)).then_some((*placement, needs))
        })
    }

    fn change(&self, lever: Lever, from: u64, to: u64) -> Option<Change> {
        let (placement, needs) = self.try_at(lever, to)?;
        let (device, host) = (needs.device_needs(), needs.host.total);
        let did = match lever {
            Lever::Lora => {
                format!("train LoRA's {} parameters instead of all {}", format_count(to), format_count(from))
            }
            Lever::Recompute => "turn gradient checkpointing on".to_owned(),
            Lever::MicroBatch => format!("take micro-batches of {to} instead of {from}"),
            Lever::MaxLength => format!("cut sequences at {to} tokens instead of {from}"),
            Lever::Ranks => format!("use {to} ranks instead of {from}"),
            Lever::Hosts => format!("use {to} hosts like this one instead of {from}"),
            Lever::DeviceMemory => {
                format!("take devices with {}, {} more", exact(to), format_bytes(to.saturating_sub(from)))
            }
            Lever::HostMemory => {
                format!("take hosts with {}, {} more", exact(to), format_bytes(to.saturating_sub(from)))
            }
        };
        let and_host =
            if host > 0 { format!(" and {} of a host", format_bytes(host)) } else { String::new() };
        let text = format!("{did}: {} then needs {}{and_host}", placement.preset, format_bytes(device));
        let preset = placement.preset.clone();
        Some(Change { change: lever, from, to, preset, device_bytes: device, host_bytes: host, text })
    }

    fn recompute(&self) -> Option<Change> {
        let shape = self.ask.shape.as_ref()?;
        if shape.recompute { None } else { self.change(Lever::Recompute, 0, 1) }
    }

    /// The largest micro-batch that fits: needs grow with it, so halving the interval finds it.
    fn micro_batch(&self) -> Option<Change> {
        let now = self.ask.shape.as_ref()?.micro_batch;
        let (mut fits, mut too_large) = (1, now);
        if now <= 1 || self.try_at(Lever::MicroBatch, fits).is_none() {
            return None;
        }
        while too_large - fits > 1 {
            let middle = fits + (too_large - fits) / 2;
            if self.try_at(Lever::MicroBatch, middle).is_some() { fits = middle } else { too_large = middle }
        }
        self.change(Lever::MicroBatch, now, fits)
    }

    fn max_length(&self) -> Option<Change> {
        let now = self.ask.shape.as_ref()?.max_length;
        let mut to = now / 2;
        while to >= SHORTEST_LENGTH {
            if let Some(change) = self.change(Lever::MaxLength, now, to) {
                return Some(change);
            }
            to /= 2;
        }
        None
    }

    fn lora(&self) -> Option<Change> {
        let adapters = self.ask.adapters?;
        match self.ask.train_type {
            TrainType::Full => self.change(Lever::Lora, self.ask.params, adapters.params),
            TrainType::Lora => None,
        }
    }

    fn ranks(&self) -> Option<Change> {
        // With several hosts ranks come by the host, but for the last, which may have room.
        let (now, hosts) = (self.ask.ranks, self.ask.hosts());
        let most = if hosts > 1 {
            hosts.saturating_mul(self.ask.ranks_on_host()).min(MOST_RANKS)
        } else {
            MOST_RANKS
        };
        (now.saturating_add(1)..=most).find_map(|to| self.change(Lever::Ranks, now, to))
    }

    fn hosts(&self) -> Option<Change> {
        let now = self.ask.hosts();
        let most = MOST_RANKS / self.ask.ranks_on_host().max(1);
        (now.saturating_add(1)..=most).find_map(|to| self.change(Lever::Hosts, now, to))
    }

    fn device_memory(&self) -> Option<Change> {
        self.memory(Lever::DeviceMemory, self.ask.device_memory?, |needs| needs.device_needs())
    }

    fn host_memory(&self) -> Option<Change> {
        self.memory(Lever::HostMemory, self.ask.host_memory?, |needs| needs.host.total)
    }

    /// The least that a placement needs of one memory, among those that are within the other's budget.
    fn memory(&self, lever: Lever, now: u64, total: impl Fn(Footprint) -> u64) -> Option<Change> {
        let unbounded = turned(self.ask, lever, u64::MAX);
        let needs = self.placements.iter().map(|placement| footprint(self.ask, placement));
        let within =
            needs.filter(|needs| unbounded.missing(needs.device_needs(), needs.host.total) == (0, 0));
        let least = within.map(total).min()?;
        if least > now { self.change(lever, now, least) } else { None }
    }
}
