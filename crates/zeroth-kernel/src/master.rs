//! Master weights beside weights in bf16: f32 numbers, in one of two forms that hold the same values.
//!
//! A weight in bf16 is the upper half of its master weight's bits, rounded; what it lacks are 16 bits, the rest, which are
//! added to its own as a signed number. An even weight stands for 65,537 numbers, from halfway below to halfway above it, one
//! more than 16 bits tell apart: so a master weight halfway above an even weight is put one unit below that, whichever its form is.

#![allow(clippy::inline_always, reason = "a loop over them becomes vector code only where they are inlined")]

use half::bf16;

/// How master weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MasterForm {
    /// As f32.
    F32,
    /// As the rest, of 16 bits, beside the weight in bf16.
    LowBits,
}

impl MasterForm {
    /// Bytes of an element.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::LowBits => 2,
        }
    }
}

/// A master weight as both forms hold it.
#[inline(always)]
pub const fn canonical_master(master: f32) -> f32 {
    let bits = master.to_bits();
    // Halfway above an even weight: 16 bits that say one half, and none before them.
    let halfway = bits & 0x1_ffff == 0x8000;
    f32::from_bits(bits.wrapping_sub(halfway as u32))
}

/// What a settled master weight is beside its weight.
#[inline(always)]
pub const fn low_bits(master: f32, weight: bf16) -> i16 {
    master.to_bits().wrapping_sub((weight.to_bits() as u32) << 16) as i16
}

/// A weight and the rest: the master weight.
#[inline(always)]
pub const fn join_low_bits(weight: bf16, rest: i16) -> f32 {
    f32::from_bits(((weight.to_bits() as u32) << 16).wrapping_add(rest as u32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Element;

    #[test]
    fn every_rest_of_many_weights_comes_back_and_only_halves_above_even_ones_move() {
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
    fn what_is_infinite_stays_and_what_is_no_number_stays_none() {
        for endless in [f32::INFINITY, f32::NEG_INFINITY] {
            let weight = <bf16 as Element>::from_f32(canonical_master(endless));
            assert_eq!(join_low_bits(weight, low_bits(canonical_master(endless), weight)), endless);
        }
        for bits in [0x7fc0_0000u32, 0x7f80_0001, 0x7f80_8000, 0x7fff_ffff, 0xffff_8000, 0xff80_0001] {
            let master = canonical_master(f32::from_bits(bits));
            let weight = <bf16 as Element>::from_f32(master);
            assert!(master.is_nan() && join_low_bits(weight, low_bits(master, weight)).is_nan(), "{bits:#x}");
        }
    }
}
