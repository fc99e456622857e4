//! Buffer placement: an offset for every transient buffer, and the waits that memory reuse needs.
//!
//! A buffer lives from the first instruction that accesses it to the last. Buffers with disjoint lifetimes may share
//! memory. Where they run on different queues, the later one's first instruction waits for every access to the earlier
//! one, so that order in the list is order in time.

use std::ops::RangeInclusive;

use zeroth_kernel::Queue;

use super::occupancy::{LastAccesses, Occupancy};
use super::waits::{self, Waits};
use crate::{Buffer, BufferId, Section};

/// A transient buffer: its lifetime in the list and the instructions that access it.
#[derive(Debug, Clone)]
pub(crate) struct TransientBuffer {
    pub(crate) buffer: Buffer,
    pub(crate) lifetime: RangeInclusive<usize>,
    pub(crate) accessed_by: Vec<usize>,
}

/// A buffer to be placed on an instruction list.
#[derive(Debug, Clone)]
pub(crate) struct Unplaced {
    pub(crate) id: BufferId,
    pub(crate) bytes: u64,
    pub(crate) lifetime: RangeInclusive<usize>,
}

/// First-fit placement, largest buffers first: returns the offsets and the end of the last buffer. Buffers that are
/// live at the same time do not overlap.
pub(crate) fn place(buffers: &[Unplaced]) -> (Vec<u64>, u64) {
    let slot = slot_of_tiles(buffers);
    let room = |buffer: &Unplaced| if is_tile(buffer) { slot.max(buffer.bytes) } else { buffer.bytes };
    let mut order: Vec<usize> = (0..buffers.len()).collect();
    order.sort_unstable_by_key(|index| {
        (std::cmp::Reverse(room(&buffers[*index])), *buffers[*index].lifetime.start(), *index)
    });
    let last = buffers.iter().map(|buffer| *buffer.lifetime.end()).max().unwrap_or(0);
    let mut occupancy = Occupancy::new(last + 1);
    let mut offsets = vec![0; buffers.len()];
    let mut end = 0;
    for index in order {
        let (lifetime, bytes) = (&buffers[index].lifetime, room(&buffers[index]));
        let offset = occupancy.first_fit(lifetime, bytes);
        occupancy.occupy(lifetime, offset..offset + bytes);
        offsets[index] = offset;
        end = end.max(offset + bytes);
    }
    (offsets, end)
}

fn is_tile(buffer: &Unplaced) -> bool {
    matches!(buffer.id, BufferId::SubGroup(_))
}

/// The bytes that every sub-group buffer takes. Sub-groups that follow each other all take the size of the largest, so
/// that each reuses the memory of an earlier one, of whichever flat; otherwise what sticks out would overlap the next
/// forward. 0 where all are live at once.
fn slot_of_tiles(buffers: &[Unplaced]) -> u64 {
    let tiles = || buffers.iter().filter(|buffer| is_tile(buffer));
    let last_begin = tiles().map(|tile| *tile.lifetime.start()).max();
    let first_end = tiles().map(|tile| *tile.lifetime.end()).min();
    if first_end >= last_begin { 0 } else { tiles().map(|tile| tile.bytes).max().unwrap_or(0) }
}

/// Adds the waits that memory reuse needs.
pub(crate) fn guard_reuse(
    section: &Section,
    buffers: &[&TransientBuffer],
    offsets: &[u64],
    waits: &mut Waits,
) {
    if !waits::has_company(section) {
        return;
    }
    let mut order: Vec<usize> = (0..buffers.len()).filter(|index| buffers[*index].buffer.bytes > 0).collect();
    // Buffers that share memory follow each other in time, so memory remembers its last accesses.
    order.sort_by_key(|index| *buffers[*index].lifetime.start());
    let mut memory = LastAccesses::default();
    for index in order {
        let buffer = buffers[index];
        let mut accesses = [None; Queue::ALL.len()];
        for &at in &buffer.accessed_by {
            accesses[section.instructions[at].queue as usize] = Some(at);
        }
        let range = offsets[index]..offsets[index] + buffer.buffer.bytes;
        let mut earlier: Vec<usize> = memory.replace(range, accesses).into_iter().flatten().collect();
        earlier.sort_unstable();
        for earlier in earlier {
            waits::add(section, waits, *buffer.lifetime.start(), earlier);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sub-groups that follow each other, `room` at a time.
    fn tiles(sizes: &[u64], room: usize) -> Vec<Unplaced> {
        let tile = |(at, bytes): (usize, &u64)| Unplaced {
            id: BufferId::SubGroup(at),
            bytes: *bytes,
            lifetime: at..=at + room - 1,
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
