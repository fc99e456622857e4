//! `config new` and `config tiers`: generate configs from flags, and from available memory where flags are missing.

use anyhow::Context;
use serde_json::{Value, json};
use zeroth::base::{DType, counted, format_bytes, parse_count};
use zeroth::config::generate::{
    self, FINE_GRAINED, MemoryFound, ProbedBatch, ZeroConfig, build_config, save_config,
};
use zeroth::machine::{Gpus, Machine, probe};

use super::refuse_existing::refuse_existing;
use crate::cli::{NewArgs, PrecisionArgs, TiersArgs};
use crate::exit::Exit;
use crate::output::{self, Output};
use crate::train_flags;

pub(super) fn new(arguments: &NewArgs, output: &Output) -> anyhow::Result<Exit> {
    let fine_grained = fine_grained(arguments)?;
    refuse_existing([arguments.output.as_path()], arguments.overwrite)?;
    // The machine is only probed for values that were not given.
    let given = arguments.memory.device_memory.map(|device| MemoryFound { device, is_gpu: true });
    let machine = if given.is_some() { None } else { Some(probe()) };
    let precision = precision(&arguments.precision, machine.as_ref())?;
    let choice = match (arguments.micro_batch_size, given) {
        (Some(_), _) => None,
        (None, Some(memory)) => Some(memory),
        (None, None) => Some(memory_of(machine.as_ref())?),
    }
    .map(|memory| generate::choose(memory, arguments.memory.params, arguments.memory.world_size));
    let chosen = |pick: fn(&ProbedBatch) -> u64| choice.as_ref().map_or(1, pick);
    let config = ZeroConfig {
        stage: arguments.stage,
        offload: arguments.offload.unwrap_or(choice.as_ref().is_some_and(|choice| choice.offload)),
        precision,
        world_size: arguments.memory.world_size,
        fine_grained,
        ..ZeroConfig::new(
            arguments.micro_batch_size.unwrap_or_else(|| chosen(|choice| choice.micro_batch_size)),
            arguments.gradient_accumulation.unwrap_or_else(|| chosen(|choice| choice.gradient_accumulation)),
        )
    };
    if config.offload && config.stage < 3 {
        output::note("note: offload_param only has an effect at stage 3");
    }
    let json = build_config(&config);
    save_config(&json, &arguments.output)?;
    if output.is_json() {
        output::json(&json!({
            "path": arguments.output,
            "config": json,
            "micro_batch_size": config.micro_batch_size,
            "reason": choice.as_ref().map(|choice| &choice.reason),
        }))?;
    } else {
        if let Some(choice) = &choice {
            output::text(&format!("chosen: {}\n", choice.reason));
        }
        output::text(&format!(
            "batch {} = micro-batch {} × accumulation {} × {}\nDeepSpeed config saved to {}\n",
            config.train_batch_size(),
            config.micro_batch_size,
            config.gradient_accumulation,
            counted(config.world_size, "rank"),
            arguments.output.display()
        ));
    }
    Ok(Exit::Done)
}

pub(super) fn tiers(arguments: &TiersArgs, output: &Output) -> anyhow::Result<Exit> {
    let machine = if arguments.device_memory.is_some() { None } else { Some(probe()) };
    let precision = precision(&arguments.precision, machine.as_ref())?;
    let memory = match arguments.device_memory {
        Some(device) => device,
        None => memory_of(machine.as_ref())?.device,
    };
    let suits = generate::tier_for(memory);
    let at = |name| arguments.output.join(format!("ds_zero3_{name}.json"));
    let tiers: Vec<_> = generate::tiers(precision, arguments.world_size)
        .into_iter()
        .map(|tier| {
            let path = at(tier.name);
            (tier, path)
        })
        .collect();
    refuse_existing(tiers.iter().map(|(_, path)| path.as_path()), arguments.overwrite)?;
    std::fs::create_dir_all(&arguments.output)
        .with_context(|| format!("cannot create the folder {}", arguments.output.display()))?;
    let mut written: Vec<Value> = Vec::new();
    for (tier, path) in tiers {
        save_config(&build_config(&tier.config), &path)?;
        if !output.is_json() {
            let mark = if tier.name == suits { "  <- suits this memory" } else { "" };
            output::text(&format!("{}: {}{mark}\n", path.display(), tier.about));
        }
        written
            .push(json!({"tier": tier.name, "path": path, "about": tier.about, "suits": tier.name == suits}));
    }
    if output.is_json() {
        output::json(&json!({"device_memory": memory, "suits": suits, "files": written}))?;
    } else {
        output::text(&format!("for {} of device memory\n", format_bytes(memory)));
    }
    Ok(Exit::Done)
}

/// The given fine-grained keys: `auto`, or a number.
fn fine_grained(arguments: &NewArgs) -> anyhow::Result<Vec<(&'static str, Value)>> {
    let typed = [
        &arguments.sub_group_size,
        &arguments.reduce_bucket_size,
        &arguments.stage3_prefetch_bucket_size,
        &arguments.stage3_param_persistence_threshold,
        &arguments.stage3_max_live_parameters,
        &arguments.stage3_max_reuse_distance,
    ];
    let mut keys = Vec::new();
    for (key, text) in FINE_GRAINED.into_iter().zip(typed) {
        let Some(text) = text else { continue };
        let value = if text == "auto" {
            Value::from("auto")
        } else {
            parse_count(text).map_err(|error| anyhow::anyhow!("--{}: {error}", key.replace('_', "-")))?.into()
        };
        keys.push((key, value));
    }
    if let Some(gather) = arguments.stage3_gather_16bit_weights_on_model_save {
        keys.push(("stage3_gather_16bit_weights_on_model_save", gather.into()));
    }
    Ok(keys)
}

/// The precision to write. bf16 is refused if a detected GPU does not support it.
fn precision(typed: &PrecisionArgs, machine: Option<&Machine>) -> anyhow::Result<DType> {
    let precision = train_flags::precision(typed.bf16, typed.fp16, None)?.unwrap_or(DType::Bf16);
    let Some(Gpus::Found { devices, .. }) = machine.map(|machine| &machine.gpus) else {
        return Ok(precision);
    };
    let without = devices.iter().find(|gpu| !gpu.supports_bf16());
    if let Some(gpu) = without.filter(|_| precision == DType::Bf16) {
        anyhow::bail!(
            "{} does not support bf16, which needs compute capability 8.0 (found {}): use --fp16",
            gpu.name,
            gpu.compute_capability
        );
    }
    Ok(precision)
}

/// The smallest GPU memory, or host memory without a GPU.
fn memory_of(machine: Option<&Machine>) -> anyhow::Result<MemoryFound> {
    let found = machine.and_then(|machine| match machine.device_memory() {
        Some(memory) => Some(MemoryFound { device: memory.free, is_gpu: true }),
        None => machine.host_memory_available().map(|device| MemoryFound { device, is_gpu: false }),
    });
    found.ok_or_else(|| {
        anyhow::anyhow!("cannot detect the memory of this machine: give it with --device-memory")
    })
}
