//! Flag values shared by several commands.

use std::ops::{Bound, RangeBounds};

use clap::ValueEnum;
use zeroth::base::{DType, grouped, parse_bytes, parse_count};
use zeroth::job::{cpus, gpus};
use zeroth::kernel::Target;
use zeroth::machine::{DeviceKind, Machine};

/// The device that runs kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceArg {
    /// CPU
    Cpu,
    /// NVIDIA GPUs
    Cuda,
}

impl From<DeviceArg> for DeviceKind {
    fn from(device: DeviceArg) -> Self {
        match device {
            DeviceArg::Cpu => Self::Cpu,
            DeviceArg::Cuda => Self::Cuda,
        }
    }
}

/// The dtype of stored weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DTypeArg {
    /// 2 bytes, with the range of fp32
    Bf16,
    /// 2 bytes, more precise, maximum 65,504
    Fp16,
    /// 4 bytes
    Fp32,
}

impl From<DTypeArg> for DType {
    fn from(dtype: DTypeArg) -> Self {
        match dtype {
            DTypeArg::Bf16 => Self::Bf16,
            DTypeArg::Fp16 => Self::F16,
            DTypeArg::Fp32 => Self::F32,
        }
    }
}

/// What a command that runs a model in this process compiles for; a GPU where there is one.
pub(crate) fn target(
    device: Option<DeviceArg>,
    threads: Option<u64>,
    machine: &Machine,
) -> anyhow::Result<&'static dyn Target> {
    let has_gpu = gpus(machine) > 0;
    let device = device.map_or(if has_gpu { DeviceKind::Cuda } else { DeviceKind::Cpu }, DeviceKind::from);
    anyhow::ensure!(
        device == DeviceKind::Cpu || has_gpu,
        "--device cuda needs a GPU, but none was found: `zeroth doctor` shows what was probed; --device cpu runs \
         on the CPU"
    );
    Ok(device.target(threads.map_or_else(cpus, |threads| threads as usize)))
}

/// The parameters to train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TrainTypeArg {
    /// All parameters
    Full,
    /// LoRA adapters
    Lora,
}

/// Parses a whole number within bounds.
pub(crate) fn whole(
    bounds: impl RangeBounds<u64> + Clone + Send + Sync + 'static,
) -> impl Fn(&str) -> Result<u64, String> + Clone + Send + Sync + 'static {
    whole_as::<u64>(bounds)
}

/// The same of another type, which holds every number within the bounds.
pub(crate) fn whole_as<T: TryFrom<u64>>(
    bounds: impl RangeBounds<u64> + Clone + Send + Sync + 'static,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text: &str| {
        let number = text.parse::<u64>().ok().filter(|number| bounds.contains(number));
        number.and_then(|number| T::try_from(number).ok()).ok_or_else(|| must_be(&bounds))
    }
}

fn must_be(bounds: &impl RangeBounds<u64>) -> String {
    let least = match bounds.start_bound() {
        Bound::Included(least) => *least,
        Bound::Excluded(below) => below + 1,
        Bound::Unbounded => 0,
    };
    let most = match bounds.end_bound() {
        Bound::Included(most) => Some(*most),
        Bound::Excluded(above) => Some(above - 1),
        Bound::Unbounded => None,
    };
    match most {
        Some(most) => format!("must be a whole number from {} to {}", grouped(least), grouped(most)),
        None => format!("must be a whole number of at least {}", grouped(least)),
    }
}

/// Parses a number; what it means decides about its bounds.
pub(crate) fn number(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| "is not a number".to_owned())
}

/// No budget is smaller than this many bytes, so a smaller number lacks its unit.
const LEAST_BUDGET: u64 = 10_000;

/// Parses a budget of memory or disk space.
pub(crate) fn budget(text: &str) -> Result<u64, String> {
    let bytes = parse_bytes(text).map_err(|error| error.to_string())?;
    let has_unit = text.trim().ends_with(|c: char| c.is_ascii_alphabetic());
    if bytes < LEAST_BUDGET && !has_unit {
        return Err(format!("is {bytes} bytes: a unit is missing, did you mean {}GB?", text.trim()));
    }
    Ok(bytes)
}

/// Parses a number of parameters.
pub(crate) fn parameters(text: &str) -> Result<u64, String> {
    match parse_count(text).map_err(|error| error.to_string())? {
        0 => Err("must be at least 1: 8B, 500M or 2e8".to_owned()),
        count => Ok(count),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_out_of_bounds_are_told_the_bounds() {
        assert_eq!((whole(1..=64)("64"), whole(0..)("0")), (Ok(64), Ok(0)));
        for wrong in ["-5", "0", "65", "x", "", "1.5", "99999999999999999999"] {
            assert_eq!(
                whole(1..=64)(wrong),
                Err("must be a whole number from 1 to 64".to_owned()),
                "{wrong}"
            );
        }
        assert_eq!(whole(2..)("1"), Err("must be a whole number of at least 2".to_owned()));
        assert_eq!(
            whole_as::<u16>(0..=65_535)("70000"),
            Err("must be a whole number from 0 to 65,535".to_owned())
        );
    }

    #[test]
    fn budgets_need_a_unit() {
        assert_eq!(
            (budget("44GB"), budget("44 B"), budget("2e8")),
            (Ok(44_000_000_000), Ok(44), Ok(200_000_000))
        );
        assert!(budget("44").unwrap_err().contains("did you mean 44GB?"));
        assert!(budget("44GX").unwrap_err().contains("unit `GX`"));
        assert!(parameters("0").is_err() && parameters("8B") == Ok(8_000_000_000));
    }
}
