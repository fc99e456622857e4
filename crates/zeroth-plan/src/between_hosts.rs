//! What crosses between hosts in one optimizer step, beside what rings would send, and what hpZ changes.
//!
//! A host of G ranks among H receives, in Ψ = 2 bytes a parameter and k micro-batches a step (the program counts its
//! collectives; these are its closed forms):
//!
//! | stage | groups of a host's ranks | one ring over all N ranks |
//! |---|---|---|
//! | 0 | 4 (H - 1) / H: partial sums and their results are fp32 | 2 (N - 1) / N |
//! | 1 | 3 (H - 1) / H | 2 (N - 1) / N |
//! | 2 | (2k + 1) (H - 1) / H | (k + 1) (N - 1) / N |
//! | 3 | 4k (H - 1) / H | 3k (N - 1) / N |
//! | 3 with hpZ | 3 (H - 1) / H, whatever k is | |
//!
//! Groups of one rank exchange with every rank of other hosts: G (N - G) / N instead of (H - 1) / H, and 2 bytes a summand.

use serde::Serialize;
use zeroth_base::format_bytes;
use zeroth_program::Settings;

use crate::communication::Transfers;
use crate::row::Footprint;
use crate::{Placement, PlanError, PlanRequest, bytes_sent_per_step, footprint};

const ELEMENT_BYTES: u64 = 2;
const SUM_BYTES: u64 = 4;

/// Bytes between hosts in one optimizer step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct BetweenHosts {
    /// The hosts.
    pub hosts: u64,
    /// Ranks on the fullest of them.
    pub ranks_per_host: u64,
    /// Ranks of a group, which add up gradients first (`zeroth.sum_group`).
    pub group: u64,
    /// Whether 16-bit parameters are sharded within groups only (`zero_hpz_partition_size`).
    pub hpz: bool,
    /// Bytes that a host receives from others.
    pub bytes_into_host: u64,
    /// The same divided by its ranks, rounded up.
    pub bytes_into_rank: u64,
    /// Bytes into a host where NCCL's rings over all ranks reduce and gather at this stage, as DeepSpeed without hpZ.
    pub nccl_rings: u64,
    /// The same step with hpZ in groups of a host's ranks; `None` where it has hpZ or cannot have it.
    pub with_hpz: Option<WithHpz>,
    /// The `zero_hpz_partition_size` to write; `None` where hpZ does not fit or sends no less.
    pub recommended_hpz: Option<u64>,
}

/// A step with `zero_hpz_partition_size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct WithHpz {
    /// Ranks of a group.
    pub group: u64,
    /// Bytes that a host receives from others.
    pub bytes_into_host: u64,
    /// The same divided by its ranks, rounded up.
    pub bytes_into_rank: u64,
    /// Bytes of a device.
    pub device_bytes: u64,
    /// Whether it is within the budgets; `None` without a budget.
    pub fits: Option<bool>,
}

impl PlanRequest {
    /// The ranks of a group where a config leaves them open: those of a host, if hosts have equally many.
    pub(crate) fn usual_group(&self) -> u64 {
        let on_host = self.ranks_on_host().max(1);
        if self.ranks.is_multiple_of(on_host) { on_host } else { 1 }
    }
}

/// What crosses between hosts, with hpZ as well where that is possible; `None` for one host.
pub(crate) fn between_hosts(
    request: &PlanRequest,
    placement: &Placement,
    needs: &Footprint,
) -> Result<Option<BetweenHosts>, PlanError> {
    if request.hosts() <= 1 {
        return Ok(None);
    }
    let Placement { settings, .. } = placement;
    let on_host = request.ranks_on_host();
    let with_hpz = match hpz_of(request, placement) {
        Some(placement) => {
            let needs = footprint(request, &placement)?;
            Some(WithHpz {
                group: on_host,
                bytes_into_host: needs.into_host,
                bytes_into_rank: needs.into_host.div_ceil(on_host),
                device_bytes: needs.device_needs(),
                fits: needs.fits(request),
            })
        }
        None => None,
    };
    let saves = |with: &WithHpz| with.bytes_into_host < needs.into_host && with.fits != Some(false);
    Ok(Some(BetweenHosts {
        hosts: request.hosts(),
        ranks_per_host: on_host,
        group: settings.group.unwrap_or_else(|| request.usual_group()),
        hpz: settings.hpz,
        bytes_into_host: needs.into_host,
        bytes_into_rank: needs.into_host.div_ceil(on_host),
        nccl_rings: bytes_sent_per_step(request, settings.stage),
        with_hpz,
        recommended_hpz: with_hpz.filter(saves).map(|with| with.group),
    }))
}

/// The placement with hpZ in groups of a host's ranks. `None` where parameters are not sharded, stay in host memory, or
/// have other groups, and where hosts are unequal or have one rank.
fn hpz_of(request: &PlanRequest, placement: &Placement) -> Option<Placement> {
    let (group, settings) = (request.usual_group(), placement.settings);
    let can = settings.stage >= 3
        && !settings.hpz
        && group > 1
        && settings.group.is_none_or(|given| given == group)
        && !placement.offload.parameters();
    let settings = Settings { hpz: true, group: Some(group), ..settings };
    can.then(|| Placement { settings, ..placement.clone() })
}

/// Bytes that a host receives in one optimizer step, in closed form.
pub fn bytes_between_hosts(request: &PlanRequest, settings: &Settings) -> u64 {
    let (ranks, on_host, hosts) = (request.ranks, request.ranks_on_host(), request.hosts());
    if hosts <= 1 {
        return 0;
    }
    let in_hosts = settings.group.unwrap_or_else(|| request.usual_group()) == on_host && on_host > 1;
    // Of everything that is summed or gathered, the share that comes from other hosts.
    let share = |bytes: u128| {
        if in_hosts {
            bytes * u128::from(hosts - 1) / u128::from(hosts)
        } else {
            bytes * u128::from(on_host) * u128::from(ranks - on_host) / u128::from(ranks)
        }
    };
    let (trained, frozen) = (u128::from(request.trainable()), u128::from(request.frozen()));
    let summand = u128::from(if in_hosts { SUM_BYTES } else { ELEMENT_BYTES });
    let (element, sum) = (u128::from(ELEMENT_BYTES), u128::from(SUM_BYTES));
    let is_hpz = settings.hpz && settings.stage >= 3 && in_hosts;
    let Transfers { all, .. } = Transfers::of(settings.stage, request.accumulation);
    let reductions = match settings.stage {
        0 | 1 => 1,
        _ if is_hpz => 1,
        _ => request.accumulation,
    };
    let gathered = match settings.stage {
        0 => trained * sum,
        1 | 2 => trained * element,
        _ if is_hpz => trained * element,
        _ => u128::from(all) * (trained + frozen) * element,
    };
    let bytes = share(u128::from(reductions) * trained * summand + gathered);
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// Bytes that hpZ adds to a device in closed form: weights, and with accumulation gradients, are sharded over a group
/// instead of all ranks.
pub fn hpz_extra_bytes(request: &PlanRequest, group: u64) -> u64 {
    let more = |elements: u64| elements.div_ceil(group.max(1)).saturating_sub(request.shard(elements));
    let everything = request.trainable().saturating_add(request.frozen());
    let weights = more(everything).saturating_mul(ELEMENT_BYTES);
    let each = if request.accumulates_in_16_bits { ELEMENT_BYTES } else { SUM_BYTES };
    let gradients = if request.accumulation > 1 {
        request.trainable().div_ceil(group.max(1)).saturating_mul(each)
    } else {
        0
    };
    weights.saturating_add(gradients)
}

/// One sentence on what hpZ changes, for a row that may have it.
pub(crate) fn note(
    request: &PlanRequest,
    preset: &str,
    between: &BetweenHosts,
    device: u64,
) -> Option<String> {
    let with = between.with_hpz?;
    let change = format!(
        "{preset}: zero_hpz_partition_size {} brings {} into a host each step instead of {}, for {} of a device instead of {}",
        with.group,
        format_bytes(with.bytes_into_host),
        format_bytes(between.bytes_into_host),
        format_bytes(with.device_bytes),
        format_bytes(device)
    );
    Some(match (between.recommended_hpz, request.device_memory.or(request.host_memory)) {
        (Some(_), Some(_)) => format!("{change}: recommended"),
        (Some(_), None) => format!("{change}: recommended where devices have that"),
        (None, _) if with.fits == Some(false) => format!("{change}: it does not fit"),
        (None, _) => format!("{change}: not recommended"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Basis, OffloadedStates, TrainType};

    const PSI: u64 = 2 << 30;

    fn job(hosts: u64, accumulation: u64) -> PlanRequest {
        PlanRequest { ranks_per_host: 8, accumulation, ..PlanRequest::new(PSI / 2, 8 * hosts) }
    }

    fn into_host(hosts: u64, accumulation: u64, settings: Settings) -> f64 {
        bytes_between_hosts(&job(hosts, accumulation), &settings) as f64 / PSI as f64
    }

    /// The sums of a step of stage 2: without the gather after the update.
    #[test]
    fn sums_cross_in_full_by_rails_alone_and_in_fp32_once_by_two_levels() {
        let sums = |hosts, group| {
            let settings = Settings { group, ..Placement::new("", 2, OffloadedStates::None).settings };
            into_host(hosts, 2, settings) - into_host(hosts, 1, settings)
        };
        for (hosts, flat, ring, two_levels) in
            [(2, 4.0, 0.94, 1.0), (16, 7.5, 0.99, 1.9), (128, 7.9, 1.0, 2.0)]
        {
            let ranks = (8 * hosts) as f64;
            let found = [sums(hosts, Some(1)), (ranks - 1.0) / ranks, sums(hosts, None)];
            for (found, expected) in found.into_iter().zip([flat, ring, two_levels]) {
                assert!((found - expected).abs() < 0.05, "{hosts} hosts: {found} and not {expected}");
            }
        }
    }

    #[test]
    fn stage_3_sends_less_than_rings_to_two_hosts_and_with_hpz_no_more_for_more_micro_batches() {
        let plain = Placement::new("", 3, OffloadedStates::None).settings;
        for (hosts, rings, mesh, hpz) in [(2, 2.8, 2.0, 1.5), (16, 3.0, 3.8, 2.8), (128, 3.0, 4.0, 3.0)] {
            for accumulation in [1, 8] {
                let of = |hpz| into_host(hosts, accumulation, Settings { hpz, ..plain });
                let each = accumulation as f64;
                let ring = bytes_sent_per_step(&job(hosts, accumulation), 3) as f64 / PSI as f64;
                for (found, expected) in [(ring / each, rings), (of(false) / each, mesh), (of(true), hpz)] {
                    assert!((found - expected).abs() < 0.06, "{hosts} hosts: {found} and not {expected}");
                }
            }
        }
    }

    #[test]
    fn hpz_takes_two_bytes_of_a_groups_share_and_four_more_with_accumulation() {
        let extra = |accumulation| hpz_extra_bytes(&job(128, accumulation), 8);
        let (weights, held) = (2 * (PSI / 2) / 8, 2 * (PSI / 2) / 1024);
        assert_eq!(extra(1), weights - held);
        assert_eq!(extra(8), 3 * weights - held);
        let narrow = PlanRequest { accumulates_in_16_bits: true, ..job(128, 8) };
        assert_eq!(hpz_extra_bytes(&narrow, 8), 2 * weights - held);
    }

    #[test]
    fn frozen_weights_cross_at_stage_3_only_without_hpz() {
        let request =
            PlanRequest { train_type: TrainType::Lora, adapter_params: Some(1 << 20), ..job(16, 4) };
        let plain = Placement::new("", 3, OffloadedStates::None).settings;
        let [mesh, hpz] = [false, true].map(|hpz| bytes_between_hosts(&request, &Settings { hpz, ..plain }));
        assert!(mesh > 7 * PSI, "{mesh}");
        assert!(hpz < 6 * (1 << 20), "{hpz}");
    }

    #[test]
    fn one_host_and_unequal_hosts() {
        let plain = Placement::new("", 3, OffloadedStates::None);
        let needs = |request: &PlanRequest| footprint(request, &plain).unwrap();
        let one = PlanRequest { ranks_per_host: 8, ..PlanRequest::new(PSI / 2, 8) };
        assert_eq!(between_hosts(&one, &plain, &needs(&one)).unwrap(), None);
        let unequal = PlanRequest { ranks_per_host: 8, ..PlanRequest::new(PSI / 2, 12) };
        let found = between_hosts(&unequal, &plain, &needs(&unequal)).unwrap().unwrap();
        assert_eq!((found.group, found.with_hpz, found.recommended_hpz), (1, None, None));
        assert_eq!(found.bytes_into_host, (3 * PSI) * 8 * 4 / 12);
        assert_eq!(needs(&unequal).basis, Basis::Estimate);
    }
}
