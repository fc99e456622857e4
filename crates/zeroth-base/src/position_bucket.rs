//! Buckets of relative positions, as T5 has them.

/// How distances between a query and a key share the rows of a learned table: short ones have a row each, longer ones share rows
/// on a logarithmic scale, and all from `max_distance` on share one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PositionBuckets {
    /// Rows of the table.
    pub buckets: u64,
    /// Distances from here on share the last bucket of their side.
    pub max_distance: u64,
    /// Whether keys after the query have buckets of their own (an encoder); else they share that of distance 0.
    pub bidirectional: bool,
}

impl PositionBuckets {
    /// The bucket of `distance`, the key's position less the query's.
    ///
    /// The logarithm is taken in f64, and a quotient within 1e-6 of a whole number is that number, so that every device finds the
    /// bucket that PyTorch's f32 arithmetic finds.
    pub fn of(self, distance: i64) -> u64 {
        let (side, buckets) =
            if self.bidirectional { (distance > 0, self.buckets / 2) } else { (false, self.buckets) };
        let first = if side { buckets } else { 0 };
        let far = if self.bidirectional { distance.unsigned_abs() } else { distance.min(0).unsigned_abs() };
        let exact = buckets / 2;
        if far < exact {
            return first + far;
        }
        let scale = (self.max_distance as f64 / exact as f64).ln();
        let quotient = (far as f64 / exact as f64).ln() / scale * (buckets - exact) as f64;
        let nearest = quotient.round();
        let whole = if (quotient - nearest).abs() < 1e-6 { nearest } else { quotient.floor() };
        first + (exact + whole as u64).min(buckets - 1)
    }

    /// Distances with an entry in a table by distance: from `-max_distance` to `max_distance`, beyond which nothing changes.
    pub const fn distances(self) -> u64 {
        2 * self.max_distance + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first distance of a bucket, and the bucket.
    type Run = (i64, u64);

    /// The distances from which on a bucket holds, up to twice the largest distance.
    ///
    /// transformers' `T5Attention._relative_position_bucket` in single precision, with `distance` its `relative_position` and `f` a
    /// rounding to f32:
    ///
    ///     n, first = buckets, 0
    ///     if bidirectional: n //= 2; first = n * (distance > 0); far = abs(distance)
    ///     else: far = -min(distance, 0)
    ///     exact = n // 2
    ///     quotient = f(f(log(f(far / exact)) / f(log(max_distance / exact))) * f(n - exact))
    ///     first + (far if far < exact else min(exact + int(quotient), n - 1))
    #[test]
    fn buckets_are_those_of_transformers() {
        let tables: [(u64, u64, bool, &[Run]); 4] = [
            (
                32,
                128,
                true,
                &[
                    (-256, 15),
                    (-90, 14),
                    (-63, 13),
                    (-45, 12),
                    (-31, 11),
                    (-22, 10),
                    (-15, 9),
                    (-11, 8),
                    (-7, 7),
                    (-6, 6),
                    (-5, 5),
                    (-4, 4),
                    (-3, 3),
                    (-2, 2),
                    (-1, 1),
                    (0, 0),
                    (1, 17),
                    (2, 18),
                    (3, 19),
                    (4, 20),
                    (5, 21),
                    (6, 22),
                    (7, 23),
                    (8, 24),
                    (12, 25),
                    (16, 26),
                    (23, 27),
                    (32, 28),
                    (46, 29),
                    (64, 30),
                    (91, 31),
                ],
            ),
            (
                32,
                128,
                false,
                &[
                    (-256, 31),
                    (-112, 30),
                    (-98, 29),
                    (-86, 28),
                    (-76, 27),
                    (-66, 26),
                    (-58, 25),
                    (-51, 24),
                    (-45, 23),
                    (-39, 22),
                    (-34, 21),
                    (-30, 20),
                    (-26, 19),
                    (-23, 18),
                    (-20, 17),
                    (-18, 16),
                    (-15, 15),
                    (-14, 14),
                    (-13, 13),
                    (-12, 12),
                    (-11, 11),
                    (-10, 10),
                    (-9, 9),
                    (-8, 8),
                    (-7, 7),
                    (-6, 6),
                    (-5, 5),
                    (-4, 4),
                    (-3, 3),
                    (-2, 2),
                    (-1, 1),
                    (0, 0),
                ],
            ),
            (8, 16, true, &[(-32, 3), (-5, 2), (-1, 1), (0, 0), (1, 5), (2, 6), (6, 7)]),
            (8, 16, false, &[(-32, 7), (-11, 6), (-7, 5), (-5, 4), (-3, 3), (-2, 2), (-1, 1), (0, 0)]),
        ];
        for (buckets, max_distance, bidirectional, runs) in tables {
            let table = PositionBuckets { buckets, max_distance, bidirectional };
            for distance in -2 * max_distance as i64..=2 * max_distance as i64 {
                let run = runs.partition_point(|(first, _)| *first <= distance) - 1;
                assert_eq!(table.of(distance), runs[run].1, "{table:?} at {distance}");
            }
            assert_eq!(table.of(i64::from(i32::MIN)), table.of(-(max_distance as i64)), "{table:?}");
            assert_eq!(table.of(i64::from(i32::MAX)), table.of(max_distance as i64), "{table:?}");
        }
    }
}
