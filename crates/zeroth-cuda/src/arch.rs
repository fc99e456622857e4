//! The architecture that kernels are compiled for, and its shared memory.

use zeroth_kernel::DeviceError;

/// The environment variable that chooses an older architecture than the GPU's.
const VARIABLE: &str = "ZEROTH_GPU_ARCH";

/// Compute capabilities that [`VARIABLE`] accepts.
const CHOICES: [(&str, (u32, u32)); 4] = [("8.0", (8, 0)), ("8.6", (8, 6)), ("8.9", (8, 9)), ("9.0", (9, 0))];

/// An architecture of GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Arch {
    /// As NVRTC names it: `sm_90a` for machine code, `compute_86` for code that the driver translates.
    name: String,
    /// Bytes of shared memory of a block.
    shared: u32,
}

impl Arch {
    /// A GPU's architecture with its own features, or the one that `ZEROTH_GPU_ARCH` names.
    pub(super) fn of_gpu(major: u32, minor: u32) -> Result<Self, DeviceError> {
        let value = std::env::var_os(VARIABLE).unwrap_or_default();
        Self::chosen(&value.to_string_lossy(), (major, minor))
    }

    fn chosen(value: &str, gpu: (u32, u32)) -> Result<Self, DeviceError> {
        if value.is_empty() {
            return Ok(Self::native(gpu));
        }
        let refused = |reason: String| DeviceError::Call {
            device: "cuda".to_owned(),
            call: format!("reading {VARIABLE}"),
            reason: format!("it is `{value}`; {reason}"),
        };
        let known = CHOICES.into_iter().find(|(name, _)| *name == value);
        let (_, chosen) =
            known.ok_or_else(|| refused("write 8.0, 8.6, 8.9 or 9.0, or unset it".to_owned()))?;
        if chosen > gpu {
            let reason = format!("the GPU has {}.{}, which runs nothing newer; unset it", gpu.0, gpu.1);
            return Err(refused(reason));
        }
        if chosen == gpu {
            return Ok(Self::native(gpu));
        }
        Ok(Self { name: format!("compute_{}{}", chosen.0, chosen.1), shared: shared(chosen) })
    }

    fn native((major, minor): (u32, u32)) -> Self {
        Self::of_name(&format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" }))
    }

    /// A GPU's architecture without features that only it has.
    pub(super) fn portable(major: u32, minor: u32) -> Self {
        Self::of_name(&format!("sm_{major}{minor}"))
    }

    /// An architecture by NVRTC's name for it.
    pub(super) fn of_name(name: &str) -> Self {
        let digits: u32 = name.chars().filter(char::is_ascii_digit).collect::<String>().parse().unwrap_or(0);
        Self { name: name.to_owned(), shared: shared((digits / 10, digits % 10)) }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Whether kernels use Hopper's architecture-specific features.
    pub(super) fn is_hopper(&self) -> bool {
        self.name == "sm_90a"
    }

    /// Whether the compiler's result is PTX, which the driver translates for the GPU.
    pub(super) fn is_virtual(&self) -> bool {
        self.name.starts_with("compute_")
    }

    /// Bytes of shared memory of a block: what a GPU of this architecture has.
    pub(super) const fn shared_per_block(&self) -> u32 {
        self.shared
    }
}

/// Bytes of shared memory of a block by compute capability, as in the CUDA programming guide's table of them.
const fn shared(capability: (u32, u32)) -> u32 {
    let kib = match capability {
        (8, 0 | 7) => 163,
        (8 | 12, _) => 99,
        (9..=11, _) => 227,
        _ => 64,
    };
    kib << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hopper_and_later_use_architecture_specific_features() {
        let native = |gpu| Arch::chosen("", gpu).unwrap();
        assert_eq!(native((8, 0)).name(), "sm_80");
        assert_eq!(native((9, 0)).name(), "sm_90a");
        assert_eq!(native((10, 0)).name(), "sm_100a");
        assert!(native((9, 0)).is_hopper() && !Arch::portable(9, 0).is_hopper());
    }

    #[test]
    fn an_older_architecture_has_its_own_limits() {
        let ada = Arch::chosen("8.9", (9, 0)).unwrap();
        assert_eq!((ada.name(), ada.shared_per_block()), ("compute_89", 99 << 10));
        assert!(ada.is_virtual() && !ada.is_hopper());
        assert_eq!(Arch::chosen("8.0", (9, 0)).unwrap().shared_per_block(), 163 << 10);
        assert_eq!(Arch::chosen("9.0", (9, 0)).unwrap(), Arch::native((9, 0)));
        assert_eq!(Arch::of_name("sm_120").shared_per_block(), 99 << 10);
        for (value, words) in [("7.5", "write 8.0, 8.6, 8.9 or 9.0"), ("9.0", "the GPU has 8.6")] {
            let error = Arch::chosen(value, (8, 6)).unwrap_err().to_string();
            assert!(error.contains(VARIABLE) && error.contains(words), "{error}");
        }
    }
}
