//! The number types that activations and weights are stored in. Arithmetic is in f32 always.

use half::bf16;
use zeroth_base::DType;

/// A stored number: read as f32, written rounded to the nearest, ties to even.
pub trait Element: Copy + Default + Send + Sync + 'static {
    /// The name of this type on disk and in a config.
    const DTYPE: DType;
    /// The value, exactly.
    fn to_f32(self) -> f32;
    /// The nearest stored value. A NaN stays a NaN.
    fn from_f32(value: f32) -> Self;
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

#[cfg(test)]
mod tests {
    use super::*;

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
