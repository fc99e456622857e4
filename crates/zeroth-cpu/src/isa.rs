//! The instruction path that kernels run on, and the macro that compiles one body for each path.
//!
//! Results are the same bits for one path. Between paths they may differ: in the last place where a path has a fused
//! multiply-add and another has not, and by the rounding of one factor to bf16 where AMX tiles multiply an f32 matrix
//! with a bf16 one (see `matmul`).

use std::fmt;
use std::sync::OnceLock;

/// The variable that chooses a path.
const VARIABLE: &str = "ZEROTH_CPU";

/// An instruction set that the kernels have code for, the best last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// What the compiler's target has.
    Portable,
    /// 128-bit vectors of Arm.
    Neon,
    /// AVX2 with fused multiply-add.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AMX tiles for products of bf16, AVX-512 (with its bf16 conversions) for all else.
    Amx,
}

/// `ZEROTH_CPU` asks for instructions that cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IsaError {
    /// The value is no path.
    #[error(
        "ZEROTH_CPU is `{found}`, which is no instruction path; write amx, avx512, avx2, neon or portable, or unset it \
         to take the best of this machine ({best})"
    )]
    Unknown {
        /// What the variable holds.
        found: String,
        /// What would be taken without it.
        best: Isa,
    },
    /// The processor or the operating system lacks it.
    #[error(
        "ZEROTH_CPU asks for `{asked}`, which this machine cannot run; it has {}. Choose one of these, or unset it to \
         take the last",
        names(Isa::available())
    )]
    Missing {
        /// The path asked for.
        asked: Isa,
    },
}

impl From<IsaError> for zeroth_kernel::DeviceError {
    fn from(error: IsaError) -> Self {
        Self::Isa(error.to_string())
    }
}

fn names(paths: &[Isa]) -> String {
    let names: Vec<_> = paths.iter().map(|path| path.name()).collect();
    names.join(", ")
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Isa {
    /// Every path there is code for on some processor.
    const ALL: [Self; 5] = [Self::Portable, Self::Neon, Self::Avx2, Self::Avx512, Self::Amx];

    /// Its name, as `ZEROTH_CPU` takes it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
        }
    }

    /// The best path of the processor at hand.
    pub fn detect() -> Self {
        Self::available().last().copied().unwrap_or(Self::Portable)
    }

    /// The path that `ZEROTH_CPU` names, or the best one where it is not set.
    pub fn chosen() -> Result<Self, IsaError> {
        match std::env::var_os(VARIABLE) {
            None => Ok(Self::detect()),
            Some(value) => Self::named(&value.to_string_lossy()),
        }
    }

    fn named(value: &str) -> Result<Self, IsaError> {
        if value.is_empty() {
            return Ok(Self::detect());
        }
        let Some(asked) = Self::ALL.into_iter().find(|path| path.name().eq_ignore_ascii_case(value)) else {
            return Err(IsaError::Unknown { found: value.to_owned(), best: Self::detect() });
        };
        if Self::available().contains(&asked) { Ok(asked) } else { Err(IsaError::Missing { asked }) }
    }

    /// Every path that the processor at hand can run, the best last. Where there are tiles, the first call asks the
    /// operating system for them, for the whole process.
    pub fn available() -> &'static [Self] {
        static FOUND: OnceLock<Vec<Isa>> = OnceLock::new();
        FOUND.get_or_init(|| Self::ALL.into_iter().filter(|path| path.runs_here()).collect())
    }

    fn runs_here(self) -> bool {
        match self {
            Self::Portable => true,
            Self::Neon => cfg!(target_arch = "aarch64"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.runs_here()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Amx => {
                Self::Avx512.runs_here()
                    && is_x86_feature_detected!("avx512bf16")
                    && super::gemm::tiles_permitted()
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 | Self::Amx => false,
        }
    }
}

/// Declares a function whose body is compiled once a path; the first argument of a call is the pool's path.
macro_rules! each_isa {
    ($(#[$meta:meta])* $visibility:vis fn $name:ident $(<$($generic:ident),+>)? ($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block) => {
        $(#[$meta])*
        $visibility fn $name $(<$($generic: ::zeroth_kernel::Element),+>)? (path: $crate::Isa, $($argument: $type),*) $(-> $result)? {
            // Inlined into each caller below, it is compiled with that caller's instructions.
            #[inline(always)]
            fn body $(<$($generic: ::zeroth_kernel::Element),+>)? ($($argument: $type),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512 $(<$($generic: ::zeroth_kernel::Element),+>)? ($($argument: $type),*) $(-> $result)? {
                body($($argument),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2 $(<$($generic: ::zeroth_kernel::Element),+>)? ($($argument: $type),*) $(-> $result)? {
                body($($argument),*)
            }

            match path {
                #[cfg(target_arch = "x86_64")]
                #[allow(unsafe_code, reason = "the compiler cannot know what was detected")]
                // SAFETY: a pool takes a path only when `Isa::available` has found its instructions.
                $crate::Isa::Avx512 | $crate::Isa::Amx => unsafe { avx512($($argument),*) },
                #[cfg(target_arch = "x86_64")]
                #[allow(unsafe_code, reason = "the compiler cannot know what was detected")]
                // SAFETY: as above.
                $crate::Isa::Avx2 => unsafe { avx2($($argument),*) },
                _ => body($($argument),*),
            }
        }
    };
}

pub(super) use each_isa;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_chosen_by_its_name_and_what_is_missing_is_said() {
        assert_eq!(Isa::named("portable"), Ok(Isa::Portable));
        assert_eq!(Isa::named(""), Ok(Isa::detect()));
        let unknown = Isa::named("avx").unwrap_err().to_string();
        assert!(unknown.contains("`avx`") && unknown.contains(Isa::detect().name()), "{unknown}");
        let foreign = if cfg!(target_arch = "aarch64") { "AVX512" } else { "NEON" };
        let missing = Isa::named(foreign).unwrap_err().to_string();
        assert!(missing.contains("cannot run") && missing.contains("portable"), "{missing}");
    }

    #[test]
    fn every_path_of_this_machine_can_be_named() {
        for &path in Isa::available() {
            assert_eq!(Isa::named(path.name()), Ok(path));
        }
    }
}
