//! The exact sum of squares of the gradient norm: independent of the ranks and of the order of additions.

/// Elements of a block, whose squares are summed in f64 before they are added to an [`ExactSum`].
pub const BLOCK: usize = 2048;

/// A fixed-point accumulator of block sums: 640 bits in units of 2^-300, enough for 2^50 blocks of the largest f32.
///
/// Ranks exchange it as bytes and merge in any order.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct ExactSum {
    /// Little-endian limbs.
    limbs: [u64; 10],
    /// Not 0 once an infinite or NaN sum was added.
    found_inf: u64,
}

const UNIT: i32 = -300;

impl ExactSum {
    /// Adds the sum of one block.
    pub fn add(&mut self, sum: f64) {
        if !(sum.is_finite() && sum >= 0.0) {
            self.found_inf = 1;
            return;
        }
        let exponent = (sum.to_bits() >> 52) as i32;
        if exponent == 0 {
            return;
        }
        let mut digits = (sum.to_bits() & ((1 << 52) - 1)) | (1 << 52);
        let mut place = exponent - 1075 - UNIT;
        if place < 0 {
            // Squares of f32 are multiples of 2^-298, and so are their sums: the bits shifted out are zero.
            digits = digits.checked_shr(place.unsigned_abs()).unwrap_or(0);
            place = 0;
        }
        let mut other = [0; 10];
        let limb = place as usize / 64;
        let wide = u128::from(digits) << (place % 64);
        if limb + 1 >= other.len() {
            self.found_inf = 1;
            return;
        }
        other[limb] = wide as u64;
        other[limb + 1] = (wide >> 64) as u64;
        self.merge(&Self { limbs: other, found_inf: 0 });
    }

    /// Adds another sum.
    pub fn merge(&mut self, other: &Self) {
        let mut carry = false;
        for (limb, &added) in self.limbs.iter_mut().zip(&other.limbs) {
            let (sum, first) = limb.overflowing_add(added);
            let (sum, second) = sum.overflowing_add(u64::from(carry));
            *limb = sum;
            carry = first || second;
        }
        self.found_inf |= other.found_inf | u64::from(carry);
    }

    /// The sum as f64; `None` where an infinite or NaN sum was added.
    pub fn total(&self) -> Option<f64> {
        let mut total = 0.0;
        for (place, &limb) in self.limbs.iter().enumerate() {
            let power = (64 * place as i64 + i64::from(UNIT) + 1023) as u64;
            total += limb as f64 * f64::from_bits(power << 52);
        }
        (self.found_inf == 0).then_some(total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_grouping_do_not_change_the_sum() {
        let sums: Vec<f64> = (0..500).map(|i| (f64::from(i) * 0.37 + 0.1).powi(i % 40 - 20)).collect();
        let mut forward = ExactSum::default();
        for &sum in &sums {
            forward.add(sum);
        }
        let mut parts = [ExactSum::default(); 3];
        for (i, &sum) in sums.iter().enumerate().rev() {
            parts[i * 7 % 3].add(sum);
        }
        let mut joined = parts[2];
        joined.merge(&parts[0]);
        joined.merge(&parts[1]);
        assert_eq!(joined, forward);
        let plain: f64 = sums.iter().sum();
        assert!((forward.total().unwrap() - plain).abs() <= 1e-14 * plain);
    }

    #[test]
    fn the_smallest_and_the_largest_squares_are_both_exact() {
        let mut sum = ExactSum::default();
        let tiny = f64::from(f32::from_bits(1)).powi(2);
        sum.add(tiny);
        assert_eq!(sum.total(), Some(tiny));
        let huge = f64::from(f32::MAX).powi(2) * BLOCK as f64;
        sum.add(huge);
        assert_eq!(sum.total(), Some(huge));
        let mut only_huge = ExactSum::default();
        only_huge.add(huge);
        assert_ne!(sum, only_huge, "the small part must be kept");
    }
}
