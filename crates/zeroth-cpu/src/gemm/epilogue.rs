//! What becomes of the sums of a product.

/// Columns of a row of two AMX tiles.
pub(crate) const LINE: usize = 32;

/// Takes sums, a piece of a row at a time. A trait and no closure: it has to be compiled into the loops of the kernels, with
/// their instructions, and the compiler stops doing that to a closure that many places call.
pub(crate) trait Store<O> {
    /// Whether it reads what is there.
    const READS: bool = false;

    /// Takes the sums of a row from column `first` of the matrix on; `out` is their place.
    fn row(&self, first: usize, sums: &[f32], out: &mut [O]);

    /// The same of a whole row of two tiles, whose sums are never subnormal. It is for vectors written out: a loop over slices
    /// that is compiled into another one becomes none, because the compiler no longer knows that they lie apart.
    #[inline(always)]
    fn line(&self, first: usize, sums: &[f32; LINE], out: &mut [O; LINE]) {
        self.row(first, sums, out);
    }
}

/// A closure, where speed is not all.
pub(super) struct Each<F>(pub(super) F);

impl<O, F: Fn(usize, &[f32], &mut [O])> Store<O> for Each<F> {
    // It may, and where it does results are f32.
    const READS: bool = size_of::<O>() == size_of::<f32>();

    #[inline(always)]
    fn row(&self, first: usize, sums: &[f32], out: &mut [O]) {
        (self.0)(first, sums, out);
    }

    #[cfg(target_arch = "x86_64")]
    #[allow(unsafe_code, reason = "the compiler cannot know what was detected")]
    #[inline(always)]
    fn line(&self, first: usize, sums: &[f32; LINE], out: &mut [O; LINE]) {
        // SAFETY: a machine with tiles has AVX-512.
        unsafe { call_avx512(&self.0, first, sums, out) }
    }
}

/// A closure on its own, where the compiler makes vectors of it.
#[cfg(target_arch = "x86_64")]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn call_avx512<O>(
    store: &impl Fn(usize, &[f32], &mut [O]),
    first: usize,
    sums: &[f32; LINE],
    out: &mut [O; LINE],
) {
    store(first, sums, out);
}

#[cfg(target_arch = "x86_64")]
pub(crate) use lines::Line;

/// A row of two tiles in registers, for [`Store::line`].
#[cfg(target_arch = "x86_64")]
#[allow(
    unsafe_code,
    reason = "vector instructions take pointers, and whoever calls them has looked for them"
)]
mod lines {
    use std::arch::x86_64::{
        __m512, __m512bh, __m512i, _mm256_loadu_epi16, _mm512_add_ps, _mm512_and_si512, _mm512_castps_si512,
        _mm512_castsi512_ps, _mm512_cmpeq_epi16_mask, _mm512_cmpeq_epi32_mask, _mm512_cvtepu16_epi32,
        _mm512_cvtne2ps_pbh, _mm512_loadu_ps, _mm512_set1_epi16, _mm512_set1_epi32, _mm512_setzero_ps,
        _mm512_slli_epi32, _mm512_storeu_ps, _mm512_storeu_si512,
    };

    use zeroth_base::DType;

    use super::LINE;
    use zeroth_kernel::Element;

    /// A row of two tiles. All functions are for machines with tiles, which have AVX-512 and its conversions to bf16.
    #[derive(Clone, Copy)]
    pub(crate) struct Line([__m512; 2]);

    impl Line {
        #[inline(always)]
        pub(crate) fn of(sums: &[f32; LINE]) -> Self {
            let start = sums.as_ptr();
            // SAFETY: 32 numbers; the machine has the instructions.
            unsafe { Self([_mm512_loadu_ps(start), _mm512_loadu_ps(start.add(16))]) }
        }

        /// Each number and the one in its place.
        #[inline(always)]
        pub(crate) fn plus(self, other: Self) -> Self {
            let ([a, b], [c, d]) = (self.0, other.0);
            // SAFETY: as above.
            unsafe { Self([_mm512_add_ps(a, c), _mm512_add_ps(b, d)]) }
        }

        /// Each number and 0, which makes -0 to 0.
        #[inline(always)]
        pub(crate) fn plus_zero(self) -> Self {
            // SAFETY: as above.
            self.plus(unsafe { Self([_mm512_setzero_ps(); 2]) })
        }

        /// What is stored, if it is f32 or bf16.
        #[inline(always)]
        pub(crate) fn read<T: Element>(from: &[T; LINE]) -> Option<Self> {
            let start = from.as_ptr();
            // SAFETY: 32 numbers of the type that was asked for; as above.
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

        /// Writes the numbers, if `T` is f32 or bf16; whether one of them is not finite. Rounded as [`Element::from_f32`] does
        /// it, but for subnormal numbers, which become 0.
        #[inline(always)]
        pub(crate) fn write<T: Element>(self, to: &mut [T; LINE]) -> Option<bool> {
            let (start, [a, b]) = (to.as_mut_ptr(), self.0);
            // SAFETY: 32 numbers of the type that was asked for; as above. Both vectors are 512 bits.
            unsafe {
                match T::DTYPE {
                    DType::F32 => {
                        _mm512_storeu_ps(start.cast(), a);
                        _mm512_storeu_ps(start.cast::<f32>().add(16), b);
                        let endless = _mm512_set1_epi32(0x7f80_0000);
                        let found = [a, b].map(|half| {
                            let exponent = _mm512_and_si512(_mm512_castps_si512(half), endless);
                            _mm512_cmpeq_epi32_mask(exponent, endless)
                        });
                        Some(found[0] | found[1] != 0)
                    }
                    DType::Bf16 => {
                        let bits = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(b, a));
                        _mm512_storeu_si512(start.cast(), bits);
                        let endless = _mm512_set1_epi16(0x7f80);
                        Some(_mm512_cmpeq_epi16_mask(_mm512_and_si512(bits, endless), endless) != 0)
                    }
                    DType::F16 => None,
                }
            }
        }
    }
}
