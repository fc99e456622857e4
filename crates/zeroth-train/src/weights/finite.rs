//! Finds non-finite values in weights and moments before they are written to disk.

/// Values checked per branch, so that the loop vectorises.
const BLOCK: usize = 1 << 10;
/// The exponent bits of f32: all set in infinities and NaNs.
const EXPONENT: u32 = 0x7f80_0000;

/// The index of the first non-finite value.
pub(crate) fn first_not_finite(values: &[f32]) -> Option<usize> {
    let is_broken = |value: &f32| value.to_bits() & EXPONENT == EXPONENT;
    let has_any = |block: &[f32]| block.iter().fold(false, |found, value| found | is_broken(value));
    let (block, values) = values.chunks(BLOCK).enumerate().find(|(_, block)| has_any(block))?;
    values.iter().position(is_broken).map(|place| block * BLOCK + place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_non_finite_value_is_found() {
        let mut values = vec![f32::MAX; 3 * BLOCK + 7];
        values[..3].copy_from_slice(&[f32::MIN, f32::MIN_POSITIVE / 2.0, -0.0]);
        assert_eq!(first_not_finite(&values), None);
        assert_eq!(first_not_finite(&[]), None);
        for value in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, BLOCK - 1, BLOCK, 3 * BLOCK + 6] {
                let mut values = values.clone();
                values[place] = value;
                assert_eq!(first_not_finite(&values), Some(place));
                *values.last_mut().unwrap() = f32::NAN;
                assert_eq!(first_not_finite(&values), Some(place));
            }
        }
    }
}
