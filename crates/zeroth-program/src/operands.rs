//! Operands: the buffers that an instruction reads and writes.
//!
//! Which buffer an instruction accesses follows from the order of its section: a flat may be gathered several times, a value
//! recomputed or reloaded, a chunk packed by one instruction and reduced by another. Passes change the order, so the last
//! one, `operands`, walks every section once and gives each instruction its list. From then on nothing asks again: live
//! ranges and waits are derived from the list, lowering turns its entries into spans, dumps and traces print it.
//!
//! ```text
//! passes ─► operands ─► Instruction.operands ─┬─► live ranges, waits, waits across steps
//!                                             ├─► launches (an access beyond the list is a bug, and asserted)
//!                                             └─► dumps, traces
//! ```
//!
//! Two things are not in the list. Scratch has a size only once an instruction is lowered for a target; it belongs to one
//! instruction, so nothing waits for it. Optimizer states in host memory are accessed by sub-group: a
//! [`BufferId::HostStateToken`] stands for them, so that sub-groups of a flat do not wait for each other.

use std::fmt;

use zeroth_kernel::Access;

use super::BufferId;

/// The buffers of an instruction, in the order in which its lowering expects them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Operands {
    /// Buffers that it only reads. A value that is an operand twice is listed twice.
    pub reads: Vec<BufferId>,
    /// Buffers that it writes: overwrites, accumulates into, or updates in place.
    pub writes: Vec<BufferId>,
}

impl Operands {
    /// Every buffer with its access, reads first.
    pub fn accesses(&self) -> impl Iterator<Item = (BufferId, Access)> {
        let reads = self.reads.iter().map(|id| (*id, Access::Read));
        reads.chain(self.writes.iter().map(|id| (*id, Access::Write)))
    }

    /// The first buffer for which a function has a result, reads first.
    pub(super) fn find_map<T>(&self, of: impl FnMut(BufferId) -> Option<T>) -> Option<T> {
        self.reads.iter().chain(&self.writes).copied().find_map(of)
    }
}

impl fmt::Display for Operands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, ids) in [(" reads", &self.reads), (" writes", &self.writes)] {
            if let [first, others @ ..] = &ids[..] {
                write!(f, "{what}({first}")?;
                others.iter().try_for_each(|id| write!(f, ", {id}"))?;
                write!(f, ")")?;
            }
        }
        Ok(())
    }
}
