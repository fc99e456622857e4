//! What the passes ask of a config, and where in a config it stands.

use crate::Target;
use zeroth_base::DType;
use zeroth_config::resolve::Resolved;
use zeroth_config::schema::{
    GatherMode, OffloadDevice, OptimizerType, RecomputePolicy, UpdateDevice, Values,
};
use zeroth_kernel::{Optimizer, Tier};

/// The types a run stores numbers in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Types {
    /// Parameters and activations.
    pub run: DType,
    /// Gradients on their way between ranks.
    pub communication: DType,
}

/// What backward computes again instead of finding it kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing.
    Nothing,
    /// Norms and gated activations: cheap to compute, large to keep.
    NormSwiGlu,
    /// Attention as well.
    Attention,
    /// All of a block but what enters it.
    Block {
        /// How many blocks, from the first on; of the others norms and gated activations. None: all blocks.
        blocks: Option<u64>,
        /// How many inputs of blocks are kept; none: every block's.
        kept: Option<u64>,
        /// Whether they wait for backward in host memory.
        parked: bool,
    },
}

/// How a rank gets parameters that other ranks hold (`zeroth.gather`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gather {
    /// It reads their shards in place: every rank maps them, read-only. On CPU only.
    View,
    /// Shards are gathered in a buffer of their own.
    Copy,
}

/// What leaves the device, and how it travels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Offload {
    /// `zero_optimization.offload_optimizer.device` is cpu: the share of the optimizer's state that lives in host memory
    /// (`.ratio`).
    pub optimizer: Option<f64>,
    /// `zero_optimization.offload_param.device` is cpu: the most elements of parameters in host memory (`.max_in_cpu`).
    pub parameters: Option<u64>,
    /// `zero_optimization.sub_group_size`: elements that are updated at a time.
    pub tile: u64,
    /// `zero_optimization.offload_optimizer.buffer_count`: tiles on their way at the same time.
    pub tiles: u64,
    /// `zero_optimization.offload_param.buffer_size`: elements that are copied at a time.
    pub piece: u64,
    /// `zero_optimization.offload_param.buffer_count`: pieces in staging at the same time.
    pub pieces: u64,
    /// `zero_optimization.offload_param.pin_memory` is false: parameters lie in pageable memory and pass through staging.
    pub pageable: bool,
    /// `zeroth.update`; none: by what a machine can do.
    pub updated_by: Option<UpdatedBy>,
    /// `zeroth.update_window`; none: what is free.
    pub window: Option<u64>,
    /// Where the optimizer's state in host memory passes through the device for its update: how.
    pub stream: Option<Stream>,
}

/// Who computes the update of state in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpdatedBy {
    /// The device: state passes through it.
    Device,
    /// The host's processors, beside the device's own work.
    Host,
}

/// How states pass through the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    /// Bytes of device memory that tiles have for themselves, beside what activations leave behind.
    pub window: u64,
    /// Where gradients wait for the update.
    pub gradients: Tier,
}

impl Offload {
    /// Nothing leaves the device, and a flat is updated at once.
    pub const NOTHING: Self = Self {
        optimizer: None,
        parameters: None,
        tile: u64::MAX,
        tiles: 1,
        piece: u64::MAX,
        pieces: 1,
        pageable: false,
        updated_by: None,
        window: None,
        stream: None,
    };

    fn from_config(values: &Values) -> Self {
        let Values { zero, offload_param, offload_optimizer, zeroth, .. } = values;
        Self {
            optimizer: (offload_optimizer.device == OffloadDevice::Cpu).then_some(offload_optimizer.ratio),
            parameters: (offload_param.device == OffloadDevice::Cpu)
                .then(|| offload_param.max_in_cpu.unwrap_or(u64::MAX)),
            tile: zero.sub_group_size.max(1),
            tiles: offload_optimizer.buffer_count.max(1),
            piece: offload_param.buffer_size.max(1),
            pieces: offload_param.buffer_count.max(1),
            pageable: !offload_param.pin_memory,
            updated_by: zeroth.update.map(|device| match device {
                UpdateDevice::Device => UpdatedBy::Device,
                UpdateDevice::Host => UpdatedBy::Host,
            }),
            window: zeroth.update_window,
            stream: None,
        }
    }
}

/// What the passes ask of a config.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// `zero_optimization.stage`.
    pub stage: u8,
    /// `gradient_accumulation_steps`.
    pub accumulation: u64,
    /// `bf16`, `fp16` and `communication_data_type`.
    pub types: Types,
    /// `data_types.grad_accum_dtype`.
    pub sums: DType,
    /// `zero_optimization.stage3_param_persistence_threshold`, in elements.
    pub persistence: u64,
    /// `zero_optimization.stage3_model_persistence_threshold`, in elements.
    pub model_persistence: u64,
    /// `zero_optimization.reduce_bucket_size`, in elements.
    pub reduce_bucket: u64,
    /// `zero_optimization.stage3_max_live_parameters`, in elements.
    pub max_live: u64,
    /// `zero_optimization.stage3_max_reuse_distance`, in elements.
    pub max_reuse: u64,
    /// `zero_optimization.stage3_prefetch_bucket_size`, in elements.
    pub prefetch: u64,
    /// `zero_optimization.overlap_comm`.
    pub overlap: bool,
    /// `optimizer.type`, and `optimizer.params.adam_w_mode`.
    pub optimizer: Optimizer,
    /// `zeroth.moments`.
    pub moments: DType,
    /// `zeroth.stochastic_rounding`: moments in 16 bits are rounded by chance.
    pub stochastic_rounding: bool,
    /// `zeroth.recompute` and `.recompute_blocks`, `activation_checkpointing.number_checkpoints` and `.cpu_checkpointing`.
    pub recompute: Recompute,
    /// `zero_optimization.offload_optimizer`, `.offload_param` and `.sub_group_size`.
    pub offload: Offload,
    /// `zero_optimization.reduce_scatter`: false sends every rank everything, and each takes its slice.
    pub reduce_scatter: bool,
    /// `zero_optimization.allgather_bucket_size`, in elements: updated parameters are gathered in such pieces.
    pub allgather_bucket: u64,
    /// `zero_optimization.allgather_partitions`: false sends updated parameters from one rank after the other.
    pub allgather_partitions: bool,
    /// `zero_optimization.memory_efficient_linear`: false keeps units with linear maps gathered from forward to backward.
    pub memory_efficient_linear: bool,
    /// `zeroth.gather`; none: by the device ([`Settings::on`]), copies where there is none.
    pub gather: Option<Gather>,
    /// The device's head can round the gradient of its projection as it makes it.
    pub head_rounds: bool,
}

impl Settings {
    /// As a device of this kind runs them: states in host memory pass through a card, which is faster than the bus is for
    /// single elements, unless the host's processors update them.
    #[must_use]
    pub fn on(mut self, target: Target) -> Self {
        let is_cpu = matches!(target, Target::Cpu { .. });
        let by_default = if is_cpu { Gather::View } else { Gather::Copy };
        self.gather = self.gather.or(Some(by_default));
        self.head_rounds &= is_cpu;
        let offload = &mut self.offload;
        // Without master weights there are only the card's own for a processor to change.
        if self.types.run == DType::F32 || offload.optimizer.is_none() {
            offload.updated_by = offload.updated_by.filter(|by| *by == UpdatedBy::Device);
        }
        let by_host = offload.updated_by == Some(UpdatedBy::Host);
        if target == Target::Cuda && offload.optimizer.is_some() && offload.stream.is_none() && !by_host {
            offload.stream = Some(Stream { window: offload.window.unwrap_or(0), gradients: Tier::Host });
        }
        self
    }

    /// The settings of a program that only evaluates: everything unsharded on one device.
    pub const fn inference(run: DType) -> Self {
        Self {
            stage: 0,
            accumulation: 1,
            types: Types { run, communication: run },
            sums: DType::F32,
            persistence: 0,
            model_persistence: u64::MAX,
            reduce_bucket: u64::MAX,
            max_live: u64::MAX,
            max_reuse: u64::MAX,
            prefetch: 0,
            overlap: false,
            optimizer: Optimizer::Sgd,
            moments: DType::F32,
            stochastic_rounding: false,
            recompute: Recompute::Nothing,
            offload: Offload::NOTHING,
            reduce_scatter: true,
            allgather_bucket: u64::MAX,
            allgather_partitions: true,
            memory_efficient_linear: true,
            gather: None,
            head_rounds: false,
        }
    }

    /// The settings of a resolved config.
    pub fn from_config(config: &Resolved) -> Self {
        let Values { top_level, zero, activation_checkpointing, zeroth, .. } = &config.values;
        let run = match (config.values.fp16.enabled, config.values.bf16.enabled) {
            (true, _) => DType::F16,
            (false, true) => DType::Bf16,
            (false, false) => DType::F32,
        };
        Self {
            stage: zero.stage,
            accumulation: top_level.gradient_accumulation_steps,
            types: Types { run, communication: top_level.communication_data_type },
            sums: config.values.data_types.grad_accum_dtype,
            persistence: zero.stage3_param_persistence_threshold,
            model_persistence: zero.stage3_model_persistence_threshold,
            reduce_bucket: zero.reduce_bucket_size,
            max_live: zero.stage3_max_live_parameters,
            max_reuse: zero.stage3_max_reuse_distance,
            prefetch: zero.stage3_prefetch_bucket_size,
            overlap: zero.overlap_comm,
            optimizer: match config.values.optimizer.name {
                OptimizerType::Sgd => Optimizer::Sgd,
                OptimizerType::Lion => Optimizer::Lion,
                OptimizerType::Adagrad => Optimizer::Adagrad,
                // DeepSpeed's Adam decays as AdamW does, unless adam_w_mode is false.
                OptimizerType::Adam if !config.values.optimizer.adam_w_mode => Optimizer::Adam,
                OptimizerType::Adam | OptimizerType::AdamW => Optimizer::AdamW,
            },
            moments: zeroth.moments,
            stochastic_rounding: zeroth.stochastic_rounding,
            recompute: match zeroth.recompute {
                RecomputePolicy::None => Recompute::Nothing,
                RecomputePolicy::NormSwiglu => Recompute::NormSwiGlu,
                RecomputePolicy::Attention => Recompute::Attention,
                RecomputePolicy::Block => Recompute::Block {
                    blocks: zeroth.recompute_blocks,
                    kept: activation_checkpointing.number_checkpoints,
                    parked: activation_checkpointing.cpu_checkpointing,
                },
            },
            offload: Offload::from_config(&config.values),
            reduce_scatter: zero.reduce_scatter,
            allgather_bucket: zero.allgather_bucket_size,
            allgather_partitions: zero.allgather_partitions,
            memory_efficient_linear: zero.memory_efficient_linear,
            gather: zeroth.gather.map(|mode| match mode {
                GatherMode::View => Gather::View,
                GatherMode::Copy => Gather::Copy,
            }),
            head_rounds: true,
        }
    }
}
