//! The instruction path that kernels run on, and the macro that compiles one body for each path.
//!
//! Results are the same bits for one path. Between paths they may differ in the last place where a path has a fused
//! multiply-add and another has not. A new path (AMX tiles, NEON) is a new variant here and in `matmul`.

/// An instruction set that the kernels have code for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Path {
    /// What the compiler's target has.
    Portable,
    /// AVX2 with fused multiply-add.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl Path {
    /// The best path of the processor at hand.
    pub fn detect() -> Self {
        Self::available().last().copied().unwrap_or(Self::Portable)
    }

    /// Every path that the processor at hand can run, the best last.
    pub fn available() -> &'static [Self] {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                &[Self::Portable, Self::Avx2, Self::Avx512]
            } else {
                &[Self::Portable, Self::Avx2]
            };
        }
        &[Self::Portable]
    }
}

/// Declares a function whose body is compiled once a path; the first argument of a call is the pool's path.
macro_rules! each_path {
    ($(#[$meta:meta])* $visibility:vis fn $name:ident $(<$($generic:ident),+>)? ($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block) => {
        $(#[$meta])*
        $visibility fn $name $(<$($generic: $crate::cpu::Element),+>)? (path: $crate::cpu::Path, $($argument: $type),*) $(-> $result)? {
            // Inlined into each caller below, it is compiled with that caller's instructions.
            #[inline(always)]
            fn body $(<$($generic: $crate::cpu::Element),+>)? ($($argument: $type),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512 $(<$($generic: $crate::cpu::Element),+>)? ($($argument: $type),*) $(-> $result)? {
                body($($argument),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2 $(<$($generic: $crate::cpu::Element),+>)? ($($argument: $type),*) $(-> $result)? {
                body($($argument),*)
            }

            match path {
                #[cfg(target_arch = "x86_64")]
                #[allow(unsafe_code, reason = "the compiler cannot know what was detected")]
                // SAFETY: a pool takes a path only when `Path::available` has found its instructions.
                $crate::cpu::Path::Avx512 => unsafe { avx512($($argument),*) },
                #[cfg(target_arch = "x86_64")]
                #[allow(unsafe_code, reason = "the compiler cannot know what was detected")]
                // SAFETY: as above.
                $crate::cpu::Path::Avx2 => unsafe { avx2($($argument),*) },
                _ => body($($argument),*),
            }
        }
    };
}

pub(super) use each_path;
