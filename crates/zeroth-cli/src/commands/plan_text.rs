//! The text of a plan: the tables, the recommendation, and what is compared with it.

use zeroth::base::{counted, format_bytes, format_count, grouped};
use zeroth::job::PlannedModel;
use zeroth::kernel::Tier;
use zeroth::plan::deepspeed::{Cluster, zero2_lines, zero3_lines};
use zeroth::plan::{Basis, BetweenHosts, Plan, PlanRequest, PlannedRows, TrainType, summary};
use zeroth::program::Bytes;

use crate::output::{Colour, Output};
use crate::table::Table;

/// DeepSpeed's own memory estimates for the same job, in its format.
pub(super) fn estimators(request: &PlanRequest) -> Vec<String> {
    if request.train_type == TrainType::Lora {
        return Vec::new();
    }
    let gpus_per_node = request.ranks_per_host.min(request.ranks).max(1);
    let cluster = Cluster { gpus_per_node, nodes: request.ranks.div_ceil(gpus_per_node) };
    let mut lines: Vec<String> =
        zero2_lines(request.params, cluster).iter().map(|line| format!("ZeRO-2 {line}")).collect();
    if let Some(layer) = request.largest_layer {
        lines.extend(zero3_lines(request.params, layer, cluster).iter().map(|line| format!("ZeRO-3 {line}")));
    }
    lines
}

pub(super) fn text(
    plan: &Plan,
    request: &PlanRequest,
    model: Option<&PlannedModel>,
    output: &Output,
) -> String {
    let mut text = head(plan, request, model);
    text.push_str(&rows(plan, request, output));
    text.push_str(&limits(plan, request));
    text.push_str(&between_hosts(plan));
    match &plan.recommended {
        Some(preset) => {
            text.push_str(&format!("\nrecommended: {}\n  {}\n", output.bold(preset), plan.reason));
        }
        None => text.push_str(&format!("\n{}\n", output.coloured(Colour::Red, &plan.reason))),
    }
    if !plan.changes.is_empty() {
        text.push_str("\nany of these changes would make it fit:\n");
        for change in &plan.changes {
            text.push_str(&format!("  {}\n", change.text));
        }
    }
    let estimators = estimators(request);
    if !estimators.is_empty() {
        text.push_str("\nDeepSpeed's own estimators for the same job (states only; its GB are GiB):\n");
        text.push_str("         per CPU  |  per GPU |   options\n");
        for line in estimators {
            text.push_str(&format!("  {line}\n"));
        }
    }
    if !plan.advice.is_empty() {
        text.push_str("\ncommon advice, compared with these numbers:\n");
        for advice in &plan.advice {
            let verdict = match advice.agrees {
                Some(true) => "confirmed",
                Some(false) => "refuted",
                None => "not compared with a budget",
            };
            text.push_str(&format!("  {}: {verdict}: {}\n", advice.says, advice.arithmetic));
        }
    }
    for note in &plan.notes {
        text.push_str(&format!("note: {note}\n"));
    }
    text
}

fn head(plan: &Plan, request: &PlanRequest, model: Option<&PlannedModel>) -> String {
    let each = plan.bytes_per_parameter;
    let mut head = match model {
        Some(model) => {
            let active = model.table.active_per_token();
            let active = if active < plan.params {
                format!(", {} active per token", format_count(active))
            } else {
                String::new()
            };
            let basis = match &request.model {
                Some(planned) => format!("the step is compiled for {}", planned.device().kind.name()),
                None => "closed-form estimate".to_owned(),
            };
            format!(
                "{}: {} parameters ({}){active}, {basis}\n",
                model.name,
                grouped(plan.params),
                format_count(plan.params)
            )
        }
        None => format!(
            "{} parameters ({}), closed-form estimate\n",
            grouped(plan.params),
            format_count(plan.params)
        ),
    };
    head.push_str(&format!(
        "{}, {} bytes per trained parameter: {} parameters + {} gradients + {} optimizer\n",
        counted(plan.ranks, "rank"),
        each.parameters + each.gradients + each.optimizer,
        each.parameters,
        each.gradients,
        each.optimizer
    ));
    if let Some(planned) = request.rows {
        head.push_str(&format!(
            "micro-batch {} × {}, accumulation {}{}\n",
            planned.micro_batch,
            length(planned),
            request.accumulation,
            if planned.recompute { ", blocks recomputed in backward" } else { "" }
        ));
    }
    if request.train_type == TrainType::Lora {
        let own = request.adapter_params.map_or_else(|| "an unknown number of".to_owned(), grouped);
        let kept = if request.quantized { ", its linear layers in nf4" } else { "" };
        head.push_str(&format!("LoRA trains {own} parameters; the model's are frozen{kept}\n"));
    }
    head.push('\n');
    head
}

fn rows(plan: &Plan, request: &PlanRequest, output: &Output) -> String {
    let budget = request
        .device_memory
        .map_or_else(|| "fits".to_owned(), |budget| format!("fits {}", format_bytes(budget)));
    let head = [
        "preset",
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "buffers",
        "device",
        "host",
        "sent/step",
        "saving",
        &budget,
        "chosen by the run",
    ];
    let has_choices = plan.rows.iter().any(|row| !summary(&row.chosen, row.blocks).is_empty());
    let columns = head.len() - usize::from(!has_choices);
    let mut table = Table::new(&head[..columns], &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
    for row in &plan.rows {
        let Bytes { parameters, gradients, optimizer, activations, buffers, total } = row.bytes[Tier::Device];
        let figures =
            [parameters, gradients, optimizer, activations, buffers, total, row.bytes[Tier::Host].total];
        let fits = match row.fits {
            Some(true) => "yes",
            Some(false) => "no",
            None => "-",
        };
        let saving = row.saving.map_or_else(|| "-".to_owned(), |saving| format!("{saving:.2}x"));
        let preset = match (row.basis, row.frozen) {
            (Basis::Program, None) => row.preset.clone(),
            (Basis::Program, Some(frozen)) => format!("{} (frozen {})", row.preset, frozen.word()),
            (Basis::Estimate, _) => format!("{} (estimate)", row.preset),
        };
        let sent = format_bytes(row.comm_bytes_per_step);
        let chosen = summary(&row.chosen, row.blocks);
        let cells = std::iter::once(preset).chain(figures.into_iter().map(format_bytes));
        table.row(cells.chain([sent, saving, fits.to_owned(), chosen]).take(columns));
    }
    let mut text = String::new();
    for (index, line) in table.lines().iter().enumerate() {
        let line = line.trim_end();
        let line = match index.checked_sub(1).map(|index| plan.rows[index].fits) {
            None => output.bold(line),
            Some(Some(true)) => output.coloured(Colour::Green, line),
            Some(Some(false)) => output.coloured(Colour::Red, line),
            Some(None) => line.to_owned(),
        };
        text.push_str(&format!("{line}\n"));
    }
    text
}

/// What the budgets leave, and how far micro-batches could grow: a second table, where there is a budget.
fn limits(plan: &Plan, request: &PlanRequest) -> String {
    let Some(planned) = request.rows else { return String::new() };
    if plan.rows.iter().all(|row| row.fits.is_none()) {
        return String::new();
    }
    let micro_batch = format!("largest micro-batch of {}", length(planned));
    let row = format!("longest row in micro-batches of {}", grouped(planned.micro_batch));
    let mut table = Table::new(&["preset", "device free", "host free", &micro_batch, &row], &[1, 2, 3, 4]);
    let free = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), format_bytes);
    let count = |count: Option<u64>| match count {
        None => "-".to_owned(),
        Some(0) => "none".to_owned(),
        Some(count) => grouped(count),
    };
    for row in &plan.rows {
        table.row([
            row.preset.clone(),
            free(row.device_bytes_free),
            free(row.host_bytes_free),
            count(row.largest_micro_batch),
            count(row.longest_row),
        ]);
    }
    let lines: Vec<String> = table.lines().iter().map(|line| format!("{}\n", line.trim_end())).collect();
    format!("\n{}", lines.concat())
}

/// What crosses between hosts in a step, where there are several: a further table.
fn between_hosts(plan: &Plan) -> String {
    let several = plan.rows.iter().find_map(|row| row.between_hosts);
    let Some(BetweenHosts { hosts, ranks_per_host, .. }) = several else { return String::new() };
    let hosts = format!("{} × {} ranks", counted(hosts, "host"), grouped(ranks_per_host));
    let heads =
        ["groups of", "into a host/step", "into a rank", "NCCL rings", "with hpZ", "device with hpZ", "fits"];
    let heads: Vec<&str> = std::iter::once(&*hosts).chain(heads).collect();
    let mut table = Table::new(&heads, &[1, 2, 3, 4, 5, 6]);
    for row in &plan.rows {
        let Some(between) = row.between_hosts else { continue };
        let with = between.with_hpz;
        let bytes = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), format_bytes);
        table.row([
            row.preset.clone(),
            format!("{}{}", between.group, if between.hpz { " (hpZ)" } else { "" }),
            format_bytes(between.bytes_into_host),
            format_bytes(between.bytes_into_rank),
            format_bytes(between.nccl_rings),
            bytes(with.map(|with| with.bytes_into_host)),
            bytes(with.map(|with| with.device_bytes)),
            match with.and_then(|with| with.fits) {
                Some(true) => "yes".to_owned(),
                Some(false) => "no".to_owned(),
                None => "-".to_owned(),
            },
        ]);
    }
    let lines: Vec<String> = table.lines().iter().map(|line| format!("{}\n", line.trim_end())).collect();
    format!("\n{}", lines.concat())
}

/// The tokens of a row; of an encoder-decoder, those of its source and its target.
fn length(rows: PlannedRows) -> String {
    match rows.max_target_length {
        0 => counted(rows.max_length, "token"),
        target => format!("({} + {} tokens)", grouped(rows.max_length), grouped(target)),
    }
}
