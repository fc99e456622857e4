//! The instruction set that kernels run on, and the macro that compiles one function body for each.
//!
//! Results have the same bits on one instruction set. They may differ between two: in the last place, where only one has a
//! fused multiply-add, and by the rounding of an operand to bf16, where AMX multiplies an f32 matrix by a bf16 one (see
//! `gemm`).

use std::fmt;
use std::sync::OnceLock;

/// The environment variable that selects an instruction set.
const VARIABLE: &str = "ZEROTH_CPU";

/// An instruction set that kernels are written for, in ascending order of preference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// The baseline of the compiler's target.
    Portable,
    /// Arm NEON.
    Neon,
    /// AVX2 with FMA.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AMX for bf16 matmuls, AVX-512 with its bf16 conversions for everything else.
    Amx,
}

/// `ZEROTH_CPU` names an instruction set that is unknown or unavailable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum IsaError {
    #[error(
        "ZEROTH_CPU is `{found}`, which is not an instruction set; use amx, avx512, avx2, neon or portable, or \
         unset it for the best of this machine ({best})"
    )]
    Unknown { found: String, best: Isa },
    #[error(
        "ZEROTH_CPU is `{requested}`, which this machine cannot run; it supports {}. Use one of these, or unset it for \
         the last",
        names(Isa::available())
    )]
    Missing { requested: Isa },
}

impl From<IsaError> for zeroth_kernel::DeviceError {
    fn from(error: IsaError) -> Self {
        Self::Isa(error.to_string())
    }
}

fn names(isas: &[Isa]) -> String {
    let names: Vec<_> = isas.iter().map(|isa| isa.name()).collect();
    names.join(", ")
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Isa {
    /// Every instruction set that kernels are written for, on any CPU.
    const ALL: [Self; 5] = [Self::Portable, Self::Neon, Self::Avx2, Self::Avx512, Self::Amx];

    /// The name that `ZEROTH_CPU` takes.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
        }
    }

    /// The best instruction set of this CPU.
    pub fn detect() -> Self {
        Self::available().last().copied().unwrap_or(Self::Portable)
    }

    /// The instruction set that `ZEROTH_CPU` names, or the best one if it is unset.
    pub fn chosen() -> Result<Self, IsaError> {
        match std::env::var_os(VARIABLE) {
            None => Ok(Self::detect()),
            Some(value) => Self::parse(&value.to_string_lossy()),
        }
    }

    fn parse(value: &str) -> Result<Self, IsaError> {
        if value.is_empty() {
            return Ok(Self::detect());
        }
        let Some(requested) = Self::ALL.into_iter().find(|isa| isa.name().eq_ignore_ascii_case(value)) else {
            return Err(IsaError::Unknown { found: value.to_owned(), best: Self::detect() });
        };
        if Self::available().contains(&requested) {
            Ok(requested)
        } else {
            Err(IsaError::Missing { requested })
        }
    }

    /// Every instruction set that this CPU runs, best last. The first call requests permission to use AMX, for the whole
    /// process.
    pub fn available() -> &'static [Self] {
        static FOUND: OnceLock<Vec<Isa>> = OnceLock::new();
        FOUND.get_or_init(|| Self::ALL.into_iter().filter(|isa| isa.runs_here()).collect())
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
                Self::Avx512.runs_here() && is_x86_feature_detected!("avx512bf16") && amx_permitted()
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 | Self::Amx => false,
        }
    }
}

/// Whether the CPU has AMX-BF16 and the operating system lets this process use it. Linux requires a permission request.
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "a system call is one instruction that has no safe form")]
fn amx_permitted() -> bool {
    /// `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)` requests permission to use tile data.
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XFEATURE_XTILEDATA: i64 = 18;
    if !cfg!(target_os = "linux") || !super::InstructionSets::detect().amx_bf16 {
        return false;
    }
    let result: i64;
    // SAFETY: the system call writes no user memory; a kernel that does not know the request returns an error.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

/// Declares a function whose body is compiled once per instruction set; calls pass the pool's [`Isa`] first.
macro_rules! each_isa {
    ($(#[$meta:meta])* $visibility:vis fn $name:ident $(<$($generic:ident),+>)? ($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block) => {
        $(#[$meta])*
        $visibility fn $name $(<$($generic: ::zeroth_kernel::Element),+>)? (isa: $crate::Isa, $($argument: $type),*) $(-> $result)? {
            // Inlined into each function below, and so compiled with its target features.
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

            match isa {
                #[cfg(target_arch = "x86_64")]
                #[allow(unsafe_code, reason = "calls functions compiled for instructions found at run time")]
                // SAFETY: a pool has an instruction set only if `Isa::available` found it.
                $crate::Isa::Avx512 | $crate::Isa::Amx => unsafe { avx512($($argument),*) },
                #[cfg(target_arch = "x86_64")]
                #[allow(unsafe_code, reason = "calls functions compiled for instructions found at run time")]
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
    fn an_isa_is_selected_by_name_and_errors_name_the_alternatives() {
        assert_eq!(Isa::parse("portable"), Ok(Isa::Portable));
        assert_eq!(Isa::parse(""), Ok(Isa::detect()));
        let unknown = Isa::parse("avx").unwrap_err().to_string();
        assert!(unknown.contains("`avx`") && unknown.contains(Isa::detect().name()), "{unknown}");
        let foreign = if cfg!(target_arch = "aarch64") { "AVX512" } else { "NEON" };
        let missing = Isa::parse(foreign).unwrap_err().to_string();
        assert!(missing.contains("cannot run") && missing.contains("portable"), "{missing}");
    }

    #[test]
    fn every_available_isa_can_be_selected() {
        for &isa in Isa::available() {
            assert_eq!(Isa::parse(isa.name()), Ok(isa));
        }
    }
}
