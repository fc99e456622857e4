//! The third step of a check: values that are fine alone and contradict each other.

use super::verdict::{KeyStatus, Verdict};
use crate::view::{ConfigView, Switch};

/// A contradiction: the keys to report it at (the first that the file has), and the message.
struct Conflict {
    at: Vec<&'static str>,
    message: String,
}

type Rule = fn(ConfigView<'_>) -> Vec<Conflict>;

const RULES: [Rule; 6] = [
    both_precisions,
    disk_without_path,
    batch_fits_no_world,
    moving_scale_needs_room,
    schedule_incomplete,
    groups_disagree,
];

pub(super) fn apply(view: ConfigView<'_>, verdicts: &mut [Verdict]) {
    for conflict in RULES.iter().flat_map(|rule| rule(view)) {
        let pinned = conflict.at.iter().find_map(|path| {
            verdicts.iter().position(|verdict| verdict.key.is_some_and(|key| key.path == *path))
        });
        // What is wrong by itself keeps its own message.
        if let Some(index) = pinned.filter(|&index| verdicts[index].status != KeyStatus::Invalid) {
            verdicts[index].refuse(conflict.message);
        }
    }
}

fn both_precisions(view: ConfigView<'_>) -> Vec<Conflict> {
    if view.switch("fp16.enabled") != Switch::On || view.switch("bf16.enabled") != Switch::On {
        return Vec::new();
    }
    vec![Conflict {
        at: vec!["fp16.enabled"],
        message:
            "fp16.enabled and bf16.enabled are both true, and a run has one precision; keep bf16 where the \
                  GPU has it"
                .to_owned(),
    }]
}

fn disk_without_path(view: ConfigView<'_>) -> Vec<Conflict> {
    let sections = [
        ("zero_optimization.offload_param", "zero_optimization.offload_param.device"),
        ("zero_optimization.offload_optimizer", "zero_optimization.offload_optimizer.device"),
    ];
    sections
        .into_iter()
        .filter(|(section, _)| {
            view.device(section) == "nvme"
                && view.text(&format!("{section}.nvme_path")).is_none_or(|path| path.trim().is_empty())
        })
        .map(|(section, device)| Conflict {
            at: vec![device],
            message: format!(
                "the device is \"nvme\", and {section}.nvme_path does not say where; add the folder"
            ),
        })
        .collect()
}

/// Whatever the number of ranks, the global batch is a multiple of micro-batch × accumulation.
fn batch_fits_no_world(view: ConfigView<'_>) -> Vec<Conflict> {
    let micro = view.integer("train_micro_batch_size_per_gpu");
    let accumulation = view.integer("gradient_accumulation_steps");
    let Some(train) = view.integer("train_batch_size") else { return Vec::new() };
    let (Some(share), true) = (
        micro.unwrap_or(1).checked_mul(accumulation.unwrap_or(1)).filter(|share| *share > 0),
        micro.is_some() || accumulation.is_some(),
    ) else {
        return Vec::new();
    };
    if train % share == 0 {
        return Vec::new();
    }
    let product = match (micro, accumulation) {
        (Some(micro), Some(steps)) => {
            format!("train_micro_batch_size_per_gpu {micro} × gradient_accumulation_steps {steps} = {share}")
        }
        (Some(micro), None) => format!("train_micro_batch_size_per_gpu {micro}"),
        (None, _) => format!("gradient_accumulation_steps {share}"),
    };
    let below = train / share * share;
    let fitting = match (below, below.checked_add(share)) {
        (0, Some(above)) => above.to_string(),
        (below, Some(above)) => format!("{below} or {above}"),
        (below, None) => below.to_string(),
    };
    vec![Conflict {
        at: vec!["train_batch_size"],
        message: format!(
            "train_batch_size {train} is no multiple of {product}, so no number of ranks fits; write {fitting}, \
             or leave one of the keys to \"auto\""
        ),
    }]
}

/// Parameters that are sharded within groups stay on the devices of those groups, which also add up gradients.
fn groups_disagree(view: ConfigView<'_>) -> Vec<Conflict> {
    const HPZ: &str = "zero_optimization.zero_hpz_partition_size";
    let Some(group) = view.integer(HPZ).filter(|group| *group > 1 && view.stage() == 3) else {
        return Vec::new();
    };
    let mut conflicts = Vec::new();
    let device = view.device("zero_optimization.offload_param");
    if device != "none" {
        conflicts.push(Conflict {
            at: vec![HPZ],
            message: format!(
                "zero_hpz_partition_size {group} keeps parameters on the devices of every group, and offload_param.device \"{device}\" \
                 moves them off; remove one of the two"
            ),
        });
    }
    if let Some(other) = view.integer("zeroth.sum_group").filter(|other| *other != group) {
        conflicts.push(Conflict {
            at: vec!["zeroth.sum_group"],
            message: format!(
                "zeroth.sum_group is {other} and zero_hpz_partition_size {group}, and ranks have one kind of groups; leave \
                 zeroth.sum_group out"
            ),
        });
    }
    conflicts
}

/// DeepSpeed asks for a window and a floor above 0 only where the loss scale moves.
fn moving_scale_needs_room(view: ConfigView<'_>) -> Vec<Conflict> {
    if view.number("fp16.loss_scale").is_some_and(|scale| scale > 0.0) {
        return Vec::new();
    }
    [("fp16.loss_scale_window", "at least 1"), ("fp16.min_loss_scale", "above 0")]
        .into_iter()
        .filter(|(path, _)| view.number(path) == Some(0.0))
        .map(|(path, bound)| Conflict {
            at: vec![path],
            message: format!(
                "0 is out of bounds: it must be {bound} where the loss scale moves (fp16.loss_scale 0)"
            ),
        })
        .collect()
}

fn schedule_incomplete(view: ConfigView<'_>) -> Vec<Conflict> {
    let Some(name) = view.text("scheduler.type") else {
        if view.contains("scheduler.type") || !view.has_section("scheduler") {
            return Vec::new();
        }
        return vec![Conflict {
            at: vec!["scheduler.type", "scheduler.params", "scheduler"],
            message:
                "scheduler has no `type`; write one of WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or \
                      LRRangeTest, or remove the section"
                    .to_owned(),
        }];
    };
    if !name.eq_ignore_ascii_case("OneCycle") {
        return Vec::new();
    }
    let missing: Vec<&str> = ["scheduler.params.cycle_min_lr", "scheduler.params.cycle_max_lr"]
        .into_iter()
        .filter(|path| !view.contains(path))
        .collect();
    if missing.is_empty() {
        return Vec::new();
    }
    vec![Conflict {
        at: vec!["scheduler.type"],
        message: format!("OneCycle needs {}", missing.join(" and ")),
    }]
}
