//! Buffer placement: an offset for every transient buffer, and the waits that memory reuse needs.
//!
//! A buffer lives from the first instruction that accesses it to the last. Buffers with disjoint lifetimes may share
//! memory. Where they run on different queues, the later one's first instruction waits for every access to the earlier
//! one, so that order in the list is order in time.

use std::ops::RangeInclusive;

use super::waits::{self, Waits};
use super::{Buffer, BufferId, Section};

/// A transient buffer: its lifetime in the list and the instructions that access it.
#[derive(Debug, Clone)]
pub(super) struct TransientBuffer {
    pub(super) buffer: Buffer,
    pub(super) lifetime: RangeInclusive<usize>,
    pub(super) accessed_by: Vec<usize>,
}

/// First-fit placement, largest buffers first: returns the offsets and the end of the last buffer. Buffers that are
/// live at the same time do not overlap.
pub(super) fn place(buffers: &[TransientBuffer]) -> (Vec<u64>, u64) {
    let slot = slot_of_tiles(buffers);
    let room = |passing: &TransientBuffer| {
        if is_tile(passing) { slot.max(passing.buffer.bytes) } else { passing.buffer.bytes }
    };
    let mut order: Vec<usize> = (0..buffers.len()).collect();
    order.sort_by_key(|index| {
        (std::cmp::Reverse(room(&buffers[*index])), *buffers[*index].lifetime.start(), *index)
    });
    let mut offsets = vec![0; buffers.len()];
    // By offset: the offset, the end, and the first and last instruction, side by side for the scan.
    let mut placed: Vec<(u64, u64, usize, usize)> = Vec::with_capacity(buffers.len());
    let mut end = 0;
    for index in order {
        let (lifetime, bytes) = (&buffers[index].lifetime, room(&buffers[index]));
        let (first, last) = (*lifetime.start(), *lifetime.end());
        let mut offset = 0;
        for (at, until, begin, finish) in &placed {
            if *begin > last || first > *finish {
                continue;
            }
            if offset + bytes <= *at {
                break;
            }
            offset = offset.max(*until);
        }
        offsets[index] = offset;
        end = end.max(offset + bytes);
        let at = placed.partition_point(|(other, ..)| *other <= offset);
        placed.insert(at, (offset, offset + bytes, first, last));
    }
    (offsets, end)
}

fn is_tile(passing: &TransientBuffer) -> bool {
    matches!(passing.buffer.id, BufferId::SubGroup(_))
}

/// The bytes that every sub-group buffer takes. Sub-groups that follow each other all take the size of the largest, so
/// that each reuses the memory of an earlier one, of whichever flat; otherwise what sticks out would overlap the next
/// forward. 0 where all are live at once.
fn slot_of_tiles(buffers: &[TransientBuffer]) -> u64 {
    let tiles = || buffers.iter().filter(|passing| is_tile(passing));
    let last_begin = tiles().map(|tile| *tile.lifetime.start()).max();
    let first_end = tiles().map(|tile| *tile.lifetime.end()).min();
    if first_end >= last_begin { 0 } else { tiles().map(|tile| tile.buffer.bytes).max().unwrap_or(0) }
}

/// Adds the waits that memory reuse needs.
pub(super) fn guard_reuse(
    section: &Section,
    buffers: &[TransientBuffer],
    offsets: &[u64],
    waits: &mut Waits,
) {
    if !waits::has_company(section) {
        return;
    }
    let mut order: Vec<usize> = (0..buffers.len()).filter(|index| buffers[*index].buffer.bytes > 0).collect();
    order.sort_by_key(|index| offsets[*index]);
    for (place, a) in order.iter().enumerate() {
        let end = offsets[*a] + buffers[*a].buffer.bytes;
        for b in order[place + 1..].iter().take_while(|b| offsets[**b] < end) {
            let (a, b) = (&buffers[*a], &buffers[*b]);
            let (earlier, later) = if a.lifetime.end() < b.lifetime.start() { (a, b) } else { (b, a) };
            for touch in &earlier.accessed_by {
                waits::add(section, waits, *later.lifetime.start(), *touch);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use zeroth_kernel::Tier;

    use super::super::Category;
    use super::*;

    /// Sub-groups that follow each other, `room` at a time.
    fn tiles(sizes: &[u64], room: usize) -> Vec<TransientBuffer> {
        let tile = |(at, bytes): (usize, &u64)| TransientBuffer {
            buffer: Buffer {
                id: BufferId::SubGroup(at),
                category: Category::Buffers,
                tier: Tier::Device,
                bytes: *bytes,
            },
            lifetime: at..=at + room - 1,
            accessed_by: vec![at, at + room - 1],
        };
        sizes.iter().enumerate().map(tile).collect()
    }

    #[test]
    fn tiles_of_several_sizes_take_no_more_than_their_room() {
        for [outer, inner] in [[33, 32], [32, 33], [40, 33], [5, 33]] {
            let sizes = [[outer; 4].as_slice(), &[inner; 20], &[outer; 4]].concat();
            for room in [1, 2, 5, 8] {
                let (_, end) = place(&tiles(&sizes, room));
                assert_eq!(end, room as u64 * outer.max(inner), "{outer} {inner} {room}");
            }
        }
    }

    #[test]
    fn tiles_that_are_there_at_once_lie_end_to_end() {
        let sizes = [7, 40, 33, 1];
        let (offsets, end) = place(&tiles(&sizes, sizes.len()));
        assert_eq!((offsets, end), (vec![73, 0, 40, 80], 81));
    }
}
