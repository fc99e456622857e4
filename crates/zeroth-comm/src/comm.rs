//! The [`Comm`] trait: collectives that move bytes and never add.

use crate::device_barrier::DeviceBarrier;
use crate::error::CommError;
use crate::op_name::OpName;
use crate::windows::Windows;

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
pub enum Transfer<'a> {
    /// Every rank's part to every rank.
    AllGather {
        /// This rank's part.
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
        /// This rank's part.
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

/// The completion side of a [`Comm`] implementation, called by [`Handle`].
pub trait Finish {
    /// Completes the collective that `start` gave `ticket`.
    fn finish(&self, ticket: u64, op: OpName, transfer: &mut Transfer<'_>) -> Result<(), CommError>;

    /// The handle was dropped without waiting: this rank will not complete the collective, and the other ranks are
    /// notified.
    fn abandon(&self, op: OpName);
}

/// A collective in progress. Its buffers are borrowed until it is waited for.
///
/// Handles are waited for in call order. Dropping one without waiting aborts the job: every rank's next call or wait
/// fails with an error that names this rank.
#[must_use = "a collective is complete only after `wait`"]
pub struct Handle<'a> {
    comm: &'a dyn Finish,
    ticket: u64,
    op: OpName,
    transfer: Transfer<'a>,
    waited: bool,
}

impl<'a> Handle<'a> {
    /// For implementations of [`Comm`]: a collective that `comm` has started.
    pub fn new(comm: &'a dyn Finish, ticket: u64, op: OpName, transfer: Transfer<'a>) -> Self {
        Self { comm, ticket, op, transfer, waited: false }
    }

    /// Waits until this rank's part is done: `send` may be modified and `recv` is complete.
    ///
    /// Fails with [`CommError::RankLost`] when a rank it needs is dead or stopped; it never hangs silently.
    pub fn wait(mut self) -> Result<(), CommError> {
        self.waited = true;
        self.comm.finish(self.ticket, self.op, &mut self.transfer)
    }
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        if !self.waited {
            self.comm.abandon(self.op);
        }
    }
}

/// A communicator: one rank's connection to the others.
///
/// All ranks start the same collectives in the same order; [`Comm::agree`] compares a hash of the program first. Sizes
/// are known to all ranks beforehand. [`Transfer`] defines what each call moves.
pub trait Comm: Send {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn world(&self) -> usize;

    /// Starts a collective. The calls below are shorthands.
    fn start<'a>(&'a self, op: OpName, transfer: Transfer<'a>) -> Result<Handle<'a>, CommError>;

    /// Windows of memory that peers map read-only; `None` where they cannot.
    fn windows(&self) -> Option<&dyn Windows> {
        None
    }

    /// The device barrier of this rank; `None` where there is none. Called once per rank.
    fn device_barrier(&self) -> Option<DeviceBarrier> {
        None
    }

    /// Every rank's part to every rank: [`Transfer::AllGather`].
    fn all_gather<'a>(
        &'a self,
        op: OpName,
        send: &'a [u8],
        recv: &'a mut [u8],
        counts: &'a [usize],
    ) -> Result<Handle<'a>, CommError> {
        self.start(op, Transfer::AllGather { send, recv, counts })
    }

    /// Every rank's part of a buffer to every rank: [`Transfer::AllGatherInPlace`].
    fn all_gather_in_place<'a>(
        &'a self,
        op: OpName,
        buffer: &'a mut [u8],
        starts: &'a [usize],
        counts: &'a [usize],
    ) -> Result<Handle<'a>, CommError> {
        self.start(op, Transfer::AllGatherInPlace { buffer, starts, counts })
    }

    /// From every rank a part for every rank: [`Transfer::AllToAll`].
    fn all_to_all<'a>(
        &'a self,
        op: OpName,
        send: &'a [u8],
        recv: &'a mut [u8],
        counts: &'a [usize],
    ) -> Result<Handle<'a>, CommError> {
        self.start(op, Transfer::AllToAll { send, recv, counts })
    }

    /// Every rank's part to `root`: [`Transfer::Gather`].
    fn gather<'a>(
        &'a self,
        op: OpName,
        root: usize,
        send: &'a [u8],
        recv: &'a mut [u8],
        counts: &'a [usize],
    ) -> Result<Handle<'a>, CommError> {
        self.start(op, Transfer::Gather { root, send, recv, counts })
    }

    /// The bytes of `root` to every rank: [`Transfer::Broadcast`].
    fn broadcast<'a>(
        &'a self,
        op: OpName,
        root: usize,
        buffer: &'a mut [u8],
    ) -> Result<Handle<'a>, CommError> {
        self.start(op, Transfer::Broadcast { root, buffer })
    }

    /// Returns once all ranks have entered.
    fn barrier(&self, op: OpName) -> Result<Handle<'_>, CommError> {
        self.start(op, Transfer::Barrier)
    }

    /// Compares `value` (a hash of the program or config) across ranks, and reports the ranks that differ from the most
    /// common value; ties go to the lowest rank.
    fn agree(&self, op: OpName, value: u64) -> Result<(), CommError> {
        let counts = vec![8; self.world()];
        let mut gathered = vec![0; 8 * self.world()];
        self.all_gather(op, &value.to_le_bytes(), &mut gathered, &counts)?.wait()?;
        let values: Vec<u64> =
            gathered.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        let votes = |of: u64| values.iter().filter(|value| **value == of).count();
        // `max_by_key` keeps the last of equal elements: in reverse, the lowest rank.
        let common = values.iter().copied().rev().max_by_key(|value| votes(*value)).unwrap_or(value);
        let differ: Vec<(usize, u64)> =
            values.iter().copied().enumerate().filter(|(_, value)| *value != common).collect();
        if differ.is_empty() { Ok(()) } else { Err(CommError::Disagree { op, common, differ }) }
    }

    /// All-gathers a text of any length from every rank, in rank order.
    fn gather_texts(&self, op: OpName, own: &str) -> Result<Vec<String>, CommError> {
        let mut lengths = vec![0; 8 * self.world()];
        let length = (own.len() as u64).to_le_bytes();
        self.all_gather(op, &length, &mut lengths, &vec![8; self.world()])?.wait()?;
        let counts: Vec<usize> =
            lengths.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes) as usize).collect();
        let mut texts = vec![0; counts.iter().sum()];
        self.all_gather(op, own.as_bytes(), &mut texts, &counts)?.wait()?;
        let mut rest = texts.as_slice();
        let texts = counts.iter().map(|count| {
            let text;
            (text, rest) = rest.split_at(*count);
            String::from_utf8_lossy(text).into_owned()
        });
        Ok(texts.collect())
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
