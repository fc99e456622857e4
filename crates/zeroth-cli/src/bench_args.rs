//! What `zeroth bench` takes.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use zeroth::base::DType;
use zeroth::bench::ModelSize;
use zeroth::machine::bench::Part;

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Examples:\n  zeroth bench\n  zeroth bench kernels optimizer --quick\n  \
                  zeroth bench step --ranks 2 --threads 2 --stage 3\n  zeroth bench disk --dir /mnt/nvme\n\n\
                  Lines are measured in turns, one short burst each, beside the limit of the hardware in the same run; best \
                  and median are given. Results are kept as the machine's profile: `zeroth doctor` shows it."
)]
pub(crate) struct BenchArgs {
    /// What to measure [default: all of it]
    #[arg(value_enum, value_name = "PART")]
    pub(crate) parts: Vec<PartArg>,
    /// A short look: fewer shapes, less data, few rounds
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) quick: bool,
    /// Bursts of every line, and steps of a whole step [default: 20, with --quick 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100_000))]
    pub(crate) rounds: Option<u64>,
    /// Threads: kernels run on one and on all of these, the ranks of a step share them [default: all processors]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=4096))]
    pub(crate) threads: Option<u64>,
    /// Ranks of collectives and of a step
    #[arg(long, aliases = ["num-gpus", "nproc-per-node"], value_name = "N", default_value_t = 2,
          value_parser = clap::value_parser!(u64).range(1..=256))]
    pub(crate) ranks: u64,
    /// The ZeRO stage of a step
    #[arg(long, value_name = "STAGE", default_value_t = 3, value_parser = clap::value_parser!(u8).range(0..=3))]
    pub(crate) stage: u8,
    /// The model of a step
    #[arg(long, value_enum, value_name = "NAME", default_value_t = SizeArg::M50)]
    pub(crate) size: SizeArg,
    /// What a step computes in
    #[arg(long, value_enum, value_name = "TYPE", default_value_t = StepTypeArg::Bf16)]
    pub(crate) dtype: StepTypeArg,
    /// The folder whose disk is measured
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) dir: PathBuf,
    /// The file that keeps the machine's profile [default: one for this machine in `machines` of the cache folder]
    #[arg(long, value_name = "FILE")]
    pub(crate) profile: Option<PathBuf>,
    /// Leave the machine's profile as it is
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) no_save: bool,
}

/// A part of what is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PartArg {
    /// Matrix products, attention, the head, norms, casts
    Kernels,
    /// AdamW
    Optimizer,
    /// What local ranks send each other
    Collectives,
    /// Writing and reading a file
    Disk,
    /// Training steps of a new model
    Step,
}

impl From<PartArg> for Part {
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

/// The model of a step, in Qwen3's shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SizeArg {
    /// 41.6M parameters: hidden 512, 8 blocks, vocabulary 32,000; 2 × 512 tokens a rank
    M50,
    /// 102M parameters: hidden 768, 12 blocks, vocabulary 32,000; 2 × 512 tokens a rank
    M125,
    /// Qwen3-0.6B: hidden 1024, 28 blocks, vocabulary 151,936; 1 × 512 tokens a rank
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

/// What a step computes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum StepTypeArg {
    /// 2 bytes, sums in fp32
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
