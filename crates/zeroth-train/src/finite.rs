//! Numbers that are none: looked for where weights and moments leave for the disk.

/// Values that are looked at before the search may end: the loop over them has no branch.
const BLOCK: usize = 1 << 10;
/// The exponent of f32: all of its bits are set in an infinity and in what is not a number.
const EXPONENT: u32 = 0x7f80_0000;

/// The place of the first value that is not finite.
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
    fn the_first_of_them_is_found_wherever_it_is() {
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
