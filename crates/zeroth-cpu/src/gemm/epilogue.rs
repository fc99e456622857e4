//! GEMM epilogues: rounding, bias, accumulation and checks on the f32 accumulators of C.

/// Columns of a full row of an AMX C tile.
pub(crate) const WIDE_ROW: usize = 32;

/// Stores rows of a C tile. It is a trait, not a closure, so that it is inlined into the loops of the kernels and compiled with
/// their target features; the compiler stops inlining a closure that is called from many places.
pub(crate) trait Epilogue<O> {
    /// Whether the epilogue reads the output.
    const READS_OUTPUT: bool = false;

    /// Stores accumulators to `out`, which starts at column `first` of the matrix.
    fn store_row(&self, first: usize, acc: &[f32], out: &mut [O]);

    /// [`Epilogue::store_row`] for a full row of an AMX C tile, whose accumulators are never subnormal. Implementations use
    /// intrinsics: a loop over slices is not vectorized when it is inlined, because the compiler cannot prove that the slices
    /// do not overlap.
    #[inline(always)]
    fn store_wide_row(&self, first: usize, acc: &[f32; WIDE_ROW], out: &mut [O; WIDE_ROW]) {
        self.store_row(first, acc, out);
    }
}

/// A closure as an epilogue, for GEMMs that are not on the critical path.
pub(super) struct ClosureEpilogue<F>(pub(super) F);

impl<O, F: Fn(usize, &[f32], &mut [O])> Epilogue<O> for ClosureEpilogue<F> {
    // A closure may read the output, and those that do write f32.
    const READS_OUTPUT: bool = size_of::<O>() == size_of::<f32>();

    #[inline(always)]
    fn store_row(&self, first: usize, acc: &[f32], out: &mut [O]) {
        (self.0)(first, acc, out);
    }

    #[cfg(target_arch = "x86_64")]
    #[allow(unsafe_code, reason = "calls functions compiled for instructions found at run time")]
    #[inline(always)]
    fn store_wide_row(&self, first: usize, acc: &[f32; WIDE_ROW], out: &mut [O; WIDE_ROW]) {
        // SAFETY: AMX implies AVX-512.
        unsafe { call_avx512(&self.0, first, acc, out) }
    }
}

/// Calls the closure in a function of its own, where the compiler vectorizes it.
#[cfg(target_arch = "x86_64")]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn call_avx512<O>(
    epilogue: &impl Fn(usize, &[f32], &mut [O]),
    first: usize,
    acc: &[f32; WIDE_ROW],
    out: &mut [O; WIDE_ROW],
) {
    epilogue(first, acc, out);
}

#[cfg(target_arch = "x86_64")]
pub(crate) use wide::F32x32;

/// A full row of an AMX C tile in registers, for [`Epilogue::store_wide_row`].
#[cfg(target_arch = "x86_64")]
#[allow(
    unsafe_code,
    reason = "vector instructions take pointers and need target features that the caller has"
)]
mod wide {
    use std::arch::x86_64::{
        __m512, __m512bh, __m512i, _mm256_loadu_epi16, _mm512_add_ps, _mm512_and_si512, _mm512_castps_si512,
        _mm512_castsi512_ps, _mm512_cmpeq_epi16_mask, _mm512_cmpeq_epi32_mask, _mm512_cvtepu16_epi32,
        _mm512_cvtne2ps_pbh, _mm512_loadu_ps, _mm512_mul_ps, _mm512_set1_epi16, _mm512_set1_ps, _mm512_set1_epi32, _mm512_setzero_ps,
        _mm512_slli_epi32, _mm512_storeu_ps, _mm512_storeu_si512,
    };

    use zeroth_base::DType;

    use super::WIDE_ROW;
    use zeroth_kernel::Element;

    /// 32 f32 in two vector registers. The methods require AMX, which implies AVX-512 and its bf16 conversions.
    #[derive(Clone, Copy)]
    pub(crate) struct F32x32([__m512; 2]);

    impl F32x32 {
        #[inline(always)]
        pub(crate) fn load(acc: &[f32; WIDE_ROW]) -> Self {
            let start = acc.as_ptr();
            // SAFETY: 32 elements; the CPU has the instructions.
            unsafe { Self([_mm512_loadu_ps(start), _mm512_loadu_ps(start.add(16))]) }
        }

        /// Elementwise sum.
        #[inline(always)]
        pub(crate) fn add(self, other: Self) -> Self {
            let ([a, b], [c, d]) = (self.0, other.0);
            // SAFETY: as in `load`.
            unsafe { Self([_mm512_add_ps(a, c), _mm512_add_ps(b, d)]) }
        }

        /// Every element times a scale.
        #[inline(always)]
        pub(crate) fn times(self, scale: f32) -> Self {
            // SAFETY: as in `load`.
            unsafe {
                let ([a, b], scale) = (self.0, _mm512_set1_ps(scale));
                Self([_mm512_mul_ps(a, scale), _mm512_mul_ps(b, scale)])
            }
        }

        /// Adds 0, which turns -0 into 0.
        #[inline(always)]
        pub(crate) fn add_zero(self) -> Self {
            // SAFETY: as in `load`.
            self.add(unsafe { Self([_mm512_setzero_ps(); 2]) })
        }

        /// Loads f32 or bf16 elements; `None` for other types.
        #[inline(always)]
        pub(crate) fn widen<T: Element>(from: &[T; WIDE_ROW]) -> Option<Self> {
            let start = from.as_ptr();
            // SAFETY: 32 elements of the matched type; the CPU has the instructions.
            unsafe {
                match T::DTYPE {
                    DType::F32 => {
                        let start = start.cast::<f32>();
                        Some(Self([_mm512_loadu_ps(start), _mm512_loadu_ps(start.add(16))]))
                    }
                    DType::Bf16 => {
                        let half = |at: usize| {
                            let bits = _mm256_loadu_epi16(start.cast::<i16>().add(at));
                            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
                        };
                        Some(Self([half(0), half(16)]))
                    }
                    DType::F16 => None,
                }
            }
        }

        /// Stores f32 or bf16 elements and returns whether one of them is not finite; `None` for other types. Rounds as
        /// [`Element::from_f32`], except that subnormals become 0.
        #[inline(always)]
        pub(crate) fn store<T: Element>(self, to: &mut [T; WIDE_ROW]) -> Option<bool> {
            let (start, [a, b]) = (to.as_mut_ptr(), self.0);
            // SAFETY: 32 elements of the matched type; the CPU has the instructions. Both vectors are 512 bits.
            unsafe {
                match T::DTYPE {
                    DType::F32 => {
                        _mm512_storeu_ps(start.cast(), a);
                        _mm512_storeu_ps(start.cast::<f32>().add(16), b);
                        let infinite = _mm512_set1_epi32(0x7f80_0000);
                        let found = [a, b].map(|half| {
                            let exponent = _mm512_and_si512(_mm512_castps_si512(half), infinite);
                            _mm512_cmpeq_epi32_mask(exponent, infinite)
                        });
                        Some(found[0] | found[1] != 0)
                    }
                    DType::Bf16 => {
                        let bits = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(b, a));
                        _mm512_storeu_si512(start.cast(), bits);
                        let infinite = _mm512_set1_epi16(0x7f80);
                        Some(_mm512_cmpeq_epi16_mask(_mm512_and_si512(bits, infinite), infinite) != 0)
                    }
                    DType::F16 => None,
                }
            }
        }
    }
}
