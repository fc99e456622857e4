//! Collectives between the devices of ranks, without their hosts: transports, and which bytes go where.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::{DeviceError, Span, Tier};

/// The environment variable that chooses a transport.
const VARIABLE: &str = "ZEROTH_GPU_COLLECTIVES";
/// The environment variable with the seconds that ranks' devices have to connect.
const CONNECT_VARIABLE: &str = "ZEROTH_GPU_CONNECT_SECONDS";

/// How ranks on GPUs exchange bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// CUDA IPC: every GPU copies out of its peers' memory.
    Ipc,
    /// NCCL.
    Nccl,
    /// Through host memory.
    Host,
}

impl Transport {
    /// All transports, in the order in which they are tried.
    pub const ALL: [Self; 3] = [Self::Ipc, Self::Nccl, Self::Host];

    /// Its name, as `ZEROTH_GPU_COLLECTIVES` takes it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ipc => "ipc",
            Self::Nccl => "nccl",
            Self::Host => "host",
        }
    }

    /// The transport that `ZEROTH_GPU_COLLECTIVES` names; `None` where it is not set.
    pub fn from_env() -> Result<Option<Self>, DeviceError> {
        std::env::var_os(VARIABLE).map_or(Ok(None), |value| Self::named(&value.to_string_lossy()))
    }

    /// The time for devices to connect, and for each of the first exchanges: what `ZEROTH_GPU_CONNECT_SECONDS` says, or a minute.
    pub fn connect_limit() -> Result<Duration, DeviceError> {
        let value = std::env::var_os(CONNECT_VARIABLE).unwrap_or_default();
        Self::limit(&value.to_string_lossy())
    }

    fn limit(value: &str) -> Result<Duration, DeviceError> {
        if value.is_empty() {
            return Ok(Duration::from_mins(1));
        }
        let seconds = value.parse().ok().filter(|seconds| (1..=86_400).contains(seconds));
        seconds.map(Duration::from_secs).ok_or_else(|| DeviceError::Call {
            device: "cuda".to_owned(),
            call: format!("reading {CONNECT_VARIABLE}"),
            reason: format!("it is `{value}`; write seconds from 1 to 86400, or unset it for 60"),
        })
    }

    fn named(value: &str) -> Result<Option<Self>, DeviceError> {
        if value.is_empty() {
            return Ok(None);
        }
        let transport = Self::ALL.into_iter().find(|transport| transport.name().eq_ignore_ascii_case(value));
        let unknown = || DeviceError::Call {
            device: "cuda".to_owned(),
            call: format!("reading {VARIABLE}"),
            reason: format!(
                "it is `{value}`; write ipc, nccl or host, or unset it to use the first of these that works"
            ),
        };
        transport.map(Some).ok_or_else(unknown)
    }

    /// The error where this transport was requested and does not work.
    pub fn refused(self, reason: &str) -> DeviceError {
        DeviceError::Call {
            device: "cuda".to_owned(),
            call: format!("{VARIABLE}={}", self.name()),
            reason: format!("{reason}; unset it to use one that works, or write host"),
        }
    }
}

/// One barrier counter per rank, in a file that all ranks map; devices increment and wait on them.
#[derive(Debug, Clone, Copy)]
pub struct BarrierCounters<'a> {
    /// The file.
    pub file: BorrowedFd<'a>,
    /// File offset of the pages with the counters.
    pub at: u64,
    /// Bytes of these pages.
    pub bytes: usize,
    /// Bytes from their start to the first rank's counter.
    pub first: usize,
    /// Bytes from one rank's counter to the next.
    pub stride: usize,
}

/// What a rank tells its device about its peers along an axis, before it asks for a handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerPlace {
    /// The rank's place on the axis.
    pub rank: usize,
    /// Whether all ranks of the axis are on this host.
    pub one_host: bool,
}

/// The handles of the devices of all ranks along an axis, who are numbered by their places on it.
#[derive(Debug, Clone, Copy)]
pub struct IpcHandles<'a> {
    /// The transport they are for.
    pub transport: Transport,
    /// This rank.
    pub rank: usize,
    /// Every rank's [`Device::ipc_handle`](crate::Device::ipc_handle), in rank order.
    pub handles: &'a [Vec<u8>],
    /// The barrier counters of all ranks; `None` where the ranks share no memory.
    pub counters: Option<BarrierCounters<'a>>,
    /// The time for all ranks to open the handles, and for each of the first exchanges.
    pub limit: Duration,
}

/// A collective over the device arenas of ranks, which have the same layout. Counts and starts are in bytes, one per rank.
#[derive(Debug, Clone, Copy)]
pub enum Exchange<'a> {
    /// Gathers every rank's `send` on every rank, contiguously.
    AllGather {
        /// This rank's part.
        send: Span,
        /// All parts.
        recv: Span,
        /// Bytes of each rank's part.
        counts: &'a [usize],
    },
    /// `AllGather` where this rank's part is already in place.
    AllGatherInPlace {
        /// All parts.
        buffer: Span,
        /// Offset of each rank's part.
        starts: &'a [usize],
        /// Bytes of each rank's part.
        counts: &'a [usize],
    },
    /// Copies one rank's bytes to every rank.
    Broadcast {
        /// The source rank.
        root: usize,
        /// Read on the root, written elsewhere.
        buffer: Span,
    },
    /// Sends a part from every rank to every rank.
    AllToAll {
        /// One part per destination, contiguously.
        send: Span,
        /// The parts for this rank, in rank order of their senders.
        recv: Span,
        /// Bytes that each rank receives from every rank.
        counts: &'a [usize],
    },
}

/// A copy from an arena, this rank's or a peer's, into this rank's arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerCopy {
    /// The rank of the source arena.
    pub from: usize,
    /// The span in it.
    pub place: Span,
    /// The destination.
    pub to: Span,
}

impl Exchange<'_> {
    /// Its name in messages.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::AllGather { .. } => "all_gather",
            Self::AllGatherInPlace { .. } => "all_gather_in_place",
            Self::Broadcast { .. } => "broadcast",
            Self::AllToAll { .. } => "all_to_all",
        }
    }

    /// The copies that `rank` of `world` makes, starting at different peers so that not all ranks read the same one first.
    pub fn copies(&self, rank: usize, world: usize) -> impl Iterator<Item = PeerCopy> + '_ {
        let from_next = (rank..world).chain(0..rank);
        from_next.filter_map(move |from| self.copy(rank, from)).filter(|copy| copy.to.bytes > 0)
    }

    fn copy(&self, rank: usize, from: usize) -> Option<PeerCopy> {
        match *self {
            Self::AllGather { send, recv, counts } => {
                let place = Span { bytes: counts[from] as u64, ..send };
                Some(PeerCopy { from, place, to: recv.part(bytes_before(counts, from), place.bytes, 1) })
            }
            Self::AllGatherInPlace { buffer, starts, counts } => {
                let place = buffer.part(starts[from] as u64, counts[from] as u64, 1);
                (from != rank).then_some(PeerCopy { from, place, to: place })
            }
            Self::Broadcast { root, buffer } => {
                (from == root && rank != root).then_some(PeerCopy { from, place: buffer, to: buffer })
            }
            Self::AllToAll { send, recv, counts } => {
                let count = counts[rank] as u64;
                let place = send.part(bytes_before(counts, rank), count, 1);
                Some(PeerCopy { from, place, to: recv.part(from as u64, 1, count) })
            }
        }
    }

    /// Whether all spans are in device memory.
    pub fn is_on_devices(&self) -> bool {
        match *self {
            Self::AllGather { send, recv, .. } | Self::AllToAll { send, recv, .. } => {
                send.tier == Tier::Device && recv.tier == Tier::Device
            }
            Self::AllGatherInPlace { buffer, .. } | Self::Broadcast { buffer, .. } => {
                buffer.tier == Tier::Device
            }
        }
    }
}

/// Bytes of all parts before `rank`'s.
pub fn bytes_before(counts: &[usize], rank: usize) -> u64 {
    counts[..rank].iter().sum::<usize>() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARENA: usize = 96;

    /// Runs a collective on byte arenas, reading the old contents.
    fn run(exchange_of: impl Fn(usize) -> Exchange<'static>, world: usize) -> Vec<Vec<u8>> {
        let old: Vec<Vec<u8>> =
            (0..world).map(|rank| (0..ARENA).map(|at| (rank * ARENA + at) as u8).collect()).collect();
        let mut new = old.clone();
        for (rank, arena) in new.iter_mut().enumerate() {
            let mut written = Vec::<Span>::new();
            for copy in exchange_of(rank).copies(rank, world) {
                assert!(!written.iter().any(|other| other.overlaps(copy.to)), "written twice: {copy:?}");
                written.push(copy.to);
                let bytes = old[copy.from][copy.place.at as usize..copy.place.end() as usize].to_vec();
                arena[copy.to.at as usize..copy.to.end() as usize].copy_from_slice(&bytes);
            }
        }
        new
    }

    fn byte(rank: usize, at: usize) -> u8 {
        (rank * ARENA + at) as u8
    }

    #[test]
    fn all_gather_of_unequal_parts_gives_every_rank_the_same() {
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
    fn in_place_gather_and_broadcast_do_not_write_the_source() {
        static STARTS: [usize; 2] = [8, 0];
        static COUNTS: [usize; 2] = [4, 6];
        let buffer = Span::device(10, 20);
        let arenas = run(|_| Exchange::AllGatherInPlace { buffer, starts: &STARTS, counts: &COUNTS }, 2);
        assert_eq!(arenas[0][18..22], arenas[1][18..22]);
        assert_eq!(arenas[1][18..22], [18, 19, 20, 21].map(|at| byte(0, at)));
        assert_eq!(arenas[0][10..16], arenas[1][10..16]);
        assert_eq!(arenas[1][16..18], [16, 17].map(|at| byte(1, at)), "between the parts nothing moves");
        let spread = Exchange::Broadcast { root: 1, buffer };
        assert_eq!(spread.copies(1, 3).count(), 0);
        assert_eq!(run(|_| spread, 3)[2][10..30], run(|_| spread, 3)[1][10..30]);
    }

    #[test]
    fn all_to_all_orders_parts_by_sender() {
        static COUNTS: [usize; 3] = [2, 3, 0];
        let exchange = |rank: usize| Exchange::AllToAll {
            send: Span::device(1, 5),
            recv: Span::device(30, 3 * COUNTS[rank] as u64),
            counts: &COUNTS,
        };
        let arenas = run(exchange, 3);
        let expected: Vec<u8> = (0..3).flat_map(|rank| (3..6).map(move |at| byte(rank, at))).collect();
        assert_eq!(arenas[1][30..39], expected);
        assert_eq!(exchange(2).copies(2, 3).count(), 0);
        let first: Vec<usize> = exchange(1).copies(1, 3).map(|copy| copy.from).collect();
        assert_eq!(first, [1, 2, 0]);
    }

    #[test]
    fn host_spans_are_not_on_devices() {
        let host = Span { tier: Tier::Host, ..Span::device(0, 8) };
        assert!(Exchange::Broadcast { root: 0, buffer: Span::device(0, 8) }.is_on_devices());
        assert!(!Exchange::Broadcast { root: 0, buffer: host }.is_on_devices());
        assert!(!Exchange::AllGather { send: host, recv: Span::device(0, 8), counts: &[8] }.is_on_devices());
    }

    #[test]
    fn unknown_transport_names_are_refused_with_the_known_ones() {
        assert_eq!(Transport::named(""), Ok(None));
        assert_eq!(Transport::named("NCCL"), Ok(Some(Transport::Nccl)));
        assert_eq!(Transport::limit(""), Ok(Duration::from_mins(1)));
        assert_eq!(Transport::limit("5"), Ok(Duration::from_secs(5)));
        assert!(Transport::limit("0").unwrap_err().to_string().contains("from 1 to 86400"));
        let error = Transport::named("mpi").unwrap_err().to_string();
        assert!(error.contains("ZEROTH_GPU_COLLECTIVES") && error.contains("`mpi`"), "{error}");
        assert!(error.contains("ipc, nccl or host"), "{error}");
        let error = Transport::Ipc.refused("rank 1: no").to_string();
        assert!(error.contains("ZEROTH_GPU_COLLECTIVES=ipc failed: rank 1: no; unset it"), "{error}");
    }
}
