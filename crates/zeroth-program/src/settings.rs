//! The compiler's view of a config, each field with its key.

use crate::{Flat, World};
use zeroth_base::DType;
use zeroth_config::resolve::Resolved;
use zeroth_config::schema::{FrozenPlacement, Gather, OffloadDevice, Recompute, UpdatedBy, Values};
use zeroth_graph::Group;
use zeroth_kernel::{Optimizer, Target, Tier};

/// The dtypes of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Types {
    /// Parameters and activations.
    pub compute: DType,
    /// Gradients in collectives.
    pub communication: DType,
}

/// Where the parameters of a distillation's teacher are, whatever the student's stage is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TeacherPlacement {
    /// Every rank holds a shard: stage 3 of the teacher's config.
    pub sharded: bool,
    /// Shards are in host memory: `offload_param` of the teacher's config. What is offloaded is sharded, too.
    pub offloaded: bool,
}

impl TeacherPlacement {
    /// Every rank holds all of them on its device.
    pub const WHOLE: Self = Self { sharded: false, offloaded: false };

    /// The placement of frozen parameters by a config: its stage and `offload_param` count.
    pub fn from_config(config: &Resolved) -> Self {
        let Values { zero, offload_param, .. } = &config.values;
        Self { sharded: zero.stage >= 3, offloaded: offload_param.device == OffloadDevice::Cpu }
    }

    /// Whether a rank holds only a shard.
    pub(crate) const fn is_partitioned(self) -> bool {
        self.sharded || self.offloaded
    }
}

/// Which states are offloaded to host memory, and how they are transferred.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Offload {
    /// `zero_optimization.offload_optimizer.device` is cpu: the fraction of optimizer states in host memory (`.ratio`).
    pub optimizer: Option<f64>,
    /// `zero_optimization.offload_param.device` is cpu: the maximum number of parameters in host memory
    /// (`.max_in_cpu`).
    pub parameters: Option<u64>,
    /// `zero_optimization.sub_group_size`: elements per optimizer call.
    pub sub_group_size: u64,
    /// `zero_optimization.offload_optimizer.buffer_count`: sub-groups in flight.
    pub sub_group_buffers: u64,
    /// `zero_optimization.offload_param.buffer_size`: elements per copy.
    pub param_buffer_size: u64,
    /// `zero_optimization.offload_param.buffer_count`: staging buffers.
    pub param_buffers: u64,
    /// `zero_optimization.offload_param.pin_memory` is false: parameters are in pageable memory and go through staging
    /// buffers.
    pub pageable: bool,
    /// `zeroth.update`; `None`: chosen by measured rates.
    pub updated_by: Option<UpdatedBy>,
    /// `zeroth.update_window`; `None`: what is free.
    pub update_window: Option<u64>,
    /// How offloaded optimizer states are streamed through the device; `None` where they are not.
    pub stream: Option<StateStream>,
}

/// Streaming of offloaded optimizer states through the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateStream {
    /// Device bytes reserved for sub-groups, beyond what activations leave free.
    pub window: u64,
    /// The tier that holds gradients until the update.
    pub gradients: Tier,
}

impl Offload {
    /// No offload; a flat is updated in one call.
    pub const NOTHING: Self = Self {
        optimizer: None,
        parameters: None,
        sub_group_size: u64::MAX,
        sub_group_buffers: 1,
        param_buffer_size: u64::MAX,
        param_buffers: 1,
        pageable: false,
        updated_by: None,
        update_window: None,
        stream: None,
    };

    fn from_config(values: &Values) -> Self {
        let Values { zero, offload_param, offload_optimizer, zeroth, .. } = values;
        Self {
            optimizer: (offload_optimizer.device == OffloadDevice::Cpu).then_some(offload_optimizer.ratio),
            parameters: (offload_param.device == OffloadDevice::Cpu)
                .then(|| offload_param.max_in_cpu.unwrap_or(u64::MAX)),
            sub_group_size: zero.sub_group_size.max(1),
            sub_group_buffers: offload_optimizer.buffer_count.max(1),
            param_buffer_size: offload_param.buffer_size.max(1),
            param_buffers: offload_param.buffer_count.max(1),
            pageable: !offload_param.pin_memory,
            updated_by: zeroth.update,
            update_window: zeroth.update_window,
            stream: None,
        }
    }
}

/// The settings that the passes read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// `zero_optimization.stage`.
    pub stage: u8,
    /// `zeroth.sum_group`, or `zero_optimization.zero_hpz_partition_size`: the ranks of a group; `None`: all.
    pub group: Option<u64>,
    /// `zero_optimization.zero_hpz_partition_size`: partitioned parameters are sharded within each group only.
    pub hpz: bool,
    /// `gradient_accumulation_steps`.
    pub accumulation: u64,
    /// `bf16`, `fp16` and `communication_data_type`.
    pub types: Types,
    /// `data_types.grad_accum_dtype`.
    pub grad_accum_dtype: DType,
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
    pub moment_dtype: DType,
    /// `zeroth.stochastic_rounding`: 16-bit moments are rounded stochastically.
    pub stochastic_rounding: bool,
    /// `zeroth.recompute` and `.recompute_blocks`, `activation_checkpointing.number_checkpoints` and `.cpu_checkpointing`.
    pub recompute: Recompute,
    /// `zero_optimization.offload_optimizer`, `.offload_param` and `.sub_group_size`.
    pub offload: Offload,
    /// `zero_optimization.reduce_scatter`: false sends everything to every rank, which takes its slice.
    pub reduce_scatter: bool,
    /// `zero_optimization.allgather_bucket_size`, in elements per all-gather of updated parameters.
    pub allgather_bucket: u64,
    /// `zero_optimization.allgather_partitions`: false broadcasts updated parameters rank by rank.
    pub allgather_partitions: bool,
    /// `zero_optimization.memory_efficient_linear`: false keeps units with linear layers gathered from forward to
    /// backward.
    pub memory_efficient_linear: bool,
    /// `zeroth.gather`; `None`: views on CPU, copies on GPUs.
    pub gather: Option<Gather>,
    /// Whether frozen parameters are sharded.
    pub frozen: FrozenPlacement,
    /// Where a teacher's parameters are.
    pub teacher: TeacherPlacement,
    /// Whether the head kernel can write its weight gradient in the communication dtype.
    pub head_rounds: bool,
}

/// What is kept of the distribution at a token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TopLogProbs {
    /// The number of ids, the most probable ones.
    pub k: u64,
    /// The temperature of the softmax.
    pub temperature: f64,
}

impl Settings {
    /// Applies the defaults of a target. On a device apart from the host, offloaded states are streamed through the device unless the CPU
    /// updates them.
    #[must_use]
    pub fn for_target(mut self, target: &dyn Target) -> Self {
        let by_default = if target.maps_peers() { Gather::View } else { Gather::Copy };
        self.gather = self.gather.or(Some(by_default));
        self.head_rounds &= target.rounds_head_gradient();
        let offload = &mut self.offload;
        // Without master weights there is nothing on the host for the CPU to update.
        if self.types.compute == DType::F32 || offload.optimizer.is_none() {
            offload.updated_by = offload.updated_by.filter(|by| *by == UpdatedBy::Device);
        }
        let by_host = offload.updated_by == Some(UpdatedBy::Host);
        if !target.is_host() && offload.optimizer.is_some() && offload.stream.is_none() && !by_host {
            offload.stream =
                Some(StateStream { window: offload.update_window.unwrap_or(0), gradients: Tier::Host });
        }
        self
    }

    /// The mesh of so many ranks.
    pub fn world(&self, ranks: u64) -> World {
        World { ranks, group: self.group.unwrap_or(ranks) }
    }

    /// Whether the parameters of a flat are sharded across ranks.
    pub(crate) fn shards(&self, flat: &Flat) -> bool {
        match self.frozen {
            _ if flat.group == Group::Teacher => self.teacher.is_partitioned(),
            FrozenPlacement::Sharded if flat.is_frozen() => true,
            FrozenPlacement::Whole if flat.is_frozen() => false,
            _ => self.stage >= 3,
        }
    }

    /// The settings of an inference program: unsharded, on the device, on one device.
    pub const fn inference(run: DType) -> Self {
        Self {
            stage: 0,
            group: None,
            hpz: false,
            accumulation: 1,
            types: Types { compute: run, communication: run },
            grad_accum_dtype: DType::F32,
            persistence: 0,
            model_persistence: u64::MAX,
            reduce_bucket: u64::MAX,
            max_live: u64::MAX,
            max_reuse: u64::MAX,
            prefetch: 0,
            overlap: false,
            optimizer: Optimizer::Sgd,
            moment_dtype: DType::F32,
            stochastic_rounding: false,
            recompute: Recompute::Nothing,
            offload: Offload::NOTHING,
            reduce_scatter: true,
            allgather_bucket: u64::MAX,
            allgather_partitions: true,
            memory_efficient_linear: true,
            gather: None,
            frozen: FrozenPlacement::ByStage,
            teacher: TeacherPlacement::WHOLE,
            head_rounds: false,
        }
    }

    /// Reads the settings from a resolved config.
    pub fn from_config(config: &Resolved) -> Self {
        let Values { top_level, zero, zeroth, .. } = &config.values;
        let run = match (config.values.fp16.enabled, config.values.bf16.enabled) {
            (true, _) => DType::F16,
            (false, true) => DType::Bf16,
            (false, false) => DType::F32,
        };
        Self {
            stage: zero.stage,
            group: config.group(),
            hpz: config.shards_in_groups(),
            accumulation: top_level.gradient_accumulation_steps,
            types: Types { compute: run, communication: top_level.communication_data_type },
            grad_accum_dtype: config.values.data_types.grad_accum_dtype,
            persistence: zero.stage3_param_persistence_threshold,
            model_persistence: zero.stage3_model_persistence_threshold,
            reduce_bucket: zero.reduce_bucket_size,
            max_live: zero.stage3_max_live_parameters,
            max_reuse: zero.stage3_max_reuse_distance,
            prefetch: zero.stage3_prefetch_bucket_size,
            overlap: zero.overlap_comm,
            optimizer: match config.values.optimizer.name {
                // DeepSpeed's Adam uses decoupled weight decay unless adam_w_mode is false.
                Optimizer::Adam if config.values.optimizer.adam_w_mode => Optimizer::AdamW,
                named => named,
            },
            moment_dtype: zeroth.moments,
            stochastic_rounding: zeroth.stochastic_rounding,
            recompute: Recompute::of(&config.values.zeroth, &config.values.activation_checkpointing),
            offload: Offload::from_config(&config.values),
            reduce_scatter: zero.reduce_scatter,
            allgather_bucket: zero.allgather_bucket_size,
            allgather_partitions: zero.allgather_partitions,
            memory_efficient_linear: zero.memory_efficient_linear,
            gather: zeroth.gather,
            frozen: zeroth.frozen,
            teacher: TeacherPlacement::from_config(config),
            head_rounds: true,
        }
    }
}
