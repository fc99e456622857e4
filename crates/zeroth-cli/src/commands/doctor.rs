//! `doctor`: what this machine offers, whether kernels compute right on it, and what its environment variables do here.

use std::path::PathBuf;

use serde_json::json;
use zeroth::base::format_bytes;
use zeroth::config::environment::{Judgement, judge_all};
use zeroth::cpu::{CpuDevice, Isa, Pool, self_test};
use zeroth::cuda::CudaDevice;
use zeroth::kernel::SelfTest;
use zeroth::kernel::{CONFORMANCE_ARENA, Device, DeviceError, conformance};
use zeroth::machine::bench::{Identity, Measured, Part, Profile, ProfileError};
use zeroth::machine::{Gpus, LibraryState, Limit, Machine, probe};

use crate::exit::Exit;
use crate::output::{self, Output};
use crate::table::Table;

pub(super) fn run(output: &Output) -> anyhow::Result<Exit> {
    let machine = probe();
    let variables = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()));
    let environment = judge_all(variables);
    let tests = self_test()?;
    let card = card_tests(&machine);
    let kept = super::bench::profile::kept(&Identity::of(&machine));
    // A machine on which a kernel computes something else must not train.
    let of_card = card.iter().flatten().flat_map(|(_, tests)| tests);
    let all_right = tests.iter().chain(of_card).all(|test| test.ok) && !matches!(card, Some(Err(_)));
    let exit = if all_right { Exit::Done } else { Exit::Problems };
    if output.is_json() {
        let environment: Vec<serde_json::Value> = environment.iter().map(Judgement::to_json).collect();
        let kernels = kernels_json(&tests);
        let card = card.map(|card| match card {
            Ok((name, tests)) => {
                let mut found = kernels_json(&tests);
                found["path"] = name.into();
                found
            }
            Err(error) => json!({"problem": error.to_string()}),
        });
        let profile = profile_json(&kept);
        output::json(&json!({
            "machine": machine, "kernels": kernels, "card_kernels": card, "profile": profile,
            "environment": environment,
        }))?;
        return Ok(exit);
    }
    output::text(&machine_text(&machine));
    let of_processor = format!("kernels of the processor ({})", path());
    let mut lines = vec![kernels_text(&of_processor, "against plain references", &tests)];
    lines.extend(card.map(|card| match card {
        Ok((name, tests)) => kernels_text(&format!("kernels of {name}"), "beside the processor's", &tests),
        Err(error) => format!("kernels of the GPU: not run: {error}"),
    }));
    lines.push(device_text(&machine));
    output::text(&format!("\n{}\n", lines.join("\n")));
    output::text(&format!("\n{}", profile_text(&kept)));
    if environment.is_empty() {
        output::text("\nenvironment: no variable that DeepSpeed, PyTorch, CUDA or zeroth reads is set\n");
        return Ok(exit);
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
    Ok(exit)
}

type Kept = Result<Option<(PathBuf, Profile)>, ProfileError>;

fn profile_json(kept: &Kept) -> serde_json::Value {
    match kept {
        Ok(None) => serde_json::Value::Null,
        Ok(Some((path, profile))) => json!({"path": path, "parts": profile.parts}),
        Err(error) => json!({"problem": error.to_string()}),
    }
}

/// What `zeroth bench` has found here: the limits, and whole steps.
fn profile_text(kept: &Kept) -> String {
    let (path, profile) = match kept {
        Ok(Some(kept)) => kept,
        Ok(None) => return "speed: not measured yet; `zeroth bench` does, and keeps it\n".to_owned(),
        Err(error) => return format!("speed: {error}\n"),
    };
    let mut table = Table::new(&["speed, as measured", "threads", "best", "median", "unit"], &[1, 2, 3]);
    for (part, kept) in &profile.parts {
        let look = if kept.quick { ", quick look" } else { "" };
        let shown = |line: &&Measured| line.limit.is_none() || *part == Part::Step;
        for line in kept.lines.iter().filter(shown) {
            table.row([
                format!("{}{look}: {}", part.name(), line.name),
                line.threads.to_string(),
                format!("{:.1}", line.best),
                format!("{:.1}", line.median),
                line.unit.name().to_owned(),
            ]);
        }
    }
    format!("{}({})\n", table.lines().concat(), path.display())
}

/// The instructions that kernels were compared with their references on: those that a run uses. What `ZEROTH_CPU` asks
/// for and cannot have is said beside what was taken.
fn path() -> String {
    match Isa::chosen() {
        Ok(path) => title(path).to_owned(),
        Err(error) => format!("{} ({error})", title(Isa::detect())),
    }
}

const fn title(path: Isa) -> &'static str {
    match path {
        Isa::Portable => "portable",
        Isa::Neon => "NEON",
        Isa::Avx2 => "AVX2",
        Isa::Avx512 => "AVX-512",
        Isa::Amx => "AMX tiles",
    }
}

/// The largest error for each type that numbers are stored in: a check's name ends with it.
fn worst(tests: &[SelfTest]) -> Vec<(&str, f64)> {
    let mut worst: Vec<(&str, f64)> = Vec::new();
    for test in tests {
        let stored = test.name.rsplit(' ').next().unwrap_or_default();
        match worst.iter_mut().find(|(other, _)| *other == stored) {
            Some((_, error)) => *error = error.max(test.error),
            None => worst.push((stored, test.error)),
        }
    }
    worst
}

fn kernels_json(tests: &[SelfTest]) -> serde_json::Value {
    let wrong: Vec<&str> = tests.iter().filter(|test| !test.ok).map(|test| test.name.as_str()).collect();
    let worst: serde_json::Map<String, serde_json::Value> =
        worst(tests).into_iter().map(|(stored, error)| (stored.to_owned(), error.into())).collect();
    json!({"path": path(), "checks": tests.len(), "wrong": wrong, "worst_error": worst})
}

/// The first card's kernels beside the processor's; none where there is no card or a library is missing.
fn card_tests(machine: &Machine) -> Option<Result<(String, Vec<SelfTest>), DeviceError>> {
    if !matches!(machine.gpus, Gpus::Found { .. }) || !missing(machine).is_empty() {
        return None;
    }
    let run = || {
        let mut card = CudaDevice::open(0, CONFORMANCE_ARENA, 0)?;
        // Where it is there, it is compared as well.
        card.use_cudnn_attention(card.check_cudnn().is_ok());
        let pool = Pool::start(std::thread::available_parallelism().map_or(1, usize::from))?;
        let mut reference = CpuDevice::on_pool(pool, CONFORMANCE_ARENA, 0)?;
        Ok((card.name(), conformance(&mut card, &mut reference)?))
    };
    Some(run())
}

/// What `whose` kernels were compared with, and what came of it.
fn kernels_text(whose: &str, with: &str, tests: &[SelfTest]) -> String {
    let wrong: Vec<&str> = tests.iter().filter(|test| !test.ok).map(|test| test.name.as_str()).collect();
    if !wrong.is_empty() {
        return format!(
            "{whose}: {} of {} checks are WRONG ({}): do not train on this machine",
            wrong.len(),
            tests.len(),
            wrong.join(", ")
        );
    }
    let worst: Vec<String> =
        worst(tests).into_iter().map(|(stored, error)| format!("{error:.1e} in {stored}")).collect();
    format!("{whose}: {} checks {with}, all right; largest relative error {}", tests.len(), worst.join(", "))
}

/// Libraries that a GPU's kernels need and that were not found.
fn missing(machine: &Machine) -> Vec<&'static str> {
    ["nvrtc", "cublasLt"].into_iter().filter(|name| !is_open(machine, name)).collect()
}

fn is_open(machine: &Machine, name: &str) -> bool {
    let found = machine.software.iter().find(|library| library.name == name);
    found.is_some_and(|library| matches!(library.state, LibraryState::Opened { .. }))
}

/// What `zeroth train` would compute on, as far as probing can tell.
fn device_text(machine: &Machine) -> String {
    let Gpus::Found { devices, .. } = &machine.gpus else {
        return "`zeroth train` computes on the processor here: no GPU was found".to_owned();
    };
    let missing = missing(machine);
    let first = devices.first().map_or("a GPU", |gpu| gpu.name.as_str());
    if missing.is_empty() {
        return format!(
            "`zeroth train` computes on GPUs here ({} found, the first is {first}): kernels are compiled for it by NVRTC, \
             products are cuBLASLt's{}",
            devices.len(),
            if is_open(machine, "cudnn") {
                ", attention over many long sequences of one length cuDNN's"
            } else {
                ""
            }
        );
    }
    format!(
        "{first} was found and {} was not: `zeroth train --device cuda` needs it. Install it, or set \
         ZEROTH_CUDA_LIBRARIES to the folder that holds it; --device cpu trains without",
        missing.join(" and ")
    )
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
