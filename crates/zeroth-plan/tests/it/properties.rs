//! What holds for every question, absurd ones included.

use proptest::prelude::*;
use zeroth_kernel::Tier;
use zeroth_plan::{
    Change, ChangeKind, OffloadedStates, PlanRequest, States, TrainType, bytes_sent_per_step, device_states,
    host_states, plan,
};
use zeroth_program::Bytes;

use crate::common::presets;

const MOST_PARAMS: u64 = 1_000_000_000_000_000;
const MOST_RANKS: u64 = 1_000_000;

/// Small and large numbers alike: uniform in the exponent.
fn count(most: u64) -> impl Strategy<Value = u64> {
    (0..=most.ilog2()).prop_flat_map(move |bits| (1u64 << bits)..=most.min((2u64 << bits) - 1))
}

fn states() -> impl Strategy<Value = States> {
    prop_oneof![Just(States::Master), Just(States::Plain), Just(States::Run)]
}

fn request() -> impl Strategy<Value = PlanRequest> {
    let adapters = prop::option::of(count(1_000_000_000));
    let numbers =
        (prop_oneof![Just(0), count(MOST_PARAMS)], count(MOST_RANKS), count(16), count(128), adapters);
    let budgets = (prop::option::of(count(1 << 40)), prop::option::of(count(1 << 44)));
    let rest = (states(), any::<bool>(), prop::option::of(count(2_000_000_000)));
    (numbers, budgets, rest).prop_map(|(numbers, budgets, rest)| {
        let (params, ranks, ranks_per_host, accumulation, adapter_params) = numbers;
        let (states, lora, largest_layer) = rest;
        PlanRequest {
            adapter_params,
            train_type: if lora { TrainType::Lora } else { TrainType::Full },
            ranks_per_host,
            states,
            accumulation,
            largest_layer,
            device_memory: budgets.0,
            host_memory: budgets.1,
            ..PlanRequest::new(params, ranks)
        }
    })
}

fn sum(bytes: Bytes) -> u64 {
    [bytes.parameters, bytes.gradients, bytes.optimizer, bytes.activations, bytes.buffers]
        .into_iter()
        .fold(0, u64::saturating_add)
}

proptest! {
    #[test]
    fn totals_are_sums_and_what_fits_is_within_the_budgets(request in request()) {
        for row in plan(&request, &presets()).unwrap().rows {
            prop_assert_eq!(row.bytes[Tier::Device].total, sum(row.bytes[Tier::Device]));
            prop_assert_eq!(row.bytes[Tier::Host].total, sum(row.bytes[Tier::Host]));
            prop_assert!(row.device_needs() >= row.bytes[Tier::Device].total.max(row.gathered_layer));
            let within = row.device_needs() <= request.device_memory.unwrap_or(u64::MAX)
                && row.bytes[Tier::Host].total <= request.host_memory.unwrap_or(u64::MAX);
            let asked = request.device_memory.or(request.host_memory).is_some();
            prop_assert_eq!(row.fits, asked.then_some(within));
        }
    }

    #[test]
    fn a_higher_stage_never_holds_more_states(request in request()) {
        for offload in [OffloadedStates::None, OffloadedStates::Optimizer] {
            let totals: Vec<u64> = (1..=3).map(|stage| device_states(&request, stage, offload).total).collect();
            prop_assert!(totals.is_sorted_by(|lower, higher| lower >= higher), "{:?}", totals);
        }
        prop_assert!(device_states(&request, 0, OffloadedStates::None).total >= device_states(&request, 1, OffloadedStates::None).total);
    }

    #[test]
    fn offload_loses_no_state(request in request(), stage in 1u8..=3) {
        let each = request.bytes_per_parameter();
        let once = each.total() * request.trainable() + 2 * request.frozen();
        let on_host = request.ranks_per_host.min(request.ranks);
        let hosts = request.ranks.div_ceil(on_host);
        for offload in [OffloadedStates::Optimizer, OffloadedStates::Parameters, OffloadedStates::OptimizerAndParameters] {
            if offload.parameters() && stage < 3 {
                continue;
            }
            let devices = device_states(&request, stage, offload).total.saturating_mul(request.ranks);
            let everywhere = devices.saturating_add(host_states(&request, offload).total.saturating_mul(hosts));
            prop_assert!(everywhere >= once, "{:?}: {} < {}", offload, everywhere, once);
        }
    }

    #[test]
    fn more_ranks_never_hold_more_states_each(request in request(), more in count(MOST_RANKS)) {
        // One parameter cannot be cut: a second rank then only brings the f32 gradient.
        prop_assume!(request.trainable() != 1);
        let larger = PlanRequest { ranks: request.ranks + more, ..request.clone() };
        // One rank alone keeps no f32 gradient, so with stage 0 a second rank costs a run 2 bytes more.
        let stages = if request.states == States::Run { 1..=3 } else { 0..=3 };
        for stage in stages {
            let (few, many) = (device_states(&request, stage, OffloadedStates::None), device_states(&larger, stage, OffloadedStates::None));
            prop_assert!(many.total <= few.total, "stage {}: {} > {}", stage, many.total, few.total);
        }
    }

    #[test]
    fn stage_3_sends_the_most_and_stages_0_and_1_the_same(request in request()) {
        let sent: Vec<u64> = (0..=3).map(|stage| bytes_sent_per_step(&request, stage)).collect();
        prop_assert!(sent[0] == sent[1] && sent[1] <= sent[2] && sent[2] <= sent[3], "{:?}", sent);
    }

    #[test]
    fn what_is_recommended_fits(request in request()) {
        let plan = plan(&request, &presets()).unwrap();
        prop_assert!(!plan.reason.is_empty());
        if let Some(name) = &plan.recommended {
            let row = plan.rows.iter().find(|row| row.preset == *name).unwrap();
            prop_assert!(row.fits != Some(false) && row.stage > 0);
        } else {
            prop_assert!(!plan.is_possible());
        }
    }

    #[test]
    fn every_change_listed_makes_its_row_fit(request in request()) {
        let before = plan(&request, &presets()).unwrap();
        prop_assert!(before.changes.is_empty() || !before.is_possible());
        for change in before.changes {
            let after = plan(&change.apply(&request), &presets()).unwrap();
            let row = after.rows.iter().find(|row| row.preset == change.preset).unwrap();
            prop_assert_eq!(row.fits, Some(true), "{}", change.text);
            prop_assert_eq!((row.device_needs(), row.bytes[Tier::Host].total), (change.device_bytes, change.host_bytes));
            prop_assert!(change.from != change.to);
            // No smaller change of the same kind would have done.
            let nearer = match change.change {
                ChangeKind::MicroBatch => change.to + 1,
                ChangeKind::MaxLength => change.from >> ((change.from / change.to).ilog2() - 1),
                ChangeKind::Ranks | ChangeKind::Hosts | ChangeKind::DeviceMemory | ChangeKind::HostMemory => change.to - 1,
                ChangeKind::Lora | ChangeKind::Recompute => continue,
            };
            let nearly = Change { to: nearer, ..change.clone() };
            prop_assert!(!plan(&nearly.apply(&request), &presets()).unwrap().is_possible(), "{}", change.text);
        }
    }

    #[test]
    fn numbers_beyond_all_measure_saturate(params in any::<u64>(), ranks in 1u64.., accumulation in 1u64..) {
        let request = PlanRequest {
            accumulation,
            largest_layer: Some(params),
            device_memory: Some(1),
            host_memory: Some(1),
            ..PlanRequest::new(params, ranks)
        };
        let plan = plan(&request, &presets()).unwrap();
        prop_assert!(plan.rows.iter().all(|row| row.bytes[Tier::Device].total >= row.bytes[Tier::Device].parameters));
    }
}
