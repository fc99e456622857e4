//! `place`: an offset for every buffer, and the waits that reuse of memory needs.
//!
//! A buffer lives from the first instruction of the list that touches it to the last. Two buffers whose lives do not
//! meet may share memory; where they do and run on different queues, the later one's first instruction waits for all
//! that touched the earlier one: then what is apart in the list is apart in time.

use std::ops::RangeInclusive;

use super::waits::{self, Waits};
use super::{Buffer, Content, Section};

/// Offsets are multiples of this: a cache line of any device, and a vector of any instruction set.
pub(super) const ALIGNMENT: u64 = 256;

/// A buffer that comes and goes: its life in the list, and who touches it.
#[derive(Debug, Clone)]
pub(super) struct Passing {
    pub(super) buffer: Buffer,
    pub(super) life: RangeInclusive<usize>,
    pub(super) touched_by: Vec<usize>,
}

/// Offsets so that no two buffers that live at the same time overlap, and the largest end. The largest are placed first,
/// each as low as it fits: small ones fill what is left between them.
pub(super) fn place(buffers: &[Passing]) -> (Vec<u64>, u64) {
    let slot = slot_of_tiles(buffers);
    let room = |passing: &Passing| {
        if is_tile(passing) { slot.max(passing.buffer.bytes) } else { passing.buffer.bytes }
    };
    let mut order: Vec<usize> = (0..buffers.len()).collect();
    order.sort_by_key(|index| {
        (std::cmp::Reverse(room(&buffers[*index])), *buffers[*index].life.start(), *index)
    });
    let mut offsets = vec![0; buffers.len()];
    let mut placed: Vec<usize> = Vec::with_capacity(buffers.len()); // by offset
    let mut end = 0;
    for index in order {
        let (life, bytes) = (&buffers[index].life, room(&buffers[index]));
        let meets = |other: &Passing| other.life.start() <= life.end() && life.start() <= other.life.end();
        let mut offset = 0;
        for other in placed.iter().filter(|other| meets(&buffers[**other])) {
            if offset + bytes <= offsets[*other] {
                break;
            }
            offset = offset.max(offsets[*other] + room(&buffers[*other]));
        }
        offsets[index] = offset;
        end = end.max(offset + bytes);
        let at = placed.partition_point(|other| offsets[*other] <= offset);
        placed.insert(at, index);
    }
    (offsets, end)
}

fn is_tile(passing: &Passing) -> bool {
    matches!(passing.buffer.content, Content::Tile(_))
}

/// The room that each tile of states takes: where they come one after the other, that of the largest, so that each finds
/// the place of one that has gone, whatever flat that was of. Tiles of one flat do not fill the places of another's, and
/// what sticks out would lie where the next forward begins. 0 where all are there at the same time.
fn slot_of_tiles(buffers: &[Passing]) -> u64 {
    let tiles = || buffers.iter().filter(|passing| is_tile(passing));
    let last_begin = tiles().map(|tile| *tile.life.start()).max();
    let first_end = tiles().map(|tile| *tile.life.end()).min();
    if first_end >= last_begin { 0 } else { tiles().map(|tile| tile.buffer.bytes).max().unwrap_or(0) }
}

/// Adds the waits that sharing of memory needs.
pub(super) fn guard_reuse(section: &Section, buffers: &[Passing], offsets: &[u64], waits: &mut Waits) {
    if !waits::has_company(section) {
        return;
    }
    let mut order: Vec<usize> = (0..buffers.len()).filter(|index| buffers[*index].buffer.bytes > 0).collect();
    order.sort_by_key(|index| offsets[*index]);
    for (place, a) in order.iter().enumerate() {
        let end = offsets[*a] + buffers[*a].buffer.bytes;
        for b in order[place + 1..].iter().take_while(|b| offsets[**b] < end) {
            let (a, b) = (&buffers[*a], &buffers[*b]);
            let (earlier, later) = if a.life.end() < b.life.start() { (a, b) } else { (b, a) };
            for touch in &earlier.touched_by {
                waits::add(section, waits, *later.life.start(), *touch);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use zeroth_kernel::Tier;

    use super::super::Category;
    use super::*;

    /// Tiles that come one after the other, `room` at a time.
    fn tiles(sizes: &[u64], room: usize) -> Vec<Passing> {
        let tile = |(at, bytes): (usize, &u64)| Passing {
            buffer: Buffer {
                content: Content::Tile(at),
                category: Category::Buffers,
                tier: Tier::Device,
                bytes: *bytes,
            },
            life: at..=at + room - 1,
            touched_by: vec![at, at + room - 1],
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
