//! Collectives between GPUs: choice of a transport, and collectives enqueued on the device, so that no host thread blocks.

use std::time::Duration;

use zeroth_base::Axis;
use zeroth_comm::{Comm, CommError, DeviceBarrier, DeviceCounters, OpName};
use zeroth_kernel::{
    BarrierCounters, Device, DeviceError, Exchange, IpcHandles, PeerPlace, Queue, Span, Tier, Transport,
};

use super::error::CollectiveError;
use super::loss_of_a_rank::{await_verdict, end_soon_after_loss};
use zeroth_program::Collective;

/// Bytes of the message in which a rank publishes its handle, or the reason why it has none.
const MESSAGE: usize = 512;

/// The operation in which devices connect.
const CONNECT: &str = "connect devices";
/// Why collectives go through the host.
const HOST_REQUESTED: &str = "requested by ZEROTH_GPU_COLLECTIVES";
/// Bytes of the parts by which connections are verified: NCCL connects differently for small and for large ones.
const TESTED: [usize; 2] = [256, 1 << 20];

/// The GPUs of all ranks along an axis, connected by one transport.
pub(super) struct GpuCollectives {
    axis: Axis,
    transport: Transport,
    barrier: Box<dyn DeviceBarrier>,
    /// Bytes of the device that the transport took.
    taken: Option<u64>,
    /// Why earlier transports were not chosen.
    refused: Vec<String>,
}

impl GpuCollectives {
    /// Opens the first transport that works on all ranks of `comm`, which are those along `axis`, or returns the reasons why none
    /// does. A transport requested by name that does not work is an error. Nothing is in the arenas yet.
    pub(super) fn open(
        requested: Option<Transport>,
        axis: Axis,
        device: &mut dyn Device,
        comm: &dyn Comm,
    ) -> Result<Result<Self, String>, CollectiveError> {
        let transports: &[Transport] = match requested {
            None => &[Transport::Ipc, Transport::Nccl],
            Some(Transport::Ipc) => &[Transport::Ipc],
            Some(Transport::Nccl) => &[Transport::Nccl],
            Some(Transport::Host) => return Ok(Err(HOST_REQUESTED.to_owned())),
        };
        match (Self::open_first(transports, axis, device, comm)?, requested) {
            (Err(reasons), Some(transport)) => Err(CollectiveError::Device(transport.refused(&reasons))),
            (opened, _) => Ok(opened),
        }
    }

    /// Connects the GPUs of a rail whose ranks are on several machines. Tensors have no other way there.
    pub(super) fn open_between_machines(
        requested: Option<Transport>,
        device: &mut dyn Device,
        rail: &dyn Comm,
    ) -> Result<Self, CollectiveError> {
        let opened = match requested {
            Some(Transport::Host) => Err(HOST_REQUESTED.to_owned()),
            _ => Self::open_first(&[Transport::Nccl], Axis::Rail, device, rail)?,
        };
        opened.map_err(|reasons| {
            CollectiveError::Device(DeviceError::Call {
                device: device.name(),
                call: "connecting the GPUs of several hosts".to_owned(),
                reason: format!("{reasons}; GPUs of several hosts exchange tensors over NCCL only"),
            })
        })
    }

    /// Opens the first of `transports` that works on all ranks, or returns the reasons why none does.
    fn open_first(
        transports: &[Transport],
        axis: Axis,
        device: &mut dyn Device,
        comm: &dyn Comm,
    ) -> Result<Result<Self, String>, CollectiveError> {
        let limit = Transport::connect_limit().map_err(CollectiveError::Device)?;
        let barrier = comm.device_barrier();
        let own = if barrier.is_some() { Ok(Vec::new()) } else { Err("no device barrier".to_owned()) };
        let all = publish(comm, "create device barrier", &own)?;
        let mut reasons = Vec::new();
        if let (Ok(_), Some(barrier)) = (&all, barrier) {
            for &transport in transports {
                // NCCL does not wait on the counters, from its first call on.
                let abort = device.abort().filter(|_| transport == Transport::Nccl);
                barrier.on_lost(abort.map(end_soon_after_loss));
                let free = device.free_bytes();
                let connected = match connect(transport, limit, axis, device, comm, &*barrier)? {
                    Ok(()) => verify(limit, axis, device, comm, &*barrier)?,
                    Err(reason) => Err(reason),
                };
                match connected {
                    Ok(()) => {
                        clear(limit, device, comm.world())?;
                        let taken =
                            free.zip(device.free_bytes()).map(|(before, now)| before.saturating_sub(now));
                        return Ok(Ok(Self { axis, transport, barrier, taken, refused: reasons }));
                    }
                    Err(reason) => {
                        device.close_ipc_handles(axis);
                        barrier.on_lost(None);
                        clear(limit, device, comm.world())?;
                        reasons.push(format!("{}: {reason}", transport.name()));
                    }
                }
            }
        } else {
            reasons.extend(all.err());
        }
        Ok(Err(reasons.join("; ")))
    }

    /// Whether a connection may fail before the loss that explains it is known.
    pub(super) fn fails_before_verdict(&self) -> bool {
        self.transport == Transport::Nccl
    }

    /// The transport, as reports print it.
    pub(super) fn describe(&self) -> String {
        let how = match self.transport {
            Transport::Ipc => "from GPU to GPU (CUDA IPC)".to_owned(),
            Transport::Nccl => match self.taken {
                Some(bytes) => {
                    format!("from GPU to GPU (NCCL, which took {})", zeroth_base::format_bytes(bytes))
                }
                None => "from GPU to GPU (NCCL)".to_owned(),
            },
            Transport::Host => unreachable!("`open` returns before it connects through the host"),
        };
        let refused = self.refused.join("; ");
        if refused.is_empty() { how } else { format!("{how}, because others do not work: {refused}") }
    }

    /// Enqueues a collective.
    pub(super) fn enqueue(
        &self,
        name: OpName,
        exchange: &Exchange<'_>,
        device: &mut dyn Device,
        queue: Queue,
    ) -> Result<(), CollectiveError> {
        let points = self.barrier.next(name).map_err(CollectiveError::Comm)?;
        device.exchange(self.axis, queue, exchange, points).map_err(|error| self.cause(name, error))
    }

    /// The cause of a device's error: a lost rank, where the connection to it failed before the loss is known.
    pub(super) fn cause(&self, name: OpName, error: DeviceError) -> CollectiveError {
        let is_connection = self.fails_before_verdict() && matches!(error, DeviceError::Call { .. });
        match if is_connection { await_verdict(&*self.barrier, name) } else { self.check(name) } {
            Ok(()) => CollectiveError::Device(error),
            Err(lost) => CollectiveError::Comm(lost),
        }
    }

    /// Returns an error if a rank was lost: the contents of the device's memory are then undefined.
    pub(super) fn check(&self, name: OpName) -> Result<(), CommError> {
        self.barrier.check(name)
    }
}

/// A collective that only moves bytes; `None` for reductions.
pub(super) fn exchange(collective: &Collective) -> Option<Exchange<'_>> {
    Some(match collective {
        Collective::AllGather { send, recv, counts } => {
            Exchange::AllGather { send: *send, recv: *recv, counts }
        }
        Collective::InPlace { buffer, starts, counts } => {
            Exchange::AllGatherInPlace { buffer: *buffer, starts, counts }
        }
        Collective::Broadcast { root, buffer } => Exchange::Broadcast { root: *root, buffer: *buffer },
        Collective::AllToAll { send, recv, counts } => {
            Exchange::AllToAll { send: *send, recv: *recv, counts }
        }
        Collective::Reduce { .. } => return None,
    })
}

/// Connects all ranks by one transport. If it fails on one rank, it fails on all.
fn connect(
    transport: Transport,
    limit: Duration,
    axis: Axis,
    device: &mut dyn Device,
    comm: &dyn Comm,
    barrier: &dyn DeviceBarrier,
) -> Result<Result<(), String>, CollectiveError> {
    let place = PeerPlace { rank: comm.rank(), one_host: barrier.counters().is_some() };
    let handle = device.ipc_handle(axis, transport, place).map_err(|error| error.to_string());
    let handles = match publish(comm, "publish IPC handles", &handle)? {
        Ok(handles) => handles,
        Err(reason) => return Ok(Err(reason)),
    };
    if transport == Transport::Nccl {
        // A rank that leaves now is missed by those who join.
        barrier.next(OpName::new(0, CONNECT, 0)).map_err(CollectiveError::Comm)?;
    }
    let shared = |DeviceCounters { file, at, bytes, first, stride }| BarrierCounters {
        file,
        at,
        bytes,
        first,
        stride,
    };
    let (rank, counters) = (comm.rank(), barrier.counters().map(shared));
    let opened =
        device.open_ipc_handles(axis, &IpcHandles { transport, rank, handles: &handles, counters, limit });
    let opened = opened.map(|()| Vec::new()).map_err(|error: DeviceError| error.to_string());
    let connected = publish(comm, "open IPC handles", &opened)?;
    Ok(connected.map(|_| ()))
}

/// The most bytes a rank in a test: parts for all ranks and from all ranks fit into the arena.
fn tested_room(device: &dyn Device, world: usize) -> usize {
    device.capacity(Tier::Device) as usize / (2 * world)
}

/// Zeroes what [`verify`] has written: arenas start as zeros, which is what moments begin with. No rank reads it any more.
fn clear(limit: Duration, device: &mut dyn Device, world: usize) -> Result<(), CollectiveError> {
    let largest = TESTED.into_iter().max().unwrap_or(0).min(tested_room(device, world));
    let zeros = vec![0; 2 * world * largest];
    let cleared = device.upload(Queue::Comm, &zeros, Span::device(0, zeros.len() as u64));
    cleared.and_then(|()| device.synchronise_within(Queue::Comm, limit)).map_err(CollectiveError::Device)
}

/// Runs exchanges of known bytes over the new connections and compares the results. If one fails on one rank, it fails on all.
fn verify(
    limit: Duration,
    axis: Axis,
    device: &mut dyn Device,
    comm: &dyn Comm,
    barrier: &dyn DeviceBarrier,
) -> Result<Result<(), String>, CollectiveError> {
    let (own, world) = (comm.rank(), comm.world());
    let room = tested_room(device, world);
    for (index, bytes) in TESTED.into_iter().map(|bytes| bytes.min(room)).enumerate() {
        let op = OpName::new(0, CONNECT, 1 + index as u32);
        let whole = (world * bytes) as u64;
        let (send, recv, counts) = (Span::device(0, whole), Span::device(whole, whole), vec![bytes; world]);
        let part = |from: usize, to: usize| (0..bytes).map(move |at| pattern(from, to, at));
        let given: Vec<u8> = (0..world).flat_map(|to| part(own, to)).collect();
        let gather = Exchange::AllGather { send: send.part(0, bytes as u64, 1), recv, counts: &counts };
        // An all-gather gives every rank what its peers have for the first one.
        for (exchange, to) in [(gather, 0), (Exchange::AllToAll { send, recv, counts: &counts }, own)] {
            let points = barrier.next(op).map_err(CollectiveError::Comm)?;
            let mut found = vec![0; given.len()];
            let exchanged = device
                .upload(Queue::Comm, &given, send)
                .and_then(|()| device.upload(Queue::Comm, &found, recv))
                .and_then(|()| device.exchange(axis, Queue::Comm, &exchange, points))
                .and_then(|()| device.synchronise_within(Queue::Comm, limit))
                .and_then(|()| device.download(Queue::Comm, recv, &mut found));
            // A lost rank is the cause of other errors.
            barrier.check(op).map_err(CollectiveError::Comm)?;
            let mut expected = (0..world).flat_map(|from| part(from, to));
            let wrong = found.iter().position(|found| Some(*found) != expected.next());
            let outcome = match (exchanged, wrong) {
                (Ok(()), None) => Ok(Vec::new()),
                (Ok(()), Some(at)) => Err(format!(
                    "{} of {bytes} bytes a rank gave wrong bytes from rank {} on",
                    exchange.name(),
                    at / bytes
                )),
                (Err(error), _) => Err(error.to_string()),
            };
            if let Err(reason) = publish(comm, "verify connections", &outcome)? {
                return Ok(Err(reason));
            }
        }
    }
    Ok(Ok(()))
}

/// The byte at an offset of the part that one rank sends to another.
fn pattern(from: usize, to: usize, at: usize) -> u8 {
    (from.wrapping_mul(101) ^ to.wrapping_mul(29) ^ at.wrapping_mul(7) ^ (at >> 8)) as u8 | 1
}

/// All-gathers a message per rank. Returns all messages in rank order, or the error of the first rank that failed.
fn publish(
    comm: &dyn Comm,
    name: &'static str,
    own: &Result<Vec<u8>, String>,
) -> Result<Result<Vec<Vec<u8>>, String>, CollectiveError> {
    const HEADER: usize = 3;
    let (is_ok, bytes) = match own {
        Ok(bytes) => (1, bytes.as_slice()),
        Err(reason) => (0, reason.as_bytes()),
    };
    let length = bytes.len().min(MESSAGE - HEADER);
    debug_assert!(own.is_err() || length == bytes.len(), "a handle must fit into a message");
    let mut message = [0; MESSAGE];
    message[0] = is_ok;
    message[1..HEADER].copy_from_slice(&(length as u16).to_le_bytes());
    message[HEADER..HEADER + length].copy_from_slice(&bytes[..length]);
    let mut all = vec![[0; MESSAGE]; comm.world()];
    let counts = vec![MESSAGE; comm.world()];
    let gathered = comm.all_gather(OpName::new(0, name, 0), &message, all.as_flattened_mut(), &counts);
    gathered.and_then(zeroth_comm::Handle::wait).map_err(CollectiveError::Comm)?;
    let payload = |message: &[u8; MESSAGE]| {
        let length = usize::from(u16::from_le_bytes([message[1], message[2]]));
        message[HEADER..HEADER + length].to_vec()
    };
    if let Some(rank) = all.iter().position(|message| message[0] == 0) {
        return Ok(Err(format!("rank {rank}: {}", String::from_utf8_lossy(&payload(&all[rank])))));
    }
    Ok(Ok(all.iter().map(payload).collect()))
}

#[cfg(test)]
mod transport_tests;

#[cfg(test)]
mod tests {
    use zeroth_comm::JoinOptions;
    use zeroth_comm::local::LocalJob;
    use zeroth_cpu::CpuDevice;
    use zeroth_kernel::ByTier;

    use super::*;

    fn on_two_ranks<R: Send>(rank: impl Fn(&dyn Comm) -> R + Sync) -> Vec<R> {
        let job = LocalJob::create(2, 4096).unwrap();
        std::thread::scope(|scope| {
            let start = |number| {
                let comm = job.join(number, &JoinOptions::default()).unwrap();
                let rank = &rank;
                scope.spawn(move || rank(&*comm))
            };
            let threads: Vec<_> = (0..2).map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn unconnected_devices_report_reasons_and_fall_back_to_the_host() {
        for reasons in on_two_ranks(|comm| {
            let mut device = CpuDevice::new(1, ByTier::on_device(4096)).unwrap();
            let Ok(Err(reasons)) = GpuCollectives::open(None, Axis::Group, &mut device, comm) else {
                panic!("a CPU device has no transport")
            };
            reasons
        }) {
            assert!(reasons.contains("ipc: rank 0: ") && reasons.contains("nccl: rank 0: "), "{reasons}");
        }
    }

    #[test]
    fn an_unavailable_requested_transport_is_an_error_on_every_rank() {
        for error in on_two_ranks(|comm| {
            let mut device = CpuDevice::new(1, ByTier::on_device(4096)).unwrap();
            let opened = GpuCollectives::open(Some(Transport::Nccl), Axis::Group, &mut device, comm);
            let Err(CollectiveError::Device(error)) = opened else { panic!("a CPU device has no transport") };
            error.to_string()
        }) {
            assert!(error.contains("ZEROTH_GPU_COLLECTIVES=nccl") && error.contains("write host"), "{error}");
        }
    }

    #[test]
    fn a_requested_host_transport_is_used_without_probing() {
        for used in on_two_ranks(|comm| {
            let mut device = CpuDevice::new(1, ByTier::on_device(4096)).unwrap();
            matches!(GpuCollectives::open(Some(Transport::Host), Axis::Group, &mut device, comm), Ok(Err(_)))
        }) {
            assert!(used);
        }
    }

    #[test]
    fn publish_returns_the_error_of_the_first_failed_rank() {
        let published = on_two_ranks(|comm| {
            let own = if comm.rank() == 1 { Err("x".repeat(2 * MESSAGE)) } else { Ok(vec![7]) };
            let first = publish(comm, "a", &own).ok().unwrap();
            (first, publish(comm, "b", &Ok(vec![comm.rank() as u8; 3])).ok().unwrap())
        });
        for (first, second) in published {
            let reason = first.unwrap_err();
            assert!(reason.starts_with("rank 1: xxx") && reason.len() < MESSAGE + 10, "{reason}");
            assert_eq!(second.unwrap(), [[0; 3], [1; 3]]);
        }
    }

    #[test]
    fn a_reduction_is_not_an_exchange() {
        let (send, to) = (Span::device(0, 8), Span::device(8, 8));
        let counts = vec![4, 4];
        let gather = Collective::AllGather { send, recv: to, counts: counts.clone() };
        assert!(exchange(&gather).is_some_and(|exchange| exchange.name() == "all_gather"));
        let starts = vec![0, 4];
        let (from_type, to_type) = (zeroth_base::DType::F32, zeroth_base::DType::F32);
        assert!(
            exchange(&Collective::Reduce {
                send,
                starts,
                counts,
                from_type,
                to,
                to_type,
                add: false,
                squares: None
            })
            .is_none()
        );
    }
}
