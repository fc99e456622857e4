//! Storage types of activations and weights. Arithmetic is always in f32.

use half::{bf16, f16};
use zeroth_base::DType;

/// A storage type: loaded as f32, stored rounded to nearest even.
pub trait Element: bytemuck::Pod + Default + Send + Sync {
    /// The dtype.
    const DTYPE: DType;
    /// The exact value.
    fn to_f32(self) -> f32;
    /// The nearest stored value. NaN stays NaN.
    fn from_f32(value: f32) -> Self;
}

/// Whether a value is infinite or NaN, without a branch.
#[inline(always)]
pub fn is_nonfinite<T: Element>(value: T) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    value.to_f32().to_bits() & EXPONENT == EXPONENT
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Element for bf16 {
    const DTYPE: DType = DType::Bf16;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    // Branch-free, so that loops over it vectorize.
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet = (bits >> 16) | 0x40;
        Self::from_bits(if value.is_nan() { quiet } else { rounded } as u16)
    }
}

// Branch-free conversions, so that loops over them vectorize on every ISA without intrinsics.
impl Element for f16 {
    const DTYPE: DType = DType::F16;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        /// 2^-14, the smallest normal f16.
        const NORMAL: f32 = 6.103_515_6e-5;
        let bits = u32::from(self.to_bits());
        let digits = (bits & 0x7fff) << 13;
        let exponent = digits & 0x0f80_0000;
        // The exponent bias is 15 in f16 and 127 in f32; infinity and NaN have the largest exponent in both.
        let normal = digits + (112 << 23);
        let infinite = digits + (224 << 23);
        let subnormal = f32::from_bits(digits + (113 << 23)) - NORMAL;
        let magnitude = match exponent {
            0x0f80_0000 => infinite,
            0 => subnormal.to_bits(),
            _ => normal,
        };
        f32::from_bits(magnitude | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        /// Added to a number below 2^-14, it rounds to multiples of 2^-24 in the low bits.
        const SHIFT: f32 = 0.5;
        let bits = value.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let odd = (magnitude >> 13) & 1;
        // 65,520 and above round to infinity.
        let normal = magnitude.wrapping_add(0xfff + odd).wrapping_sub(112 << 23) >> 13;
        let subnormal = (f32::from_bits(magnitude) + SHIFT).to_bits().wrapping_sub(SHIFT.to_bits());
        let quiet = 0x7e00 | ((magnitude >> 13) & 0x3ff);
        let near = if magnitude < 113 << 23 { subnormal } else { normal };
        let near = if magnitude >= 143 << 23 { 0x7c00 } else { near };
        let near = if value.is_nan() { quiet } else { near };
        Self::from_bits((near | (bits >> 16) & 0x8000) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f16_conversions_match_the_half_crate_around_every_value() {
        for bits in 0..=u16::MAX {
            let (stored, exact) = (f16::from_bits(bits), f16::from_bits(bits).to_f32_const());
            let wide = Element::to_f32(stored);
            assert!(wide.to_bits() == exact.to_bits() || wide.is_nan() && exact.is_nan(), "{bits:#x}");
            let halfway = |next: f16| (f64::midpoint(exact.into(), next.to_f64_const())) as f32;
            let next = f16::from_bits(bits.wrapping_add(1));
            for value in [exact, halfway(next), halfway(next).next_up(), halfway(next).next_down()] {
                let expected = f16::from_f32_const(value).to_bits();
                assert_eq!(<f16 as Element>::from_f32(value).to_bits(), expected, "{value:?}");
            }
        }
        for exponent in 0..=255u32 {
            for digits in [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x3000, 0x7f_ffff, 0x7f_efff] {
                let value = f32::from_bits(exponent << 23 | digits);
                let expected = f16::from_f32_const(value).to_bits();
                assert_eq!(<f16 as Element>::from_f32(value).to_bits(), expected, "{value:?}");
                assert_eq!(<f16 as Element>::from_f32(-value).to_bits(), expected | 0x8000, "-{value:?}");
            }
        }
    }

    #[test]
    fn f16_overflows_to_infinity_at_65520() {
        assert_eq!(<f16 as Element>::from_f32(65_519.996).to_bits(), 0x7bff);
        assert_eq!(<f16 as Element>::from_f32(65_520.0).to_bits(), 0x7c00);
        assert_eq!(<f16 as Element>::from_f32(-1e30).to_bits(), 0xfc00);
    }

    #[test]
    fn bf16_rounding_matches_the_half_crate_around_every_value() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits((u32::from(high) << 16) | low);
                assert_eq!(
                    <bf16 as Element>::from_f32(value).to_bits(),
                    bf16::from_f32(value).to_bits(),
                    "{value:?}"
                );
            }
        }
    }

    #[test]
    fn every_bf16_round_trips_through_f32() {
        for bits in 0..=u16::MAX {
            let stored = bf16::from_bits(bits);
            if !stored.is_nan() {
                assert_eq!(<bf16 as Element>::from_f32(Element::to_f32(stored)).to_bits(), bits);
            }
        }
    }
}
