//! The compiler's view of a config, each field with its key.

use crate::Target;
use zeroth_base::DType;
use zeroth_config::resolve::Resolved;
use zeroth_kernel::{Optimizer, Tier};

/// The dtypes of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Types {
    /// Parameters and activations.
    pub compute: DType,
    /// Gradients in collectives.
    pub communication: DType,
}

/// Which activations backward recomputes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing.
    Nothing,
    /// Norms and gated activations: cheap to recompute, large to keep.
    NormSwiGlu,
    /// Attention as well.
    Attention,
    /// Whole blocks from their inputs (activation checkpointing).
    Block {
        /// The number of leading blocks, `None` for all; of the others, norms and gated activations.
        blocks: Option<u64>,
        /// The number of block inputs kept, `None` for one per block.
        checkpoints: Option<u64>,
        /// Whether they are offloaded to host memory (`cpu_checkpointing`).
        offloaded: bool,
    },
}

/// How a rank accesses other ranks' parameter shards (`zeroth.gather`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gather {
    /// Zero-copy: every rank maps the other ranks' shards read-only. CPU only.
    View,
    /// Shards are gathered into a buffer.
    Copy,
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

/// Where offloaded optimizer states are updated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpdatedBy {
    /// On the device, through which states are streamed.
    Device,
    /// On the CPU, overlapping the device's work.
    Host,
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

    fn from_config(config: &Resolved) -> Self {
        let on_host =
            |section: &str| config.text(&format!("zero_optimization.{section}.device")) == Some("cpu");
        let whole =
            |key: &str, default: u64| config.whole(&format!("zero_optimization.{key}")).unwrap_or(default);
        let ratio =
            config.get("zero_optimization.offload_optimizer.ratio").and_then(|ratio| ratio.value.as_f64());
        let pinned =
            config.get("zero_optimization.offload_param.pin_memory").and_then(|pin| pin.value.as_bool());
        Self {
            optimizer: on_host("offload_optimizer").then(|| ratio.unwrap_or(1.0)),
            parameters: on_host("offload_param").then(|| whole("offload_param.max_in_cpu", u64::MAX)),
            sub_group_size: whole("sub_group_size", u64::MAX).max(1),
            sub_group_buffers: whole("offload_optimizer.buffer_count", 1).max(1),
            param_buffer_size: whole("offload_param.buffer_size", u64::MAX).max(1),
            param_buffers: whole("offload_param.buffer_count", 1).max(1),
            pageable: pinned == Some(false),
            updated_by: match config.text("zeroth.update") {
                Some("device") => Some(UpdatedBy::Device),
                Some("host") => Some(UpdatedBy::Host),
                _ => None,
            },
            update_window: config.whole("zeroth.update_window"),
            stream: None,
        }
    }
}

/// The settings that the passes read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// `zero_optimization.stage`.
    pub stage: u8,
    /// `gradient_accumulation_steps`.
    pub accumulation: u64,
    /// `bf16`, `fp16` and `communication_data_type`.
    pub types: Types,
    /// `data_types.grad_accum_dtype`.
    pub grad_accum_dtype: DType,
    /// `zero_optimization.stage3_param_persistence_threshold`, in elements.
    pub persistence: u64,
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
    /// Whether the head kernel can write its weight gradient in the communication dtype.
    pub head_rounds: bool,
}

impl Settings {
    /// Applies the defaults of a target. On a GPU, offloaded states are streamed through the device unless the CPU
    /// updates them.
    #[must_use]
    pub fn for_target(mut self, target: Target) -> Self {
        let is_cpu = matches!(target, Target::Cpu { .. });
        let by_default = if is_cpu { Gather::View } else { Gather::Copy };
        self.gather = self.gather.or(Some(by_default));
        self.head_rounds &= is_cpu;
        let offload = &mut self.offload;
        // Without master weights there is nothing on the host for the CPU to update.
        if self.types.compute == DType::F32 || offload.optimizer.is_none() {
            offload.updated_by = offload.updated_by.filter(|by| *by == UpdatedBy::Device);
        }
        let by_host = offload.updated_by == Some(UpdatedBy::Host);
        if target == Target::Cuda && offload.optimizer.is_some() && offload.stream.is_none() && !by_host {
            offload.stream =
                Some(StateStream { window: offload.update_window.unwrap_or(0), gradients: Tier::Host });
        }
        self
    }

    /// The settings of an inference program: unsharded, on the device, on one rank.
    pub(super) const fn inference(run: DType) -> Self {
        Self {
            stage: 0,
            accumulation: 1,
            types: Types { compute: run, communication: run },
            grad_accum_dtype: DType::F32,
            persistence: 0,
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
            head_rounds: false,
        }
    }

    /// Reads the settings from a resolved config, in which every value is set.
    pub fn from_config(config: &Resolved) -> Self {
        let zero = |key: &str| config.whole(&format!("zero_optimization.{key}")).unwrap_or(0);
        let is_not_off = |key: &str| {
            let found =
                config.get(&format!("zero_optimization.{key}")).and_then(|setting| setting.value.as_bool());
            found != Some(false)
        };
        let run = match (config.is_on("fp16.enabled"), config.is_on("bf16.enabled")) {
            (true, _) => DType::F16,
            (false, true) => DType::Bf16,
            (false, false) => DType::F32,
        };
        let communication = config.text("communication_data_type").and_then(DType::from_name);
        Self {
            stage: zero("stage") as u8,
            accumulation: config.whole("gradient_accumulation_steps").unwrap_or(1),
            types: Types { compute: run, communication: communication.unwrap_or(run) },
            grad_accum_dtype: config
                .text("data_types.grad_accum_dtype")
                .and_then(DType::from_name)
                .unwrap_or(DType::F32),
            persistence: zero("stage3_param_persistence_threshold"),
            reduce_bucket: zero("reduce_bucket_size"),
            max_live: zero("stage3_max_live_parameters"),
            max_reuse: zero("stage3_max_reuse_distance"),
            prefetch: zero("stage3_prefetch_bucket_size"),
            overlap: config.is_on("zero_optimization.overlap_comm"),
            optimizer: match config.text("optimizer.type") {
                Some("SGD") => Optimizer::Sgd,
                Some("Lion") => Optimizer::Lion,
                Some("Adagrad") => Optimizer::Adagrad,
                // DeepSpeed's Adam uses decoupled weight decay unless adam_w_mode is false.
                Some("Adam") if !config.is_on("optimizer.params.adam_w_mode") => Optimizer::Adam,
                _ => Optimizer::AdamW,
            },
            moment_dtype: config.text("zeroth.moments").and_then(DType::from_name).unwrap_or(DType::F32),
            stochastic_rounding: config.is_on("zeroth.stochastic_rounding"),
            recompute: match config.text("zeroth.recompute") {
                Some("norm_swiglu") => Recompute::NormSwiGlu,
                Some("attention") => Recompute::Attention,
                Some("block") => Recompute::Block {
                    blocks: config.whole("zeroth.recompute_blocks"),
                    checkpoints: config.whole("activation_checkpointing.number_checkpoints"),
                    offloaded: config.is_on("activation_checkpointing.cpu_checkpointing"),
                },
                _ => Recompute::Nothing,
            },
            offload: Offload::from_config(config),
            reduce_scatter: is_not_off("reduce_scatter"),
            allgather_bucket: zero("allgather_bucket_size"),
            allgather_partitions: is_not_off("allgather_partitions"),
            memory_efficient_linear: is_not_off("memory_efficient_linear"),
            gather: match config.text("zeroth.gather") {
                Some("view") => Some(Gather::View),
                Some("copy") => Some(Gather::Copy),
                _ => None,
            },
            head_rounds: true,
        }
    }
}
