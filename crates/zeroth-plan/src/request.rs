//! The planner's input: a job (model, ranks, budgets), and the placements of its states.

use std::sync::Arc;

use crate::{Freedom, Processes, SizingError, TrainableModel};
use serde::Serialize;
use zeroth_base::DType;
use zeroth_program::Settings;

/// A job to plan.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanRequest {
    /// The model's parameters, without LoRA's own.
    pub params: u64,
    /// The parameters of LoRA's adapters; `None` where unknown.
    pub adapter_params: Option<u64>,
    /// What is trained.
    pub train_type: TrainType,
    /// Whether frozen linear layers are kept in nf4.
    pub quantized: bool,
    /// Ranks, one device each.
    pub ranks: u64,
    /// Ranks on the fullest host.
    pub ranks_per_host: u64,
    /// How bytes per trained parameter are counted.
    pub states: States,
    /// Whether weights are bf16 rather than fp16; it decides how a run stores master weights.
    pub in_bf16: bool,
    /// Whether gradient shards accumulate in 16 bits (`data_types.grad_accum_dtype`, stages 2 and 3).
    pub accumulates_in_16_bits: bool,
    /// Micro-batches per optimizer step.
    pub accumulation: u64,
    /// The rows of a micro-batch, where there is a model.
    pub rows: Option<PlannedRows>,
    /// The model to compile a step of; without it figures are closed forms.
    pub model: Option<Arc<TrainableModel>>,
    /// Parameters of the largest layer as DeepSpeed's estimator counts them: one module's own, without its children's.
    pub largest_layer: Option<u64>,
    /// Memory of a device, in bytes.
    pub device_memory: Option<u64>,
    /// Memory of a host, in bytes.
    pub host_memory: Option<u64>,
    /// How ranks are started: a host's memory also holds their processes.
    pub processes: Processes,
}

/// The rows of a planned micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedRows {
    /// Sequences of a micro-batch.
    pub micro_batch: u64,
    /// Tokens of the longest sequence; of an encoder-decoder, of the longest source.
    pub max_length: u64,
    /// Tokens of the longest target of an encoder-decoder; 0 for other models.
    pub max_target_length: u64,
    /// Gradient checkpointing: blocks keep their input and are recomputed in backward.
    pub recompute: bool,
}

impl PlannedRows {
    /// Tokens of the longest sequence of each stream.
    pub(crate) const fn lengths(&self) -> [u64; 2] {
        [self.max_length, self.max_target_length]
    }

    /// The same with a longest sequence of `max_length` tokens, and targets in proportion.
    pub(crate) fn scaled_to(&self, max_length: u64) -> Self {
        let target = u128::from(self.max_target_length) * u128::from(max_length);
        let max_target_length = target.div_ceil(u128::from(self.max_length.max(1))) as u64;
        Self { max_length, max_target_length, ..*self }
    }
}

/// What is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TrainType {
    /// All parameters.
    Full,
    /// LoRA adapters; the model's parameters are frozen.
    Lora,
}

/// How bytes per trained parameter are counted: parameters + gradients + optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum States {
    /// 2 + 2 + 12: the ZeRO paper's mixed precision, with an fp32 master copy.
    Master,
    /// 2 + 2 + 8: fp32 moments, no master copy.
    Plain,
    /// What a run holds: 2 + 2 + 10 on one rank without accumulation, else 2 + 4 + 10.
    Run,
}

/// Bytes per trained parameter by category.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct BytesPerParameter {
    /// The 16-bit parameter.
    pub parameters: u64,
    /// Its gradient.
    pub gradients: u64,
    /// Moments, and fp32 master weights where they exist.
    pub optimizer: u64,
}

impl BytesPerParameter {
    /// The total.
    pub const fn total(self) -> u64 {
        self.parameters + self.gradients + self.optimizer
    }
}

impl States {
    /// Bytes per trained parameter under this accounting.
    pub const fn bytes_per_parameter(self, ranks: u64, accumulation: u64) -> BytesPerParameter {
        let (gradients, optimizer) = match self {
            Self::Master => (2, 12),
            Self::Plain => (2, 8),
            // Ranks and micro-batches accumulate in f32; with neither, the 16-bit gradient suffices. Next to bf16
            // weights, only the low-order 16 bits of master weights are stored.
            Self::Run if ranks <= 1 && accumulation <= 1 => (2, 10),
            Self::Run => (4, 10),
        };
        BytesPerParameter { parameters: 2, gradients, optimizer }
    }
}

/// What is offloaded to host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum OffloadedStates {
    /// Nothing.
    #[serde(rename = "none")]
    None,
    /// The optimizer and the gradient shards it reads.
    #[serde(rename = "optimizer")]
    Optimizer,
    /// The parameter shards alone (stage 3). No preset does this; a file may.
    #[serde(rename = "parameters")]
    Parameters,
    /// The optimizer, its gradient shards and the parameter shards (stage 3).
    #[serde(rename = "optimizer+parameters")]
    OptimizerAndParameters,
}

/// The placement of states by a preset or a config file.
#[derive(Debug, Clone, PartialEq)]
pub struct Placement {
    /// The preset's or the file's name.
    pub preset: String,
    /// What is offloaded to host memory.
    pub offload: OffloadedStates,
    /// The settings of the config, from which a step is compiled; closed forms read some of them.
    pub settings: Settings,
    /// What the config leaves open, so that a run chooses it to fit.
    pub freedom: Freedom,
}

/// A request that cannot be planned.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum PlanError {
    #[error("{preset}: {source}")]
    Compile { preset: String, source: Box<SizingError> },
    #[error("0 {what} requested: give at least 1")]
    Zero { what: &'static str },
    #[error("{preset} asks for ZeRO stage {stage}: the stages are 0, 1, 2 and 3")]
    Stage { preset: String, stage: u8 },
    #[error(
        "{preset} offloads {what} at stage {stage}, where they are not sharded: set stage {least} or higher, \
         or offload nothing"
    )]
    OffloadStage { preset: String, stage: u8, what: &'static str, least: u8 },
}

impl PlanRequest {
    /// A full fine-tune with fp32 master weights on one host, without accumulation, model or budgets.
    pub fn new(params: u64, ranks: u64) -> Self {
        Self {
            params,
            adapter_params: None,
            train_type: TrainType::Full,
            quantized: false,
            ranks,
            ranks_per_host: ranks,
            states: States::Master,
            in_bf16: true,
            accumulates_in_16_bits: false,
            accumulation: 1,
            rows: None,
            model: None,
            largest_layer: None,
            device_memory: None,
            host_memory: None,
            processes: Processes::default(),
        }
    }

    /// Parameters that have gradients and optimizer state.
    pub fn trainable(&self) -> u64 {
        match self.train_type {
            TrainType::Full => self.params,
            TrainType::Lora => self.adapter_params.unwrap_or(0),
        }
    }

    /// Frozen parameters.
    pub fn frozen(&self) -> u64 {
        match self.train_type {
            TrainType::Full => 0,
            TrainType::Lora => self.params,
        }
    }

    /// Bytes per trained parameter by category, where everything is on the device.
    pub fn bytes_per_parameter(&self) -> BytesPerParameter {
        let each = self.states.bytes_per_parameter(self.ranks, self.accumulation);
        let more = if self.in_bf16 { 0 } else { self.whole_master_extra_bytes() };
        let narrow = self.accumulates_in_16_bits && self.states == States::Run;
        let gradients = if narrow { each.gradients.min(2) } else { each.gradients };
        BytesPerParameter { gradients, optimizer: each.optimizer + more, ..each }
    }

    /// Additional bytes of whole fp32 master weights over their low-order bits.
    const fn whole_master_extra_bytes(&self) -> u64 {
        match self.states {
            States::Master | States::Plain => 0,
            States::Run => 2,
        }
    }

    /// Additional optimizer bytes with offload: master weights that are apart from the weights, or streamed through a
    /// device, are whole.
    pub(crate) const fn offload_extra_bytes(&self) -> u64 {
        if self.in_bf16 { self.whole_master_extra_bytes() } else { 0 }
    }

    /// Optimizer bytes per trained parameter under an offload mode.
    pub(crate) fn optimizer_bytes(&self, offload: OffloadedStates) -> u64 {
        let more = if offload == OffloadedStates::None { 0 } else { self.offload_extra_bytes() };
        self.bytes_per_parameter().optimizer + more
    }

    /// The largest shard of `elements`; shards are whole elements, so the division rounds up.
    pub(crate) fn shard(&self, elements: u64) -> u64 {
        elements.div_ceil(self.ranks.max(1))
    }

    /// Ranks on the fullest host, at most all of them.
    pub(crate) fn ranks_on_host(&self) -> u64 {
        self.ranks_per_host.min(self.ranks)
    }

    /// The number of hosts.
    pub(crate) fn hosts(&self) -> u64 {
        self.ranks.div_ceil(self.ranks_on_host().max(1))
    }

    /// Bytes of a host, with the devices' where CPUs compute in the host's memory and have no budget of their own.
    pub(crate) fn host_needs(&self, device: u64, host: u64) -> u64 {
        let is_shared = self.model.as_ref().is_some_and(|model| model.shares_host_memory());
        let devices = if is_shared && self.device_memory.is_none() { self.ranks_on_host() } else { 0 };
        host.saturating_add(device.saturating_mul(devices))
    }

    /// Whether these totals are within the budgets; `None` without a budget.
    pub(crate) fn fits(&self, device: u64, host: u64) -> Option<bool> {
        if self.device_memory.is_none() && self.host_memory.is_none() {
            return None;
        }
        Some(self.missing(device, host) == (0, 0))
    }

    /// Bytes of device and host memory by which these totals exceed the budgets.
    pub(crate) fn missing(&self, device: u64, host: u64) -> (u64, u64) {
        let host = self.host_needs(device, host);
        let beyond = |need: u64, budget: Option<u64>| budget.map_or(0, |budget| need.saturating_sub(budget));
        (beyond(device, self.device_memory), beyond(host, self.host_memory))
    }

    pub(crate) fn check(&self) -> Result<(), PlanError> {
        let mut counts = vec![
            (self.ranks, "ranks"),
            (self.ranks_per_host, "ranks on a host"),
            (self.accumulation, "micro-batches in a step"),
        ];
        if let Some(rows) = self.rows {
            counts.push((rows.micro_batch, "sequences in a micro-batch"));
            counts.push((rows.max_length, "tokens in a sequence"));
        }
        match counts.into_iter().find(|(count, _)| *count == 0) {
            Some((_, what)) => Err(PlanError::Zero { what }),
            None => Ok(()),
        }
    }
}

impl OffloadedStates {
    /// Whether the optimizer lives in host memory.
    pub const fn optimizer(self) -> bool {
        matches!(self, Self::Optimizer | Self::OptimizerAndParameters)
    }

    /// Whether parameter shards live in host memory.
    pub const fn parameters(self) -> bool {
        matches!(self, Self::Parameters | Self::OptimizerAndParameters)
    }
}

impl Placement {
    /// A placement with overlapped communication and the bucket sizes of ms-swift's presets, or DeepSpeed's defaults
    /// where those have none.
    pub fn new(preset: impl Into<String>, stage: u8, offload: OffloadedStates) -> Self {
        let settings = Settings {
            stage,
            reduce_bucket: 200_000_000,
            prefetch: 50_000_000,
            max_live: 1_000_000_000,
            overlap: true,
            offload: zeroth_program::Offload {
                optimizer: offload.optimizer().then_some(1.0),
                parameters: offload.parameters().then_some(u64::MAX),
                ..zeroth_program::Offload::NOTHING
            },
            ..Settings::inference(DType::Bf16)
        };
        Self { preset: preset.into(), offload, settings, freedom: Freedom::default() }
    }

    pub(crate) fn check(&self) -> Result<(), PlanError> {
        let stage = self.settings.stage;
        let refuse =
            |what, least| Err(PlanError::OffloadStage { preset: self.preset.clone(), stage, what, least });
        if stage > 3 {
            Err(PlanError::Stage { preset: self.preset.clone(), stage })
        } else if self.offload.parameters() && stage < 3 {
            refuse("parameters", 3)
        } else if self.offload.optimizer() && stage == 0 {
            refuse("optimizer states", 1)
        } else {
            Ok(())
        }
    }
}
