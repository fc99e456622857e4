//! Flag values shared by several commands.

use clap::ValueEnum;

/// The device that runs kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceArg {
    /// CPU
    Cpu,
    /// NVIDIA GPUs
    Cuda,
}

/// The parameters to train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TrainTypeArg {
    /// All parameters
    Full,
    /// LoRA adapters
    Lora,
}
