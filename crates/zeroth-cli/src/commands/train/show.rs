//! What a run says before it starts: the model, where values came from, and the memory plan.

use std::ops::Range;

use serde_json::{Value, json};
use zeroth::base::{counted, format_bytes, format_count, grouped};
use zeroth::config::resolve::{Origin, Resolved};
use zeroth::data::left_out;
use zeroth::kernel::Tier;
use zeroth::program::Compiled;
use zeroth::train::MicroBatch;

use super::ask::Asked;
use crate::cli::DeviceArg;
use crate::output::{self, Colour, Output};
use crate::table::Table;

pub(super) fn model(asked: &Asked) {
    let (job, totals) = (&asked.job, asked.job.samples.totals());
    output::note(&format!(
        "{}: {} with {} parameters ({})",
        asked.name,
        job.model.family.model_type(),
        format_count(job.table.total()),
        grouped(job.table.total())
    ));
    output::note(&format!(
        "data: {}, {}, {} of them trained; the longest has {}",
        counted(totals.samples, "sample"),
        counted(totals.tokens, "token"),
        grouped(totals.trained_tokens),
        grouped(totals.longest)
    ));
    let shape = &job.shape;
    output::note(&format!(
        "{} of {}: {} × {} × {}",
        counted(job.steps, "step"),
        counted(shape.train_batch(), "sample"),
        counted(shape.ranks, "rank"),
        counted(shape.accumulation, "micro-batch"),
        shape.micro_batch
    ));
}

/// Only what differs from the defaults and is not part of a section that is off.
pub(super) fn origins(asked: &Asked) {
    let mut table = Table::new(&["key", "value", "origin"], &[]);
    let settings = asked.resolved.settings().iter();
    let shown = settings.filter(|setting| setting.origin != Origin::Default);
    for setting in shown.filter(|setting| !is_off(&asked.resolved, setting.key.path)) {
        table.row([setting.key.path.to_owned(), setting.value.to_string(), setting.origin.to_string()]);
    }
    output::note(&format!("\n{}", table.lines().concat()));
}

/// Whether a key is in a section that is not enabled, or offloads to nowhere.
fn is_off(resolved: &Resolved, key: &str) -> bool {
    let sections = key.match_indices('.').map(|(end, _)| &key[..end]);
    sections.into_iter().any(|section| {
        let enabled = resolved.get(&format!("{section}.enabled"));
        enabled.is_some_and(|setting| setting.value == false)
            || resolved.get(&format!("{section}.device")).is_some_and(|setting| setting.value == "none")
    })
}

pub(super) fn origin_json(asked: &Asked) -> Value {
    let entries = asked.resolved.settings().iter().map(|setting| {
        let entry = json!({
            "value": setting.value, "origin": setting.origin.word(), "detail": setting.origin.to_string(),
        });
        (setting.key.path.to_owned(), entry)
    });
    Value::Object(entries.collect())
}

pub(super) fn memory(asked: &Asked, compiled: &Compiled) {
    let [device, host] = [Tier::Device, Tier::Host].map(|tier| compiled.memory.by_category(tier));
    // The process, beside the arenas that are counted above: host memory, as is a processor's device.
    let overhead = asked.overhead(compiled).total;
    let has_host = host.total > 0 || asked.device == DeviceArg::Cuda;
    let heads: &[&str] = if has_host {
        &["memory of a rank", "device", "", "host", ""]
    } else {
        &["memory of a rank", "bytes", ""]
    };
    let mut table = Table::new(heads, &[1, 3]);
    for (name, device, host) in [
        ("parameters", device.parameters, host.parameters),
        ("gradients", device.gradients, host.gradients),
        ("optimizer", device.optimizer, host.optimizer),
        ("activations", device.activations, host.activations),
        ("buffers", device.buffers, host.buffers),
        ("all", device.total, host.total),
        ("overhead", if has_host { 0 } else { overhead }, overhead),
    ] {
        let mut cells = vec![name.to_owned(), grouped(device), format_bytes(device)];
        if has_host {
            cells.extend([grouped(host), format_bytes(host)]);
        }
        table.row(cells);
    }
    output::note(&table.lines().concat());
    let rows = asked.job.row_sizes.last().copied().unwrap_or(0);
    let asked_rows = asked.job.shape.micro_batch * asked.job.samples.totals().longest;
    output::note(&format!(
        "planned for micro-batches of up to {} (the data's largest; {} × the longest sample would be {})",
        counted(rows, "row"),
        asked.job.shape.micro_batch,
        grouped(asked_rows)
    ));
}

pub(super) fn plan_json(asked: &Asked, compiled: &Compiled) -> Value {
    json!({
        "ranks": asked.ranks,
        "rows": asked.job.row_sizes,
        "device_bytes": compiled.memory.by_category(Tier::Device),
        "host_bytes": compiled.memory.by_category(Tier::Host),
        "overhead_bytes": asked.overhead(compiled),
    })
}

/// The first micro-batch of rank 0, its trained tokens marked: as text where the model has a tokenizer.
pub(super) fn first_batch(asked: &Asked, output: &Output) -> anyhow::Result<()> {
    let encoder = asked.reading.encoder()?;
    let mut batch = MicroBatch::default();
    asked.job.batches().fill(0, 0, 0, &mut batch)?;
    output::text("first micro-batch, the tokens that are predicted in [brackets]:\n");
    for sequence in batch.starts.windows(2) {
        let rows = sequence[0] as usize..sequence[1] as usize;
        let token = |row: usize| {
            // A token is trained where the one before it has it as its label.
            let trained = row > rows.start && batch.labels[row - 1] >= 0;
            let text = encoder.token_text(batch.ids[row]).unwrap_or_else(|| batch.ids[row].to_string());
            if trained { output.coloured(Colour::Green, &format!("[{text}]")) } else { text }
        };
        let words = |rows: Range<usize>| rows.map(token).collect::<Vec<_>>().join(" ");
        let text = match left_out(rows.len()) {
            None => words(rows.clone()),
            Some(gap) => format!(
                "{} […{} left out…] {}",
                words(rows.start..rows.start + gap.start),
                counted(gap.len() as u64, "token"),
                words(rows.start + gap.end..rows.end)
            ),
        };
        output::text(&format!("  {text}\n"));
    }
    Ok(())
}
