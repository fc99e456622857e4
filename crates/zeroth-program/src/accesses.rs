//! Buffer accesses of a section's instructions.

use zeroth_kernel::Access;

use super::buffer::BufferId;

/// The buffer accesses of each instruction of a section.
pub(super) type Accesses = Vec<Vec<(BufferId, Access)>>;

/// A section before placement: the buffer accesses of its instructions, and their scratch sizes.
pub(super) struct SectionAccesses {
    pub(super) touches: Accesses,
    pub(super) scratch: Vec<u64>,
}
