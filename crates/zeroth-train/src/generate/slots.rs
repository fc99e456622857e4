//! Cache slots of the beams of one source. A slot holds the keys and values of one sequence. A beam goes where most of its tokens
//! are cached, and only the others are fed: nothing in the cache is ever copied.

/// What a beam feeds: its slot, and how many of its tokens are there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Placed {
    pub(super) slot: usize,
    pub(super) cached: usize,
}

/// Chooses a slot for each sequence, the longest common prefixes first. `slots` has the tokens in each, and takes those of its
/// sequence. At least the last token of a sequence is fed, for its logits.
pub(super) fn place(sequences: &[Vec<i32>], slots: &mut [Vec<i32>]) -> Vec<Placed> {
    let shared = |one: &[i32], other: &[i32]| {
        let common = one.iter().zip(other).take_while(|(one, other)| one == other).count();
        common.min(one.len().saturating_sub(1))
    };
    let mut pairs: Vec<(usize, usize, usize)> = Vec::with_capacity(sequences.len() * slots.len());
    for (sequence, ids) in sequences.iter().enumerate() {
        pairs.extend(slots.iter().enumerate().map(|(slot, held)| (shared(ids, held), sequence, slot)));
    }
    pairs.sort_by_key(|(shared, sequence, slot)| (std::cmp::Reverse(*shared), *sequence, *slot));
    let mut placed: Vec<Option<Placed>> = vec![None; sequences.len()];
    let mut taken = vec![false; slots.len()];
    for (cached, sequence, slot) in pairs {
        if placed[sequence].is_none() && !taken[slot] {
            placed[sequence] = Some(Placed { slot, cached });
            taken[slot] = true;
        }
    }
    let placed: Vec<Placed> = placed.into_iter().flatten().collect();
    for (Placed { slot, .. }, ids) in placed.iter().zip(sequences) {
        slots[*slot].clone_from(ids);
    }
    placed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beams_go_where_most_of_them_is_cached() {
        let mut slots = vec![vec![0, 5, 6], vec![0, 5, 7], vec![0, 8, 9]];
        // Two continue the first, one the second; the third beam has died.
        let sequences = [vec![0, 5, 6, 1], vec![0, 5, 6, 2], vec![0, 5, 7, 3]];
        let placed = place(&sequences, &mut slots);
        assert_eq!(
            placed,
            [Placed { slot: 0, cached: 3 }, Placed { slot: 2, cached: 1 }, Placed { slot: 1, cached: 3 }]
        );
        assert_eq!(slots, [sequences[0].clone(), sequences[2].clone(), sequences[1].clone()]);
        // The last token is fed even where it is cached.
        assert_eq!(place(&[vec![0, 5, 6, 1]], &mut slots), [Placed { slot: 0, cached: 3 }]);
        assert_eq!(place(&[vec![0]], &mut [Vec::new(), Vec::new()]), [Placed { slot: 0, cached: 0 }]);
    }
}
