//! A tile: the states of some elements, brought to the device for their update in one buffer.

use zeroth_kernel::Tier;

use super::Program;
use super::place::ALIGNMENT;

/// Where the parts of a tile begin in its buffer, in bytes; none for what it has not.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileParts {
    pub(super) gradient: Option<u64>,
    pub(super) master: u64,
    pub(super) first: Option<u64>,
    pub(super) second: Option<u64>,
    pub(super) bytes: u64,
}

impl TileParts {
    pub(super) fn of(program: &Program, flat: usize, elements: u64) -> Self {
        let mut bytes = 0;
        let mut part = |size: u64| {
            let at = bytes;
            bytes += (elements * size).next_multiple_of(ALIGNMENT);
            at
        };
        let (_, gradient_type, _) = program.complete_gradient(flat, 0);
        let on_host = program.held[flat].gradients == Tier::Host;
        let [has_first, has_second] = program.optimizer.moments();
        let moment = program.moments.bytes();
        let gradient = on_host.then(|| part(gradient_type.bytes()));
        let master = part(4);
        let (first, second) = (has_first.then(|| part(moment)), has_second.then(|| part(moment)));
        Self { gradient, master, first, second, bytes }
    }
}
