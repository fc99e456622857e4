//! Instruction sets of this CPU that kernels use.

use std::fmt;

use serde::Serialize;

/// Instruction sets that are present and enabled by the operating system.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct InstructionSets {
    /// AMX with bf16 tiles.
    pub amx_bf16: bool,
    /// The CPU has AMX, but the operating system does not enable it.
    pub amx_not_enabled: bool,
    /// AVX-512 with the F, BW, DQ and VL parts.
    pub avx512: bool,
    /// AVX-512 BF16.
    pub avx512_bf16: bool,
    /// AVX2 with FMA.
    pub avx2: bool,
    /// Arm NEON.
    pub neon: bool,
}

/// The ISA of the CPU kernels, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelIsa {
    /// AMX bf16 tiles for matmuls, AVX-512 for all else.
    Amx,
    /// AVX-512.
    Avx512,
    /// AVX2 with FMA.
    Avx2,
    /// Arm NEON.
    Neon,
    /// The compiler's baseline.
    Portable,
}

impl fmt::Display for KernelIsa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Amx => "AMX bf16 tiles",
            Self::Avx512 => "AVX-512",
            Self::Avx2 => "AVX2",
            Self::Neon => "NEON",
            Self::Portable => "portable",
        })
    }
}

impl InstructionSets {
    /// The best ISA that these instruction sets allow.
    pub fn kernels(self) -> KernelIsa {
        match self {
            Self { amx_bf16: true, avx512: true, .. } => KernelIsa::Amx,
            Self { avx512: true, .. } => KernelIsa::Avx512,
            Self { avx2: true, .. } => KernelIsa::Avx2,
            Self { neon: true, .. } => KernelIsa::Neon,
            _ => KernelIsa::Portable,
        }
    }

    #[cfg(target_arch = "x86_64")]
    /// Detects them on this CPU.
    pub fn detect() -> Self {
        use std::arch::is_x86_feature_detected as has;
        let amx = amx_bf16_in_cpuid();
        let amx_enabled = xcr0().is_some_and(enables_amx);
        Self {
            amx_bf16: amx && amx_enabled,
            amx_not_enabled: amx && !amx_enabled,
            avx512: has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl"),
            avx512_bf16: has!("avx512bf16"),
            avx2: has!("avx2") && has!("fma"),
            neon: false,
        }
    }

    #[cfg(target_arch = "aarch64")]
    /// Detects them on this CPU.
    pub fn detect() -> Self {
        Self { neon: std::arch::is_aarch64_feature_detected!("neon"), ..Self::default() }
    }

    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    /// Detects them on this CPU.
    pub fn detect() -> Self {
        Self::default()
    }
}

/// Leaf 7 of CPUID, register EDX: bit 22 is AMX-BF16, bit 24 AMX-TILE. The standard library's detection of AMX is
/// not stable yet.
#[cfg(target_arch = "x86_64")]
fn amx_bf16_in_cpuid() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const AMX: u32 = 1 << 22 | 1 << 24;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & AMX == AMX
}

/// XCR0, the register states that the operating system saves, where programs may read it.
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "reading XCR0 is one instruction that has no safe form")]
fn xcr0() -> Option<u64> {
    const OSXSAVE: u32 = 1 << 27;
    if std::arch::x86_64::__cpuid(1).ecx & OSXSAVE == 0 {
        return None;
    }
    // SAFETY: OSXSAVE means that XGETBV is present and enabled; register 0 always exists.
    Some(unsafe { std::arch::x86_64::_xgetbv(0) })
}

/// AMX needs the tile configuration (bit 17) and tile data (bit 18) to be saved. On Linux a process must also request permission
/// before its first tile instruction, which the kernels do.
#[cfg(target_arch = "x86_64")]
fn enables_amx(xcr0: u64) -> bool {
    const TILE_STATE: u64 = 1 << 17 | 1 << 18;
    xcr0 & TILE_STATE == TILE_STATE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_isa_is_chosen_and_amx_needs_avx512() {
        let none = InstructionSets::default();
        assert_eq!(none.kernels(), KernelIsa::Portable);
        assert_eq!(InstructionSets { neon: true, ..none }.kernels(), KernelIsa::Neon);
        let avx2 = InstructionSets { avx2: true, ..none };
        assert_eq!(avx2.kernels(), KernelIsa::Avx2);
        assert_eq!(InstructionSets { amx_bf16: true, ..avx2 }.kernels(), KernelIsa::Avx2);
        let avx512 = InstructionSets { avx512: true, ..avx2 };
        assert_eq!(avx512.kernels(), KernelIsa::Avx512);
        assert_eq!(InstructionSets { amx_bf16: true, ..avx512 }.kernels(), KernelIsa::Amx);
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn amx_is_enabled_with_both_xcr0_bits() {
        assert!(enables_amx(0x6_02e7), "Sapphire Rapids on Linux 6");
        assert!(!enables_amx(0x2e7), "the same without AMX");
        assert!(!enables_amx(0x2_02e7), "configuration without data");
    }

    /// Linux lists in cpuinfo what it found and enabled by its own code.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn instruction_sets_match_proc_cpuinfo() {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let flags = cpuinfo.lines().find_map(|line| line.strip_prefix("flags")).unwrap();
        let flags: Vec<&str> = flags.trim_start_matches([' ', '\t', ':']).split(' ').collect();
        let has = |names: &[&str]| names.iter().all(|name| flags.contains(name));
        let found = InstructionSets::detect();
        assert_eq!(found.amx_bf16, has(&["amx_tile", "amx_bf16"]));
        assert_eq!(found.avx512, has(&["avx512f", "avx512bw", "avx512dq", "avx512vl"]));
        assert_eq!(found.avx512_bf16, has(&["avx512_bf16"]));
        assert_eq!(found.avx2, has(&["avx2", "fma"]));
    }
}
