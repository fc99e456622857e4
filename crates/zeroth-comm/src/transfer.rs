//! The operands of collectives: bytes that move and are never added.

use crate::error::CommError;
use crate::op_name::OpName;

/// The operands of a collective on one rank.
///
/// `W` is the world size, `r` this rank. `counts` has one entry per rank, in bytes, equal on all ranks; entries may be
/// 0. Parts are contiguous in rank order.
///
/// | call | `send` on r | `recv` on r afterwards |
/// |---|---|---|
/// | `AllGather` | `counts[r]` bytes | for each rank s in order: the `counts[s]` bytes s sent |
/// | `AllGatherInPlace` | its part of `buffer`, `counts[r]` bytes from `starts[r]` on | all ranks' parts, each at its start |
/// | `AllToAll` | for each rank t in order: `counts[t]` bytes for t | for each rank s in order: the `counts[r]` bytes s sent to r; `W × counts[r]` in all |
/// | `Gather` | `counts[r]` bytes | on `root` as `AllGather`; elsewhere empty |
/// | `Broadcast` | | `buffer` of `root`; the same length everywhere |
/// | `Barrier` | | nothing; no rank leaves before all have entered |
///
/// `AllToAll` is the communication of a reduce-scatter: the size of a part depends on the receiver (its shard) and not
/// on the sender, so one row of counts suffices.
#[derive(Debug)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum Transfer<'a> {
    /// Every rank's part to every rank.
    AllGather {
        send: &'a [u8],
        /// All parts in rank order.
        recv: &'a mut [u8],
        /// Bytes of each rank's part.
        counts: &'a [usize],
    },
    /// As `AllGather`, with this rank's part already in the receive buffer; parts need not be contiguous.
    AllGatherInPlace {
        /// All parts; this rank's own is set.
        buffer: &'a mut [u8],
        /// The offset of each rank's part.
        starts: &'a [usize],
        /// Bytes of each rank's part.
        counts: &'a [usize],
    },
    /// From every rank a part for every rank.
    AllToAll {
        /// A part for each rank, in rank order.
        send: &'a [u8],
        /// The parts meant for this rank, in the order of their senders.
        recv: &'a mut [u8],
        /// Bytes that each rank receives from every rank.
        counts: &'a [usize],
    },
    /// Every rank's part to one rank.
    Gather {
        /// The rank that receives.
        root: usize,
        send: &'a [u8],
        /// All parts in rank order on `root`, empty elsewhere.
        recv: &'a mut [u8],
        /// Bytes of each rank's part.
        counts: &'a [usize],
    },
    /// One rank's bytes to every rank.
    Broadcast {
        /// The rank that sends.
        root: usize,
        /// Read on `root`, written elsewhere.
        buffer: &'a mut [u8],
    },
    /// Moves nothing; returns once all ranks have entered.
    Barrier,
}

impl Transfer<'_> {
    /// Its name in messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::AllGather { .. } => "all_gather",
            Self::AllGatherInPlace { .. } => "all_gather_in_place",
            Self::AllToAll { .. } => "all_to_all",
            Self::Gather { .. } => "gather",
            Self::Broadcast { .. } => "broadcast",
            Self::Barrier => "barrier",
        }
    }

    /// Validates the operands before any byte moves.
    pub fn check(&self, op: OpName, rank: usize, world: usize) -> Result<(), CommError> {
        let equal = |what: &'static str, given: usize, needed: usize| {
            if given == needed {
                return Ok(());
            }
            Err(CommError::Operands { op, kind: self.kind(), what, given, needed })
        };
        let known = |root: usize| {
            if root < world { Ok(()) } else { Err(CommError::Root { op, kind: self.kind(), root, world }) }
        };
        match self {
            Self::AllGather { send, recv, counts } => {
                equal("entries of counts", counts.len(), world)?;
                equal("bytes to send", send.len(), counts[rank])?;
                equal("bytes to receive", recv.len(), counts.iter().sum())
            }
            Self::AllGatherInPlace { buffer, starts, counts } => {
                equal("entries of counts", counts.len(), world)?;
                equal("entries of starts", starts.len(), world)?;
                let ends = starts.iter().zip(*counts).map(|(start, count)| start + count);
                let beyond = ends.max().unwrap_or(0).saturating_sub(buffer.len());
                equal("bytes beyond the buffer", beyond, 0)
            }
            Self::AllToAll { send, recv, counts } => {
                equal("entries of counts", counts.len(), world)?;
                equal("bytes to send", send.len(), counts.iter().sum())?;
                equal("bytes to receive", recv.len(), world * counts[rank])
            }
            Self::Gather { root, send, recv, counts } => {
                known(*root)?;
                equal("entries of counts", counts.len(), world)?;
                equal("bytes to send", send.len(), counts[rank])?;
                equal("bytes to receive", recv.len(), if rank == *root { counts.iter().sum() } else { 0 })
            }
            Self::Broadcast { root, .. } => known(*root),
            Self::Barrier => Ok(()),
        }
    }

    /// A hash of name, kind and sizes (FNV-1a), equal on ranks in the same collective.
    pub fn signature(&self, op: OpName) -> u64 {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        let mut add = |bytes: &[u8]| {
            for byte in bytes {
                hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
            }
        };
        add(&op.step.to_le_bytes());
        add(&op.index.to_le_bytes());
        add(op.name.as_bytes());
        add(self.kind().as_bytes());
        match self {
            Self::AllGather { counts, .. }
            | Self::AllGatherInPlace { counts, .. }
            | Self::AllToAll { counts, .. } => {
                counts.iter().for_each(|count| add(&count.to_le_bytes()));
            }
            Self::Gather { root, counts, .. } => {
                add(&root.to_le_bytes());
                counts.iter().for_each(|count| add(&count.to_le_bytes()));
            }
            Self::Broadcast { root, buffer } => {
                add(&root.to_le_bytes());
                add(&buffer.len().to_le_bytes());
            }
            Self::Barrier => {}
        }
        hash
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OP: OpName = OpName::new(5, "gather layers", 3);

    #[test]
    fn operands_that_do_not_fit_the_counts_are_refused_with_both_numbers() {
        let mut recv = [0; 5];
        let short = Transfer::AllGather { send: &[1, 2], recv: &mut recv, counts: &[2, 4] };
        let message = short.check(OP, 0, 2).unwrap_err().to_string();
        assert!(message.contains("5 bytes to receive") && message.contains('6'), "{message}");
        assert!(message.contains("step 5, op gather layers#3"), "{message}");

        let many = Transfer::AllToAll { send: &[1, 2], recv: &mut [], counts: &[2, 0, 0] };
        assert!(many.check(OP, 0, 2).unwrap_err().to_string().contains("3 entries of counts"));

        let elsewhere = Transfer::Broadcast { root: 2, buffer: &mut [] };
        assert!(elsewhere.check(OP, 0, 2).unwrap_err().to_string().contains("root 2"));
    }

    #[test]
    fn a_signature_tells_collectives_apart_by_name_kind_and_sizes() {
        let barrier = Transfer::Barrier;
        assert_eq!(barrier.signature(OP), Transfer::Barrier.signature(OP));
        assert_ne!(barrier.signature(OP), barrier.signature(OpName { step: 6, ..OP }));
        assert_ne!(barrier.signature(OP), barrier.signature(OpName { index: 4, ..OP }));
        let mut recv = [0; 6];
        let gather = Transfer::AllGather { send: &[1, 2], recv: &mut recv, counts: &[2, 4] }.signature(OP);
        let other = Transfer::AllGather { send: &[1, 2], recv: &mut recv, counts: &[4, 2] }.signature(OP);
        assert_ne!(gather, other);
        assert_ne!(gather, Transfer::AllToAll { send: &[], recv: &mut [], counts: &[2, 4] }.signature(OP));
    }
}
