//! TransferRounds of a collective: counts of MPI are C ints, so that many bytes are moved piece by piece.

use std::ffi::c_int;
use std::ops::Range;

/// The pieces of a collective, equal on all ranks.
#[derive(Debug, Clone, Copy)]
pub(super) struct TransferRounds {
    /// Bytes of the largest piece of a part.
    piece: usize,
    /// Buffers up to this length are described by displacements.
    reach: usize,
}

impl TransferRounds {
    /// TransferRounds of at most 1 GiB in total over `world` parts.
    pub(super) fn new(world: usize) -> Self {
        Self { piece: ((1 << 30) / world).max(1), reach: c_int::MAX as usize }
    }

    /// TransferRounds and reach of a few bytes, for tests.
    #[cfg(test)]
    pub(super) fn of(piece: usize, reach: usize) -> Self {
        Self { piece, reach }
    }

    /// Whether a displacement in a buffer of `bytes` is a C int. Elsewhere parts are sent one by one.
    pub(super) fn reaches(self, bytes: usize) -> bool {
        bytes <= self.reach
    }

    /// The number of rounds; at least one, so that every rank takes part.
    pub(super) fn count(self, counts: &[usize]) -> usize {
        counts.iter().copied().max().unwrap_or(0).div_ceil(self.piece).max(1)
    }

    /// The range of a part of `bytes` that a round moves.
    pub(super) fn range(self, bytes: usize, round: usize) -> Range<usize> {
        (round * self.piece).min(bytes)..((round + 1) * self.piece).min(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_cover_every_part_once_and_fit_c_ints() {
        let rounds = TransferRounds::new(3);
        let counts = [5 << 30, 0, 7];
        let mut moved = [0; 3];
        for round in 0..rounds.count(&counts) {
            let mut total = 0;
            for (count, moved) in counts.iter().zip(&mut moved) {
                let range = rounds.range(*count, round);
                assert_eq!(range.start, *moved);
                *moved = range.end;
                total += range.len();
            }
            assert!(total <= 1 << 30);
        }
        assert_eq!(moved, counts);
        assert_eq!(rounds.count(&[0, 0, 0]), 1);
        assert!(rounds.reaches(i32::MAX as usize) && !rounds.reaches(1 << 31));
    }
}
