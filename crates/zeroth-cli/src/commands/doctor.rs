//! `doctor`: hardware and libraries, a self-test of kernels, and the effect of environment variables.

use std::path::PathBuf;

use serde_json::json;
use zeroth::base::{counted, format_bytes};
use zeroth::config::environment::{Judgement, judge_all};
use zeroth::cpu::{CpuDevice, Isa, Pool, self_test};
use zeroth::cuda::CudaDevice;
use zeroth::kernel::SelfTest;
use zeroth::kernel::{ByTier, CONFORMANCE_ARENA, Device, DeviceError, conformance};
use zeroth::machine::bench::{BenchPart, BenchResult, Identity, Profile, ProfileError};
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
    let gpu = gpu_tests(&machine);
    let kept = super::machine_profile::kept(&Identity::of(&machine));
    // A machine on which a kernel computes wrong results must not train.
    let of_gpu = gpu.iter().flatten().flat_map(|(_, tests)| tests);
    let all_right = tests.iter().chain(of_gpu).all(|test| test.ok) && !matches!(gpu, Some(Err(_)));
    let exit = if all_right { Exit::Done } else { Exit::Problems };
    if output.is_json() {
        let environment: Vec<serde_json::Value> = environment.iter().map(Judgement::to_json).collect();
        let kernels = kernels_json(&tests);
        let gpu = gpu.map(|gpu| match gpu {
            Ok((name, tests)) => {
                let mut found = kernels_json(&tests);
                found["path"] = name.into();
                found
            }
            Err(error) => json!({"problem": error.to_string()}),
        });
        let profile = profile_json(&kept);
        output::json(&json!({
            "machine": machine, "kernels": kernels, "card_kernels": gpu, "profile": profile,
            "environment": environment,
        }))?;
        return Ok(exit);
    }
    output::text(&machine_text(&machine));
    let of_processor = format!("CPU kernels ({})", path());
    let mut lines = vec![kernels_text(&of_processor, "against reference implementations", &tests)];
    lines.extend(gpu.map(|gpu| match gpu {
        Ok((name, tests)) => kernels_text(&format!("kernels of {name}"), "against the CPU's", &tests),
        Err(error) => format!("GPU kernels: not run: {error}"),
    }));
    lines.push(device_text(&machine));
    output::text(&format!("\n{}\n", lines.join("\n")));
    output::text(&format!("\n{}", profile_text(&kept)));
    if environment.is_empty() {
        output::text("\nenvironment: no variables of DeepSpeed, PyTorch, CUDA or zeroth are set\n");
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

/// Results of `zeroth bench` on this machine: hardware limits, and training steps.
fn profile_text(kept: &Kept) -> String {
    let (path, profile) = match kept {
        Ok(Some(kept)) => kept,
        Ok(None) => return "speed: not measured yet; run `zeroth bench`\n".to_owned(),
        Err(error) => return format!("speed: {error}\n"),
    };
    let mut table = Table::new(&["measured speed", "threads", "best", "median", "unit"], &[1, 2, 3]);
    for (part, kept) in &profile.parts {
        let look = if kept.quick { ", quick" } else { "" };
        let shown = |line: &&BenchResult| line.limit.is_none() || *part == BenchPart::Step;
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

/// The instruction set of the kernels under test, which runs use too. An unavailable `ZEROTH_CPU` is reported beside
/// it.
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

/// The largest error per storage dtype, which is the last word of a check's name.
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

/// Compares the first GPU's kernels with the CPU's; `None` without a GPU or if a library is missing.
fn gpu_tests(machine: &Machine) -> Option<Result<(String, Vec<SelfTest>), DeviceError>> {
    if !matches!(machine.gpus, Gpus::Found { .. }) || !missing(machine).is_empty() {
        return None;
    }
    let run = || {
        let mut gpu = CudaDevice::open(0, ByTier::on_device(CONFORMANCE_ARENA))?;
        // Also test the attention library if available.
        gpu.use_cudnn_attention(gpu.check_cudnn().is_ok());
        let pool = Pool::start(std::thread::available_parallelism().map_or(1, usize::from))?;
        let mut reference = CpuDevice::on_pool(pool, ByTier::on_device(CONFORMANCE_ARENA))?;
        Ok((gpu.name(), conformance(&mut gpu, &mut reference)?))
    };
    Some(run())
}

/// Formats the results of a self-test.
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
    format!("{whose}: {} checks {with} passed; largest relative error {}", tests.len(), worst.join(", "))
}

/// Missing libraries that GPU kernels need.
fn missing(machine: &Machine) -> Vec<&'static str> {
    ["nvrtc", "cublasLt"].into_iter().filter(|name| !is_open(machine, name)).collect()
}

fn is_open(machine: &Machine, name: &str) -> bool {
    let found = machine.software.iter().find(|library| library.name == name);
    found.is_some_and(|library| matches!(library.state, LibraryState::Opened { .. }))
}

/// The device that `zeroth train` would use, as far as probing can tell.
fn device_text(machine: &Machine) -> String {
    let Gpus::Found { devices, .. } = &machine.gpus else {
        return "`zeroth train` runs on the CPU: no GPU was found".to_owned();
    };
    let missing = missing(machine);
    let first = devices.first().map_or("a GPU", |gpu| gpu.name.as_str());
    if missing.is_empty() {
        return format!(
            "`zeroth train` runs on GPUs ({} found, the first is {first}): kernels are compiled with NVRTC, \
             matmuls use cuBLASLt{}",
            devices.len(),
            if is_open(machine, "cudnn") {
                ", attention over many long sequences of equal length cuDNN"
            } else {
                ""
            }
        );
    }
    format!(
        "{first} was found, but {} was not: `zeroth train --device cuda` needs it. Install it, or set \
         ZEROTH_CUDA_LIBRARIES to its folder; --device cpu trains without it",
        missing.join(" and ")
    )
}

fn machine_text(machine: &Machine) -> String {
    let bytes = |value: Option<u64>| value.map_or_else(|| "unknown".to_owned(), format_bytes);
    let mut table = Table::new(&["what", "found"], &[]);
    let mut row = |what: &str, found: String| table.row([what.to_owned(), found]);
    let cpu = &machine.cpu;
    row("CPU", cpu.model.clone().unwrap_or_else(|| "unknown".to_owned()));
    row("threads", format!("{} for this process", cpu.threads));
    row("instruction set", cpu.kernels.to_string());
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
                format!("at most {}: too little for pin_memory, see `ulimit -l`", format_bytes(limit))
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
            LibraryState::Missing { tried } => {
                format!("not found ({} tried)", counted(tried.len() as u64, "place"))
            }
            LibraryState::Skipped { why } => format!("skipped: {why}"),
        };
        row(library.name, found);
    }
    for unknown in &machine.unknown {
        row(unknown.what, format!("unknown: {}", unknown.why));
    }
    table.lines().concat()
}
