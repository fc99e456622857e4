//! Prints the model, the origins of config values and the memory plan before a run starts.

use std::ops::Range;

use serde_json::{Value, json};
use zeroth::base::{counted, format_bytes, format_count, grouped};
use zeroth::config::resolve::{Origin, Resolved};
use zeroth::data::{Encoder, Samples, Totals, omitted_range};
use zeroth::job::ResolvedJob;
use zeroth::kernel::{ByTier, Tier};
use zeroth::machine::DeviceKind;
use zeroth::program::Compiled;
use zeroth::train::{Distillation, Job, TokenBatch, base_table};

use super::{lora, teacher};
use crate::output::{self, Colour, Output};
use crate::table::Table;

pub(super) fn model(resolved_job: &ResolvedJob) {
    let (job, totals) = (&resolved_job.job, resolved_job.job.samples.totals());
    let total = job.lora.as_ref().map_or_else(|| job.table.total(), |_| base_table(&job.table).total());
    output::note(&format!(
        "{}: {} with {} parameters ({})",
        resolved_job.name,
        job.model.family.model_type(),
        format_count(total),
        grouped(total)
    ));
    if let Some(lora) = lora::summary(resolved_job) {
        output::note(&lora);
    }
    if let Some(teacher) = teacher::summary(resolved_job) {
        output::note(&teacher);
    }
    output::note(&format!("data: {}", data(&totals)));
    if let Some(evaluation) = &job.evaluation {
        let totals = evaluation.samples.totals();
        output::note(&format!(
            "evaluation: {}{}",
            data(&totals),
            if resolved_job.holds_out { ", held out from the data (--split-dataset-ratio)" } else { "" }
        ));
    }
    let shape = &job.shape;
    output::note(&format!(
        "{} of {}: {} × {} × {}",
        counted(job.steps, "step"),
        counted(shape.train_batch(), "sample"),
        counted(shape.ranks, "rank"),
        counted(shape.accumulation, "micro-batch"),
        shape.micro_batch
    ));
    if let Some(name) = &resolved_job.run_name {
        output::note(&format!("run: {name}"));
    }
}

/// Samples and tokens of a dataset.
fn data(totals: &Totals) -> String {
    let longest = match totals.targets {
        None => format!("the longest has {}", grouped(totals.longest)),
        Some(targets) => format!(
            "the longest source has {}, the longest target {}",
            grouped(totals.longest),
            grouped(targets.longest)
        ),
    };
    format!(
        "{}, {}, {} trained; {longest}",
        counted(totals.samples, "sample"),
        counted(totals.tokens, "token"),
        grouped(totals.trained_tokens)
    )
}

/// Prints values that differ from the defaults, except in disabled sections.
pub(super) fn origins(resolved_job: &ResolvedJob) {
    let mut table = Table::new(&["key", "value", "origin"], &[]);
    let settings = resolved_job.resolved.settings().iter();
    let shown = settings.filter(|setting| setting.origin != Origin::Default);
    for setting in shown.filter(|setting| !is_off(&resolved_job.resolved, setting.key.path)) {
        table.row([setting.key.path.to_owned(), setting.value.to_string(), setting.origin.to_string()]);
    }
    output::note(&format!("\n{}", table.lines().concat()));
}

/// Whether a key is in a disabled section, or in an offload section with device "none".
fn is_off(resolved: &Resolved, key: &str) -> bool {
    let sections = key.match_indices('.').map(|(end, _)| &key[..end]);
    sections.into_iter().any(|section| {
        let enabled = resolved.get(&format!("{section}.enabled"));
        enabled.is_some_and(|setting| setting.value == false)
            || resolved.get(&format!("{section}.device")).is_some_and(|setting| setting.value == "none")
    })
}

pub(super) fn origin_json(resolved_job: &ResolvedJob) -> Value {
    let entries = resolved_job.resolved.settings().iter().map(|setting| {
        let entry = json!({
            "value": setting.value, "origin": setting.origin.word(), "detail": setting.origin.to_string(),
        });
        (setting.key.path.to_owned(), entry)
    });
    Value::Object(entries.collect())
}

/// Prints what crosses between hosts in a step.
pub(super) fn between_hosts(resolved_job: &ResolvedJob, compiled: &Compiled) {
    let (program, on_host) = (&compiled.program, resolved_job.started.local_world);
    if resolved_job.ranks == on_host {
        return;
    }
    let into_host = program.bytes_between_hosts_per_step(on_host);
    output::note(&format!(
        "{} a host, in groups of {}{}: a host receives {} from others in a step, {} a rank",
        counted(on_host, "rank"),
        program.world().group,
        if program.hpz { " that shard the parameters (zero_hpz_partition_size)" } else { "" },
        format_bytes(into_host),
        format_bytes(into_host.div_ceil(on_host))
    ));
}

pub(super) fn memory(resolved_job: &ResolvedJob, compiled: &Compiled) {
    let planned = ByTier::new(|tier| compiled.memory.by_category(tier));
    let has_host = planned[Tier::Host].total > 0 || resolved_job.device == DeviceKind::Cuda;
    let is_shown =
        |tier: &Tier| !tier.is_offloaded() || planned[*tier].total > 0 || (*tier == Tier::Host && has_host);
    let tiers: Vec<Tier> = Tier::ALL.into_iter().filter(is_shown).collect();
    let mut heads = vec!["memory per rank"];
    match &tiers[..] {
        [_] => heads.extend(["bytes", ""]),
        tiers => heads.extend(tiers.iter().flat_map(|tier| [tier.name(), ""])),
    }
    let right: Vec<usize> = (0..tiers.len()).map(|place| 1 + 2 * place).collect();
    let mut table = Table::new(&heads, &right);
    let mut row = |name: &str, bytes: &dyn Fn(Tier) -> u64| {
        let bytes = tiers.iter().map(|tier| bytes(*tier));
        let cells = bytes.flat_map(|bytes| [grouped(bytes), format_bytes(bytes)]);
        table.row(std::iter::once(name.to_owned()).chain(cells));
    };
    row("parameters", &|tier| planned[tier].parameters);
    row("gradients", &|tier| planned[tier].gradients);
    row("optimizer", &|tier| planned[tier].optimizer);
    row("activations", &|tier| planned[tier].activations);
    row("buffers", &|tier| planned[tier].buffers);
    row("all", &|tier| planned[tier].total);
    // Host memory of the process outside of the arenas; on a CPU, device memory is host memory.
    let (overhead, of) =
        (resolved_job.overhead(compiled).total, if has_host { Tier::Host } else { Tier::Device });
    row("overhead", &|tier| if tier == of { overhead } else { 0 });
    output::note(&table.lines().concat());
    if let Some(&[sources, targets]) = resolved_job.job.row_sizes.iter().last() {
        output::note(&format!(
            "planned for micro-batches of up to {} and {} (the largest in the data)",
            counted(sources, "source row"),
            counted(targets, "target row")
        ));
        return;
    }
    let rows = resolved_job.job.row_sizes.last().copied().unwrap_or(0);
    let requested_rows = resolved_job.job.shape.micro_batch * resolved_job.job.samples.totals().longest;
    // Row counts are rounded up to tiles of 16.
    let largest =
        (resolved_job.job.shape.micro_batch * resolved_job.job.samples.longest()).next_multiple_of(16);
    let is_evaluation = resolved_job.job.evaluation.is_some() && rows > largest;
    output::note(&format!(
        "planned for micro-batches of up to {} (the largest in the {}; {} × the longest sample would be {})",
        counted(rows, "row"),
        if is_evaluation { "evaluation data" } else { "data" },
        resolved_job.job.shape.micro_batch,
        grouped(requested_rows)
    ));
}

/// The sizes that micro-batches are padded to: rows, or rows of sources and of targets.
pub(super) fn rows_json(job: &Job) -> Value {
    let size = |rows: &[u64]| match rows {
        [rows] => json!(rows),
        streams => json!(streams),
    };
    job.row_sizes.iter().map(size).collect()
}

pub(super) fn plan_json(resolved_job: &ResolvedJob, compiled: &Compiled) -> Value {
    let samples = |samples: &Samples| samples.totals().samples;
    let mut plan = json!({
        "ranks": resolved_job.ranks,
        "rows": rows_json(&resolved_job.job),
        "samples": samples(&resolved_job.job.samples),
        "evaluation_samples": resolved_job.job.evaluation.as_ref().map(|found| samples(&found.samples)),
    });
    for tier in Tier::ALL {
        plan[format!("{}_bytes", tier.name())] = json!(compiled.memory.by_category(tier));
    }
    plan["overhead_bytes"] = json!(resolved_job.overhead(compiled));
    if resolved_job.job.lora.is_some() {
        plan["parameters"] = resolved_job.job.table.total().into();
        plan["trained_parameters"] = resolved_job.job.table.trained().into();
    }
    if let Some(teacher) = resolved_job.job.objective.distillation().and_then(Distillation::model) {
        let mut of_teacher = json!({ "parameters": teacher.table.total() });
        for tier in Tier::ALL {
            of_teacher[format!("{}_bytes", tier.name())] = compiled.teacher_bytes(tier).into();
        }
        plan["teacher"] = of_teacher;
    }
    let started = resolved_job.started;
    if started.local_world < started.world {
        plan["bytes_between_hosts_per_step"] =
            compiled.program.bytes_between_hosts_per_step(started.local_world).into();
    }
    if let Some(name) = &resolved_job.run_name {
        plan["run_name"] = name.as_str().into();
    }
    plan
}

/// Prints the first micro-batch of rank 0 with trained tokens marked, as text if the model has a tokenizer.
pub(super) fn first_batch(resolved_job: &ResolvedJob, output: &Output) -> anyhow::Result<()> {
    let encoder = resolved_job.reading.encoder()?;
    let mut batch = TokenBatch::default();
    resolved_job.job.batches().fill(0, 0, 0, &mut batch)?;
    if let Some(targets) = &batch.targets {
        first_pairs(&batch, targets, &encoder, output);
        return Ok(());
    }
    output::text("first micro-batch, with trained tokens in [brackets]:\n");
    for sequence in batch.starts.windows(2) {
        let rows = sequence[0] as usize..sequence[1] as usize;
        let token = |row: usize| {
            // A token is trained if it is the label of the previous one.
            let trained = row > rows.start && batch.labels[row - 1] >= 0;
            let text = encoder.token_text(batch.ids[row]).unwrap_or_else(|| batch.ids[row].to_string());
            if trained { output.coloured(Colour::Green, &format!("[{text}]")) } else { text }
        };
        let words = |rows: Range<usize>| rows.map(token).collect::<Vec<_>>().join(" ");
        let text = match omitted_range(rows.len()) {
            None => words(rows.clone()),
            Some(gap) => format!(
                "{} […{} omitted…] {}",
                words(rows.start..rows.start + gap.start),
                counted(gap.len() as u64, "token"),
                words(rows.start + gap.end..rows.end)
            ),
        };
        output::text(&format!("  {text}\n"));
    }
    Ok(())
}

/// Prints sources, decoder inputs and labels of a micro-batch, with trained labels marked.
fn first_pairs(sources: &TokenBatch, targets: &TokenBatch, encoder: &Encoder, output: &Output) {
    output::text("first micro-batch, with trained labels in [brackets]:\n");
    let word = |id: i32| encoder.token_text(id).unwrap_or_else(|| id.to_string());
    let label = |label: i32| match label {
        0.. => output.coloured(Colour::Green, &format!("[{}]", word(label))),
        untrained => untrained.to_string(),
    };
    let words = |ids: &[i32], shown: &dyn Fn(i32) -> String| {
        let text = |ids: &[i32]| ids.iter().map(|id| shown(*id)).collect::<Vec<_>>().join(" ");
        match omitted_range(ids.len()) {
            None => text(ids),
            Some(gap) => format!(
                "{} […{} omitted…] {}",
                text(&ids[..gap.start]),
                counted(gap.len() as u64, "token"),
                text(&ids[gap.end..])
            ),
        }
    };
    for (source, target) in sources.starts.windows(2).zip(targets.starts.windows(2)) {
        let source = source[0] as usize..source[1] as usize;
        let target = target[0] as usize..target[1] as usize;
        output::text(&format!(
            "  source: {}\n  decoder input: {}\n  labels: {}\n",
            words(&sources.ids[source], &word),
            words(&targets.ids[target.clone()], &word),
            words(&targets.labels[target], &label)
        ));
    }
}
