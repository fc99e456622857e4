//! Arguments of `zeroth bench`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use zeroth::base::DType;
use zeroth::bench::ModelSize;
use zeroth::machine::bench::BenchPart;

use crate::value_args::{whole, whole_as};

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Examples:\n  zeroth bench\n  zeroth bench kernels optimizer --quick\n  \
                  zeroth bench step --ranks 2 --threads 2 --stage 3\n  zeroth bench disk --dir /mnt/nvme\n\n\
                  Benchmarks are interleaved in short bursts and compared with the hardware's limit in the same run; best \
                  and median are reported. Results are saved as the machine's profile, which `zeroth doctor` shows."
)]
pub(crate) struct BenchArgs {
    /// What to measure [default: everything]
    #[arg(value_enum, value_name = "PART")]
    pub(crate) parts: Vec<PartArg>,
    /// Quick run: fewer shapes, less data, fewer rounds
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) quick: bool,
    /// Bursts per benchmark, and training steps of `step` [default: 20, with --quick 3]
    #[arg(long, value_name = "N", value_parser = whole(1..=100_000))]
    pub(crate) rounds: Option<u64>,
    /// CPU threads: kernels run on one and on all of them, the ranks of a step share them [default: all CPUs]
    #[arg(long, value_name = "N", value_parser = whole(1..=4096))]
    pub(crate) threads: Option<u64>,
    /// Ranks of `collectives` and `step`
    #[arg(long, aliases = ["num-gpus", "nproc-per-node"], value_name = "N", default_value_t = 2,
          value_parser = whole(1..=256))]
    pub(crate) ranks: u64,
    /// ZeRO stage of `step`
    #[arg(long, value_name = "STAGE", default_value_t = 3, value_parser = whole_as::<u8>(0..=3))]
    pub(crate) stage: u8,
    /// Model of `step`
    #[arg(long, value_enum, value_name = "NAME", default_value_t = SizeArg::M50)]
    pub(crate) size: SizeArg,
    /// Compute dtype of `step`
    #[arg(long, value_enum, value_name = "TYPE", default_value_t = StepTypeArg::Bf16)]
    pub(crate) dtype: StepTypeArg,
    /// The folder whose disk is measured
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) dir: PathBuf,
    /// File of the machine's profile [default: in `machines/` of the cache folder]
    #[arg(long, value_name = "FILE")]
    pub(crate) profile: Option<PathBuf>,
    /// Do not update the machine's profile
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) no_save: bool,
}

/// A group of benchmarks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PartArg {
    /// Matmuls, attention, head and loss, norms, casts
    Kernels,
    /// AdamW
    Optimizer,
    /// Collectives between ranks of this machine
    Collectives,
    /// Writing and reading a file
    Disk,
    /// Whole training steps
    Step,
}

impl From<PartArg> for BenchPart {
    fn from(part: PartArg) -> Self {
        match part {
            PartArg::Kernels => Self::Kernels,
            PartArg::Optimizer => Self::Optimizer,
            PartArg::Collectives => Self::Collectives,
            PartArg::Disk => Self::Disk,
            PartArg::Step => Self::Step,
        }
    }
}

/// The model of a step, in Qwen3's architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SizeArg {
    /// 41.6M parameters: hidden 512, 8 blocks, vocabulary 32,000; 2 × 512 tokens per rank
    M50,
    /// 102M parameters: hidden 768, 12 blocks, vocabulary 32,000; 2 × 512 tokens per rank
    M125,
    /// Qwen3-0.6B: hidden 1024, 28 blocks, vocabulary 151,936; 1 × 512 tokens per rank
    #[value(name = "0.6b")]
    Qwen3,
}

impl From<SizeArg> for ModelSize {
    fn from(size: SizeArg) -> Self {
        match size {
            SizeArg::M50 => Self::M50,
            SizeArg::M125 => Self::M125,
            SizeArg::Qwen3 => Self::Qwen3,
        }
    }
}

/// The compute dtype of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum StepTypeArg {
    /// 2 bytes, accumulation in fp32
    Bf16,
    /// 4 bytes
    Fp32,
}

impl From<StepTypeArg> for DType {
    fn from(dtype: StepTypeArg) -> Self {
        match dtype {
            StepTypeArg::Bf16 => Self::Bf16,
            StepTypeArg::Fp32 => Self::F32,
        }
    }
}
