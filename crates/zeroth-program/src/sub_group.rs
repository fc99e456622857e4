//! A sub-group: the optimizer states of a range of elements, streamed to the device in one buffer.

use zeroth_kernel::MOMENTS;

use super::Program;
use crate::memory::buffer::ALIGNMENT;

/// Byte offsets of a sub-group's parts in its buffer; `None` for parts it does not have.
#[derive(Debug, Clone, Copy)]
pub(super) struct SubGroupLayout {
    pub(super) gradient: Option<u64>,
    pub(super) master: u64,
    pub(super) moments: [Option<u64>; MOMENTS],
    pub(super) bytes: u64,
}

impl SubGroupLayout {
    pub(super) fn of(program: &Program, flat: usize, elements: u64) -> Self {
        let mut bytes = 0;
        let mut part = |size: u64| {
            let at = bytes;
            bytes += (elements * size).next_multiple_of(ALIGNMENT);
            at
        };
        let (_, gradient_type, _) = program.reduced_gradient(flat, 0);
        let on_host = program.residency[flat].gradients.is_offloaded();
        let moment = program.moment_dtype.bytes();
        let gradient = on_host.then(|| part(gradient_type.bytes()));
        let master = part(4);
        let moments = program.optimizer.each_moment(|_| part(moment));
        Self { gradient, master, moments, bytes }
    }
}
