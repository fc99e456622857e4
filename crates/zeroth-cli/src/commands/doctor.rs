//! `doctor`: what this machine offers, what is missing, and what its environment variables do here.

use serde_json::json;
use zeroth::base::format_bytes;
use zeroth::config::environment::{Judgement, judge_all};
use zeroth::device::{Gpus, LibraryState, Limit, Machine, probe};

use crate::exit::Exit;
use crate::output::{self, Output};
use crate::table::Table;

pub(super) fn run(output: &Output) -> anyhow::Result<Exit> {
    let machine = probe();
    let variables = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()));
    let environment = judge_all(variables);
    if output.is_json() {
        let environment: Vec<serde_json::Value> = environment.iter().map(Judgement::to_json).collect();
        output::json(&json!({"machine": machine, "environment": environment}))?;
        return Ok(Exit::Done);
    }
    output::text(&machine_text(&machine));
    if environment.is_empty() {
        output::text("\nenvironment: no variable that DeepSpeed, PyTorch, CUDA or zeroth reads is set\n");
        return Ok(Exit::Done);
    }
    let mut table = Table::new(&["variable", "value", "here", "why"], &[]);
    for judgement in &environment {
        table.row([
            judgement.name.clone(),
            judgement.value.clone(),
            judgement.verdict.title().to_owned(),
            judgement.message.clone(),
        ]);
    }
    output::text(&format!("\n{}", table.lines().concat()));
    Ok(Exit::Done)
}

fn machine_text(machine: &Machine) -> String {
    let bytes = |value: Option<u64>| value.map_or_else(|| "unknown".to_owned(), format_bytes);
    let mut table = Table::new(&["what", "found"], &[]);
    let mut row = |what: &str, found: String| table.row([what.to_owned(), found]);
    let cpu = &machine.cpu;
    row("processor", cpu.model.clone().unwrap_or_else(|| "unknown".to_owned()));
    row("threads", format!("{} for this process", cpu.threads));
    row("best instructions", cpu.kernels.to_string());
    row(
        "host memory",
        format!(
            "{} available of {}",
            bytes(machine.host_memory_available()),
            bytes(machine.host_memory_total())
        ),
    );
    for group in &machine.memory.groups {
        row("  limit", format!("{} by control group {}", format_bytes(group.limit), group.group.display()));
    }
    if let Some(shared) = &machine.memory.shared {
        row("shared memory", format!("{} free of {}", format_bytes(shared.free), format_bytes(shared.total)));
    }
    row(
        "locked memory",
        match machine.memory.locked_limit {
            Some(Limit::Unlimited) => "no limit".to_owned(),
            Some(Limit::Bytes(limit)) => {
                format!("at most {}: pin_memory needs more, see `ulimit -l`", format_bytes(limit))
            }
            None => "unknown".to_owned(),
        },
    );
    if let Some(disk) = &machine.disk {
        let kind = disk.filesystem.as_deref().unwrap_or("unknown filesystem");
        row(
            "disk here",
            format!("{} free of {} ({kind})", format_bytes(disk.free), format_bytes(disk.total)),
        );
    }
    match &machine.gpus {
        Gpus::NoDriver { why } | Gpus::NoDevice { why } | Gpus::Failed { why } => {
            row("GPU", format!("none: {why}"));
        }
        Gpus::Found { driver_version, devices } => {
            row("GPU driver", format!("CUDA {driver_version}"));
            for gpu in devices {
                let bf16 = if gpu.supports_bf16() { "bf16" } else { "no bf16: use fp16" };
                let (free, total) = (bytes(gpu.free), format_bytes(gpu.total));
                row(
                    &format!("GPU {}", gpu.index),
                    format!(
                        "{}, {free} free of {total}, compute {}, {bf16}",
                        gpu.name, gpu.compute_capability
                    ),
                );
            }
        }
    }
    for library in &machine.software {
        let found = match &library.state {
            LibraryState::Opened { at, version } => {
                format!("{} at {at}", version.as_deref().unwrap_or("found"))
            }
            LibraryState::Missing { tried } => format!("not found ({} places tried)", tried.len()),
            LibraryState::Skipped { why } => format!("not looked for: {why}"),
        };
        row(library.name, found);
    }
    for unknown in &machine.unknown {
        row(unknown.what, format!("unknown: {}", unknown.why));
    }
    table.lines().concat()
}
