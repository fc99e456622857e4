//! bf16 in AVX-512: loads, stores and conversions shared by the row kernels, 16 f32 per vector.
//!
//! A kernel written with these functions converts 32 bf16 (one cache line) with one instruction, where the portable loops
//! spend more time on conversions than on memory.
//!
//! VCVTNE2PS2BF16 rounds to nearest even but treats subnormal inputs as zero. On [`Isa::Amx`] that is the defined result: AMX
//! flushes subnormals too. On [`Isa::Avx512`] the bits must not depend on whether the CPU has the instruction, so a line that
//! holds a subnormal is rounded in integers, with the bits of [`Element::from_f32`]. See [`Subnormals`].
#![allow(unsafe_code, reason = "vector loads and stores take pointers")]

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _CMP_UNORD_Q, _MM_HINT_T0, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32,
    _mm_movehl_ps, _mm_prefetch, _mm_shuffle_ps, _mm256_add_ps, _mm256_castps256_ps128,
    _mm256_extractf128_ps, _mm256_loadu_si256, _mm256_storeu_si256, _mm512_add_epi32, _mm512_and_si512,
    _mm512_castps_si512, _mm512_castps512_ps256, _mm512_castsi256_si512, _mm512_castsi512_ps,
    _mm512_castsi512_si256, _mm512_cmp_ps_mask, _mm512_cvtepi16_epi32, _mm512_cvtepi32_epi16,
    _mm512_cvtepu16_epi32, _mm512_cvtne2ps_pbh, _mm512_extractf32x8_ps, _mm512_extracti64x4_epi64,
    _mm512_fpclass_ps_mask, _mm512_inserti64x4, _mm512_loadu_ps, _mm512_mask_or_epi32, _mm512_set1_epi32,
    _mm512_slli_epi32, _mm512_srli_epi32, _mm512_storeu_ps, _mm512_storeu_si512,
};

use zeroth_base::DType;
use zeroth_kernel::Element;

use super::isa::Isa;

/// f32 elements of a vector.
pub(super) const LANES: usize = 16;
/// bf16 elements of a cache line, converted together.
pub(super) const LINE: usize = 2 * LANES;
/// Bytes that [`prefetch`] runs ahead: the hardware prefetcher stops at the end of a 4 KiB page.
const PREFETCH_DISTANCE: usize = 4096;

/// How a conversion to bf16 treats subnormal numbers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Subnormals {
    /// They become zero.
    Flush,
    /// They are rounded as by [`Element::from_f32`].
    Keep,
}

impl Subnormals {
    /// The treatment under `isa`; `None` where `T` is not bf16 or the CPU does not convert to it.
    pub(super) fn of<T: Element>(isa: Isa) -> Option<Self> {
        match isa {
            _ if T::DTYPE != DType::Bf16 => None,
            Isa::Amx => Some(Self::Flush),
            Isa::Avx512 if is_x86_feature_detected!("avx512bf16") => Some(Self::Keep),
            _ => None,
        }
    }

    /// 32 f32 rounded to bf16.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    pub(super) fn narrow(self, values: [__m512; 2]) -> __m512i {
        // Class 0x20: subnormal. A normal f32 never rounds to a subnormal bf16.
        if self == Self::Keep && values.map(|values| _mm512_fpclass_ps_mask::<0x20>(values)) != [0; 2] {
            return narrow_with_subnormals(values);
        }
        // SAFETY: both are 512 bits.
        unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(values[1], values[0])) }
    }

    /// 32 f32 rounded to bf16 and widened again.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    pub(super) fn round(self, values: [__m512; 2]) -> [__m512; 2] {
        widen_line(self.narrow(values))
    }
}

#[cold]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn narrow_with_subnormals(values: [__m512; 2]) -> __m512i {
    let [low, high] = values.map(|values| _mm512_cvtepi32_epi16(nearest(values)));
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
}

/// 16 bf16 as f32.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load(from: &[u16; LANES]) -> __m512 {
    // SAFETY: the array is 256 bits.
    widen(_mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }))
}

/// 32 bf16 as f32.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load_line(from: &[u16; LINE]) -> [__m512; 2] {
    let (vectors, _) = from.as_chunks();
    [load(&vectors[0]), load(&vectors[1])]
}

/// Stores 32 bf16.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn store_line(line: __m512i, to: &mut [u16; LINE]) {
    // SAFETY: the array is 512 bits.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), line) }
}

/// Stores the low 16 bits of every lane.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn store_low_halves<T: bytemuck::Pod>(values: __m512i, to: &mut [T; LANES]) {
    const { assert!(size_of::<T>() == 2, "the low half of a lane is 16 bits") };
    // SAFETY: the array is 256 bits, and any bits are a value of its type.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(values)) }
}

/// 16 signed 16-bit integers, sign-extended.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load_i16(from: &[i16; LANES]) -> __m512i {
    // SAFETY: the array is 256 bits.
    _mm512_cvtepi16_epi32(unsafe { _mm256_loadu_si256(from.as_ptr().cast()) })
}

/// 16 f32.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load_f32(from: &[f32; LANES]) -> __m512 {
    // SAFETY: the array is 512 bits.
    unsafe { _mm512_loadu_ps(from.as_ptr()) }
}

/// Stores 16 f32.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn store_f32(values: __m512, to: &mut [f32; LANES]) {
    // SAFETY: the array is 512 bits.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), values) }
}

/// Prefetches the line a page after `from`, which need not be in the same allocation.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn prefetch<T>(from: &T) {
    let line = std::ptr::from_ref(from).wrapping_byte_add(PREFETCH_DISTANCE);
    _mm_prefetch::<_MM_HINT_T0>(line.cast());
}

/// bf16 in the low half of every lane, as f32.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn widen(halves: __m512i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves))
}

/// 32 bf16 as f32.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn widen_line(line: __m512i) -> [__m512; 2] {
    [_mm512_castsi512_si256(line), _mm512_extracti64x4_epi64::<1>(line)]
        .map(|half| widen(_mm512_cvtepu16_epi32(half)))
}

/// The nearest bf16 in the low half of every lane, with the bits of [`Element::from_f32`] for subnormals too.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn nearest(values: __m512) -> __m512i {
    let bits = _mm512_castps_si512(values);
    let upper = _mm512_srli_epi32::<16>(bits);
    let odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    let bias = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd);
    let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, bias));
    let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
    _mm512_mask_or_epi32(rounded, is_nan, upper, _mm512_set1_epi32(0x40))
}

/// The sum of 16 lanes, in the order of [`super::math`].
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
pub(super) fn lane_sum(lanes: __m512) -> f32 {
    let eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps::<1>(lanes));
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    /// Rounds 32 numbers on a CPU that has the instruction.
    fn narrow(subnormals: Subnormals, values: [f32; LINE]) -> [u16; LINE] {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
        fn run(subnormals: Subnormals, values: [f32; LINE]) -> [u16; LINE] {
            let (vectors, _) = values.as_chunks();
            let mut line = [0; LINE];
            store_line(subnormals.narrow([load_f32(&vectors[0]), load_f32(&vectors[1])]), &mut line);
            line
        }
        // SAFETY: the caller has found the instructions.
        unsafe { run(subnormals, values) }
    }

    #[test]
    fn conversions_round_like_element_and_only_flush_drops_subnormals() {
        if Subnormals::of::<bf16>(Isa::Avx512).is_none() || !Isa::available().contains(&Isa::Avx512) {
            return;
        }
        let smallest = f32::MIN_POSITIVE;
        let numbers = [0.0, -0.0, 1.0, 1.003_906_2, 1.011_718_7, smallest, f32::MAX, f32::INFINITY, f32::NAN];
        let subnormal = [1e-40, -1e-40, smallest.next_down(), f32::from_bits(1), f32::from_bits(0x8000)];
        for number in numbers.into_iter().chain(subnormal) {
            // One lane of an otherwise normal line, in either half.
            for lane in [0, 21] {
                let mut values: [f32; LINE] = std::array::from_fn(|i| i as f32 - 7.3);
                values[lane] = number;
                let expected = values.map(|value| <bf16 as Element>::from_f32(value).to_bits());
                assert_eq!(narrow(Subnormals::Keep, values), expected, "{number:e} in lane {lane}");
                let mut flushed = expected;
                if number.is_subnormal() {
                    flushed[lane] &= 0x8000;
                }
                assert_eq!(narrow(Subnormals::Flush, values), flushed, "{number:e} in lane {lane}");
            }
        }
    }
}
