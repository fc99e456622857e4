//! fp32 master weights of bf16 weights, stored as f32 or as low-order bits.
//!
//! A bf16 weight is its master weight rounded to the high 16 bits. The low-order form stores only the difference of the bits, a
//! signed 16-bit number. 65,537 f32 values round to an even bf16, one more than 16 bits distinguish: so a master weight exactly
//! halfway above an even bf16 is moved down by one ulp, in both forms. See [`canonical_master`].

#![allow(clippy::inline_always, reason = "a loop over them becomes vector code only where they are inlined")]

use half::bf16;

/// How master weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MasterForm {
    /// f32 values.
    F32,
    /// The low-order 16 bits; the bf16 weights hold the high-order bits.
    LowBits,
}

impl MasterForm {
    /// Bytes per element.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::LowBits => 2,
        }
    }
}

/// The nearest master weight that both forms can hold.
#[inline(always)]
pub const fn canonical_master(master: f32) -> f32 {
    let bits = master.to_bits();
    // Halfway above an even bf16: the low 17 bits are exactly one half.
    let halfway = bits & 0x1_ffff == 0x8000;
    f32::from_bits(bits.wrapping_sub(halfway as u32))
}

/// The low-order bits of a canonical master weight whose bf16 is `weight`.
#[inline(always)]
pub const fn low_bits(master: f32, weight: bf16) -> i16 {
    master.to_bits().wrapping_sub((weight.to_bits() as u32) << 16) as i16
}

/// The master weight of a bf16 weight and its low-order bits.
#[inline(always)]
pub const fn join_low_bits(weight: bf16, low_bits: i16) -> f32 {
    f32::from_bits(((weight.to_bits() as u32) << 16).wrapping_add(low_bits as u32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Element;

    #[test]
    fn low_bits_round_trip_and_only_halves_above_even_weights_move() {
        for upper in [0u32, 1, 2, 0x7f, 0x80, 0x3f80, 0x3f81, 0x7f7e, 0x7f7f, 0x8000, 0x8001, 0xbf80, 0xff7f]
        {
            for lower in 0..=0xffff {
                let given = f32::from_bits(upper << 16 | lower);
                let master = canonical_master(given);
                let moved = lower == 0x8000 && upper.is_multiple_of(2);
                assert_eq!(master.to_bits(), given.to_bits() - u32::from(moved), "{given:?}");
                let weight = <bf16 as Element>::from_f32(given);
                assert_eq!(weight, <bf16 as Element>::from_f32(master), "it moves no weight: {given:?}");
                let back = join_low_bits(weight, low_bits(master, weight));
                assert_eq!(back.to_bits(), master.to_bits(), "{given:?}");
            }
        }
    }

    #[test]
    fn infinities_round_trip_and_nan_stays_nan() {
        for infinite in [f32::INFINITY, f32::NEG_INFINITY] {
            let weight = <bf16 as Element>::from_f32(canonical_master(infinite));
            assert_eq!(join_low_bits(weight, low_bits(canonical_master(infinite), weight)), infinite);
        }
        for bits in [0x7fc0_0000u32, 0x7f80_0001, 0x7f80_8000, 0x7fff_ffff, 0xffff_8000, 0xff80_0001] {
            let master = canonical_master(f32::from_bits(bits));
            let weight = <bf16 as Element>::from_f32(master);
            assert!(master.is_nan() && join_low_bits(weight, low_bits(master, weight)).is_nan(), "{bits:#x}");
        }
    }
}
