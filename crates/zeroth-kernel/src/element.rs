//! The number types that activations and weights are stored in. Arithmetic is in f32 always.

use half::{bf16, f16};
use zeroth_base::DType;

/// A stored number: read as f32, written rounded to the nearest, ties to even.
pub trait Element: bytemuck::Pod + Default + Send + Sync {
    /// The name of this type on disk and in a config.
    const DTYPE: DType;
    /// The value, exactly.
    fn to_f32(self) -> f32;
    /// The nearest stored value. A NaN stays a NaN.
    fn from_f32(value: f32) -> Self;
}

/// Whether a number is infinite or none, without a branch.
#[inline(always)]
pub fn is_nonfinite<T: Element>(value: T) -> bool {
    /// The exponent of infinity and NaN.
    const ENDLESS: u32 = 0x7f80_0000;
    value.to_f32().to_bits() & ENDLESS == ENDLESS
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

    // Without a branch, so that loops over it become vector code.
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet = (bits >> 16) | 0x40;
        Self::from_bits(if value.is_nan() { quiet } else { rounded } as u16)
    }
}

// Our own conversions, without a branch: a loop over them becomes vector code on every path, which an instruction that
// converts four or eight numbers at a time would have to be written out for.
impl Element for f16 {
    const DTYPE: DType = DType::F16;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        /// 2^-14, the smallest normal f16. Its bits are those of exponent 1 with the exponent's offset of f32.
        const NORMAL: f32 = 6.103_515_6e-5;
        let bits = u32::from(self.to_bits());
        let digits = (bits & 0x7fff) << 13;
        let exponent = digits & 0x0f80_0000;
        // The offset of the exponent is 15 here and 127 there; infinity and NaN have the largest one of either.
        let normal = digits + (112 << 23);
        let endless = digits + (224 << 23);
        let subnormal = f32::from_bits(digits + (113 << 23)) - NORMAL;
        let magnitude = match exponent {
            0x0f80_0000 => endless,
            0 => subnormal.to_bits(),
            _ => normal,
        };
        f32::from_bits(magnitude | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        /// Added to a number below 2^-14 it leaves, rounded, multiples of 2^-24 in the lowest bits.
        const SHIFT: f32 = 0.5;
        let bits = value.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let odd = (magnitude >> 13) & 1;
        // 65,520 and above round up to what is infinity in f16.
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
    fn f16_agrees_with_the_half_crate_around_every_value() {
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
    fn rounding_agrees_with_the_half_crate_around_every_bf16() {
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
    fn a_stored_value_survives_the_way_through_f32() {
        for bits in 0..=u16::MAX {
            let stored = bf16::from_bits(bits);
            if !stored.is_nan() {
                assert_eq!(<bf16 as Element>::from_f32(Element::to_f32(stored)).to_bits(), bits);
            }
        }
    }
}
