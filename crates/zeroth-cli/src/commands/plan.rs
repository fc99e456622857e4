//! `plan`: bytes by tier and category for every preset, what fits, and what to change if nothing does.

use std::path::Path;

use anyhow::Context;
use serde_json::json;
use zeroth::base::format_bytes;
use zeroth::job::{ResolvedPlan, resolve_plan};
use zeroth::machine::{known_gpu, other_sizes};
use zeroth::plan::{Basis, Placement, PlanRequest, compile, plan};

use super::{dump_program, plan_text};
use crate::cli::PlanArgs;
use crate::exit::Exit;
use crate::output::{self, Output};

pub(super) fn run(arguments: &PlanArgs, output: &Output) -> anyhow::Result<Exit> {
    let (request, options) = arguments.job_request()?;
    let ResolvedPlan { request, placements, model, notes } = resolve_plan(&request, &options)?;
    if let Some(file) = &arguments.dump_program {
        return dump(file, &request, &placements);
    }
    let mut plan = plan(&request, &placements)?;
    plan.notes.extend(notes);
    plan.notes.extend(idle_flags(arguments));
    let builtin = model.as_ref().and_then(|model| model.builtin.clone());
    plan.notes.splice(0..0, card_note(arguments).into_iter().chain(builtin));
    if output.is_json() {
        let mut json = serde_json::to_value(&plan)?;
        json["model"] = json!(model.as_ref().map(|model| &model.name));
        json["estimate"] = json!(plan.rows.iter().any(|row| row.basis == Basis::Estimate));
        json["device"] = json!(request.model.as_ref().map(|model| model.device().kind.name()));
        json["device_memory"] = json!(request.device_memory);
        json["deepspeed_estimators"] = json!(plan_text::estimators(&request));
        output::json(&json)?;
    } else {
        output::text(&plan_text::text(&plan, &request, model.as_ref(), output));
    }
    Ok(if plan.is_possible() { Exit::Done } else { Exit::DoesNotFit })
}

/// Writes the program of the only placement.
fn dump(file: &Path, request: &PlanRequest, placements: &[Placement]) -> anyhow::Result<Exit> {
    let placement = placements.first().context("--dump-program needs --deepspeed")?;
    let (compiled, fits) = compile(request, placement)?
        .context("--dump-program needs a model that can be trained, without --states")?;
    dump_program::write(file, &compiled)?;
    Ok(if fits { Exit::Done } else { Exit::DoesNotFit })
}

/// A note about flags that have no effect without a model.
fn idle_flags(arguments: &PlanArgs) -> Option<String> {
    let typed = [
        ("--max-length", arguments.rows.max_length.is_some()),
        ("--max-source-length", arguments.lengths.max_source_length.is_some()),
        ("--max-target-length", arguments.lengths.max_target_length.is_some()),
        ("--per-device-train-batch-size", arguments.train.per_device_train_batch_size.is_some()),
        ("--gradient-checkpointing", arguments.train.gradient_checkpointing.is_some()),
        ("--device", arguments.device.is_some()),
        ("--quantize", arguments.lora.quantize.is_some()),
    ];
    let typed = typed.into_iter().filter(|(_, typed)| *typed).map(|(flag, _)| flag);
    let idle: Vec<&str> = typed.chain(arguments.lora.typed()).collect();
    let counts = arguments.model.is_some() || idle.is_empty();
    (!counts).then(|| format!("{} have no effect without --model", idle.join(", ")))
}

/// Says which memory size was assumed for a GPU model that has several.
fn card_note(arguments: &PlanArgs) -> Option<String> {
    let name = arguments.card.as_deref()?;
    let (gpu, others) = (known_gpu(name).ok()?, other_sizes(name));
    let sizes: Vec<String> = others.iter().map(|other| format_bytes(other.memory)).collect();
    let other = others.first()?.name;
    Some(format!(
        "--card {name} has {} or {}: {} is assumed; --card \"{other}\" says the other",
        format_bytes(gpu.memory),
        sizes.join(" or "),
        format_bytes(gpu.memory)
    ))
}
