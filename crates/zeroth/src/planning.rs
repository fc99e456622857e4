//! Translates a config and a model into a request for the planner, which depends on neither.

use zeroth_config::resolve::{Origin, Resolved, ResolvedSetting};
use zeroth_config::schema::{OffloadDevice, Values};
use zeroth_machine::Rates;
use zeroth_plan::{Freedom, OffloadedStates, Placement};
use zeroth_program::Settings;

/// State offloaded to disk, which cannot be planned yet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{section}.device is \"nvme\": planning of NVMe offload is not yet built; use \"cpu\" or \"none\"")]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct NvmeOffload {
    pub section: &'static str,
}

/// The placement of model states under a resolved config.
pub fn placement(name: &str, config: &Resolved) -> Result<Placement, NvmeOffload> {
    let Values { zero, offload_param, offload_optimizer, .. } = &config.values;
    let stage = zero.stage;
    let on_host = |section: &'static str, device: OffloadDevice, least: u8| -> Result<bool, NvmeOffload> {
        match device {
            // Below its stage nothing is partitioned, so nothing is offloaded; `config check` says so too.
            _ if stage < least => Ok(false),
            OffloadDevice::Nvme => Err(NvmeOffload { section }),
            device => Ok(device == OffloadDevice::Cpu),
        }
    };
    let optimizer = on_host("zero_optimization.offload_optimizer", offload_optimizer.device, 1)?;
    let parameters = on_host("zero_optimization.offload_param", offload_param.device, 3)?;
    let offload = match (optimizer, parameters) {
        (false, false) => OffloadedStates::None,
        (true, false) => OffloadedStates::Optimizer,
        (false, true) => OffloadedStates::Parameters,
        (true, true) => OffloadedStates::OptimizerAndParameters,
    };
    Ok(Placement {
        settings: Settings::from_config(config),
        // Rates are measured by runs: without them state stays where the stream has it.
        freedom: freedom(config, None),
        ..Placement::new(name, stage, offload)
    })
}

/// What the config leaves open, so that runs and plans choose it to fit. `update` are the measured rates of a rank's share
/// of the machine.
pub fn freedom(config: &Resolved, update: Option<Rates>) -> Freedom {
    let checkpoints = |setting: &ResolvedSetting| {
        setting.key.path.starts_with("activation_checkpointing") && setting.origin != Origin::Default
    };
    Freedom {
        recompute: is_open(config, "zeroth.recompute") && !config.settings().iter().any(checkpoints),
        prefetch: is_open(config, "zero_optimization.stage3_prefetch_bucket_size"),
        micro_batch: is_open(config, "train_micro_batch_size_per_gpu")
            && is_open(config, "gradient_accumulation_steps"),
        frozen: is_open(config, "zeroth.frozen"),
        update,
    }
}

/// Whether a key was given neither in the file nor as a flag.
pub fn is_open(config: &Resolved, key: &str) -> bool {
    let origin = config.get(key).map(|setting| &setting.origin);
    !matches!(origin, Some(Origin::File(_) | Origin::Flag(_)))
}
