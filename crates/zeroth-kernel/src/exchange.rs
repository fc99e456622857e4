//! What ranks on cards pass to each other without their hosts: which bytes go where, and the ways there are.

use std::os::fd::BorrowedFd;

use crate::{DeviceError, Span, Tier};

/// The variable that chooses a way.
const VARIABLE: &str = "ZEROTH_GPU_COLLECTIVES";

/// How ranks on cards exchange bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// Each card copies out of the others' memory, which their processes have opened to it.
    Ipc,
    /// NVIDIA's library of collectives.
    Nccl,
    /// Through the memory of the host.
    Host,
}

impl Transport {
    /// All ways, in the order in which they are tried.
    pub const ALL: [Self; 3] = [Self::Ipc, Self::Nccl, Self::Host];

    /// Its name, as `ZEROTH_GPU_COLLECTIVES` takes it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ipc => "ipc",
            Self::Nccl => "nccl",
            Self::Host => "host",
        }
    }

    /// The way that `ZEROTH_GPU_COLLECTIVES` names; none where it is not set.
    pub fn asked() -> Result<Option<Self>, DeviceError> {
        std::env::var_os(VARIABLE).map_or(Ok(None), |value| Self::named(&value.to_string_lossy()))
    }

    fn named(value: &str) -> Result<Option<Self>, DeviceError> {
        if value.is_empty() {
            return Ok(None);
        }
        let way = Self::ALL.into_iter().find(|way| way.name().eq_ignore_ascii_case(value));
        let unknown = || DeviceError::Call {
            device: "cuda".to_owned(),
            call: format!("reading {VARIABLE}"),
            reason: format!(
                "it is `{value}`; write ipc, nccl or host, or unset it to take the first of these that works"
            ),
        };
        way.map(Some).ok_or_else(unknown)
    }

    /// An error where this way was asked for and is not to be had.
    pub fn refused(self, reason: &str) -> DeviceError {
        DeviceError::Call {
            device: "cuda".to_owned(),
            call: format!("meeting by {VARIABLE}={}", self.name()),
            reason: format!("{reason}; unset it to take a way that works, or write host"),
        }
    }
}

/// Counters in a file that all ranks map, one for each rank: what their devices count up and wait for.
#[derive(Debug, Clone, Copy)]
pub struct BarrierCounters<'a> {
    /// The file.
    pub file: BorrowedFd<'a>,
    /// Where in it the first rank's word is, on a page.
    pub at: u64,
    /// Bytes of all, in whole pages.
    pub bytes: usize,
    /// Bytes from one rank's word to the next one's.
    pub stride: usize,
}

/// What all ranks have told of their devices.
#[derive(Debug, Clone, Copy)]
pub struct IpcHandles<'a> {
    /// The way that the doors are for.
    pub transport: Transport,
    /// This rank.
    pub rank: usize,
    /// What each rank's `Device::door` gave, in their order.
    pub handles: &'a [Vec<u8>],
    /// Where devices meet.
    pub counters: BarrierCounters<'a>,
}

/// Bytes that move between the arenas of ranks, whose programs put the same things in the same places. Counts and starts are
/// in bytes, one for each rank.
#[derive(Debug, Clone, Copy)]
pub enum Exchange<'a> {
    /// Every rank's `send` to every rank, end to end.
    AllGather {
        /// This rank's part.
        send: Span,
        /// All parts.
        recv: Span,
        /// Bytes of each rank's part.
        counts: &'a [usize],
    },
    /// As `AllGather`, where this rank's part lies in its place already.
    InPlace {
        /// All parts.
        buffer: Span,
        /// Where each rank's part begins.
        starts: &'a [usize],
        /// Bytes of each rank's part.
        counts: &'a [usize],
    },
    /// One rank's bytes to every rank.
    Broadcast {
        /// That rank.
        root: usize,
        /// Read there, written elsewhere.
        buffer: Span,
    },
    /// From every rank a part for every rank.
    AllToAll {
        /// A part for each rank, end to end.
        send: Span,
        /// The parts for this rank, in the order of their senders.
        recv: Span,
        /// Bytes that each rank gets from every rank.
        counts: &'a [usize],
    },
}

/// Bytes that a rank takes out of an arena, its own or another one's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Take {
    /// Whose arena.
    pub from: usize,
    /// The place in it.
    pub place: Span,
    /// Where in this rank's arena it is put.
    pub to: Span,
}

impl Exchange<'_> {
    /// Its name in messages.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::AllGather { .. } => "all_gather",
            Self::InPlace { .. } => "all_gather_in_place",
            Self::Broadcast { .. } => "broadcast",
            Self::AllToAll { .. } => "all_to_all",
        }
    }

    /// What `rank` of `world` takes to be done, in an order in which not all take from the same rank first.
    pub fn takes(&self, rank: usize, world: usize) -> impl Iterator<Item = Take> + '_ {
        let from_next = (rank..world).chain(0..rank);
        from_next.filter_map(move |from| self.take(rank, from)).filter(|take| take.to.bytes > 0)
    }

    fn take(&self, rank: usize, from: usize) -> Option<Take> {
        match *self {
            Self::AllGather { send, recv, counts } => {
                let place = Span { bytes: counts[from] as u64, ..send };
                Some(Take { from, place, to: recv.part(before(counts, from), place.bytes, 1) })
            }
            Self::InPlace { buffer, starts, counts } => {
                let place = buffer.part(starts[from] as u64, counts[from] as u64, 1);
                (from != rank).then_some(Take { from, place, to: place })
            }
            Self::Broadcast { root, buffer } => {
                (from == root && rank != root).then_some(Take { from, place: buffer, to: buffer })
            }
            Self::AllToAll { send, recv, counts } => {
                let count = counts[rank] as u64;
                let place = send.part(before(counts, rank), count, 1);
                Some(Take { from, place, to: recv.part(from as u64, 1, count) })
            }
        }
    }

    /// Whether all of it lies in the arenas of the devices.
    pub fn is_on_devices(&self) -> bool {
        match *self {
            Self::AllGather { send, recv, .. } | Self::AllToAll { send, recv, .. } => {
                send.tier == Tier::Device && recv.tier == Tier::Device
            }
            Self::InPlace { buffer, .. } | Self::Broadcast { buffer, .. } => buffer.tier == Tier::Device,
        }
    }
}

/// Bytes of all parts before one.
pub fn before(counts: &[usize], rank: usize) -> u64 {
    counts[..rank].iter().sum::<usize>() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARENA: usize = 96;

    /// Runs an exchange on arenas of plain bytes, all taking out of what was there before.
    fn run(exchange_of: impl Fn(usize) -> Exchange<'static>, world: usize) -> Vec<Vec<u8>> {
        let old: Vec<Vec<u8>> =
            (0..world).map(|rank| (0..ARENA).map(|at| (rank * ARENA + at) as u8).collect()).collect();
        let mut new = old.clone();
        for (rank, arena) in new.iter_mut().enumerate() {
            let mut written = Vec::<Span>::new();
            for take in exchange_of(rank).takes(rank, world) {
                assert!(!written.iter().any(|other| other.meets(take.to)), "written twice: {take:?}");
                written.push(take.to);
                let bytes = old[take.from][take.place.at as usize..take.place.end() as usize].to_vec();
                arena[take.to.at as usize..take.to.end() as usize].copy_from_slice(&bytes);
            }
        }
        new
    }

    fn byte(rank: usize, at: usize) -> u8 {
        (rank * ARENA + at) as u8
    }

    #[test]
    fn a_gather_of_unequal_parts_gives_everyone_the_same() {
        static COUNTS: [usize; 3] = [5, 0, 7];
        let exchange = |rank: usize| Exchange::AllGather {
            send: Span::device(3, COUNTS[rank] as u64),
            recv: Span::device(40, 12),
            counts: &COUNTS,
        };
        for arena in run(exchange, 3) {
            let expected: Vec<u8> =
                (3..8).map(|at| byte(0, at)).chain((3..10).map(|at| byte(2, at))).collect();
            assert_eq!(arena[40..52], expected);
        }
    }

    #[test]
    fn in_place_and_broadcast_leave_the_owner_alone() {
        static STARTS: [usize; 2] = [8, 0];
        static COUNTS: [usize; 2] = [4, 6];
        let buffer = Span::device(10, 20);
        let arenas = run(|_| Exchange::InPlace { buffer, starts: &STARTS, counts: &COUNTS }, 2);
        assert_eq!(arenas[0][18..22], arenas[1][18..22]);
        assert_eq!(arenas[1][18..22], [18, 19, 20, 21].map(|at| byte(0, at)));
        assert_eq!(arenas[0][10..16], arenas[1][10..16]);
        assert_eq!(arenas[1][16..18], [16, 17].map(|at| byte(1, at)), "between the parts nothing moves");
        let spread = Exchange::Broadcast { root: 1, buffer };
        assert_eq!(spread.takes(1, 3).count(), 0);
        assert_eq!(run(|_| spread, 3)[2][10..30], run(|_| spread, 3)[1][10..30]);
    }

    #[test]
    fn all_to_all_gives_each_rank_its_part_of_everyone_in_their_order() {
        static COUNTS: [usize; 3] = [2, 3, 0];
        let exchange = |rank: usize| Exchange::AllToAll {
            send: Span::device(1, 5),
            recv: Span::device(30, 3 * COUNTS[rank] as u64),
            counts: &COUNTS,
        };
        let arenas = run(exchange, 3);
        let expected: Vec<u8> = (0..3).flat_map(|rank| (3..6).map(move |at| byte(rank, at))).collect();
        assert_eq!(arenas[1][30..39], expected);
        assert_eq!(exchange(2).takes(2, 3).count(), 0);
        let first: Vec<usize> = exchange(1).takes(1, 3).map(|take| take.from).collect();
        assert_eq!(first, [1, 2, 0]);
    }

    #[test]
    fn what_lies_with_the_host_is_told_apart() {
        let host = Span { tier: Tier::Host, ..Span::device(0, 8) };
        assert!(Exchange::Broadcast { root: 0, buffer: Span::device(0, 8) }.is_on_devices());
        assert!(!Exchange::Broadcast { root: 0, buffer: host }.is_on_devices());
        assert!(!Exchange::AllGather { send: host, recv: Span::device(0, 8), counts: &[8] }.is_on_devices());
    }

    #[test]
    fn a_way_is_known_by_its_name_and_another_word_is_refused_with_those_there_are() {
        assert_eq!(Transport::named(""), Ok(None));
        assert_eq!(Transport::named("NCCL"), Ok(Some(Transport::Nccl)));
        let error = Transport::named("mpi").unwrap_err().to_string();
        assert!(error.contains("ZEROTH_GPU_COLLECTIVES") && error.contains("`mpi`"), "{error}");
        assert!(error.contains("ipc, nccl or host"), "{error}");
        let error = Transport::Ipc.refused("rank 1: no").to_string();
        assert!(error.contains("ZEROTH_GPU_COLLECTIVES=ipc failed: rank 1: no; unset it"), "{error}");
    }
}
