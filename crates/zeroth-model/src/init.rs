//! New weights: every element is a function of (seed, name, element), so any rank makes any range alone, and the bits
//! do not depend on how a tensor is sharded.
//!
//! Normal numbers come from Philox by Box and Muller's method. Logarithm, sine and cosine of a platform's library
//! differ in their last bits from one platform to the next, so they are written out here in f32 with the operations
//! that IEEE rounds alike everywhere: addition, multiplication, division, square root; no fused multiply-add. They
//! are within 4 units in the last place of the true value.

use std::ops::Range;

use zeroth_base::philox4x32;

use crate::architecture::FamilyStacks;
use crate::{LoraInit, ModelConfig, Parameter, ParameterKind, t5};

/// The standard deviation of new weights where a config has no `initializer_range`, as in transformers.
pub const INITIALIZER_RANGE: f64 = 0.02;

/// The distribution of a parameter's new values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum NewValues {
    /// All of them this one.
    Constant(f32),
    /// Normal numbers of this standard deviation.
    Normal(f32),
    /// Those of an adapter: zeros for its outer matrix, uniform numbers up to 1/√in for its inner one (as PEFT).
    Adapter,
}

impl NewValues {
    /// Those of a decoder-only model: ones for norms, zeros for biases, and normal numbers for all else but adapters.
    pub const fn of(parameter: &Parameter, deviation: f32) -> Self {
        match parameter.kind {
            ParameterKind::Norm => Self::Constant(1.0),
            ParameterKind::Bias => Self::Constant(0.0),
            ParameterKind::LoraA | ParameterKind::LoraB => Self::Adapter,
            ParameterKind::Embedding
            | ParameterKind::PositionBias
            | ParameterKind::Linear
            | ParameterKind::Expert
            | ParameterKind::Router
            | ParameterKind::Head => Self::Normal(deviation),
        }
    }
}

impl ModelConfig {
    /// The distribution of a parameter's new values: that of transformers.
    pub fn new_values(&self, parameter: &Parameter) -> NewValues {
        let (deviation, norm_weight) = match &self.family.architecture().stack {
            FamilyStacks::Decoder(decoder) => (self.initializer_range as f32, decoder.norm_weight),
            FamilyStacks::EncoderDecoder(_) => {
                let deviation = t5::initial_deviation(self, parameter) as f32;
                (deviation, deviation)
            }
        };
        match parameter.kind {
            ParameterKind::Norm => NewValues::Constant(norm_weight),
            _ => NewValues::of(parameter, deviation),
        }
    }
}

/// Fills `out` with the new values of a range of a parameter's elements.
///
/// # Panics
///
/// If `out` does not hold exactly the range.
pub fn fill_new(seed: u64, values: NewValues, parameter: &Parameter, elements: Range<u64>, out: &mut [f32]) {
    assert_eq!(elements.end.checked_sub(elements.start), Some(out.len() as u64), "the buffer is the range");
    match values {
        NewValues::Constant(value) => out.fill(value),
        NewValues::Adapter => fill_adapter(seed, LoraInit::Kaiming, parameter, elements, out),
        NewValues::Normal(deviation) => {
            let stream = Stream::new(seed, &parameter.name);
            stream.fill(elements.start, out, |words| four_normals(words).map(|normal| deviation * normal));
        }
    }
}

/// Fills `out` with the initial values of a range of an adapter's elements, as PEFT draws them; zeros for its outer matrix.
pub fn fill_adapter(seed: u64, init: LoraInit, parameter: &Parameter, elements: Range<u64>, out: &mut [f32]) {
    if parameter.kind != ParameterKind::LoraA {
        out.fill(0.0);
        return;
    }
    let stream = Stream::new(seed, &parameter.name);
    match (init, parameter.shape.as_slice()) {
        (LoraInit::Kaiming, shape) => {
            let bound = 1.0 / (shape.last().copied().unwrap_or(1) as f32).sqrt();
            stream.fill(elements.start, out, |words| words.map(|word| bound * signed_unit(word)));
        }
        (LoraInit::Gaussian, shape) => {
            // The rank: [rank, in], and [experts, rank, in] of experts.
            let deviation = 1.0 / shape.iter().nth_back(1).copied().unwrap_or(1) as f32;
            stream.fill(elements.start, out, |words| four_normals(words).map(|normal| deviation * normal));
        }
    }
}

/// The random words of one tensor: four for every four elements.
struct Stream {
    key: [u32; 2],
    name: [u32; 2],
}

impl Stream {
    fn new(seed: u64, name: &str) -> Self {
        let halves = |value: u64| [value as u32, (value >> 32) as u32];
        Self { key: halves(seed), name: halves(fnv(name.as_bytes())) }
    }

    /// Fills `out` with elements from `start`, made four at a time from a block of words.
    fn fill(&self, start: u64, out: &mut [f32], make: impl Fn([u32; 4]) -> [f32; 4]) {
        let block = |index: u64| {
            let counter = [index as u32, (index >> 32) as u32, self.name[0], self.name[1]];
            make(philox4x32(counter, self.key))
        };
        // The first elements may be the end of a block.
        let skipped = (start % 4) as usize;
        let head_length = ((4 - skipped) % 4).min(out.len());
        let (head, rest) = out.split_at_mut(head_length);
        if !head.is_empty() {
            head.copy_from_slice(&block(start / 4)[skipped..skipped + head_length]);
        }
        let first = start.div_ceil(4);
        for (index, values) in (first..).zip(rest.chunks_mut(4)) {
            values.copy_from_slice(&block(index)[..values.len()]);
        }
    }
}

/// 64-bit FNV-1a: stable, and short enough to be written here.
fn fnv(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// 2^-32.
const WORD: f32 = 1.0 / 4_294_967_296.0;

/// A word as a number from -1 to 1.
fn signed_unit(word: u32) -> f32 {
    word.cast_signed() as f32 * (2.0 * WORD)
}

/// Four normal numbers from four words: each pair of words is a radius and an angle.
fn four_normals([a, b, c, d]: [u32; 4]) -> [f32; 4] {
    let (first, second) = two_normals(a, b);
    let (third, fourth) = two_normals(c, d);
    [first, second, third, fourth]
}

fn two_normals(radius: u32, angle: u32) -> (f32, f32) {
    // Half a step above the word: never zero, so the largest number is √(66 ln 2), 6.8.
    let uniform = (radius as f32 + 0.5) * WORD;
    let radius = (-2.0 * ln(uniform)).sqrt();
    let (sine, cosine) = sin_cos_of_turn(angle);
    (radius * cosine, radius * sine)
}

/// The natural logarithm of a normal number above zero.
fn ln(x: f32) -> f32 {
    // x = 2^exponent · m with m from √½ to √2, by the bits.
    let from_half_root = x.to_bits().wrapping_sub(std::f32::consts::FRAC_1_SQRT_2.to_bits()).cast_signed();
    let exponent = from_half_root >> 23;
    let m = f32::from_bits(x.to_bits().wrapping_sub((exponent << 23).cast_unsigned()));
    // ln m = 2 artanh((m - 1) / (m + 1)): the series of artanh, of which s^11 is below the last place.
    let s = (m - 1.0) / (m + 1.0);
    let square = s * s;
    let series = polynomial(square, &[1.0 / 9.0, 1.0 / 7.0, 0.2, 1.0 / 3.0]);
    let s2 = 2.0 * s;
    exponent as f32 * std::f32::consts::LN_2 + (s2 + s2 * (square * series))
}

/// Sine and cosine of an angle given as a part of a whole turn: 2^32 is all of it.
fn sin_cos_of_turn(angle: u32) -> (f32, f32) {
    // The nearest quarter turn, and what is left of it: from -1/8 to 1/8 of a turn.
    let quarter = angle.wrapping_add(1 << 29) >> 30;
    let left = (angle << 2).cast_signed() as f32 * WORD;
    let x = left * std::f32::consts::FRAC_PI_2;
    let square = x * x;
    // Taylor's series; the next terms are below the last place.
    let sine =
        x + x * (square * polynomial(square, &[1.0 / 362_880.0, -1.0 / 5040.0, 1.0 / 120.0, -1.0 / 6.0]));
    let cosine = 1.0
        + square * polynomial(square, &[-1.0 / 3_628_800.0, 1.0 / 40_320.0, -1.0 / 720.0, 1.0 / 24.0, -0.5]);
    match quarter {
        0 => (sine, cosine),
        1 => (cosine, -sine),
        2 => (-sine, -cosine),
        _ => (-cosine, sine),
    }
}

/// Horner's rule, from the highest coefficient down; each step rounds twice.
fn polynomial(x: f32, coefficients: &[f32]) -> f32 {
    coefficients.iter().fold(0.0, |sum, coefficient| sum * x + coefficient)
}

#[cfg(test)]
mod tests {
    use std::f64::consts::TAU;

    use super::*;

    /// Words that cover all magnitudes: powers of two, their neighbours, and a walk over the rest.
    fn words() -> impl Iterator<Item = u32> {
        let edges = (0..32).flat_map(|bit| {
            let power = 1_u32 << bit;
            [power - 1, power, power.wrapping_add(1), !power]
        });
        edges.chain((0..200_000_u32).map(|step| step.wrapping_mul(2_654_435_761)))
    }

    #[test]
    fn the_logarithm_is_right_to_four_units_in_the_last_place() {
        for word in words() {
            let x = (word as f32 + 0.5) * WORD;
            let (found, true_value) = (ln(x), f64::from(x).ln());
            let unit = (true_value.abs() * f64::from(f32::EPSILON)).max(1e-300);
            assert!(
                (f64::from(found) - true_value).abs() <= 4.0 * unit,
                "ln({x}) = {true_value}, not {found}"
            );
        }
    }

    #[test]
    fn sine_and_cosine_are_right_to_a_few_parts_in_ten_million() {
        for word in words() {
            let (sine, cosine) = sin_cos_of_turn(word);
            let angle = f64::from(word) / 4_294_967_296.0 * TAU;
            assert!((f64::from(sine) - angle.sin()).abs() < 1.5e-7, "sine of {angle}: {sine}");
            assert!((f64::from(cosine) - angle.cos()).abs() < 1.5e-7, "cosine of {angle}: {cosine}");
        }
    }

    #[test]
    fn the_hash_of_names_is_fnv() {
        // From the reference's own test vectors.
        assert_eq!(fnv(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv(b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn uniform_numbers_stay_within_one() {
        for word in words() {
            assert!(signed_unit(word).abs() <= 1.0);
        }
    }
}
