//! Collectives between GPUs: choice of a transport, and collectives enqueued on the device, so that no host thread blocks.

use zeroth_base::Axis;
use zeroth_comm::{Comm, CommError, DeviceBarrier, DeviceCounters, OpName};
use zeroth_kernel::{
    BarrierCounters, Device, DeviceError, Exchange, IpcHandles, PeerPlace, Queue, Transport,
};

use super::error::CollectiveError;
use zeroth_program::Collective;

/// Bytes of the message in which a rank publishes its handle, or the reason why it has none.
const MESSAGE: usize = 512;

/// The GPUs of all ranks along an axis, connected by one transport.
pub(super) struct GpuCollectives {
    axis: Axis,
    transport: Transport,
    barrier: Box<dyn DeviceBarrier>,
}

impl GpuCollectives {
    /// Opens the first transport that works on all ranks of `comm`, which are those along `axis`, or returns the reasons why none does. A transport requested by name
    /// that does not work is an error. Nothing is in the arenas yet.
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
            Some(Transport::Host) => return Ok(Err("requested by ZEROTH_GPU_COLLECTIVES".to_owned())),
        };
        let barrier = comm.device_barrier();
        let own = if barrier.is_some() { Ok(Vec::new()) } else { Err("no device barrier".to_owned()) };
        let all = publish(comm, "create device barrier", &own)?;
        let mut reasons = Vec::new();
        if let (Ok(_), Some(barrier)) = (&all, barrier) {
            for &transport in transports {
                match connect(transport, axis, device, comm, &*barrier)? {
                    Ok(()) => {
                        if let Some(abort) = device.abort() {
                            barrier.on_lost(Some(Box::new(move |_| abort())));
                        }
                        return Ok(Ok(Self { axis, transport, barrier }));
                    }
                    Err(reason) => reasons.push(format!("{}: {reason}", transport.name())),
                }
            }
        } else {
            reasons.extend(all.err());
        }
        let reasons = reasons.join("; ");
        match requested {
            Some(transport) => Err(CollectiveError::Device(transport.refused(&reasons))),
            None => Ok(Err(reasons)),
        }
    }

    /// The transport, as reports print it.
    pub(super) fn describe(&self) -> String {
        match self.transport {
            Transport::Ipc => "from GPU to GPU (CUDA IPC)".to_owned(),
            Transport::Nccl => "from GPU to GPU (NCCL)".to_owned(),
            Transport::Host => unreachable!("`open` returns before it connects through the host"),
        }
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
        device.exchange(self.axis, queue, exchange, points).map_err(CollectiveError::Device)
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
    let shared = |DeviceCounters { file, at, bytes, stride }| BarrierCounters { file, at, bytes, stride };
    let (rank, counters) = (comm.rank(), barrier.counters().map(shared));
    let opened = device.open_ipc_handles(axis, &IpcHandles { transport, rank, handles: &handles, counters });
    let opened = opened.map(|()| Vec::new()).map_err(|error: DeviceError| error.to_string());
    let connected = publish(comm, "open IPC handles", &opened)?;
    if connected.is_err() {
        device.close_ipc_handles(axis);
    }
    Ok(connected.map(|_| ()))
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
mod tests {
    use zeroth_comm::JoinOptions;
    use zeroth_comm::local::LocalJob;
    use zeroth_cpu::CpuDevice;
    use zeroth_kernel::{ByTier, Span};

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
