//! `place`: an offset for every buffer, and the waits that reuse of memory needs.
//!
//! A buffer lives from the first instruction of the list that touches it to the last. Two buffers whose lives do not
//! meet may share memory; where they do and run on different queues, the later one's first instruction waits for all
//! that touched the earlier one: then what is apart in the list is apart in time.

use std::ops::RangeInclusive;

use super::waits::{self, Waits};
use super::{Buffer, Section};

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
    let mut order: Vec<usize> = (0..buffers.len()).collect();
    order.sort_by_key(|index| {
        (std::cmp::Reverse(buffers[*index].buffer.bytes), *buffers[*index].life.start(), *index)
    });
    let mut offsets = vec![0; buffers.len()];
    let mut placed: Vec<usize> = Vec::with_capacity(buffers.len()); // by offset
    let mut end = 0;
    for index in order {
        let Passing { buffer, life, .. } = &buffers[index];
        let meets = |other: &Passing| other.life.start() <= life.end() && life.start() <= other.life.end();
        let mut offset = 0;
        for other in placed.iter().filter(|other| meets(&buffers[**other])) {
            if offset + buffer.bytes <= offsets[*other] {
                break;
            }
            offset = offset.max(offsets[*other] + buffers[*other].buffer.bytes);
        }
        offsets[index] = offset;
        end = end.max(offset + buffer.bytes);
        let at = placed.partition_point(|other| offsets[*other] <= offset);
        placed.insert(at, index);
    }
    (offsets, end)
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
