//! What is asked: the job (model, ranks, budgets) and where a preset puts its states.

use crate::{ActivationShape, BytesPerParameter};
use serde::Serialize;

/// A question to the planner: one job, to be placed in several ways.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    /// The model's parameters, without LoRA's own.
    pub params: u64,
    /// What LoRA adds or would add to this model; `None` where that is not known.
    pub adapters: Option<Adapters>,
    /// What is trained.
    pub train_type: TrainType,
    /// Ranks of the job, one device each.
    pub ranks: u64,
    /// Ranks of the fullest host.
    pub ranks_per_host: u64,
    /// How the bytes of a trained parameter are counted.
    pub states: States,
    /// Whether weights are in bf16, and not in fp16: what a run of ours stores of master weights depends on it.
    pub in_bf16: bool,
    /// Whether shards of gradients add up in 16 bits (`data_types.grad_accum_dtype`, stages 2 and 3).
    pub narrow_sums: bool,
    /// Micro-batches of one optimizer step.
    pub accumulation: u64,
    /// The model's shape. Without it activations and buffers are 0.
    pub shape: Option<Shape>,
    /// Parameters of the largest layer as DeepSpeed's estimator means it: one module's own, not its children's.
    pub largest_layer: Option<u64>,
    /// Bytes a device has.
    pub device_memory: Option<u64>,
    /// Bytes a host has.
    pub host_memory: Option<u64>,
}

/// LoRA's own parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Adapters {
    /// All of them.
    pub params: u64,
    /// Those of the unit that has the most.
    pub largest_unit: u64,
}

/// What a model's shape adds to the question: units, activations, tokens of a micro-batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// Elements of the largest unit.
    pub largest_unit: u64,
    /// The widths that activations depend on.
    pub activations: ActivationShape,
    /// Sequences of a micro-batch.
    pub micro_batch: u64,
    /// Tokens of the longest sequence.
    pub max_length: u64,
    /// Gradient checkpointing: blocks keep their input and are computed again in backward.
    pub recompute: bool,
}

/// What is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TrainType {
    /// All parameters.
    Full,
    /// LoRA's own parameters; the model's stay frozen.
    Lora,
}

/// How the bytes of a trained parameter are counted: parameters + gradients + optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum States {
    /// 2 + 2 + 12: the ZeRO paper's mixed precision, with an fp32 master copy.
    Master,
    /// 2 + 2 + 8: fp32 moments, no master copy.
    Plain,
    /// What a run of ours holds: 2 + 2 + 10 with one rank and no accumulation, else 2 + 4 + 10.
    Run,
}

/// What lives in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Offload {
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

/// Where a preset or a config file puts the states.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// The preset's name, or what a file is called.
    pub preset: String,
    /// ZeRO's stage, 0 to 3.
    pub stage: u8,
    /// What lives in host memory.
    pub offload: Offload,
    /// `reduce_bucket_size`, in elements.
    pub reduce_bucket: u64,
    /// `stage3_prefetch_bucket_size`, in elements. 0: a unit is gathered when it is needed.
    pub prefetch: u64,
    /// `stage3_max_live_parameters`, in elements.
    pub max_live: u64,
    /// `offload_param.max_in_cpu`: a rank's parameters in host memory, in elements; the rest of its shard stays on the
    /// device. `None`: all of them go.
    pub max_in_cpu: Option<u64>,
    /// Elements of this model that stay gathered because they are below `stage3_param_persistence_threshold`.
    pub persistent: u64,
    /// `overlap_comm`.
    pub overlap: bool,
}

/// A question that has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    /// A count that must be at least 1 is 0.
    #[error("0 {what} were asked for: give at least 1")]
    Zero {
        /// What is counted.
        what: &'static str,
    },
    /// There is no such stage.
    #[error("{preset} asks for ZeRO stage {stage}: the stages are 0, 1, 2 and 3")]
    Stage {
        /// The placement's name.
        preset: String,
        /// Its stage.
        stage: u8,
    },
    /// Offload of something this stage does not cut into shards.
    #[error(
        "{preset} offloads {what} at stage {stage}, where they are not cut into shards: set stage {least} or higher, \
         or offload nothing"
    )]
    OffloadStage {
        /// The placement's name.
        preset: String,
        /// Its stage.
        stage: u8,
        /// What it offloads.
        what: &'static str,
        /// The lowest stage that can.
        least: u8,
    },
}

impl Ask {
    /// All parameters trained with a master copy, on one host, without accumulation, shape or budgets.
    pub fn new(params: u64, ranks: u64) -> Self {
        Self {
            params,
            adapters: None,
            train_type: TrainType::Full,
            ranks,
            ranks_per_host: ranks,
            states: States::Master,
            in_bf16: true,
            narrow_sums: false,
            accumulation: 1,
            shape: None,
            largest_layer: None,
            device_memory: None,
            host_memory: None,
        }
    }

    /// Parameters that have gradients and optimizer state.
    pub fn trainable(&self) -> u64 {
        match self.train_type {
            TrainType::Full => self.params,
            TrainType::Lora => self.adapters.map_or(0, |adapters| adapters.params),
        }
    }

    /// Parameters that are only read.
    pub fn frozen(&self) -> u64 {
        match self.train_type {
            TrainType::Full => 0,
            TrainType::Lora => self.params,
        }
    }

    /// Bytes of a trained parameter, by what they are for, where all of it is on the device.
    pub fn bytes_per_parameter(&self) -> BytesPerParameter {
        let each = self.states.bytes_per_parameter(self.ranks, self.accumulation);
        let more = if self.in_bf16 { 0 } else { self.more_whole() };
        let narrow = self.narrow_sums && self.states == States::Run;
        let gradients = if narrow { each.gradients.min(2) } else { each.gradients };
        BytesPerParameter { gradients, optimizer: each.optimizer + more, ..each }
    }

    /// Bytes that whole master weights of a run of ours take more than what weights in bf16 lack of them.
    const fn more_whole(&self) -> u64 {
        match self.states {
            States::Master | States::Plain => 0,
            States::Run => 2,
        }
    }

    /// Bytes that the optimizer has more of where it or the parameters are in host memory: master weights that lie
    /// elsewhere than weights, or pass through a device, are whole.
    pub(crate) const fn more_apart(&self) -> u64 {
        if self.in_bf16 { self.more_whole() } else { 0 }
    }

    /// Bytes of the optimizer's state for a trained parameter, with what lives in host memory.
    pub(crate) fn optimizer_bytes(&self, offload: Offload) -> u64 {
        let more = if offload == Offload::None { 0 } else { self.more_apart() };
        self.bytes_per_parameter().optimizer + more
    }

    /// The largest rank's part of `elements`. Ranks hold whole elements, so the division rounds up.
    pub(crate) fn shard(&self, elements: u64) -> u64 {
        elements.div_ceil(self.ranks.max(1))
    }

    /// Ranks on the fullest host: a host is never fuller than the job.
    pub(crate) fn ranks_on_host(&self) -> u64 {
        self.ranks_per_host.min(self.ranks)
    }

    /// Hosts of the job.
    pub(crate) fn hosts(&self) -> u64 {
        self.ranks.div_ceil(self.ranks_on_host().max(1))
    }

    /// Whether these totals are within the budgets; `None` where there is no budget.
    pub(crate) fn fits(&self, device: u64, host: u64) -> Option<bool> {
        if self.device_memory.is_none() && self.host_memory.is_none() {
            return None;
        }
        Some(self.missing(device, host) == (0, 0))
    }

    /// Bytes of device and host memory that these totals need beyond the budgets.
    pub(crate) fn missing(&self, device: u64, host: u64) -> (u64, u64) {
        let beyond = |need: u64, budget: Option<u64>| budget.map_or(0, |budget| need.saturating_sub(budget));
        (beyond(device, self.device_memory), beyond(host, self.host_memory))
    }

    pub(crate) fn check(&self) -> Result<(), AskError> {
        let mut counts = vec![
            (self.ranks, "ranks"),
            (self.ranks_per_host, "ranks on a host"),
            (self.accumulation, "micro-batches in a step"),
        ];
        if let Some(shape) = &self.shape {
            counts.push((shape.micro_batch, "sequences in a micro-batch"));
            counts.push((shape.max_length, "tokens in a sequence"));
        }
        match counts.into_iter().find(|(count, _)| *count == 0) {
            Some((_, what)) => Err(AskError::Zero { what }),
            None => Ok(()),
        }
    }
}

impl Offload {
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
    /// A placement with the buckets of ms-swift's presets where they have numbers, DeepSpeed's defaults elsewhere, and
    /// communication overlapped.
    pub fn new(preset: impl Into<String>, stage: u8, offload: Offload) -> Self {
        Self {
            preset: preset.into(),
            stage,
            offload,
            reduce_bucket: 200_000_000,
            prefetch: 50_000_000,
            max_live: 1_000_000_000,
            max_in_cpu: None,
            persistent: 0,
            overlap: true,
        }
    }

    pub(crate) fn check(&self) -> Result<(), AskError> {
        let refuse = |what, least| {
            Err(AskError::OffloadStage { preset: self.preset.clone(), stage: self.stage, what, least })
        };
        if self.stage > 3 {
            Err(AskError::Stage { preset: self.preset.clone(), stage: self.stage })
        } else if self.offload.parameters() && self.stage < 3 {
            refuse("parameters", 3)
        } else if self.offload.optimizer() && self.stage == 0 {
            refuse("optimizer states", 1)
        } else {
            Ok(())
        }
    }
}
